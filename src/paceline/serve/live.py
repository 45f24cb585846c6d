"""What the page asks the server beside the API: the engine as it is now, and the stories of recent requests."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

from fastapi import APIRouter, FastAPI, HTTPException, Request
from fastapi.responses import Response, StreamingResponse

from paceline import __version__
from paceline.async_llm import AsyncLLM
from paceline.engine.observe.timeline import Timelines
from paceline.serve.calls import told_trace
from paceline.serve.keys import Caller, caller_of
from paceline.serve.options import ServeOptions
from paceline.serve.responses import JSONResponse
from paceline.serve.snapshot import EngineState, engine_state, frame, own_frame
from paceline.serve.stories import copied, glimpses, line, lines, story

FRAMES_A_SECOND = 4
NEW_SECONDS = 3
"""Seconds of history in every frame but a viewer's first, which has all that is kept."""

METHODS: dict[str, Any] = {
    **{name: name for name in ("auto", "ngram", "suffix", "lookahead", "precision", "skip", "exit")},
    "ngram + suffix": {"method": "merge", "drafters": ["ngram", "suffix"]},
    "ngram + suffix + lookahead": {"method": "merge", "drafters": ["ngram", "suffix", "lookahead"]},
}
"""What the page offers: ways to speculate that need neither a file nor a model of their own."""

router = APIRouter(prefix="/paceline", include_in_schema=False)


class Feed:
    """The engine as it was a moment ago. However many look, it is asked at most FRAMES_A_SECOND times a second."""

    def __init__(self, llm: AsyncLLM, timelines: Timelines) -> None:
        """`timelines`: which observe the engine."""
        self.timelines = timelines
        self._llm = llm
        self._state: EngineState | None = None
        self._frames: dict[str | None, dict[str, Any]] = {}
        """Made of that state, by who looks; None: operators."""
        self._taken = -1.0
        self._turn = asyncio.Lock()

    async def frame(self, viewer: Caller) -> dict[str, Any]:
        """The latest frame for a viewer; a new dict each time it changed."""
        who = None if viewer.operator else viewer.tenant.name
        async with self._turn:
            if self._state is None or time.monotonic() - self._taken >= 0.9 / FRAMES_A_SECOND:
                self._state = await self._llm.ask(
                    lambda engine: engine_state(engine, self.timelines, self._llm.watch))
                self._frames = {}
                self._taken = time.monotonic()
            if who not in self._frames:
                self._frames[who] = await asyncio.to_thread(
                    frame if viewer.operator else partial(own_frame, tenant=viewer.tenant.name), self._state)
            return self._frames[who]


def attach(app: FastAPI, timelines: Timelines) -> None:
    """What the page looks at. Needs app.state.llm, which `timelines` observe."""
    app.state.feed = Feed(app.state.llm, timelines)


@router.get("/about")
async def about(request: Request) -> dict[str, Any]:
    """What the page's controls offer."""
    engine, options = _llm(request).engine, _options(request)
    return {"version": __version__, "model": options.model_name, "max_model_len": engine.config.max_model_len,
            "chat": engine.chat is not None, "kernels": engine.kernels.name,
            "methods": {name: wish for name, wish in METHODS.items() if options.allows(wish, engine.speculation)},
            "speculation": None if engine.speculation is None else engine.speculation.method}


@router.get("/live")
async def live(request: Request) -> StreamingResponse:
    """Frames as server-sent events until the viewer leaves."""
    return StreamingResponse(_frames(request), media_type="text/event-stream",
                             headers={"cache-control": "no-store", "x-accel-buffering": "no"})


@router.get("/requests")
async def requests(request: Request) -> Response:
    timelines = _feed(request).timelines
    seen = await _llm(request).ask(lambda engine: glimpses(timelines, engine, caller_of(request)))
    return await asyncio.to_thread(lambda: JSONResponse({"requests": lines(seen)}))


@router.get("/request")
async def one_request(request: Request, id: str) -> Response:
    timelines = _feed(request).timelines
    found = await _llm(request).ask(lambda engine: copied(timelines, id, engine, caller_of(request)))
    if found is None:
        raise _unknown(id)
    seen, events, dropped = found
    return await asyncio.to_thread(
        lambda: JSONResponse(story(line(seen), events, seen.timeline.arrival, dropped, _llm(request).engine.tokenizer,
                                   seen.timeline.prompt_end)))


@router.get("/trace")
async def trace(request: Request, id: str) -> Response:
    """The file that `paceline replay` reads."""
    timelines = _feed(request).timelines
    found = await _llm(request).ask(lambda _: timelines.seen_by(caller_of(request).sees, id))
    if not found:
        raise _unknown(id)
    timeline, recorded = found[0], found[0].trace
    if recorded is None:
        wait = "it has not ended yet" if timeline.record is not None else 'it was not asked for with "trace": true'
        raise HTTPException(404, f"There is no trace of this request: {wait}.")
    text = await asyncio.to_thread(lambda: json.dumps(told_trace(recorded), indent=1, allow_nan=False))
    name = "".join(letter if letter.isascii() and (letter.isalnum() or letter in "-_") else "-" for letter in id)
    return Response(text, media_type="application/json",
                    headers={"content-disposition": f'attachment; filename="trace-{name}.json"'})


async def _frames(request: Request) -> AsyncIterator[str]:
    feed, llm, viewer = _feed(request), _llm(request), caller_of(request)
    first, last = True, None
    while llm.alive and not request.app.state.service.draining:
        latest = await feed.frame(viewer)
        if latest is not last:
            shown = latest
            if "seconds" in latest and not first:
                shown = latest | {"seconds": latest["seconds"][-NEW_SECONDS:]}
            first, last = False, latest
            yield f"data: {json.dumps(shown, separators=(',', ':'))}\n\n"
        await asyncio.sleep(1 / FRAMES_A_SECOND)


def _llm(request: Request) -> AsyncLLM:
    llm: AsyncLLM = request.app.state.llm
    return llm


def _feed(request: Request) -> Feed:
    feed: Feed = request.app.state.feed
    return feed


def _options(request: Request) -> ServeOptions:
    options: ServeOptions = request.app.state.options
    return options


def _unknown(request_id: str) -> HTTPException:
    return HTTPException(404, f"There is no request {request_id!r} among the recent ones: it may be too long ago.")


__all__ = ["attach", "router"]
