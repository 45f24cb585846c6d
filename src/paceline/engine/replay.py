"""Replay: run a recorded request again, set up as it was and with the drafts it had, and compare token by token."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from paceline.config import EngineOptions
from paceline.engine.build import build_engine
from paceline.engine.core import Engine
from paceline.engine.decide.recording import RecordedDrafts
from paceline.engine.setup import options_for
from paceline.errors import ConfigError, NotYetError, RequestError
from paceline.sampling.setup import Difference, differences
from paceline.sampling.trace import Trace

MOST_BYTES = 256 << 20
"""Of a trace's file."""
CUT_SHORT = ("cancelled", "timeout", "error")
"""Ends of which the text is a beginning."""


@dataclass(slots=True)
class ReplayReport:
    """`ran`: what was recorded could be rebuilt, or was run all the same. `equal`: the same tokens came out."""

    ran: bool
    equal: bool = False
    tokens: list[int] = field(default_factory=list)
    expected: list[int] = field(default_factory=list)
    """As many as can be compared."""
    recorded: int = 0
    """As many as there were."""
    first_difference: int | None = None
    differences: list[Difference] = field(default_factory=list)
    """What decides texts and is not here as it was."""
    notes: list[Difference] = field(default_factory=list)
    """What should change no text, and is not as it was either."""
    deterministic: bool = True
    """As it was recorded; else texts are the same up to numerical ties."""

    @property
    def same_model(self) -> bool:
        """The model's revision, and the adapter's if it had one, are the recorded ones."""
        return not any(one.field in ("model", "adapter") for one in self.differences)


def replay(trace: Path | str, *, model: str | None = None, adapters: Mapping[str, str] | None = None,
           anyway: bool = False, progress: Callable[[str, int, int | None], None] | None = None) -> ReplayReport:
    """Read a trace file, build the engine that it names and reproduce the text. A trace may come from anybody: of what
    it names, nothing is opened or fetched; `model` and `adapters` are the caller's. Where this machine cannot run what
    was recorded, the report says what differs; `anyway` runs what there is."""
    recorded = read_trace(trace)
    rows = 1 + max((len(cycle.tokens) for cycle in recorded.cycles), default=0)
    try:
        engine = build_engine(options_for(recorded.setup, model=model, adapters=adapters, rows=rows), progress)
    except (ConfigError, NotYetError) as problem:
        if not anyway:
            return ReplayReport(False, recorded=len(recorded.tokens), differences=[
                Difference("setup", _told(recorded), f"cannot be built ({problem})")])
        engine = build_engine(EngineOptions(model=model, adapters=adapters, heads=()), progress)
    found, notes = compare_setups(recorded, engine)
    if found and not anyway:
        return ReplayReport(False, recorded=len(recorded.tokens), differences=found, notes=notes)
    return replay_on(engine, recorded)


def read_trace(path: Path | str) -> Trace:
    """Or a RequestError."""
    try:
        with Path(path).open("rb") as file:
            raw = file.read(MOST_BYTES + 1)
        if len(raw) > MOST_BYTES:
            raise RequestError(f"The trace {path} has more than {MOST_BYTES >> 20} MiB, as none has: check the path.",
                               "trace")
        return Trace.from_json(raw.decode("utf-8"))
    except (OSError, UnicodeDecodeError) as problem:
        raise RequestError(f"The trace {path} cannot be read ({problem}): check the path.", "trace") from problem


def compare_setups(recorded: Trace, engine: Engine) -> tuple[list[Difference], list[Difference]]:
    """What decides the text and differs on this engine, its adapter included; and what is worth noting."""
    found, notes = differences(recorded.setup, engine.setup)
    if recorded.adapter is not None:
        name = recorded.adapter.rpartition("@")[0]
        loaded = engine.adapters.get(name) if name in engine.adapters.names else None
        own = "none of that name (--lora)" if loaded is None else loaded.identity
        if own != recorded.adapter:
            found.append(Difference("adapter", recorded.adapter, own))
    return found, notes


def replay_on(engine: Engine, recorded: Trace) -> ReplayReport:
    """Reproduce on an engine that is already there, whatever differs. Only sample 0 is recorded, so only it is run; a
    trace is made of it too, because who is traced is sampled in the same place."""
    found, notes = compare_setups(recorded, engine)
    params = replace(recorded.params, seed=recorded.seed, n=1, trace=True, timeout_s=None)
    name = (recorded.adapter or "").rpartition("@")[0] or None
    drafts = RecordedDrafts.of(recorded, engine.model.config.vocab_size)
    request_id = engine.add(recorded.prompt, params, speculation=None if drafts is None else recorded.speculation,
                            adapter=name, drafts=drafts)
    record = engine.record(request_id)
    while record.open:
        engine.step()
    out = engine.take(request_id).snapshot()
    if out.error is not None and recorded.finish_reason != "error":  # else it has come to where it came then
        raise out.error
    tokens = out.outputs[0].token_ids
    expected = [entry.token for entry in recorded.tokens]
    report = ReplayReport(True, tokens=tokens, expected=expected, recorded=len(expected), differences=found,
                          notes=notes, deterministic=recorded.setup.deterministic)
    if recorded.cut is not None:
        report.expected = expected = expected[:max(0, recorded.cut - len(recorded.prompt))]
    if recorded.cut is not None or recorded.cut_short or recorded.finish_reason in CUT_SHORT:
        report.tokens = tokens = tokens[:len(expected)]
    different = next((i for i, (a, b) in enumerate(zip(tokens, expected)) if a != b), None)
    if different is None and len(tokens) != len(expected):
        different = min(len(tokens), len(expected))
    report.equal, report.first_difference = different is None, different
    return report


def _told(recorded: Trace) -> str:
    """What an engine was asked to be, in a line."""
    setup = recorded.setup
    return (f"device {setup.device}, kernels {setup.kernels}, dtype {setup.dtype}, kv_dtype {setup.kv_dtype}, "
            f"quantization {setup.quantization}, max_model_len {setup.max_model_len}")
