"""A plan for people and for programs: tables in plain text, and one JSON object."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from paceline.plan.advice import advise
from paceline.plan.planner import Plan

_GB = 1e9


def as_dict(plan: Plan) -> dict[str, Any]:
    """Seconds, bytes and tokens; what is not known is None."""
    shape, hardware, work = plan.shape, plan.hardware, plan.workload
    return {
        "model": {
            "name": shape.name, "model_type": shape.model_type, "parameters": shape.parameters,
            "active_parameters": shape.active, "layers": len(shape.layers), "attention": list(shape.kinds),
            "dtype": plan.dtype, "weight_bytes": plan.memory.weights, "kv_dtype": plan.kv_dtype,
            "kv_bytes_per_token": shape.cache_bytes_per_token(plan.kv_dtype), "state_bytes": shape.state_bytes,
            "kv_bytes_per_sequence": shape.cache_bytes(work.context, plan.kv_dtype), "context": shape.context},
        "hardware": {
            "name": hardware.name, "count": hardware.count, "memory_bytes": hardware.memory * hardware.count,
            "bandwidth": hardware.bandwidth, "flops": hardware.arithmetic(plan.dtype),
            "ridge": hardware.ridge(plan.dtype), "price": hardware.price, "calibrated": hardware.calibrated},
        "workload": {"context": work.context, "prompt": work.prompt_tokens, "output": work.output_tokens,
                     "batches": list(work.batches), "rate": work.rate, "ttft_s": work.ttft_s, "tpot_s": work.tpot_s},
        "memory": asdict(plan.memory) | {"left": plan.memory.left, "sequences": plan.memory.sequences},
        "prefill": {"ttft_s": plan.ttft_s, "tokens_per_s": plan.prefill_tokens_per_s},
        "intensity": {"attention_decode": plan.attention_decode, "attention_prefill": plan.attention_prefill},
        "compute_batch": plan.compute_batch,
        "decode": [asdict(row) for row in plan.rows],
        "drafters": [asdict(one) | {"source": drafter.source} for one, drafter in zip(plan.beside, plan.drafters)],
        "speculation": [asdict(row) for row in plan.drafts],
        "by_k": [asdict(row) for row in plan.by_k],
        "trees": [asdict(row) for row in plan.trees],
        "limits": [asdict(row) for row in plan.limits],
        "serving": None if plan.serving is None else asdict(plan.serving),
        "cards": plan.cards, "dollars_per_million_tokens": plan.dollars_per_million,
        "advice": [asdict(one) for one in advise(plan)],
        "measured": [asdict(one) | {"error": one.error} for one in plan.comparisons],
        "problems": plan.problems,
    }


def text(plan: Plan) -> str:
    parts = [_model(plan), _measured(plan), _decode(plan), _drafts(plan), _beside(plan), _trees(plan), _serving(plan)]
    if plan.problems:
        parts.append("What is in the way\n" + "\n".join(f"- {one}" for one in plan.problems))
    advice = advise(plan)
    if advice:
        parts.append("What to switch on\n" + "\n".join(f"- {one.option}: {one.why}" for one in advice))
    return "\n\n".join(part for part in parts if part)


def _model(plan: Plan) -> str:
    shape, hardware, work = plan.shape, plan.hardware, plan.workload
    active = f", {shape.active / 1e9:.2f} at work on a token" if shape.is_mixture else ""
    state = f", and {shape.state_bytes / 1e6:.1f} MB of state" if shape.state_bytes else ""
    roof = (f"{hardware.label}: {hardware.count * hardware.memory / _GB:.0f} GB, {hardware.bandwidth / 1e12:.3g} TB/s, "
            f"{hardware.arithmetic(plan.dtype) / 1e12:.4g} TFLOP/s in {plan.dtype}: {hardware.ridge(plan.dtype):.0f} "
            "FLOP/byte")
    batch = ("matrices never compute longer than they read" if plan.compute_batch is None else
             f"arithmetic takes over from {plan.compute_batch} tokens a step")
    return "\n".join([
        f"{shape.name}: {shape.parameters / 1e9:.3f} billion parameters{active}, {len(shape.layers)} layers "
        f"({', '.join(shape.kinds)}), {plan.memory.weights / _GB:.2f} GB in {plan.dtype}",
        f"cache in {plan.kv_dtype}: {shape.cache_bytes_per_token(plan.kv_dtype):,.0f} bytes a token{state}; "
        f"{plan.memory.sequence / _GB:.3f} GB for {work.context} tokens; room for {plan.memory.sequences} at once",
        f"{roof}; {batch}",
        f"attention: {plan.attention_decode:.2f} FLOP/byte in decode, {plan.attention_prefill:.0f} in a prompt of "
        f"{work.context}",
        f"prompt of {work.prompt_tokens} tokens: first token after {1e3 * plan.ttft_s:.1f} ms, "
        f"{plan.prefill_tokens_per_s:,.0f} tok/s"])


def _measured(plan: Plan) -> str:
    rows = [[one.what, f"{1e3 * one.measured_s:.2f}", f"{1e3 * one.predicted_s:.2f}",
             "fitted" if one.fitted else f"{one.error:+.0%}"] for one in plan.comparisons]
    return table("This machine, measured", ["what", "measured ms", "predicted ms", "off by"], rows) if rows else ""


def _decode(plan: Plan) -> str:
    mixture = plan.shape.is_mixture
    rows = [[str(row.batch), f"{1e3 * row.ttft_s:.1f}", f"{1e3 * row.tpot_s:.2f}", f"{1e3 * row.floor_s:.2f}",
             f"{row.tokens_per_s:,.0f}", f"{row.mlp_intensity:.0f}", *([f"{row.experts or 0:.0f}"] if mixture else []),
             "compute" if row.compute_bound else "memory", "yes" if row.fits else "NO"] for row in plan.rows]
    return table(f"Decoding behind {plan.workload.context} tokens",
                 ["batch", "TTFT ms", "TPOT ms", "floor ms", "tok/s", "FLOP/byte",
                  *(["experts"] if mixture else []), "bound by", "fits"], rows)


def _drafts(plan: Plan) -> str:
    limits = {(one.drafter, one.acceptance): one.batch for one in plan.limits}
    rows = []
    for row in plan.drafts:
        limit = limits.get((row.drafter, row.acceptance))
        rows.append([row.drafter, str(row.batch), f"{row.acceptance:.2f}", str(row.k), f"{row.tokens:.2f}",
                     f"{row.speed_up:.2f}x", "-" if row.break_even is None else f"{row.break_even:.2f}",
                     "all that fit" if limit is None else str(limit)])
    return table("Speculation at its best depth", ["drafter", "batch", "acceptance", "K", "tokens", "speed-up",
                                                   "break-even", "pays up to"], rows) if rows else ""


def _beside(plan: Plan) -> str:
    rows = [[one.drafter, f"{one.weights / _GB:.2f}", f"{one.sequence / 1e6:.1f}", str(one.sequences), one.cache]
            for one in plan.beside]
    sources = [f"{one.name}: {one.source}" for one in plan.drafters]
    return "\n".join([table("Drafters in memory", ["drafter", "weights GB", "MB a text", "texts", "cache"], rows), "",
                      "Where acceptance is from, unless it was given", *sources]) if rows else ""


def _trees(plan: Plan) -> str:
    rows = [[row.drafter, str(row.batch), f"{row.acceptance:.2f}", "x".join(map(str, row.branches)), str(row.nodes),
             f"{row.tokens:.2f}", f"{row.speed_up:.2f}x"] for row in plan.trees]
    return table("Trees", ["drafter", "batch", "acceptance", "children", "nodes", "tokens", "speed-up"],
                 rows) if rows else ""


def _serving(plan: Plan) -> str:
    one, work = plan.serving, plan.workload
    if one is None:
        return ""
    lines = [f"Serving prompts of {work.prompt_tokens} and outputs of {work.output_tokens} tokens: {one.batch} at "
             f"once, {one.requests_per_s:.2f} requests/s, {one.tokens_per_s:,.0f} output tok/s, "
             f"{1e3 * one.tpot_s:.1f} ms between tokens"]
    if plan.copies is not None and work.rate is not None:
        lines.append(f"{work.rate:g} requests/s need {plan.cards} of {plan.hardware.name}, at 80 % of what they can do")
    if plan.dollars_per_million is not None:
        lines.append(f"${plan.dollars_per_million:.3f} for a million output tokens of cards that are never idle")
    return "\n".join(lines)


def table(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Words to the left, numbers to the right."""
    widths = [max(len(line[column]) for line in [head, *rows]) for column in range(len(head))]
    words = [all(not _numeric(row[column]) for row in rows) for column in range(len(head))]
    lines = ["  ".join(cell.ljust(width) if word else cell.rjust(width)
                       for cell, width, word in zip(line, widths, words)).rstrip() for line in [head, *rows]]
    return "\n".join([title, *lines])


def _numeric(text: str) -> bool:
    return text.rstrip("x").replace(",", "").replace(".", "").isdigit() or text == "-"
