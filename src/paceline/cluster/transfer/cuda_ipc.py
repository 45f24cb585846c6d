"""CudaIpcTransport: blocks between processes that share a card. They stay on it; a handle travels."""

from __future__ import annotations

from typing import Any, cast

import torch

from paceline.cluster.transfer.transport import LEASE_S, MOST_BYTES, Leases, Ticket
from paceline.cluster.transfer.wire import filled, pack_head, unpack_head
from paceline.engine.exchange import PrefixBlocks
from paceline.errors import TransferError


class CudaIpcTransport:
    """Implements Transport. What is offered is a copy beside the cache, which torch keeps until the last process that
    has opened it lets go; nothing of it is checksummed, for nothing of it leaves the card."""

    name = "cuda-ipc"
    on_device = True

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self._leases = Leases(most_bytes)
        self._offers: dict[str, tuple[torch.Tensor, ...]] = {}

    async def offer(self, blocks: PrefixBlocks, lease_s: float = LEASE_S) -> Ticket:
        if any(rows.device.type != "cuda" for rows in blocks.data):
            raise TransferError("CUDA IPC hands over what lies on a card, and this cache does not.")
        self._leases.check(blocks.nbytes)
        data = tuple(rows.contiguous() for rows in blocks.data)
        # Per tensor: what torch opens a storage by, and where in it the rows begin.
        storages: list[Any] = [rows.untyped_storage() for rows in data]
        handles = [(storage._share_cuda_(), rows.storage_offset()) if rows.numel() else None
                   for storage, rows in zip(storages, data)]
        key = self._leases.begin(blocks.nbytes, lease_s, lambda: self._forget(key))
        self._offers[key] = data
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
        self._offers.pop(key, None)


def _open(shape: tuple[int, int], device: torch.device, handle: Any) -> torch.Tensor:
    rows = torch.empty(0, dtype=torch.uint8, device=device)
    if handle is None:
        return rows.view(0, shape[1])
    (opened, offset), kind = handle, cast(Any, torch.UntypedStorage)
    return rows.set_(kind._new_shared_cuda(*opened), offset, shape, (shape[1], 1))
