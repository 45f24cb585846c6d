"""Clients that only hold on: too many connections, answers that nobody reads, connections that say nothing."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest.mock import Mock

import httpx
import pytest
import uvicorn
from serving import WAIT, metrics_of, served, until
from uvicorn.server import ServerState

from engine.tiny import tiny_engine
from paceline.serve import connections
from paceline.serve.connections import Connection, crowded

READ = b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n"


def connect(url: str) -> socket.socket:
    host, port = url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), WAIT)


def ended(client: socket.socket) -> bool:
    """Read what there is, to the end of the connection; it may be reset, or just end."""
    try:
        while client.recv(1 << 20):
            pass
    except ConnectionResetError:
        pass
    return True


def test_one_connection_too_many_is_refused_in_openais_shape() -> None:
    with served(tiny_engine(), max_connections=3) as url:
        with ExitStack() as held:
            for _ in range(3):
                held.enter_context(connect(url))

            def refused() -> httpx.Response | None:
                answer = httpx.get(f"{url}/v1/models", timeout=WAIT)
                return answer if answer.status_code == 503 else None

            answer = until(refused)
            assert answer.json()["error"]["code"] == "too_many_connections" and answer.headers["retry-after"]
            assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
            assert answer.headers["connection"] == "close" and answer.headers["x-request-id"]
        until(lambda: httpx.get(f"{url}/v1/models", timeout=WAIT).status_code == 200)
        assert metrics_of(url)['paceline_http_responses_total{status="503"}'] >= 1


@contextmanager
def endless(stall_s: float) -> Iterator[tuple[str, list[str]]]:
    """An app that goes on writing for as long as it is read; what became of its clients."""
    ends: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        gone = asyncio.ensure_future(receive())
        while not gone.done() or gone.result()["type"] != "http.disconnect":
            if gone.done():
                gone = asyncio.ensure_future(receive())
            await send({"type": "http.response.body", "body": b"x" * 1_000_000, "more_body": True})
            await asyncio.sleep(0)
        ends.append("gone")

    connection: Any = partial(Connection, most=9, stall_s=stall_s, refusal=crowded)
    server = uvicorn.Server(uvicorn.Config(app, http=connection, log_config=None, lifespan="off"))
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        thread = threading.Thread(target=asyncio.run, args=(server.serve([listening]),))
        thread.start()
        try:
            until(lambda: server.started)
            yield f"http://127.0.0.1:{listening.getsockname()[1]}", ends
        finally:
            server.should_exit = True
            thread.join(WAIT)


def test_a_client_that_does_not_read_is_cut_off() -> None:
    with endless(0.3) as (url, ends), connect(url) as client:
        client.sendall(READ)
        until(lambda: ends)
        assert ended(client)


def test_a_client_that_reads_slowly_is_not() -> None:
    with endless(5.0) as (url, ends), connect(url) as client:
        client.sendall(READ)
        seen = 0
        while seen < 20_000_000:
            seen += len(client.recv(1 << 20))
        assert not ends


HALF = b"POST /tokenize HTTP/1.1\r\nhost: localhost\r\ncontent-length: 90\r\n\r\n{"
HEALTH = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"


@pytest.mark.parametrize("sent", [b"", b"GET / HT", HALF, HEALTH + HALF])
def test_a_connection_that_says_nothing_is_closed(sent: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "SILENT_S", 0.2)
    with served(tiny_engine()) as url, connect(url) as client:
        client.sendall(sent)
        assert ended(client)
        assert httpx.get(f"{url}/health", timeout=WAIT).status_code == 200


class Clock(asyncio.SelectorEventLoop):
    """A loop whose time passes when it is told to."""

    now = 0.0

    def time(self) -> float:
        return self.now

    def passes(self, seconds: float) -> None:
        self.now += seconds
        self.call_soon(self.stop)
        self.run_forever()


@contextmanager
def alone() -> Iterator[tuple[Clock, Connection, Mock]]:
    """A connection without a network: its clock, itself, and the transport it writes to."""
    loop, transport = Clock(), Mock(spec=asyncio.Transport)
    transport.is_closing.return_value = False
    transport.get_extra_info.return_value = None

    async def app(scope: Any, receive: Any, send: Any) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    config = uvicorn.Config(app, log_config=None, lifespan="off")
    config.load()
    connection = Connection(most=9, stall_s=10.0, refusal=crowded, config=config, server_state=ServerState(),
                            app_state={}, _loop=loop)
    connection.connection_made(transport)
    yield loop, connection, transport
    connection.connection_lost(None)
    loop.passes(0)
    loop.close()


def test_only_who_reads_nothing_at_all_is_cut_off() -> None:
    with alone() as (clock, connection, transport):
        connection.data_received(READ)
        transport.get_write_buffer_size.return_value = 1_000_000
        connection.pause_writing()
        for _ in range(20):  # never down to where writing goes on
            transport.get_write_buffer_size.return_value -= 1000
            clock.passes(10.0)
        assert not transport.abort.called
        clock.passes(10.0)
        assert transport.abort.called


def test_a_body_may_come_slowly_but_not_stop() -> None:
    with alone() as (clock, connection, transport):
        connection.data_received(HALF)
        for _ in range(20):
            clock.passes(connections.SILENT_S * 0.9)
            connection.data_received(b" ")
        assert not transport.abort.called
        clock.passes(connections.SILENT_S)
        assert transport.abort.called


def test_whoever_has_sent_all_may_wait() -> None:
    with alone() as (clock, connection, transport):
        connection.data_received(HALF)
        connection.data_received(b" " * 89)
        clock.passes(connections.SILENT_S * 3)
        assert not transport.abort.called


def test_a_head_does_not_get_longer_by_coming_in_pieces() -> None:
    with alone() as (clock, connection, transport):
        for _ in range(4):
            connection.data_received(b"G")
            clock.passes(connections.SILENT_S / 4)
        assert transport.abort.called
