"""What happens to every HTTP request before and after its endpoint: id, size, log (and the key: keys.py).
Plain ASGI, no copies."""

from __future__ import annotations

import logging
import re
import secrets
import time
from urllib.parse import quote

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from paceline.serve.errors import ApiError, api_error
from paceline.serve.metrics import Metrics

log = logging.getLogger("paceline.access")

REQUEST_ID = re.compile(r"[A-Za-z0-9._:@/+=-]{1,128}")


class RequestIds:
    """Takes x-request-id or makes one, returns it, logs the request under it, counts the response."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics
        self._in_use: set[str] = set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        asked = Headers(scope=scope).get("x-request-id", "")
        request_id = asked if REQUEST_ID.fullmatch(asked) else secrets.token_hex(16)
        # Clients may send one id with calls side by side; the engine's requests need names of their own.
        name = request_id if request_id not in self._in_use else f"{request_id}-{secrets.token_hex(8)}"
        self._in_use.add(name)
        scope.setdefault("state", {}).update(request_id=request_id, name=name)
        started, status = time.perf_counter(), 0

        async def respond(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        try:
            await self._app(scope, receive, respond)
        finally:
            self._in_use.discard(name)
            self._metrics.responded(status)
            # The path is decoded by now: a line break in it must not look like another line of the log.
            path = quote(scope["path"], safe="/:@!$&'()*+,;=~", errors="replace")
            log.info("%s %s %d", scope["method"], path, status, extra={
                "request_id": request_id, "method": scope["method"], "path": scope["path"], "status": status,
                "seconds": round(time.perf_counter() - started, 6)})


class Failures:
    """A mistake of the server's own is an answer like others: it passes through what is around, and has its headers.

    (The framework's own handler for them sits outside of all middleware.)
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = False

        async def respond(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self._app(scope, receive, respond)
        except Exception as problem:
            if started:
                raise  # half an answer is out: all that is left is to cut the connection
            await api_error(problem, scope["state"]["request_id"]).response()(scope, receive, send)


class BodyLimit:
    """Refuses bodies that are too large, by their declared length or as soon as they have grown too long."""

    def __init__(self, app: ASGIApp, limit: int) -> None:
        self._app = app
        self._limit = limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        declared = Headers(scope=scope).get("content-length", "0")
        if declared.isdigit() and int(declared) > self._limit:
            await self._refusal().response()(scope, receive, send)
            return
        seen = 0

        async def counted() -> Message:
            nonlocal seen
            message = await receive()
            seen += len(message.get("body", b""))
            if seen > self._limit:
                raise self._refusal()
            return message

        await self._app(scope, counted, send)

    def _refusal(self) -> ApiError:
        return ApiError(413, f"The body is larger than {self._limit} bytes, which is this server's limit: send less.",
                        code="request_too_large", headers={"connection": "close"})
