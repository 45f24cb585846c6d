"""Data movements of the cache that the runner carries out before a step writes its rows."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple


class Route(Enum):
    """From which memory to which a block is copied."""

    WITHIN = "within"
    """Copy-on-write: both blocks are the cache's own."""
    SWAP_OUT = "swap out"
    """A preempted sequence's block goes to the host."""
    SWAP_IN = "swap in"
    OFFLOAD = "offload"
    """A block of the prefix cache that had to make room goes to the host."""
    FETCH = "fetch"
    """It comes back because a prompt starts with its text."""


class BlockCopy(NamedTuple):
    """The whole block `source` is copied to `target`, after the step's moves and before its rows. Copies take effect in
    the order of their list: what one writes a later one may read or write again."""

    group: int
    source: int
    target: int
    route: Route = Route.WITHIN


class SlotMove(NamedTuple):
    """Path compaction: one token's KV moves between slots before the step's rows are written.
    All moves of a step are read before any is written (sources and targets overlap)."""

    group: int
    source: int
    target: int
