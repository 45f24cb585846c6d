"""Which model a request is for: where there are several, it is loaded first and stays so until the answer is sent."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from functools import wraps
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from paceline.serve.calls import Service, disconnected
from paceline.serve.errors import ApiError
from paceline.serve.pool import LoadError, PoolClosed
from paceline.serve.several import Several

Endpoint = Callable[..., Awaitable[Response]]
LEAST_S = 0.001
"""What is left at least of the time of a request that has waited for its model: the engine ends it then."""


class Leases:
    """What a request has borrowed goes back when it has ended, however it did."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with ExitStack() as leases:
            if scope["type"] == "http":
                scope["state"]["leases"] = leases
            await self._app(scope, receive, send)


def for_model(endpoint: Any) -> Any:
    """An endpoint that needs the model that its body names, or the query of one without a body: service_of() is that
    model's. With one model it is the endpoint itself, all but called by another name."""

    @wraps(endpoint)
    async def when_loaded(request: Request, **given: Any) -> Any:
        several: Several | None = request.app.state.several
        if several is not None:
            request.state.service = await _borrowed(several, request, given.get("body"))
            # A connection that is kept open keeps the scope of its last request: not the model with it.
            request.state.leases.callback(request.scope["state"].pop, "service", None)
        return await endpoint(request=request, **given)

    return when_loaded


async def _borrowed(several: Several, request: Request, body: Any) -> Service:
    if several.draining:
        raise several.leaving()
    asked = request.query_params.get("model") if body is None else getattr(body, "model", None)
    if asked and request.url.path.startswith("/api/") and asked not in several.models:
        asked = asked.removesuffix(":latest")  # Ollama's clients may add it
    name = several.unnamed() if body is None and not asked else several.owner(asked)
    leases: ExitStack = request.state.leases

    async def borrow() -> Service:
        service = await several.pool.acquire(name)
        leases.callback(several.pool.release, name)
        return service

    limits = (several.options.timeout_s, getattr(body, "timeout_s", None))
    seconds = min((limit for limit in limits if limit is not None), default=math.inf)
    began = time.monotonic()
    try:
        service = await _unless_gone(request, borrow(), seconds)
    except LoadError as problem:
        raise ApiError(503, problem.told, param="model", code="model_not_loaded",
                       headers={"retry-after": str(max(1, math.ceil(problem.retry_s)))}) from None
    except PoolClosed:
        raise several.leaving() from None
    except TimeoutError:
        raise ApiError(503, f"The model {name!r} was not loaded in the time that this request may take: try again "
                       "later, or give it more.", code="timeout") from None
    if seconds < math.inf and hasattr(body, "timeout_s"):
        body.timeout_s = max(LEAST_S, seconds - (time.monotonic() - began))
    return service


async def _unless_gone(request: Request, work: Awaitable[Service], seconds: float) -> Service:
    """What comes of it, as long as the client is there and its time is not over."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(disconnected(request.receive))
    try:
        await asyncio.wait({task, gone}, timeout=None if seconds == math.inf else seconds,
                           return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        if gone.done():
            raise ApiError(499, "The client has gone.", code="client_closed_request")
        raise TimeoutError
    finally:
        gone.cancel()
        task.cancel()
