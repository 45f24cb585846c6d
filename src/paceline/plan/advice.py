"""Which of Paceline's options to switch on for a workload, and why: sentences made of a plan's own figures."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace

from paceline.plan.capacity import memory_of
from paceline.plan.hardware import MOST_CARDS
from paceline.plan.planner import DraftRow, Plan, pays
from paceline.plan.roofline import Roofline, smallest
from paceline.plan.shape import CACHE_BITS, weight_bits


@dataclass(frozen=True, slots=True)
class Advice:
    option: str
    why: str


def advise(plan: Plan) -> list[Advice]:
    if plan.memory.sequences < 1:  # nothing else is of use to what cannot run
        return [*_room(plan), *_cache_bits(plan), *_machine(plan)]
    return [*_speculation(plan), *_cache(plan), *_weights(plan), *_serving(plan), *_machine(plan)]


def best(plan: Plan, batch: int) -> DraftRow | None:
    """The drafter with the largest speed-up at a batch, at what is typical of it or was given."""
    rows = [row for row in plan.drafts if row.batch == batch]
    return max(rows, key=lambda row: row.speed_up, default=None)


def _room(plan: Plan) -> Iterator[Advice]:
    """Not even one text fits: on how many cards it would, and in how many bits."""
    weights, card = f"{plan.memory.weights / 1e9:.1f}", plan.hardware.kind != "cpu"
    count = smallest(lambda cards: _fits(plan, plan.dtype, cards), MOST_CARDS) if card else None
    if count is not None:
        yield Advice(f"tensor_parallel_size={count}", f"{count} of {plan.hardware.name} at least hold the weights, "
                     f"{weights} GB in {plan.dtype}, and a text of {plan.workload.context} tokens.")
    fewer = (dtype for dtype in ("fp8" if card else "int8", "int4") if weight_bits(dtype) < weight_bits(plan.dtype))
    dtype = next((one for one in fewer if _fits(plan, one, plan.hardware.count)), None)
    if dtype is not None:
        option = "fewer bits" if card else f"paceline quantize --to {dtype}"
        note = (f"; but Paceline widens them to {plan.dtype} on a card" if card else
                ', as quantization="blocks" keeps them' if dtype == "int4" else "")
        yield Advice(option, f"In {dtype} the weights take {plan.shape.weight_bytes(dtype) / 1e9:.1f} GB instead of "
                     f"{weights}, and a text fits beside them{note}.")


def _fits(plan: Plan, dtype: str, cards: int) -> bool:
    roofline = replace(plan.roofline, dtype=dtype, hardware=replace(plan.hardware, count=cards))
    return memory_of(roofline, plan.workload.context).sequences > 0


def _speculation(plan: Plan) -> Iterator[Advice]:
    known = {drafter.name: drafter for drafter in plan.drafters}
    for batch in plan.workload.batches:
        row = best(plan, batch)
        if row is None or known[row.drafter].disagreements(plan.shape):
            continue
        if not pays(row):
            yield Advice("speculation=None", f"At {batch} at once no drafter pays: a step that verifies drafts "
                         "computes more than the weights take to read.")
            break
        wish = {**(known[row.drafter].wish or {"method": row.drafter}), "k": row.k}
        yield Advice(f"speculation={json.dumps(wish)}",
                     f"At {batch} at once {row.tokens:.2f} tokens a cycle are expected, {row.speed_up:.2f}x plain "
                     f"decoding, if {row.acceptance:.0%} of drafted tokens are accepted; below "
                     f"{row.break_even or 0.0:.0%} it loses.")
    bounded = [limit for limit in plan.limits if limit.batch]
    if bounded:
        widest = max(bounded, key=lambda limit: limit.batch or 0)
        yield Advice("adaptive=True", f"{widest.drafter} pays up to about {widest.batch} sequences at once and hurts "
                     "beyond: leave the depth to the controller, which is the default.")


def _cache_bits(plan: Plan) -> Iterator[Advice]:
    work, most = plan.workload, plan.memory.sequences
    wanted = max(work.batches)
    shared = plan.memory.sequence * wanted
    smaller = "int8" if plan.hardware.kind == "cpu" else "fp8"
    able = plan.hardware.kind == "cpu" or (plan.hardware.capability or (0, 0)) >= (8, 9)
    crowded = most < wanted or shared > plan.memory.weights
    if crowded and able and "mla" not in plan.shape.kinds and CACHE_BITS[plan.kv_dtype] > CACHE_BITS[smaller]:
        other = memory_of(replace(plan.roofline, kv_dtype=smaller), work.context).sequences
        if other > most:
            yield Advice(f'kv_dtype="{smaller}"', f"Caches of {wanted} texts take {shared / 1e9:.1f} GB beside "
                         f"{plan.memory.weights / 1e9:.1f} of weights; in {smaller} {other} texts fit instead of "
                         f"{most}, and attention reads less.")


def _cache(plan: Plan) -> Iterator[Advice]:
    work, most = plan.workload, plan.memory.sequences
    wanted = max(work.batches)
    yield from _cache_bits(plan)
    if most < wanted:
        yield Advice(f"max_num_seqs={most}", f"Of {wanted} texts of {work.context} tokens {most} fit at once: "
                     "more would be preempted, so let them wait.")
        yield Advice("host_cache", "With little room beside running texts, prefixes are soon forgotten: some GiB of "
                     "host memory keep them.")
    if plan.shape.context is not None and plan.shape.context > 4 * work.context and plan.memory.sequence:
        yield Advice(f"max_model_len={work.context}", f"The model takes texts of {plan.shape.context} tokens: a limit "
                     "keeps one of them from taking everybody's room.")


def _weights(plan: Plan) -> Iterator[Advice]:
    first = plan.rows[0]
    wide = plan.dtype in ("float32", "bfloat16", "float16")
    if plan.hardware.kind != "cpu" or not wide or first.compute_bound or plan.memory.weights < 1e9:
        return
    smaller = Roofline(plan.shape, plan.hardware.sustained(), "int4", plan.kv_dtype)
    quicker = plan.roofline.decode(first.batch, plan.workload.context) / smaller.decode(
        first.batch, plan.workload.context)
    if quicker > 1.0:
        yield Advice("paceline quantize --to int4", f"Decoding reads {plan.memory.weights / 1e9:.1f} GB of weights a "
                     f'step; in 4 bits, which quantization="blocks" keeps, it would be {quicker:.1f}x as quick at '
                     f"{first.batch} at once.")


def _serving(plan: Plan) -> Iterator[Advice]:
    work, one = plan.workload, plan.serving
    if work.ttft_s is not None and plan.ttft_s <= work.ttft_s:
        yield Advice(f"paceline serve --target-ttft-ms {1e3 * work.ttft_s:g}", "Tells the server of the target: while "
                     "a prompt waits whose first token would be late, nobody's drafts get rows.")
    if work.tpot_s is not None and one is not None:
        yield Advice(f"paceline serve --target-tpot-ms {1e3 * work.tpot_s:g}", "Tells the server of the target: where "
                     "not all drafts have room, those of requests that are slower come first.")
    if work.rate is not None and one is not None and (plan.copies or 0) > 1:
        yield Advice(f"paceline serve --replicas {plan.copies}", f"{work.rate:g} requests a second take {plan.copies} "
                     f"copies of the model ({one.requests_per_s:.2f} a second each, 80 % of it planned with), each on "
                     f"{plan.hardware.label}: one server before all of them.")
    if plan.ttft_s > 0.5 and max(plan.workload.batches) > 1:
        yield Advice("max_step_ms=100", f"A prompt of {plan.workload.prompt_tokens} tokens takes {plan.ttft_s:.1f} s: "
                     "in chunks nobody else waits that long for a token (the server's default).")
    if plan.shape.is_mixture and plan.rows[0].experts is not None:
        yield Advice("larger batches", f"A step of {plan.rows[0].batch} reads {plan.rows[0].experts:.0f} experts of a "
                     "layer and one with many tokens all of them: tokens get cheap only when experts are shared.")


def _machine(plan: Plan) -> Iterator[Advice]:
    if plan.hardware.count > 1 and plan.memory.sequences:
        yield Advice(f"tensor_parallel_size={plan.hardware.count}", "Shares the model between the cards, planned with "
                     "two sums a layer over their links; in deterministic mode results are gathered instead, twice as "
                     "often. Where the model fits one card, an engine on each needs no links at all.")
    if plan.hardware.kind == "other":
        yield Advice("another device", f"Paceline runs on CPUs and CUDA cards, not on {plan.hardware.name}.")
    elif plan.hardware.capability is not None and plan.hardware.capability < (8, 0):
        yield Advice('kernels="eager", dtype="float16"', f"{plan.hardware.name} is older than the CUDA kernels need "
                     "(compute capability 8.0).")
