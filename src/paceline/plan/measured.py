"""This machine in place of a data sheet: a few steps of the real engine are timed, bandwidth and arithmetic follow from
two of them, and what that predicts of the others is shown beside what they took."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from paceline.errors import ConfigError
from paceline.plan.hardware import KNOWN, STARTS, Hardware
from paceline.plan.roofline import Roofline
from paceline.plan.shape import ModelShape
from paceline.speculation.step_cost import StepCost

if TYPE_CHECKING:
    from paceline.llm import LLM

PROMPT = 64
"""Tokens before those that are timed."""
FEW = 4
"""Sequences that are timed in any case: as many rows as a step with drafts has."""
STEPS = 24
"""That are timed, all sequences together in each."""
PROMPTS = (128, 512, 1024, 512, 128)
"""Tokens of prompts that are timed for a simulation."""
REPEATS = 4
"""Of every batch, in turn, so that all have the machine's better and worse minutes; the best counts, for others use it
as well."""
OVERLAPS = tuple(tenth / 10 for tenth in range(11))
"""That are tried of a processor (Hardware.overlap)."""
COPIED, COPIES = 64 << 20, 20
"""Bytes that a thread copies, and how often, to see what memory gives."""
_NEVER = 1e300
_BEYOND = 1.2
"""Times what reading alone would take, from which on a step tells of arithmetic."""


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds."""

    decode: Mapping[int, float]
    """Of a step, by how many sequences it gave a token; 1 is among them."""
    context: int
    """Tokens before those steps."""
    prompt: float
    """Of a prompt of PROMPT tokens."""


@dataclass(frozen=True, slots=True)
class Comparison:
    what: str
    measured_s: float
    predicted_s: float
    fitted: bool
    """It was calibrated on; the others are predictions."""

    @property
    def error(self) -> float:
        """Share by which the prediction is too long."""
        return self.predicted_s / self.measured_s - 1.0


@dataclass(frozen=True, slots=True)
class Calibration:
    hardware: Hardware
    comparisons: list[Comparison]
    cost: StepCost | None = None
    """What the engine itself learned of its steps; None: it was not asked."""


def calibrate(shape: ModelShape, dtype: str, kv_dtype: str, machine: Hardware, timings: Timings) -> Calibration:
    """Two unknowns from two measurements, decoding alone and in the largest batch (or a prompt, where no other batch is
    large enough to tell of arithmetic); the rest is predicted. How far a processor computes while it reads, the batches
    between say, where there are any."""
    context, most = timings.context, max(timings.decode)
    batched = most > FEW
    other = ((most, 1, context), timings.decode[most]) if batched else ((1, PROMPT, 0), timings.prompt)
    steps = {(1, 1, context): timings.decode[1], other[0]: other[1]}

    def compared(overlap: float) -> Calibration:
        hardware = fit(shape, dtype, kv_dtype, machine, steps, overlap)
        found = Roofline(shape, hardware, dtype, kv_dtype)
        rows = [Comparison(f"a step of {batch} at once", seconds, found.decode(batch, context),
                           (batch, 1, context) in steps) for batch, seconds in sorted(timings.decode.items())]
        return Calibration(hardware, [*rows, Comparison(f"a prompt of {PROMPT} tokens", timings.prompt,
                                                        found.prefill(PROMPT), not batched)])

    if machine.kind == "card" or not batched:
        return compared(float(machine.kind == "card"))
    return min(map(compared, OVERLAPS), key=_missed)


def _missed(found: Calibration) -> float:
    """By how much the batches were, at most, the prompt left out: it is computed in other ways than steps are."""
    return max(abs(one.error) for one in found.comparisons[:-1])


def fit(shape: ModelShape, dtype: str, kv_dtype: str, machine: Hardware, steps: dict[tuple[int, int, int], float],
        overlap: float = 0.0) -> Hardware:
    """The bandwidth and arithmetic by which two steps (sequences, rows, context) take what they were measured to. The
    first is taken to read for longer than it computes and the second to compute, unless that, on a card, is one that
    reads too: its arithmetic is what such cards have then, where that is known."""
    (first, alone), (second, many) = steps.items()
    layers = len(shape.layers)
    starts = min(STARTS * layers, alone / 2) if machine.kind == "card" else 0.0

    def made(bandwidth: float, arithmetic: float, layer_s: float = 0.0) -> Hardware:
        return replace(machine, bandwidth=bandwidth, flops=dict.fromkeys(("float32", "bfloat16"), arithmetic),
                       overlap=overlap, layer_s=layer_s, drafted_s=machine.sustained().drafted_s, calibrated=True)

    reading, computing = (Roofline(shape, one, dtype, kv_dtype) for one in (made(1.0, _NEVER), made(_NEVER, 1.0)))
    r1, r2 = (reading.step(*step).total for step in (first, second))
    c1, c2 = (computing.step(*step).total for step in (first, second))
    alone, many = alone - starts, max(many - starts, 1e-9)
    shown = 1.0 - overlap  # of what is shorter
    determinant = r1 * c2 - shown**2 * r2 * c1
    per_byte = (alone * c2 - shown * many * c1) / determinant
    per_flop = (r1 * many - shown * r2 * alone) / determinant
    if per_byte <= 0:  # arithmetic alone explains it
        per_byte, per_flop = 0.0, many / c2
    elif per_flop <= 0:
        per_byte, per_flop = alone / r1, 0.0
    if machine.kind == "card" and machine.flops and many < _BEYOND * r2 * per_byte:
        per_flop = 1.0 / machine.sustained().arithmetic(dtype)
    return made(1.0 / max(per_byte, 1e-18), 1.0 / max(per_flop, 1e-21), starts / layers)


