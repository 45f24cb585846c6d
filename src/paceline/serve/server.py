"""Running the app on a socket, and leaving in good order."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI

from paceline.async_llm import AsyncLLM
from paceline.errors import ConfigError
from paceline.serve.app import create_app
from paceline.serve.connections import Connection, crowded
from paceline.serve.hosts import is_loopback
from paceline.serve.llm import Serving
from paceline.serve.middleware import RequestIds
from paceline.serve.options import ServeOptions

log = logging.getLogger("paceline.serve")

LEAVING_S = 5.0
"""After the last request has ended: how long its answer may take to be sent."""


class Server(uvicorn.Server):
    """On the first SIGTERM or SIGINT it drains: /ready says 503, new requests are refused, running ones may finish for
    `drain_s` seconds and are then ended. A second signal leaves at once."""

    def __init__(self, app: FastAPI, options: ServeOptions, announce: Callable[[], None] = lambda: None) -> None:
        """`announce` is called once requests are welcome."""
        connection: Any = partial(Connection, most=options.max_connections, stall_s=options.stall_s,
                                  refusal=RequestIds(crowded, app.state.service.metrics))
        super().__init__(uvicorn.Config(app, http=connection, log_config=None, access_log=False, lifespan="on",
                                        server_header=False, timeout_graceful_shutdown=int(LEAVING_S)))
        self._app = app
        self._options = options
        self._announce = announce
        self._loop: asyncio.AbstractEventLoop | None = None
        self._draining: asyncio.Task[None] | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._loop is None:  # not even started
            self.should_exit = True
            return
        # A signal may come while anything runs: only note it here.
        again, self._app.state.service.draining = self._app.state.service.draining, True
        self._loop.call_soon_threadsafe(self._leave if again else self._begin_drain)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)
        if self.started:
            self._announce()

    def _begin_drain(self) -> None:
        self._draining = asyncio.ensure_future(self._drain())

    async def _drain(self) -> None:
        llm: Serving = self._app.state.llm
        self._app.state.service.begin_drain()
        log.info("draining: %d requests run", llm.live, extra={"request_ids": llm.live_ids})
        end = time.monotonic() + self._options.drain_s
        while llm.live and llm.alive and time.monotonic() < end:
            await asyncio.sleep(0.05)
        self._leave()

    def _leave(self) -> None:
        llm: Serving = self._app.state.llm
        if llm.live and llm.alive:
            log.warning("%d requests did not finish in time and are ended", llm.live,
                        extra={"request_ids": llm.live_ids})
            llm.cancel_all()
        self.should_exit = True


def listen(options: ServeOptions) -> socket.socket:
    """The socket, so that its port is known before the first request (port 0: any free one)."""
    try:
        family = socket.getaddrinfo(options.host, options.port, type=socket.SOCK_STREAM)[0][0]
        made = socket.socket(family, socket.SOCK_STREAM)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind((options.host, options.port))
    except (OSError, OverflowError, UnicodeError) as error:  # the latter: no port, no name at all
        why = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"Cannot listen on {options.host}:{options.port} ({why}): choose another --port or "
                          "--host.") from None
    return made


def run(llm: AsyncLLM, options: ServeOptions, made: socket.socket, announce: Callable[[], None],
        spans: Any = None) -> None:
    """Serve until a signal ends it; closes `llm`. `spans`: as create_app() takes it."""
    run_app(lambda: create_app(llm, options, spans=spans), llm, options, made, announce)


def run_app(create: Callable[[], FastAPI], llm: Serving, options: ServeOptions, made: socket.socket,
            announce: Callable[[], None]) -> None:
    """The same with an app made by `create`, which serves `llm`."""
    if not options.keys and not is_loopback(options.host):
        log.warning("other machines can reach this server and no key is asked for: set --api-key")
    try:
        Server(create(), options, announce).run(sockets=[made])
    finally:
        llm.close()
        made.close()
