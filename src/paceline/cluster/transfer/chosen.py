"""Transports: those of one process, of which each pair of workers uses the one that connects them."""

from __future__ import annotations

import asyncio
import os
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from paceline.cluster.transfer.named import TRANSPORTS, open_transport
from paceline.cluster.transfer.shared_memory import SharedMemoryTransport, memory_folder
from paceline.cluster.transfer.tcp import TcpTransport
from paceline.cluster.transfer.transport import Ticket, Transport
from paceline.engine.exchange import PrefixBlocks
from paceline.errors import ConfigError, TransferError

AUTO = "auto"


@dataclass(frozen=True)
class TransferOptions:
    """Of all workers of a cluster alike."""

    transport: str = AUTO
    """One of TRANSPORTS, or auto: shared memory within a machine, TCP between machines."""
    token: str = field(default="", repr=False)
    """The cluster's: who does not know it is given nothing."""
    beyond: bool = False
    """Workers may be on other machines: listen on this one's own address and not on loopback alone."""

    def __post_init__(self) -> None:
        check_transport(self.transport)


def check_transport(name: str) -> None:
    if name != AUTO and name not in TRANSPORTS:
        raise ConfigError(f"The transfer of blocks must be {AUTO} or one of {', '.join(TRANSPORTS)}, got {name!r}.")


def place() -> str:
    """The same in two processes only if a file that one of them puts into memory can be read by the other."""
    boot = ""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{os.stat(memory_folder()).st_dev}/{os.getuid()}" if boot else f"process {os.getpid()}"


class Transports:
    """Opened when first needed. In one event loop."""

    def __init__(self, options: TransferOptions, host: str) -> None:
        """`host`: at which other workers reach this one."""
        self._options = options
        self._host = host
        self._opened: dict[str, asyncio.Future[Transport]] = {}

    async def towards(self, there: str) -> Transport:
        """By which to offer blocks to a worker whose place() that is."""
        name = self._options.transport
        if name == AUTO:
            name = SharedMemoryTransport.name if there == place() else TcpTransport.name
        return await self._named(name)

    async def fetch(self, ticket: Ticket) -> PrefixBlocks:
        if self._options.transport not in (AUTO, ticket.transport) or ticket.transport not in TRANSPORTS:
            raise TransferError(f"The blocks are offered by {ticket.transport} and this worker fetches by "
                                f"{self._options.transport}: give prefill and decode workers the same transport.")
        return await (await self._named(ticket.transport)).fetch(ticket)

    async def _named(self, name: str) -> Transport:
        found = self._opened.get(name)
        if found is None or (found.done() and (found.cancelled() or found.exception() is not None)):
            found = self._opened[name] = asyncio.ensure_future(
                open_transport(name, token=self._options.token, host=self._host))
        return await asyncio.shield(found)  # whoever asked first may leave meanwhile

    def close(self) -> None:
        """Withdraw all offers."""
        for found in self._opened.values():
            if found.done() and not found.cancelled() and found.exception() is None:
                found.result().close()
