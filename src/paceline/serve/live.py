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
from paceline.serve.choosing import for_model
from paceline.serve.keys import Caller, caller_of
from paceline.serve.responses import JSONResponse, house_of, service_of
from paceline.serve.snapshot import EngineState, frame, own_frame
from paceline.serve.views import Views

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

    def __init__(self, views: Views) -> None:
        self._views = views
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
                self._state = await self._views.state()
                self._frames = {}
                self._taken = time.monotonic()
            if who not in self._frames:
                self._frames[who] = await asyncio.to_thread(
                    frame if viewer.operator else partial(own_frame, tenant=viewer.tenant.name), self._state)
            return self._frames[who]


def attach(app: FastAPI) -> None:
    """What the page looks at. Needs app.state.service."""
    app.state.feed = Feed(app.state.service.views)


@router.get("/about")
@for_model
async def about(request: Request) -> dict[str, Any]:
    """What the page's controls offer, with the model that the query names."""
    service = service_of(request)
    engine, options = service.llm.engine, service.options
    return {"version": __version__, "model": options.model_name,
            "models": [card.name for card in house_of(request).cards if card.parent is None],
            "max_model_len": engine.config.max_model_len,
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
    seen = await _views(request).requests(caller_of(request))
    return await asyncio.to_thread(lambda: JSONResponse({"requests": seen}))


@router.get("/request")
async def one_request(request: Request, id: str) -> Response:
    found = await _views(request).story(id, caller_of(request))
    if found is None:
        raise _unknown(id)
    return await asyncio.to_thread(lambda: JSONResponse(found))


@router.get("/trace")
async def trace(request: Request, id: str) -> Response:
    """The file that `paceline replay` reads."""
    found = await _views(request).trace(id, caller_of(request))
    if found is None:
        raise _unknown(id)
    if found.text is None:
        raise HTTPException(404, f"There is no trace of this request: {found.missing}.")
    name = "".join(letter if letter.isascii() and (letter.isalnum() or letter in "-_") else "-" for letter in id)
    return Response(found.text, media_type="application/json",
                    headers={"content-disposition": f'attachment; filename="trace-{name}.json"'})


async def _frames(request: Request) -> AsyncIterator[str]:
    feed, llm, viewer = _feed(request), house_of(request).llm, caller_of(request)
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


def _views(request: Request) -> Views:
    views: Views = request.app.state.service.views
    return views


def _feed(request: Request) -> Feed:
    feed: Feed = request.app.state.feed
    return feed


def _unknown(request_id: str) -> HTTPException:
    return HTTPException(404, f"There is no request {request_id!r} among the recent ones: it may be too long ago.")


__all__ = ["attach", "router"]
