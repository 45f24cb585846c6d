"""HostStorage: host memory for whole blocks of a cache, and the copies there and back."""

from __future__ import annotations

import logging
import math
import time
import weakref
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
import torch

from paceline.cache.transfers import Route
from paceline.kernels.reference.quantised import as_bytes

log = logging.getLogger("paceline.engine")

OUT = (Route.SWAP_OUT, Route.OFFLOAD)
SAMPLE_BLOCKS = 64
"""Blocks that are copied to measure what copying takes."""
STAGING = 64 << 20
"""Bytes on the device in which the planes of blocks are put together, at most (and a block at least)."""


class CopyRates(NamedTuple):
    """Bytes a second."""

    out: float
    back: float


class HostStorage:
    """Of each cache group `num_blocks` blocks, the bytes of all planes of a block side by side.

    On a card the memory is pinned, so that a block is one transfer that nobody waits for; where the system does not
    let it, copies take longer and the host waits for them. Everything runs on the current stream, in order with the
    steps that write and read the blocks; the host itself never looks at them.
    """

    def __init__(self, planes: Sequence[Sequence[torch.Tensor]], block_size: int, num_blocks: int,
                 device: torch.device) -> None:
        """`planes`: of each group the tensors to copy, contiguous, slots first. Raises MemoryError or RuntimeError
        where there is no memory."""
        self._planes = [[by_block(plane, block_size) for plane in own] for own in planes]
        self._device = device
        self.block_bytes = [sum(plane.shape[1] for plane in own) for own in self._planes]
        self._memory = [_allocate(num_blocks, size) for size in self.block_bytes]
        self.num_blocks = num_blocks
        self.pinned = device.type == "cuda" and all(_pin(memory, device) for memory in self._memory)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """That memory, of each group."""
        return list(self._memory)

    @property
    def bytes(self) -> int:
        return sum(memory.numel() for memory in self._memory)

    def copy(self, group: int, pairs: Sequence[tuple[int, int]], route: Route) -> None:
        """Copy blocks (source, target) out to the host or back in; no target twice."""
        sources, targets = [list(side) for side in zip(*pairs)]
        if self._device.type == "cpu":
            self._copy_here(group, sources, targets, route)
        else:
            self._copy_staged(group, sources, targets, route)

    def measure(self) -> CopyRates:
        """What copying takes now, both ways. Blocks are read and get back what they held."""
        count = min(SAMPLE_BLOCKS, self.num_blocks - 1, *(own[0].shape[0] for own in self._planes))
        blocks, copied = list(range(count)), count * sum(self.block_bytes)
        seconds = {Route.SWAP_OUT: math.inf, Route.SWAP_IN: math.inf}
        for _ in range(2):  # the first round touches the memory for the first time
            for route in seconds:
                self._wait()
                started = time.perf_counter()
                for group in range(len(self._memory)):
                    self.copy(group, [(block, block) for block in blocks], route)
                self._wait()
                seconds[route] = min(seconds[route], time.perf_counter() - started)
        return CopyRates(*(copied / max(taken, 1e-9) for taken in seconds.values()))

    def _copy_here(self, group: int, sources: list[int], targets: list[int], route: Route) -> None:
        # numpy copies whole rows at once, torch byte by byte: 4.6 against 73 ms of CPU time for 63 blocks of 180 KiB.
        memory, at = self._memory[group].numpy(), 0
        for tensor in self._planes[group]:
            plane = tensor.numpy()
            kept = memory[:, at:at + plane.shape[1]]
            if route in OUT:
                kept[targets] = plane[sources]
            else:
                plane[targets] = kept[sources]
            at += plane.shape[1]

    def _copy_staged(self, group: int, sources: list[int], targets: list[int], route: Route) -> None:
        copy = self._send if route in OUT else self._bring
        most = max(1, STAGING // self.block_bytes[group])
        for begin in range(0, len(sources), most):
            copy(group, sources[begin:begin + most], targets[begin:begin + most])

    def _send(self, group: int, sources: list[int], targets: list[int]) -> None:
        memory, at = self._memory[group], 0
        gathered = torch.empty((len(sources), memory.shape[1]), dtype=torch.uint8, device=self._device)
        index = torch.tensor(sources, device=self._device)
        for plane in self._planes[group]:
            gathered[:, at:at + plane.shape[1]] = plane[index]
            at += plane.shape[1]
        for place, block in enumerate(targets):
            memory[block].copy_(gathered[place], non_blocking=True)

    def _bring(self, group: int, sources: list[int], targets: list[int]) -> None:
        memory, at = self._memory[group], 0
        arrived = torch.empty((len(sources), memory.shape[1]), dtype=torch.uint8, device=self._device)
        for place, block in enumerate(sources):
            arrived[place].copy_(memory[block], non_blocking=True)
        index = torch.tensor(targets, device=self._device)
        for plane in self._planes[group]:
            plane[index] = arrived[:, at:at + plane.shape[1]]
            at += plane.shape[1]

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def by_block(plane: torch.Tensor, block_size: int) -> torch.Tensor:
    """[blocks, bytes of a block] of a plane [slots, ...], over the same memory."""
    return as_bytes(plane).view(torch.uint8).view(plane.shape[0] // block_size, -1)


def _allocate(blocks: int, size: int) -> torch.Tensor:
    return torch.from_numpy(np.empty((blocks, size), dtype=np.uint8))


def _pin(memory: torch.Tensor, device: torch.device) -> bool:
    """Until it is freed; False, and said in the log: it cannot be. torch's own pinned memory comes in powers of two: up
    to twice what was asked for."""
    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    problem = runtime.cudaHostRegister(memory.data_ptr(), memory.numel(), 0)
    if int(problem):
        _clear_last_error(runtime, device)
        log.warning("%d bytes of host memory cannot be pinned (CUDA error %d): copies there and back take longer",
                    memory.numel(), int(problem))
        return False
    weakref.finalize(memory, runtime.cudaHostUnregister, memory.data_ptr())
    return True


def _clear_last_error(runtime: Any, device: torch.device) -> None:
    """A call that failed stays CUDA's last error until somebody asks, and who launches the next kernel asks."""
    if hasattr(runtime, "cudaGetLastError"):
        runtime.cudaGetLastError()
        return
    with suppress(RuntimeError):  # versions of torch that have no such call: a kernel of our own takes the blame
        torch.ones(1, device=device)
