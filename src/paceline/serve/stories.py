"""Stories: a request's timeline as the page draws it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from paceline.engine.core import Engine
from paceline.engine.observe.timeline import Draft, Event, RequestTimeline, Timelines
from paceline.engine.records.metrics import RequestMetrics
from paceline.models.detokenizer import Detokenizer
from paceline.models.tokenizer import Tokenizer
from paceline.sampling.trace import Trace
from paceline.serve.keys import Caller
from paceline.serve.tokens import TokenNames
from paceline.speculation.options import without_files
from paceline.speculation.stats import SpeculationStats

FINISHED = "finished"
LONGEST_PIECE = 160
"""Characters of a prompt in a line."""


class Glimpse(NamedTuple):
    """A request as it was between two steps. What goes on changing is copied; of finished ones that is nothing."""

    timeline: RequestTimeline
    state: str
    now: float
    metrics: RequestMetrics | None = None
    speculation: SpeculationStats | None = None


def glimpses(timelines: Timelines, engine: Engine, viewer: Caller, most: int = 200) -> list[Glimpse]:
    """The latest requests that the viewer may see, newest first. On the engine's thread."""
    return [_glimpse(timeline, engine) for timeline in timelines.seen_by(viewer.sees)[:most]]


def _glimpse(timeline: RequestTimeline, engine: Engine) -> Glimpse:
    record, now = timeline.record, engine.clock()
    if record is None:
        return Glimpse(timeline, FINISHED, now)
    state = "running" if any(seq.seated for seq in engine.scheduler.sequences(timeline.id)) else "waiting"
    stats = record.speculation
    return Glimpse(
        timeline, state, now, replace(record.metrics, token_times=record.metrics.token_times.copy()),
        None if stats is None else replace(stats, by_depth=stats.by_depth.copy(), provenance=[],
                                           tried_by_depth=stats.tried_by_depth.copy()))


def copied(timelines: Timelines, request_id: str, engine: Engine,
           viewer: Caller) -> tuple[Glimpse, list[Event], int] | None:
    """What story() needs of a request: a glimpse of it, its events, and how many were given up; None: there is none
    that the viewer may see. On the engine's thread."""
    timeline = next(iter(timelines.seen_by(viewer.sees, request_id)), None)
    if timeline is None:
        return None
    return _glimpse(timeline, engine), list(timeline.events), timeline.dropped


def told_trace(trace: Trace) -> dict[str, Any]:
    """A trace as clients get it: where the server's files lie is not theirs to know."""
    return trace.as_dict() | {"speculation": without_files(trace.speculation)}


def piece(tokens: Sequence[int], tokenizer: Tokenizer | None) -> str | None:
    """Of the end of a prompt what people know it by: the longest text between two special tokens, where a chat has its
    last message."""
    if tokenizer is None:
        return None
    parts: list[list[int]] = [[]]
    for token in tokens:
        if token in tokenizer.special_ids:
            parts.append([])
        else:
            parts[-1].append(token)
    text = " ".join(tokenizer.decode(max(parts, key=len)).split())
    return text if len(text) <= LONGEST_PIECE else f"{text[:LONGEST_PIECE]}…"


def lines(seen: list[Glimpse], tokenizer: Tokenizer | None) -> list[dict[str, Any]]:
    """One line each, in JSON's types."""
    return [line(one, tokenizer) for one in seen]


def line(seen: Glimpse, tokenizer: Tokenizer | None) -> dict[str, Any]:
    timeline, ended = seen.timeline, seen.state == FINISHED
    finished = timeline.finished if ended and timeline.finished is not None else seen.now
    return {
        "id": timeline.id, "prompt": piece(timeline.prompt_end, tokenizer), "state": seen.state,
        "age_s": seen.now - timeline.arrival, "method": timeline.method,
        "seed": str(timeline.seed), "samples": timeline.samples, "duration_s": finished - timeline.arrival,
        "reason": timeline.reason if ended else None, "reasons": list(timeline.reasons) if ended else [],
        "error": timeline.error if ended else None, "traced": ended and timeline.trace is not None,
        "metrics": timeline.summary if seen.metrics is None else seen.metrics.figures(),
        "speculation": timeline.speculation if seen.speculation is None else seen.speculation.as_dict(),
    }


def story(line: dict[str, Any], events: list[Event], arrival: float, dropped: int, tokenizer: Tokenizer | None,
          prompt_end: Sequence[int] = ()) -> dict[str, Any]:
    """The whole request in JSON's types, times in seconds since it arrived. Its texts go on from `prompt_end`."""
    names = TokenNames(tokenizer)
    tokens = {token for event in events for token in (*event.tokens, *(event.draft.tokens if event.draft else ()))}
    streams: dict[int, Detokenizer] = {}
    if tokenizer is not None:
        streams = {event.sample: tokenizer.detokenizer(skip_special=False, after=prompt_end) for event in events}
    return {**line, "events": [_told(event, arrival, streams.get(event.sample)) for event in events],
            "dropped": dropped, "texts": {str(token): names.text(token) for token in sorted(tokens)}}


def _told(event: Event, arrival: float, stream: Detokenizer | None) -> dict[str, Any]:
    return {"kind": event.kind, "sample": event.sample, "begun": round(event.started - arrival, 6),
            "ended": round(event.ended - arrival, 6), "start": event.start, "rows": event.rows,
            "company": event.company, "tokens": list(event.tokens),
            "pieces": [f" {token}" if stream is None else stream.push(token) for token in event.tokens],
            "origins": [origin.outcome for origin in event.origins],
            "draft": None if event.draft is None else _tree(event.draft)}


def _tree(draft: Draft) -> dict[str, Any]:
    return {"tokens": list(draft.tokens), "parents": list(draft.parents), "path": list(draft.path),
            "drafter": draft.drafter, "sources": None if draft.sources is None else list(draft.sources)}
