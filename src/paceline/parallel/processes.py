"""Ranks that are processes, by torch.distributed: gloo on CPUs, NCCL on cards."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from paceline.errors import ParallelError
from paceline.parallel.communicator import in_order

PATIENCE = 300.0
"""Seconds that a rank waits for the others in one exchange. A process that ends is noticed at once; this is for one
that hangs."""


class ProcessRank:
    """Implements Communicator. The group is this object's own: nothing of torch.distributed's global state is used, so
    a process may have several, beside one that a program has set up for itself."""

    def __init__(self, store: Any, rank: int, size: int, device: torch.device, host: str = "127.0.0.1",
                 patience: float = PATIENCE) -> None:
        """`store`: a torch.distributed.Store that all ranks reach. `host`: the address by which the others reach this
        one. Waits for all of them."""
        self.rank = rank
        self.size = size
        self._nccl = device.type == "cuda"
        limit = timedelta(seconds=patience)
        kinds: Any = dist
        try:
            if self._nccl:
                options = kinds.ProcessGroupNCCL.Options()
                options._timeout = limit
                torch.cuda.set_device(device)
                self._group = kinds.ProcessGroupNCCL(store, rank, size, options)
            else:
                options = kinds.ProcessGroupGloo._Options()
                options._timeout = limit
                options._devices = [kinds.ProcessGroupGloo.create_device(hostname=host)]
                self._group = kinds.ProcessGroupGloo(store, rank, size, options)
        except (RuntimeError, AttributeError) as problem:
            raise ParallelError(f"Rank {rank} of {size} could not join the others by "
                                f"{'NCCL' if self._nccl else 'gloo'}: see that this torch has it, and that the ranks "
                                "reach each other.", problem) from problem
        self.gather(torch.zeros(1, device=device))  # some libraries meet when they are first used

    def gather(self, part: torch.Tensor) -> Sequence[torch.Tensor]:
        # Bytes, which every version of every library can send.
        sent = part.contiguous()
        found = [torch.empty_like(sent) for _ in range(self.size)]
        self._wait(lambda: self._group.allgather([[_bytes(one) for one in found]], [_bytes(sent)]))
        return found

    def add(self, part: torch.Tensor) -> torch.Tensor:
        if not self._nccl:
            return in_order(self.gather(part))
        total = part.contiguous().clone()
        self._wait(lambda: self._group.allreduce([total]))
        return total

    def broadcast(self, tensor: torch.Tensor) -> None:
        self._wait(lambda: self._group.broadcast(_bytes(tensor), 0))

    def abort(self) -> None:
        """Another rank is gone: who waits for it hears of it. gloo notices by itself."""
        if self._nccl:
            self._group.abort()

    def _wait(self, start: Any) -> None:
        try:
            start().wait()
        except RuntimeError as problem:
            raise ParallelError("Another rank of this engine is gone, or does not answer: make the engine anew.",
                                problem) from problem


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1).view(torch.uint8) if tensor.numel() else torch.empty(0, dtype=torch.uint8,
                                                                                device=tensor.device)
