"""What is new of a request since somebody last heard of it: telling a long text costs no more than a short one."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from paceline.engine.records.metrics import RequestMetrics
from paceline.engine.records.record import Record
from paceline.request import RequestOutput, TokenLogprob
from paceline.so_far import SampleSoFar
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
    begun: RequestMetrics | None = None
    """With the first tokens: what the request had gone through by then, for whoever has to tell should all else be
    lost."""
    exact: bool = True
    """Whether another worker could have said the same, bit for bit; see Moved."""


class DeltaCursor:
    """How much of a record has been handed out. Belongs to the thread that drives the engine."""

    __slots__ = ("_begun", "_closed", "_record", "_said", "_texts", "_tokens")

    def __init__(self, record: Record) -> None:
        so_far = record.so_far or [SampleSoFar()] * len(record.emitters)
        self._record = record
        self._said = [len(one.token_ids) for one in so_far]
        """Tokens that were told by others: of those there is nothing but their ids here."""
        self._texts = [one.characters for one in so_far]
        self._tokens = self._said.copy()
        self._closed = [one.finish_reason is not None for one in so_far]
        self._begun = False

    def advance(self) -> Delta:
        record = self._record
        delta = Delta()
        for index, emitter in enumerate(record.emitters):
            if self._closed[index]:
                continue
            begin, end = self._tokens[index], len(emitter.token_ids)
            if begin == end and emitter.finish_reason is None:
                continue
            text, own = emitter.text, slice(begin - self._said[index], end - self._said[index])
            origins = record.speculation.provenance[own] if record.speculation and index == 0 else None
            delta.samples.append(SampleDelta(
                index, text[self._texts[index]:], emitter.token_ids[begin:end],
                None if emitter.logprobs is None else emitter.logprobs[own], origins,
                emitter.finish_reason, emitter.stop_reason))
            self._texts[index], self._tokens[index] = len(text), end
            self._closed[index] = emitter.finish_reason is not None
        if delta.samples and not self._begun:
            self._begun = True
            delta.begun = replace(record.metrics, token_times=[])
        if record.open == 0:
            delta.output = record.snapshot()
        return delta
