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
"""How long a connection may take to send the head of a request, and how long it may pause within a body."""
REFUSED_S = 5.0
"""The same for one too many, which waits for a refusal only."""


class Connection(AutoHTTPProtocol):  # type: ignore[misc, valid-type]
    """A client's connection.

    One beyond `most` is answered by `refusal`. A client that reads nothing of what it asked for during `stall_s`
    seconds is cut off, which cancels its requests: until then what it leaves unread piles up here.
    """

    def __init__(self, *, most: int, stall_s: float, refusal: ASGIApp, **uvicorns: Any) -> None:
        super().__init__(**uvicorns)
        self._most = most
        self._stall_s = stall_s
        self._refusal = refusal
        self._silent: asyncio.TimerHandle | None = None
        self._stalled: asyncio.TimerHandle | None = None
        self._unsent = 0

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        crowded = len(self.connections) > self._most
        if crowded:
            self.app = self._refusal
        self._silent = self.loop.call_later(REFUSED_S if crowded else SILENT_S, self._hang_up)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            self._await_body()
        elif self._silent is None:  # a head has this long as a whole, however many pieces it comes in
            self._silent = self.loop.call_later(SILENT_S, self._hang_up)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self.cycle.response_complete:  # the next request had come early, perhaps without all of its body
            self._await_body()

    def _await_body(self) -> None:
        if self._silent is not None:
            self._silent.cancel()
        self._silent = self.loop.call_later(SILENT_S, self._hang_up) if self.cycle.more_body else None

    def _hang_up(self) -> None:
        if self.flow.read_paused:  # what the client sends waits for the server
            self._silent = self.loop.call_later(SILENT_S, self._hang_up)
        else:
            self.transport.abort()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._stalled is not None:
            self._stalled.cancel()

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._silent, self._stalled):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def _watch(self) -> None:
        self._unsent = self.transport.get_write_buffer_size()
        self._stalled = self.loop.call_later(self._stall_s, self._cut_off)

    def _cut_off(self) -> None:
        # Nothing is added while writing is paused: less than before means that the client reads.
        if self.transport.get_write_buffer_size() < self._unsent:
            self._watch()
            return
        log.info("a client has not read for %g s and is cut off", self._stall_s)
        self.transport.abort()


async def crowded(scope: Scope, receive: Receive, send: Send) -> None:
    """The answer to one connection too many."""
    refusal = ApiError(503, "There are too many connections: close some, or try again later.",
                       code="too_many_connections", headers={"retry-after": "5", "connection": "close"})
    await refusal.response()(scope, receive, send)
