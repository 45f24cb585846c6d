"""TcpTransport: blocks between machines. Who fetches proves that it knows the cluster's token, which never travels."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import secrets
from contextlib import suppress

from paceline.cluster.transfer.transport import LEASE_S, MOST_BYTES, Leases, Ticket
from paceline.cluster.transfer.wire import digest_of, pack, unpack
from paceline.engine.exchange import PrefixBlocks
from paceline.errors import ConfigError, TransferError

log = logging.getLogger("paceline.cluster")

GREETING = b"paceline tcp 1\n"
NONCE = 32
KEY = 32
"""Characters of an offer's key."""
PROOF = 32
PIECE = 1 << 20
STALL_S = 10.0
"""How long either side may keep the other waiting."""
MOST_CONNECTIONS = 64


def proof(token: str, nonce: bytes, key: str) -> bytes:
    return hmac.new(token.encode(), GREETING + nonce + key.encode(), hashlib.sha256).digest()


class TcpTransport:
    """Implements Transport. Call start() before offer(); who only fetches need not."""

    name = "tcp"
    on_device = False

    def __init__(self, token: str, host: str = "127.0.0.1", port: int = 0, *, advertised: str | None = None,
                 most_bytes: int = MOST_BYTES, stall_s: float = STALL_S) -> None:
        """`host`: to listen on; others than this machine reach it only where it is told so. `advertised`: by which name
        they do, where that is another one."""
        if not token:
            raise ConfigError("Blocks travel with the cluster's token alone: give one.")
        self._token = token
        self._host = host
        self._port = port
        self._advertised = advertised or host
        self._stall_s = stall_s
        self._leases = Leases(most_bytes)
        self._offers: dict[str, list[memoryview]] = {}
        self._server: asyncio.Server | None = None
        self._connections = 0

    async def start(self) -> None:
        try:
            self._server = await asyncio.start_server(self._serve, self._host, self._port)
        except OSError as problem:
            raise ConfigError(f"Cannot listen for block transfers on {self._host}:{self._port} ({problem.strerror}): "
                              "choose another address.") from None
        self._port = self._server.sockets[0].getsockname()[1]

    async def offer(self, blocks: PrefixBlocks, lease_s: float = LEASE_S) -> Ticket:
        if self._server is None:
            raise TransferError("This worker does not listen for block transfers: start() its transport.")
        parts = pack(blocks)
        size = sum(part.nbytes for part in parts)
        self._leases.check(size)
        digest = await asyncio.to_thread(digest_of, parts)
        key = self._leases.begin(size, lease_s, lambda: self._forget(key))
        self._offers[key] = parts
        return Ticket(self.name, f"{self._advertised}:{self._port}", key, size, digest, len(blocks.tokens))

    async def fetch(self, ticket: Ticket) -> PrefixBlocks:
        ticket.check(self.name)
        host, _, port = ticket.address.rpartition(":")
        try:
            async with asyncio.timeout(self._stall_s):
                reader, writer = await asyncio.open_connection(host, int(port))
        except (OSError, ValueError, TimeoutError) as problem:
            raise TransferError(f"No blocks from {ticket.address}: no connection ({type(problem).__name__}).") from None
        received = bytearray(ticket.size)
        try:
            async with asyncio.timeout(self._stall_s):
                greeting = await reader.readexactly(len(GREETING) + NONCE)
            if not greeting.startswith(GREETING):
                raise TransferError(f"{ticket.address} speaks another protocol or version: update both sides.")
            writer.write(ticket.key.encode() + proof(self._token, greeting[len(GREETING):], ticket.key))
            at = 0
            while at < ticket.size:
                async with asyncio.timeout(self._stall_s):
                    piece = await reader.read(min(PIECE, ticket.size - at))
                if not piece:
                    raise TransferError(f"{ticket.address} sent {at} of {ticket.size} bytes: the lease has ended, its "
                                        "worker has, or it has another token.")
                received[at:at + len(piece)] = piece
                at += len(piece)
        except (OSError, EOFError, TimeoutError) as problem:
            raise TransferError(f"The connection to {ticket.address} broke ({type(problem).__name__}).") from None
        finally:
            writer.close()
        return await asyncio.to_thread(unpack, received, ticket.digest)

    def withdraw(self, ticket: Ticket) -> None:
        self._leases.end(ticket.key)

    def close(self) -> None:
        self._leases.close()
        if self._server is not None:
            self._server.close()

    def _forget(self, key: str) -> None:
        self._offers.pop(key, None)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._connections += 1
        try:
            if self._connections <= MOST_CONNECTIONS:
                await self._answer(reader, writer)
        except (OSError, EOFError, TimeoutError):  # whoever it was has gone, or never was one of us
            pass
        finally:
            self._connections -= 1
            writer.close()
            with suppress(OSError, TimeoutError):
                async with asyncio.timeout(self._stall_s):
                    await writer.wait_closed()
            writer.transport.abort()  # who does not read what was sent would keep it, and the connection

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonce = secrets.token_bytes(NONCE)
        writer.write(GREETING + nonce)
        async with asyncio.timeout(self._stall_s):
            asked = await reader.readexactly(KEY + PROOF)
        key = asked[:KEY].decode("ascii", "replace")
        if not hmac.compare_digest(asked[KEY:], proof(self._token, nonce, key)):
            log.warning("a block transfer was refused: who asked for it has another token")
            return
        for part in self._offers.get(key, ()):
            for begin in range(0, part.nbytes, PIECE):
                if key not in self._offers:  # withdrawn, or its lease has ended
                    return
                writer.write(part.cast("B")[begin:begin + PIECE])
                async with asyncio.timeout(self._stall_s):
                    await writer.drain()
