"""Replay: run a recorded request again and compare, token by token."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from paceline.config import KERNELS, EngineOptions
from paceline.engine.build import build_engine
from paceline.engine.core import Engine
from paceline.errors import RequestError
from paceline.sampling.trace import Trace
from paceline.speculation.options import files_named, shown


@dataclass(frozen=True, slots=True)
class ReplayReport:
    """`equal`: the same tokens came out. `same_model`: the model's revision, and the adapter's if it had one, are the
    recorded ones."""

    equal: bool
    tokens: list[int]
    expected: list[int]
    first_difference: int | None
    same_model: bool


def replay(trace: Path | str, *, model: str | None = None, adapters: Mapping[str, str] | None = None,
           progress: Callable[[str, int, int | None], None] | None = None,
           may_open: Callable[[list[str]], bool] = lambda names: False) -> ReplayReport:
    """Read a trace file, load the model and reproduce the text. A trace may come from anybody and may name further
    files, or models to fetch, to draft with: `may_open(names)` says whether that is all right."""
    try:
        recorded = Trace.from_json(Path(trace).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as problem:
        raise RequestError(f"The trace {trace} cannot be read ({problem}): check the path.", "trace") from problem
    named = [f"{option} {shown(value)}" for option, value in files_named(recorded.speculation)]
    if named and not may_open(named):
        raise RequestError(f"The trace {trace} drafts with {', '.join(named)}, which is not opened because a trace "
                           "says so: look at it, then allow it (--yes).", "trace")
    kernels = recorded.kernels if recorded.kernels in KERNELS else "auto"
    options = EngineOptions(model=model, kernels=kernels, adapters=adapters)
    return replay_on(build_engine(options, progress), recorded)


def replay_on(engine: Engine, recorded: Trace) -> ReplayReport:
    """Reproduce on an engine that is already there. Only sample 0 is recorded, so only it is run."""
    params = replace(recorded.params, seed=recorded.seed, n=1, trace=False, timeout_s=None)
    name, _, revision = (recorded.adapter or "").rpartition("@")
    adapter = engine.adapters.get(name or None)
    request_id = engine.add(recorded.prompt, params, speculation=recorded.speculation, adapter=name or None)
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
    same = recorded.model == engine.revision and (adapter is None or adapter.revision == revision)
    return ReplayReport(different is None, tokens, expected, different, same)
