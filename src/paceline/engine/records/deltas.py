"""What is new of a request since somebody last heard of it: telling a long text costs no more than a short one."""

from __future__ import annotations

from dataclasses import dataclass, field

from paceline.engine.records.record import Record
from paceline.request import RequestOutput, TokenLogprob
from paceline.speculation.stats import Provenance


@dataclass(slots=True)
class SampleDelta:
    """What one sample gained. Text may lag behind tokens (half a character, a stop string in the making)."""

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprob] | None = None
    origins: list[Provenance] | None = None
    """Where the tokens came from; None for samples other than the first and where nothing was drafted for."""
    finish_reason: str | None = None
    stop_reason: str | int | None = None


@dataclass(slots=True)
class Delta:
    """What a request gained. The last one brings the whole output along."""

    samples: list[SampleDelta] = field(default_factory=list)
    output: RequestOutput | None = None
    """Set when the request has ended."""


class DeltaCursor:
    """How much of a record has been handed out. Belongs to the thread that drives the engine."""

    __slots__ = ("_closed", "_record", "_texts", "_tokens")

    def __init__(self, record: Record) -> None:
        count = len(record.emitters)
        self._record = record
        self._texts = [0] * count
        self._tokens = [0] * count
        self._closed = [False] * count

    def advance(self) -> Delta:
        record = self._record
        delta = Delta()
        for index, emitter in enumerate(record.emitters):
            if self._closed[index]:
                continue
            begin, end = self._tokens[index], len(emitter.token_ids)
            if begin == end and emitter.finish_reason is None:
                continue
            text = emitter.text
            origins = record.speculation.provenance[begin:end] if record.speculation and index == 0 else None
            delta.samples.append(SampleDelta(
                index, text[self._texts[index]:], emitter.token_ids[begin:end],
                None if emitter.logprobs is None else emitter.logprobs[begin:end], origins,
                emitter.finish_reason, emitter.stop_reason))
            self._texts[index], self._tokens[index] = len(text), end
            self._closed[index] = emitter.finish_reason is not None
        if record.open == 0:
            delta.output = record.snapshot()
        return delta
