"""NixlTransport: blocks by NVIDIA's transfer library (RDMA and the like), where it is installed.

Written against its published interface and tested with a stand-in of that; never run on hardware that needs it.
"""

from __future__ import annotations

import asyncio
import importlib
import secrets
from collections import Counter
from contextlib import suppress
from typing import Any

import torch

from paceline.cluster.transfer.transport import LEASE_S, MOST_BYTES, Leases, Ticket
from paceline.cluster.transfer.wire import digest_of, filled, pack, pack_head, unpack_head
from paceline.engine.exchange import PrefixBlocks
from paceline.errors import ConfigError, TransferError

PATIENCE_S = 30.0
LOOK_S = 0.001


class NixlTransport:
    """Implements Transport: who has a ticket reads the blocks out of the memory of who offers them."""

    name = "nixl"
    on_device = False

    def __init__(self, most_bytes: int = MOST_BYTES, *, patience_s: float = PATIENCE_S) -> None:
        try:
            api: Any = importlib.import_module("nixl._api")
        except ImportError:
            raise ConfigError("The nixl transport needs the package 'nixl': pip install nixl, or use shared memory or "
                              "TCP.") from None
        self._agent = api.nixl_agent(f"paceline-{secrets.token_hex(8)}", api.nixl_agent_config())
        self._patience_s = patience_s
        self._leases = Leases(most_bytes)
        self._offers: dict[str, tuple[list[torch.Tensor], Any]] = {}
        self._reads: Counter[str] = Counter()
        """Of each other agent, those under way."""

    async def offer(self, blocks: PrefixBlocks, lease_s: float = LEASE_S) -> Ticket:
        self._leases.check(blocks.nbytes)
        digest = await asyncio.to_thread(lambda: digest_of(pack(blocks)))
        self._leases.check(blocks.nbytes)  # before anything is registered that would have to be let go
        tensors = [rows.contiguous() for rows in blocks.data if rows.numel()]
        registered = self._registered(tensors)
        described = self._agent.get_serialized_descs(self._agent.get_xfer_descs(tensors))
        key = self._leases.begin(blocks.nbytes, lease_s, lambda: self._forget(key))
        self._offers[key] = (tensors, registered)
        return Ticket(self.name, self._agent.name, key, blocks.nbytes, digest, len(blocks.tokens),
                      (pack_head(blocks), self._agent.get_agent_metadata(), described))

    async def fetch(self, ticket: Ticket) -> PrefixBlocks:
        ticket.check(self.name)
        head, metadata, described = ticket.more
        shapes, blank = unpack_head(head)
        if sum(count * size for count, size in shapes) != ticket.size:
            raise TransferError("The blocks that were announced are not those of the ticket.")
        data = [torch.empty(shape, dtype=torch.uint8) for shape in shapes]
        tensors = [rows for rows in data if rows.numel()]
        registered = self._registered(tensors)
        remote = handle = None
        try:
            remote = self._agent.add_remote_agent(metadata)
            if isinstance(remote, bytes):
                remote = remote.decode()
            self._reads[remote] += 1
            handle = self._agent.initialize_xfer("READ", self._agent.get_xfer_descs(tensors),
                                                 self._agent.deserialize_descs(described), remote)
            state = self._agent.transfer(handle)
            async with asyncio.timeout(self._patience_s):
                while state == "PROC":
                    await asyncio.sleep(LOOK_S)
                    state = self._agent.check_xfer_state(handle)
            if state != "DONE":
                raise TransferError(f"nixl could not read the blocks of {ticket.address} ({state}).")
        except TransferError:
            raise
        except Exception as problem:  # whatever a backend of it raises, and a read that never ends
            raise TransferError(f"nixl could not read the blocks of {ticket.address} ({type(problem).__name__}: "
                                f"{problem}).") from None
        finally:
            for undo, what in ((self._agent.release_xfer_handle, handle), (self._leave, remote),
                               (self._agent.deregister_memory, registered)):
                with suppress(Exception):
                    if what is not None:
                        undo(what)
        blocks = filled(blank, data)
        if await asyncio.to_thread(lambda: digest_of(pack(blocks))) != ticket.digest:
            raise TransferError("The blocks were damaged on their way: the checksum differs.")
        return blocks

    def withdraw(self, ticket: Ticket) -> None:
        self._leases.end(ticket.key)

    def close(self) -> None:
        self._leases.close()

    def _registered(self, tensors: list[torch.Tensor]) -> Any:
        try:
            found = self._agent.register_memory(tensors)
        except Exception as problem:
            raise TransferError(f"nixl could not register the blocks' memory ({problem}).") from None
        if found is None:
            raise TransferError("nixl has no backend for the blocks' memory.")
        return found

    def _leave(self, remote: str) -> None:
        """A read of it is over; with the last one nothing more need be known of it."""
        self._reads[remote] -= 1
        if not self._reads[remote]:
            del self._reads[remote]
            self._agent.remove_remote_agent(remote)

    def _forget(self, key: str) -> None:
        offered = self._offers.pop(key, None)
        if offered is not None:
            with suppress(Exception):
                self._agent.deregister_memory(offered[1])
