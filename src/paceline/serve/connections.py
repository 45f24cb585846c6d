"""Connections: how many may be open at once, and how long one may keep the server waiting."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from paceline.serve.errors import ApiError

log = logging.getLogger("paceline.serve")

SILENT_S = 60.0
"""How long a connection may take to send the head of its first request."""
REFUSED_S = 5.0
"""The same for one too many, which waits for a refusal only."""


class Connection(AutoHTTPProtocol):  # type: ignore[misc, valid-type]
    """A client's connection.

    One beyond `most` is answered by `refusal`. A client that does not read what it asked for is cut off after
    `stall_s` seconds, which cancels its requests: until then what it leaves unread piles up here.
    """

    def __init__(self, *, most: int, stall_s: float, refusal: ASGIApp, **uvicorns: Any) -> None:
        super().__init__(**uvicorns)
        self._most = most
        self._stall_s = stall_s
        self._refusal = refusal
        self._silent: asyncio.TimerHandle | None = None
        self._stalled: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        crowded = len(self.connections) > self._most
        if crowded:
            self.app = self._refusal
        self._silent = self.loop.call_later(REFUSED_S if crowded else SILENT_S, transport.abort)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._silent is not None and self.cycle is not None:
            self._silent.cancel()
            self._silent = None

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stalled = self.loop.call_later(self._stall_s, self._cut_off)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._stalled is not None:
            self._stalled.cancel()

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._silent, self._stalled):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def _cut_off(self) -> None:
        log.info("a client has not read for %g s and is cut off", self._stall_s)
        self.transport.abort()


async def crowded(scope: Scope, receive: Receive, send: Send) -> None:
    """What one connection too many is told."""
    refusal = ApiError(503, "There are too many connections: close some, or try again later.",
                       code="too_many_connections", headers={"retry-after": "5", "connection": "close"})
    await refusal.response()(scope, receive, send)
