"""Transport: how blocks get to another process. Ticket: by which it finds them. Leases: until when."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from paceline.engine.exchange import PrefixBlocks
from paceline.errors import TransferError

LEASE_S = 30.0
"""How long blocks that are offered wait for who wants them."""
MOST_BYTES = 2 << 30
"""That one process offers at a time."""
LARGEST = 64 << 30
"""Bytes that a ticket may announce."""


@dataclass(frozen=True)
class Ticket:
    """Plain values: it travels with whatever carries the cluster's calls, and is worth nothing without its token."""

    transport: str
    address: str
    """Where the blocks are, in the transport's own words."""
    key: str
    size: int
    """Bytes that will come."""
    digest: str
    """Of all of them; "": of memory that no copy of leaves the card."""
    tokens: int
    """How long a beginning of the text it is."""
    more: Any = None
    """What the transport needs besides."""

    def check(self, transport: str) -> None:
        """Raises TransferError where it is not this transport's, or is none at all."""
        if self.transport != transport:
            raise TransferError(f"The blocks are offered by {self.transport} and this worker fetches by {transport}: "
                                "give prefill and decode workers the same transport.")
        if not 0 <= self.size <= LARGEST:
            raise TransferError(f"The ticket announces {self.size} bytes, and no offer has more than {LARGEST}.")


class Transport(Protocol):
    """Of one process. Every failure is a TransferError, and costs nothing but the prompt's computing."""

    name: str
    on_device: bool
    """Whether it takes and gives blocks that lie on a card."""

    async def offer(self, blocks: PrefixBlocks, lease_s: float = LEASE_S) -> Ticket:
        """Keep them for whoever has the ticket, so long at most."""

    async def fetch(self, ticket: Ticket) -> PrefixBlocks:
        """What was offered, to the byte."""

    def withdraw(self, ticket: Ticket) -> None:
        """An own offer has been fetched, or is of no use any more. At any time, as often as one likes."""

    def close(self) -> None:
        """Withdraw all offers, and take no more."""


class Leases:
    """Offers of one process: each ends by itself."""

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self._most = most_bytes
        self._ends: dict[str, tuple[int, asyncio.TimerHandle, Callable[[], None]]] = {}
        self._closed = False

    def __len__(self) -> int:
        return len(self._ends)

    @property
    def bytes(self) -> int:
        return sum(size for size, _, _ in self._ends.values())

    def check(self, size: int) -> None:
        """Raises TransferError where an offer of so many bytes has no place."""
        if self._closed:
            raise TransferError("This worker leaves and offers no more blocks.")
        if self.bytes + size > self._most:
            raise TransferError(f"{self.bytes} bytes of blocks wait to be fetched, {size} more were to, and the limit "
                                f"is {self._most}.")

    def begin(self, size: int, lease_s: float, end: Callable[[], None]) -> str:
        """A new offer's key; `end` is called once, when it is withdrawn or its time is up. Raises as check(), which may
        be long ago: others were made meanwhile, or close() was called. What was to be offered is then the caller's."""
        self.check(size)
        key = secrets.token_hex(16)
        timer = asyncio.get_running_loop().call_later(lease_s, lambda: self.end(key))
        self._ends[key] = (size, timer, end)
        return key

    def end(self, key: str) -> None:
        found = self._ends.pop(key, None)
        if found is not None:
            found[1].cancel()
            found[2]()

    def close(self) -> None:
        self._closed = True
        for key in list(self._ends):
            self.end(key)