def time_engine(llm: LLM, batches: Sequence[int]) -> Timings:
    """Plain greedy runs of the engine. Those that it cannot have at once are left out."""
    config = llm.engine.config
    room = min(config.max_num_seqs, config.kv_blocks * config.block_size // (2 * (PROMPT + STEPS)))
    if room < 1 or config.max_model_len < PROMPT + 2 * STEPS:
        raise ConfigError(f"--measured times {STEPS} steps behind {PROMPT} tokens, and the engine has no room for "
                          "those: raise max_model_len.")
    run(llm, 1, STEPS, 0)  # what is made once is made now
    timed = sorted({1, *(batch for batch in (FEW, *batches) if batch <= room)})
    decode = dict.fromkeys(timed, math.inf)
    for repeat in range(REPEATS):
        for batch in timed:
            # Prompts come in several steps, in which those that came first already decode.
            output = min(STEPS + 2 * batch * PROMPT // config.max_batch_tokens, config.max_model_len - PROMPT)
            decode[batch] = min(decode[batch], _together(run(llm, batch, output, repeat)))
    prompt = min(one[0] for repeat in range(REPEATS) for one in run(llm, 1, 1, 100 + repeat))
    return Timings(decode, PROMPT + STEPS // 2, prompt)


def run(llm: LLM, batch: int, output: int, salt: int) -> list[list[float]]:
    """When each sequence had its tokens, in seconds from the beginning. Runs share no prefixes."""
    from paceline.request import SamplingParams

    vocab = llm.engine.model.config.vocab_size
    prompts = [[(at * 7919 + (1000 * salt + place) * 104729 + batch) % vocab for at in range(PROMPT)]
               for place in range(batch)]
    params = SamplingParams(max_tokens=output, temperature=0.0, ignore_eos=True)
    begin = llm.engine.clock()
    outs = llm.generate(list(prompts), params, speculation=None)
    for one in outs:
        if one.error is not None:
            raise one.error
    return [[at - begin for at in one.metrics.token_times] for one in outs]


def _together(times: Sequence[Sequence[float]]) -> float:
    """Seconds of a step while all of them decode."""
    begin, end = max(one[0] for one in times), min(one[-1] for one in times)
    inside = [at for at in times[-1] if begin <= at <= end]
    if len(inside) < 3:
        raise ConfigError("--measured: the requests did not run at once; try smaller batches.")
    return (inside[-1] - inside[0]) / (len(inside) - 1)


def flops_of(card: str) -> Mapping[str, float]:
    """By format, of a card as its driver calls it; nothing: it is not known."""
    called = re.sub("[^a-z0-9]", "", card.lower())
    known = [one for name, one in KNOWN.items() if one.kind == "card" and re.sub("[^a-z0-9]", "", name) in called]
    return max(known, key=lambda one: len(one.name)).flops if known else {}


def this_machine() -> Hardware:
    """Its memory and what it is; bandwidth and arithmetic are to be measured."""
    import torch

    from paceline.measure.machine import inspect_machine

    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        return Hardware(properties.name, float(properties.total_memory), 1.0, flops_of(properties.name),
                        capability=(properties.major, properties.minor))
    machine = inspect_machine()
    return Hardware(f"{machine.cpu} ({machine.usable_cores} cores)", float(machine.memory_total or 0) or 1e9, 1.0,
                    {"float32": 1.0}, kind="cpu")


def measure(llm: LLM, shape: ModelShape, dtype: str, kv_dtype: str, batches: Sequence[int]) -> Calibration:
    """On this machine, with an engine that is there."""
    found = calibrate(shape, dtype, kv_dtype, this_machine(), time_engine(llm, batches))
    return replace(found, cost=llm.engine.cost)


def scaling(threads: int, cores: int) -> float:
    """How many times as many bytes a second `cores` threads of this machine copy as `threads` do. The best of some
    tries each: others use the machine as well."""
    import numpy as np

    def rate(count: int) -> float:
        arrays = [np.ones(COPIED, dtype=np.uint8) for _ in range(2 * count)]
        best = math.inf
        with ThreadPoolExecutor(count) as pool:
            for _ in range(COPIES):
                begin = time.perf_counter()
                list(pool.map(lambda place: np.copyto(arrays[2 * place], arrays[2 * place + 1]), range(count)))
                best = min(best, time.perf_counter() - begin)
        return count / best

    return max(1.0, rate(cores) / rate(threads)) if cores > threads else 1.0


def time_prompts(llm: LLM) -> None:
    """Prompts of several lengths, so that the engine knows what their rows take behind short and long texts."""
    from paceline.request import SamplingParams

    vocab, room = llm.engine.model.config.vocab_size, llm.engine.config.max_model_len - 1
    params = SamplingParams(max_tokens=1, temperature=0.0)
    for salt, length in enumerate(PROMPTS):
        if length <= room:
            llm.generate([[(at * 7919 + salt) % vocab for at in range(length)]], params, speculation=None)
