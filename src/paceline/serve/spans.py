"""Spans: what a finished request went through, by OpenTelemetry's conventions for generative AI.

Plain data, made of the request's record and timeline; telemetry.py hands it to an exporter. No text of a prompt or an
answer is in it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from urllib.parse import quote

from paceline.engine.observe.timeline import DECODE, PREEMPTED, PREFILL, Event
from paceline.engine.records.record import Record

PROVIDER = "paceline"
MOST_EVENTS = 128
"""Steps told of one request: the first and the last of more."""
WHOLE_NUMBERS = range(-(1 << 63), 1 << 63)
"""Those that OTLP has. Clients may ask for others, of which nothing is told."""
Attributes = dict[str, Any]


class Origin(NamedTuple):
    """What the HTTP call says of a request that the engine does not know."""

    operation: str
    """"chat" or "text_completion"."""
    model: str
    """As the client calls it."""
    response_id: str
    headers: Mapping[str, str] = {}
    """Those of W3C's trace context that it sent."""


@dataclass(slots=True)
class Finished:
    """A request that has ended."""

    record: Record
    origin: Origin
    events: Sequence[Event] = ()
    """Of its timeline, or none where that was given up for want of room."""
    dropped: int = 0
    """Events that the timeline itself had given up."""


@dataclass(slots=True)
class Span:
    """Times are seconds on the engine's clock."""

    name: str
    start: float
    end: float
    attributes: Attributes = field(default_factory=dict)
    events: list[tuple[float, Attributes]] = field(default_factory=list)
    children: list[Span] = field(default_factory=list)
    error: str | None = None
    """The kind of what went wrong."""


def span_of(finished: Finished, replayable: bool = True) -> Span:
    """The whole request, with a child for each of its phases. `replayable`: the server gives traces out."""
    record, origin = finished.record, finished.origin
    metrics, params, request = record.metrics, record.request.params, record.request
    end = metrics.finished if metrics.finished is not None else metrics.arrival
    reasons = [emitter.finish_reason or "" for emitter in record.emitters]
    asked = {"temperature": params.temperature, "top_p": params.top_p, "top_k": params.top_k or None,
             "max_tokens": params.max_tokens, "seed": params.seed,
             "frequency_penalty": params.frequency_penalty or None,
             "presence_penalty": params.presence_penalty or None,
             "choice.count": params.n if params.n != 1 else None}
    attributes: Attributes = {
        "gen_ai.operation.name": origin.operation, "gen_ai.provider.name": PROVIDER,
        "gen_ai.request.model": origin.model, "gen_ai.response.model": origin.model,
        "gen_ai.response.id": origin.response_id, "gen_ai.response.finish_reasons": reasons,
        "gen_ai.usage.input_tokens": metrics.prompt_tokens, "gen_ai.usage.output_tokens": metrics.output_tokens,
        "gen_ai.usage.cache_read.input_tokens": metrics.cached_tokens,
        **{f"gen_ai.request.{name}": value for name, value in asked.items()},
        "paceline.request.id": request.id, "paceline.seed": str(request.seed),
        "paceline.preemptions": metrics.preemptions, "paceline.time_to_first_token_s": metrics.ttft,
        "paceline.time_per_output_token_s": metrics.tpot,
    }
    if record.trace is not None and replayable:
        attributes["paceline.replay.path"] = f"/paceline/trace?id={quote(request.id, safe='')}"
    whole = Span(f"{origin.operation} {origin.model}".strip(), metrics.arrival, end, attributes)
    if record.error is not None:
        whole.error = attributes["error.type"] = type(record.error).__name__
    whole.children = _phases(finished, end)
    for span in (whole, *whole.children):
        span.attributes = {name: value for name, value in span.attributes.items()
                           if value is not None and (not isinstance(value, int) or value in WHOLE_NUMBERS)}
    return whole


def _phases(finished: Finished, end: float) -> list[Span]:
    """Queue, prefill, decode: as far as the request came."""
    metrics = finished.record.metrics
    begun, first = metrics.first_scheduled, metrics.first_token
    spans = [Span("queue", metrics.arrival, end if begun is None else begun)]
    if begun is None:
        return spans
    chunks = [event for event in finished.events if event.kind is PREFILL]
    spans.append(Span("prefill", begun, end if first is None else first, {
        "paceline.prompt_tokens": metrics.prompt_tokens, "paceline.cached_tokens": metrics.cached_tokens,
        "paceline.cache_miss": metrics.cache_miss, "paceline.prefill.chunks": len(chunks),
        "paceline.prefill.rows": sum(event.rows for event in chunks)}))
    if first is not None and metrics.output_tokens > 1:
        spans.append(_decode(finished, first, end))
    return spans


def _decode(finished: Finished, first: float, end: float) -> Span:
    stats = finished.record.speculation
    steps = [event for event in finished.events if event.kind in (DECODE, PREEMPTED)]
    shown = steps if len(steps) <= MOST_EVENTS else [*steps[:MOST_EVENTS // 2], *steps[-(MOST_EVENTS // 2):]]
    left_out = len(steps) - len(shown) + finished.dropped
    attributes: Attributes = {"paceline.decode.steps": sum(event.kind is DECODE for event in steps),
                              "paceline.decode.steps_left_out": left_out or None}
    if stats is not None:
        attributes |= {
            "paceline.speculation.method": stats.method, "paceline.speculation.rule": stats.rule,
            "paceline.speculation.cycles": stats.cycles, "paceline.speculation.drafted": stats.drafted,
            "paceline.speculation.accepted": stats.accepted,
            "paceline.speculation.acceptance_rate": stats.accepted / stats.drafted if stats.drafted else None,
            "paceline.speculation.tokens_per_step": stats.tokens_per_step,
            "paceline.speculation.net_speed": stats.net_speed}
    return Span("decode", first, end, attributes, [(event.ended, _told(event)) for event in shown])


def _told(event: Event) -> Attributes:
    if event.kind is PREEMPTED:
        return {"paceline.step.kind": event.kind, "paceline.step.sample": event.sample}
    drafted = {} if event.draft is None else {
        "paceline.step.drafter": event.draft.drafter, "paceline.step.drafted": len(event.draft.tokens),
        "paceline.step.accepted": len(event.draft.path)}
    return {"paceline.step.kind": event.kind, "paceline.step.sample": event.sample,
            "paceline.step.tokens": len(event.tokens), "paceline.step.company": event.company,
            "paceline.step.seconds": event.ended - event.started, **drafted}
