"""Data movements inside the cache that the runner carries out before a step writes its rows."""

from __future__ import annotations

from typing import NamedTuple


class BlockCopy(NamedTuple):
    """Copy-on-write: the whole block `source` is copied to `target` after the step's moves and before its rows.
    In list order, or all read before any is written: no target is a later copy's source."""

    group: int
    source: int
    target: int


class SlotMove(NamedTuple):
    """Path compaction: one token's KV moves between slots before the step's rows are written.
    All moves of a step are read before any is written (sources and targets overlap)."""

    group: int
    source: int
    target: int
