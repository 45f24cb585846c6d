"""Timelines: what every recent request went through, step by step, in bounded memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from paceline.engine.decide.decision import Decision
from paceline.engine.records.metrics import StepTimes
from paceline.engine.records.record import Record
from paceline.engine.schedule.step import RowGroup, Step
from paceline.request import Request, Tenant
from paceline.sampling.trace import Trace
from paceline.speculation.stats import Provenance
from paceline.speculation.tree import DraftTree

PREFILL, DECODE, PREEMPTED = "prefill", "decode", "preempted"

SECONDS_KEPT = 180
LATENCIES_KEPT = 512
PROMPT_END = 64
"""Tokens of a prompt that are kept: enough to know how the text after them begins, and to know the request again."""


class Draft(NamedTuple):
    """A draft tree without what it was sampled from, and which of its nodes stood."""

    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    drafter: str
    sources: tuple[str, ...] | None
    path: tuple[int, ...]


class Event(NamedTuple):
    """A sequence's part in one step, or the loss of its seat. Times are seconds on the engine's clock."""

    kind: str
    sample: int
    started: float
    ended: float
    start: int
    """Tokens of the sequence in the cache before."""
    rows: int
    company: int
    """Sequences in the step, itself included."""
    tokens: Sequence[int] = ()
    origins: Sequence[Provenance] = ()
    draft: Draft | None = None

    weight: int = 1
    """Memory it holds, roughly, in units of one small event."""


class RequestTimeline:
    """One request: live ones lend their record, finished ones leave what is worth showing."""

    __slots__ = ("arrival", "dropped", "error", "events", "finished", "id", "method", "prompt_end", "prompt_tokens",
                 "reason", "reasons", "record", "samples", "seed", "speculation", "summary", "tenant", "trace",
                 "trace_weight", "weight")

    def __init__(self, record: Record) -> None:
        request = record.request
        self.id = request.id
        self.tenant = request.tenant
        self.arrival = request.arrival
        self.prompt_tokens = len(request.prompt)
        self.prompt_end = request.prompt[-PROMPT_END:]
        """What its texts go on from."""
        self.samples = request.params.samples
        self.seed = request.seed
        self.method: str | None = None if request.speculation is None else request.speculation.method
        self.record: Record | None = record
        self.events: deque[Event] = deque()
        self.dropped = 0
        """Events given up, the oldest first, because the request had too many."""
        self.weight = 0
        """Of the events."""
        self.trace_weight = 0
        """Apart: giving up events makes no trace lighter."""
        self.finished: float | None = None
        self.reason: str | None = None
        """Of sample 0."""
        self.reasons: list[str | None] = []
        """Of each sample."""
        self.error: str | None = None
        self.trace: Trace | None = None
        self.speculation: dict[str, Any] | None = None
        self.summary: dict[str, Any] = {}

    def note(self, event: Event, most: int) -> int:
        """Add an event, giving up old ones beyond `most`; by how much the weight changed."""
        change = event.weight
        self.events.append(event)
        while self.events and self.weight + change > most:
            change -= self.events.popleft().weight
            self.dropped += 1
        self.weight += change
        return change

    def close(self) -> None:
        """Keep what the record says and let go of it."""
        record = self.record
        if record is None:
            return
        self.record = None
        self.finished = record.metrics.finished
        self.reason = record.emitters[0].finish_reason
        self.reasons = [emitter.finish_reason for emitter in record.emitters]
        self.error = None if record.error is None else str(record.error)
        self.trace = record.trace
        self.summary = record.metrics.figures()
        self.speculation = None if record.speculation is None else record.speculation.as_dict()
        if self.trace is not None:
            self.trace_weight = self.trace.numbers // 8 + 2 * len(self.trace.tokens)


class Second(NamedTuple):
    """What the engine did in one second of its clock."""

    second: int
    tokens: int
    prompt_rows: int
    steps: int


class Timelines:
    """An observer (engine.observer) that remembers the most recent requests.

    `most_requests` and `most_weight` bound what is kept of all of them (finished ones go first, the oldest first),
    `request_weight` what is kept of one. A unit of weight is a few hundred bytes.
    """

    def __init__(self, most_requests: int = 512, most_weight: int = 120_000, request_weight: int = 6_000) -> None:
        self.requests: dict[tuple[str, str], RequestTimeline] = {}
        """By tenant and id, oldest first: ids are chosen by clients, and two of them may choose the same."""
        self.seconds: deque[Second] = deque(maxlen=SECONDS_KEPT)
        self.latencies: deque[tuple[float | None, float | None]] = deque(maxlen=LATENCIES_KEPT)
        """Time to first token and time per further token of finished requests, in seconds."""
        self.weight = 0
        self._most_requests = most_requests
        self._most_weight = most_weight
        self._request_weight = request_weight

    def admitted(self, record: Record) -> None:
        key = _key(record.request)
        self._forget(key)  # an id may come again once its request is over
        self.requests[key] = RequestTimeline(record)
        self._shrink()

    def stepped(self, step: Step, decisions: Sequence[Decision], started: float, times: StepTimes) -> None:
        ended, company = started + sum(times), sum(not group.seq.request.shadow for group in step.groups)
        for seq in step.preempted:
            self._note(seq.request, Event(PREEMPTED, seq.sample, started, started, 0, 0, company))
        tokens = prompt_rows = 0
        for group, decision in zip(step.groups, decisions):
            event = _event(step, group, decision, started, ended)
            if group.seq.request.shadow:
                continue
            self._note(group.seq.request, event)
            tokens += len(event.tokens)
            if event.kind is PREFILL:
                prompt_rows += event.rows
            if group.siblings:
                for sibling, own in zip(group.siblings, decision.siblings):
                    self._note(sibling.request, Event(DECODE, sibling.sample, started, ended,
                                                         event.start + event.rows, 0, company, own.tokens,
                                                         own.origins))
                    tokens += len(own.tokens)
            for branch in decision.branches:
                self._note(branch.seq.request, Event(DECODE, branch.seq.sample, started, ended,
                                                        event.start + event.rows, 0, company, branch.tokens))
                tokens += len(branch.tokens)
        self._count(int(ended), tokens, prompt_rows, max(step.repeat, 1))
        self._shrink()

    def closed(self, record: Record) -> None:
        timeline = self.requests.get(_key(record.request))
        if timeline is None or timeline.record is not record:
            return
        timeline.close()
        self.weight += timeline.trace_weight
        self.latencies.append((record.metrics.ttft, record.metrics.tpot))
        self._shrink()

    def seen_by(self, sees: Callable[[Tenant], bool], request_id: str | None = None) -> list[RequestTimeline]:
        """Those whose tenants somebody sees, newest first; with an id, those that have it."""
        return [one for one in reversed(self.requests.values())
                if sees(one.tenant) and request_id in (None, one.id)]

    def of(self, request: Request) -> RequestTimeline | None:
        """A request's own; None: it was given up for want of room."""
        return self.requests.get(_key(request))

    def _note(self, request: Request, event: Event) -> None:
        timeline = self.requests.get(_key(request))
        if timeline is not None:
            self.weight += timeline.note(event, self._request_weight)

    def _count(self, second: int, tokens: int, prompt_rows: int, steps: int) -> None:
        last = self.seconds[-1] if self.seconds else None
        if last is not None and last.second == second:
            self.seconds[-1] = Second(second, last.tokens + tokens, last.prompt_rows + prompt_rows, last.steps + steps)
        else:
            self.seconds.append(Second(second, tokens, prompt_rows, steps))

    def _shrink(self) -> None:
        while len(self.requests) > self._most_requests or self.weight > self._most_weight:
            oldest = next((one for one in self.requests.values() if one.record is None), None)
            if oldest is None:
                return  # live ones stay; each is bounded by itself, and their number by seats and queue
            self._forget((oldest.tenant.name, oldest.id))

    def _forget(self, key: tuple[str, str]) -> None:
        gone = self.requests.pop(key, None)
        if gone is not None:
            self.weight -= gone.weight + gone.trace_weight


def _key(request: Request) -> tuple[str, str]:
    return request.tenant.name, request.id


def _event(step: Step, group: RowGroup, decision: Decision, started: float, ended: float) -> Event:
    """Once a sequence and step, so kept lean: what the decision holds is kept, not copied; nobody changes it."""
    seq, start, rows, tokens, draft = group.seq, group.start, len(group.tokens), decision.tokens, decision.draft
    if draft is not None:
        return Event(DECODE, seq.sample, started, ended, start, rows, len(step.groups), tokens, decision.origins,
                     _kept(draft, decision.path), 2 + (len(tokens) + 2 * rows) // 8)
    kind = DECODE if rows == 1 and start >= seq.prompt_len else PREFILL
    if step.repeat:
        rows *= step.repeat
    return Event(kind, seq.sample, started, ended, start, rows, len(step.groups), tokens,
                 decision.origins if tokens else (), None, 1 + len(tokens) // 8)


def _kept(draft: DraftTree, path: Sequence[int]) -> Draft:
    return Draft(tuple(draft.tokens), tuple(draft.parents), draft.drafter,
                 None if draft.sources is None else tuple(draft.sources), tuple(row - 1 for row in path))
