"""HostLimits: how much of the cache's content may be kept in host memory, and who gets that memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HostLimits:
    """How much the cache may keep on the host, in blocks of every group. The memory is asked for at first use; an
    answer of False means that there is none and that nothing is kept."""

    swap_blocks: int = 0
    """For preempted sequences."""
    cold_blocks: int = 0
    """For blocks of the prefix cache that had to make room."""
    allocate_swap: Callable[[], bool] = lambda: True
    allocate_cold: Callable[[], bool] = lambda: True


NO_HOST = HostLimits()
