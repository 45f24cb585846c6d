"""Stories: a request's timeline as the page draws it."""

from __future__ import annotations

from typing import Any

from paceline.engine.timeline import Draft, Event, RequestTimeline, Timelines, summary
from paceline.models.detokenizer import Detokenizer
from paceline.models.tokenizer import Tokenizer
from paceline.serve.tokens import TokenNames


def listed(timelines: Timelines, now: float, most: int = 200) -> list[dict[str, Any]]:
    """The latest requests, newest first, one line each. On the engine's thread."""
    newest = list(timelines.requests.values())[:-most - 1:-1]
    return [_line(timeline, now) for timeline in newest]


def _line(timeline: RequestTimeline, now: float) -> dict[str, Any]:
    record = timeline.record
    figures = timeline.summary if record is None else summary(record)
    speculation = timeline.speculation
    if record is not None and record.speculation is not None:
        speculation = record.speculation.as_dict()
    return {
        "id": timeline.id, "state": _state(timeline), "reason": timeline.reason, "age_s": now - timeline.arrival,
        "method": timeline.method, "seed": str(timeline.seed), "samples": timeline.samples, "error": timeline.error,
        "traced": timeline.trace is not None, "speculation": speculation, "metrics": figures,
        "duration_s": (now if timeline.finished is None else timeline.finished) - timeline.arrival,
    }


def _state(timeline: RequestTimeline) -> str:
    if timeline.record is None:
        return "finished"
    return "running" if any(seq.allocation is not None for seq in timeline.record.sequences) else "waiting"


def copied(timelines: Timelines, request_id: str, now: float) -> tuple[dict[str, Any], list[Event], float, int] | None:
    """What story() needs of a request: its line, events, arrival, and events given up. On the engine's thread."""
    timeline = timelines.requests.get(request_id)
    if timeline is None:
        return None
    return _line(timeline, now), list(timeline.events), timeline.arrival, timeline.dropped


def story(line: dict[str, Any], events: list[Event], arrival: float, dropped: int,
          tokenizer: Tokenizer | None) -> dict[str, Any]:
    """The whole request in JSON's types, times in seconds since it arrived."""
    names = TokenNames(tokenizer)
    tokens = {token for event in events for token in (*event.tokens, *(event.draft.tokens if event.draft else ()))}
    streams: dict[int, Detokenizer] = {}
    if tokenizer is not None:
        streams = {event.sample: tokenizer.detokenizer(skip_special=False) for event in events}
    return {**line, "events": [_told(event, arrival, streams.get(event.sample)) for event in events],
            "dropped": dropped, "texts": {str(token): names.text(token) for token in sorted(tokens)}}


def _told(event: Event, arrival: float, stream: Detokenizer | None) -> dict[str, Any]:
    return {"kind": event.kind, "sample": event.sample, "begun": round(event.begun - arrival, 6),
            "ended": round(event.ended - arrival, 6), "start": event.start, "rows": event.rows,
            "company": event.company, "tokens": list(event.tokens),
            "pieces": [f" {token}" if stream is None else stream.push(token) for token in event.tokens],
            "origins": [origin.outcome for origin in event.origins],
            "draft": None if event.draft is None else _tree(event.draft)}


def _tree(draft: Draft) -> dict[str, Any]:
    return {"tokens": list(draft.tokens), "parents": list(draft.parents), "path": list(draft.path),
            "drafter": draft.drafter, "sources": None if draft.sources is None else list(draft.sources)}
