"""Mail: what replicas tell a front, over one connection each, however many requests there are.

A replica opens it when a front first asks it for something, to the address that came with the order. Both prove that
they know the front's token before anything else is read: what comes in is unpickled.
"""

from __future__ import annotations

import asyncio
import hmac
import pickle
import secrets
import struct
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

NONCE = 32
HEAD = struct.Struct(">Q")
LONGEST = 1 << 30
"""Bytes of a message: more is a mistake."""
PATIENCE_S = 10.0
"""How long the other side may take to say who it is."""

Letter = tuple[int, Any]
"""(which order of the front's, what is new of it)."""


class Farewell(NamedTuple):
    """The last letter about an order that was given up."""

    queue_s: float | None
    """How long it waited until somebody computed its prompt; None: nobody did."""


class Stranger(Exception):
    """The other side does not know the token."""


@dataclass(frozen=True, slots=True)
class Address:
    """Where a front's mail goes."""

    host: str
    port: int
    token: bytes = field(repr=False)


def _proof(token: bytes, who: bytes, *nonces: bytes) -> bytes:
    return hmac.digest(token, who + b"".join(nonces), "sha256")


async def _greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, token: bytes, own: bytes,
                 other: bytes) -> None:
    """Each proves to the other that it knows the token; neither says it. A proof is made for one side and one
    connection, so that nobody can send it back or again."""
    mine = secrets.token_bytes(NONCE)
    writer.write(mine)
    theirs = await reader.readexactly(NONCE)
    writer.write(_proof(token, own, theirs, mine))
    proof = await reader.readexactly(NONCE)
    if not hmac.compare_digest(proof, _proof(token, other, mine, theirs)):
        raise Stranger


async def _read(reader: asyncio.StreamReader) -> Any:
    (size,) = HEAD.unpack(await reader.readexactly(HEAD.size))
    if size > LONGEST:
        raise ValueError(f"a message of {size} bytes")
    return pickle.loads(await reader.readexactly(size))


def _write(writer: asyncio.StreamWriter, message: Any) -> None:
    body = pickle.dumps(message, protocol=5)
    writer.write(HEAD.pack(len(body)))
    writer.write(body)


class Sender:
    """A replica's side: letters to one front. What is posted while the front reads slowly goes in one message."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter,
                 on_cancel: Callable[[int], None]) -> None:
        self.open = True
        self._writer = writer
        self._waiting: list[Letter] = []
        self._flushing: asyncio.Task[None] | None = None
        self._listening = asyncio.ensure_future(self._listen(reader, on_cancel))
        self._on_close: list[Callable[[], None]] = []

    @classmethod
    async def connect(cls, address: Address, name: str, on_cancel: Callable[[int], None]) -> Sender:
        """`name`: the replica's. `on_cancel`: hears which orders the front has given up."""
        reader, writer = await asyncio.wait_for(asyncio.open_connection(address.host, address.port), PATIENCE_S)
        try:
            await asyncio.wait_for(_greet(reader, writer, address.token, b"replica", b"front"), PATIENCE_S)
            _write(writer, name)
        except BaseException:
            writer.close()
            raise
        return cls(reader, writer, on_cancel)

    def when_closed(self, act: Callable[[], None]) -> None:
        """The front is gone, or left."""
        self._on_close.append(act)

    def post(self, key: int, news: Any) -> None:
        self._waiting.append((key, news))
        if self._flushing is None and self.open:
            self._flushing = asyncio.ensure_future(self._flush())

    async def _flush(self) -> None:
        """Begins when all who have something to post in this turn of the event loop have posted it."""
        try:
            while self._waiting and self.open:
                letters, self._waiting = self._waiting, []
                _write(self._writer, letters)
                await self._writer.drain()
        except OSError:
            self.close()
        finally:
            self._flushing = None

    async def _listen(self, reader: asyncio.StreamReader, on_cancel: Callable[[int], None]) -> None:
        with suppress(OSError, EOFError, ValueError):
            while True:
                on_cancel(await _read(reader))
        self.close()

    def close(self) -> None:
        if not self.open:
            return
        self.open = False
        self._writer.close()
        self._listening.cancel()
        for act in self._on_close:
            act()


class MailRoom:
    """A front's side: takes letters from every replica that it has sent orders to."""

    def __init__(self, deliver: Callable[[str, list[Letter]], None], lost: Callable[[str], None]) -> None:
        """`deliver`: (replica, letters). `lost`: a replica's connection has ended."""
        self._deliver = deliver
        self._lost = lost
        self._token = secrets.token_bytes(32)
        self._server: asyncio.Server | None = None
        self._replicas: dict[str, asyncio.StreamWriter] = {}

    async def open(self, host: str = "127.0.0.1") -> Address:
        self._server = await asyncio.start_server(self._take, host, 0)
        return Address(host, self._server.sockets[0].getsockname()[1], self._token)

    def cancel(self, replica: str, key: int) -> None:
        """The order is given up."""
        if (writer := self._replicas.get(replica)) is not None:
            _write(writer, key)

    def part(self, replica: str) -> None:
        """Nothing more is wanted of it."""
        if (writer := self._replicas.pop(replica, None)) is not None:
            writer.close()

    async def _take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        name: str | None = None
        try:
            await asyncio.wait_for(_greet(reader, writer, self._token, b"front", b"replica"), PATIENCE_S)
            name = str(await asyncio.wait_for(_read(reader), PATIENCE_S))
            if (before := self._replicas.get(name)) is not None:  # it hung up; that news is on its way still
                before.close()
                self._lost(name)
            self._replicas[name] = writer
            while True:
                self._deliver(name, await _read(reader))
        except (OSError, EOFError, ValueError, Stranger, TimeoutError, asyncio.CancelledError):
            pass  # cancelled: the event loop ends, and asyncio's streams would log that
        finally:
            writer.close()
            if name is not None and self._replicas.get(name, writer) is writer:
                self._replicas.pop(name, None)
                self._lost(name)

    def close(self) -> None:
        """Nothing more is taken. In the event loop, or after it has ended."""
        server, self._server = self._server, None
        with suppress(RuntimeError):  # it has ended
            if server is not None:
                server.close()
            for writer in list(self._replicas.values()):
                writer.close()
