"""Replay: run a recorded request again and compare, token by token."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from paceline.config import KERNELS, EngineOptions
from paceline.engine.build import build_engine
from paceline.engine.core import Engine
from paceline.errors import RequestError
from paceline.sampling.trace import Trace


@dataclass(frozen=True, slots=True)
class ReplayReport:
    """`equal`: the same tokens came out. `same_model`: the model's revision is the recorded one."""

    equal: bool
    tokens: list[int]
    expected: list[int]
    first_difference: int | None
    same_model: bool


def replay(trace: Path | str, *, model: str | None = None,
           progress: Callable[[str, int, int | None], None] | None = None) -> ReplayReport:
    """Read a trace file, load the model and reproduce the text."""
    try:
        recorded = Trace.from_json(Path(trace).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as problem:
        raise RequestError(f"The trace {trace} cannot be read ({problem}): check the path.", "trace") from problem
    kernels = recorded.kernels if recorded.kernels in KERNELS else "auto"
    options = EngineOptions(model=model, kernels=kernels)
    return replay_on(build_engine(options, progress), recorded)


def replay_on(engine: Engine, recorded: Trace) -> ReplayReport:
    """Reproduce on an engine that is already there. Only sample 0 is recorded, so only it is run."""
    params = replace(recorded.params, seed=recorded.seed, n=1, trace=False, timeout_s=None)
    request_id = engine.add(recorded.prompt, params, speculation=recorded.speculation)
    record = engine.record(request_id)
    while record.open:
        engine.step()
    out = engine.take(request_id).snapshot()
    if out.error is not None:
        raise out.error
    tokens = out.outputs[0].token_ids
    expected = [entry.token for entry in recorded.tokens]
    # A recording that was cut short (cancelled, timed out, interrupted) is a beginning of the text.
    if recorded.finish_reason in ("cancelled", "timeout", "interrupt", "error"):
        tokens = tokens[:len(expected)]
    different = next((i for i, (a, b) in enumerate(zip(tokens, expected)) if a != b), None)
    if different is None and len(tokens) != len(expected):
        different = min(len(tokens), len(expected))
    return ReplayReport(different is None, tokens, expected, different, recorded.model == engine.revision)
