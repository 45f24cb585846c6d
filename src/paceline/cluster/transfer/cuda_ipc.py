"""CudaIpcTransport: blocks between processes that share a card. They stay on it; a handle travels."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import Any, cast

import torch

from paceline.cluster.transfer.shared_memory import NAME, PREFIX, memory_folder
from paceline.cluster.transfer.transport import LEASE_S, MOST_BYTES, Leases, Ticket
from paceline.cluster.transfer.wire import filled, pack_head, unpack_head
from paceline.engine.exchange import PrefixBlocks
from paceline.errors import TransferError

REF_HANDLE, REF_OFFSET = 4, 5
"""In what torch shares a storage by: where it counts who has yet to let go."""


class Claim:
    """A file that whoever removes it wins: who fetches, or who offers when the lease ends. Torch keeps what was offered
    until who opened it has let go, so for who never will its owner has to, and nobody may open it afterwards."""

    def __init__(self, key: str) -> None:
        self._path = memory_folder() / (PREFIX + key)
        # Locked: what a killed process leaves is removed by SharedMemoryTransport.sweep().
        self._opened = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        fcntl.flock(self._opened, fcntl.LOCK_SH | fcntl.LOCK_NB)

    def withdrawn(self) -> bool:
        """Whether nobody has taken it, nor will."""
        os.close(self._opened)
        return _removed(self._path)


def claimed(key: str) -> bool:
    """Whether it is for this process to open what was offered; at most once."""
    return NAME.fullmatch(PREFIX + key) is not None and _removed(memory_folder() / (PREFIX + key))


def _removed(path: Path) -> bool:
    try:
        path.unlink()
    except OSError:
        return False
    return True


class CudaIpcTransport:
    """Implements Transport. What is offered is a copy beside the cache, which torch keeps until the process that has
    opened it lets go; nothing of it is checksummed, for nothing of it leaves the card."""

    name = "cuda-ipc"
    on_device = True

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self._leases = Leases(most_bytes)
        self._offers: dict[str, tuple[Claim, list[Any], tuple[torch.Tensor, ...]]] = {}

    async def offer(self, blocks: PrefixBlocks, lease_s: float = LEASE_S) -> Ticket:
        if any(rows.device.type != "cuda" for rows in blocks.data):
            raise TransferError("CUDA IPC hands over what lies on a card, and this cache does not.")
        self._leases.check(blocks.nbytes)
        data = tuple(rows.contiguous() for rows in blocks.data)
        # Per tensor: what torch opens a storage by, and where in it the rows begin.
        storages: list[Any] = [rows.untyped_storage() for rows in data]
        handles = [(storage._share_cuda_(), rows.storage_offset()) if rows.numel() else None
                   for storage, rows in zip(storages, data)]
        try:
            key = self._leases.begin(blocks.nbytes, lease_s, lambda: self._forget(key))
            self._offers[key] = (Claim(key), handles, data)
        except (OSError, TransferError) as problem:
            _let_go(handles)
            raise TransferError(f"The blocks cannot be offered on this card ({problem}).") from None
        return Ticket(self.name, str(torch.cuda.get_device_properties(data[0].device).uuid), key, blocks.nbytes, "",
                      len(blocks.tokens), (pack_head(blocks), handles))

    async def fetch(self, ticket: Ticket) -> PrefixBlocks:
        ticket.check(self.name)
        head, handles = ticket.more
        shapes, blank = unpack_head(head)
        here = torch.device("cuda", torch.cuda.current_device())
        if str(torch.cuda.get_device_properties(here).uuid) != ticket.address:
            raise TransferError("CUDA IPC hands blocks over on one card, and this worker has another one: use shared "
                                "memory or TCP.")
        if not claimed(ticket.key):
            raise TransferError("The blocks are gone: their lease has ended, or their worker has.")
        try:
            data = [_open(shape, here, handle) for shape, handle in zip(shapes, handles, strict=True)]
        except (RuntimeError, ValueError) as problem:
            raise TransferError(f"The blocks cannot be opened on this card ({problem}).") from None
        return filled(blank, data)

    def withdraw(self, ticket: Ticket) -> None:
        self._leases.end(ticket.key)

    def close(self) -> None:
        self._leases.close()

    def _forget(self, key: str) -> None:
        claim, handles, _ = self._offers.pop(key, (None, [], ()))
        if claim is not None and claim.withdrawn():
            _let_go(handles)


def _let_go(handles: list[Any]) -> None:
    """Nobody opens these, so nobody else will tell torch that they are not needed."""
    kind = cast(Any, torch.UntypedStorage)
    for handle in handles:
        if handle is not None:
            opened, _ = handle
            kind._release_ipc_counter_cuda(opened[REF_HANDLE], opened[REF_OFFSET])


def _open(shape: tuple[int, int], device: torch.device, handle: Any) -> torch.Tensor:
    rows = torch.empty(0, dtype=torch.uint8, device=device)
    if handle is None:
        return rows.view(0, shape[1])
    (opened, offset), kind = handle, cast(Any, torch.UntypedStorage)
    return rows.set_(kind._new_shared_cuda(*opened), offset, shape, (shape[1], 1))
