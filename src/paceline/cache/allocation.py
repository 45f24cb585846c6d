"""Allocation: what one sequence holds of the cache."""

from __future__ import annotations

from typing import NamedTuple

from paceline.cache.prefix import Node

NEVER = 1 << 62


class Absent(NamedTuple):
    """A block of a sequence whose KV the host keeps in its block `cold`; `node` is the prefix cache's."""

    group: int
    place: int
    node: Node
    cold: int
    ahead: tuple[int, ...]


class Allocation:
    """What one sequence holds. Made by CacheManager.open or fork, ended by close; only the manager changes it."""

    __slots__ = ("absent", "blocks", "cached", "chain", "due", "miss", "passed", "registered", "salt", "sealed", "seat",
                 "writable_from", "writable_to")

    def __init__(self, seat: int, groups: int, salt: str) -> None:
        self.seat = seat
        """Row of this sequence in CacheManager.tables; -1 once closed."""
        self.blocks: list[list[int]] = [[] for _ in range(groups)]
        """Per group: block ids in logical order, NULL_BLOCK where the window has passed."""
        self.absent: list[Absent] = []
        """Between open and fetch: what the host keeps of the beginning; NULL_BLOCK stands in `blocks` for it."""
        self.salt = salt
        self.cached = 0
        """Tokens that were found in the prefix cache when the sequence was opened."""
        self.miss: str | None = None
        """Why it was not more (strings of cache/prefix.py); None if nothing more could have been shared."""
        self.sealed = 0
        """Leading positions that came from the prefix cache together with the tokens they depend on."""
        self.chain: list[Node] = []
        """The prefix cache's nodes for this sequence's whole, final blocks."""
        self.registered = [0] * groups
        """Per group: leading blocks that have been offered to the prefix cache."""
        self.passed = [0] * groups
        """Per group: leading blocks that the window has left behind."""
        self.due = NEVER
        """Committing fewer tokens than this changes nothing, so commit returns at once."""
        self.writable_from = 0
        self.writable_to = 0
        """Positions known to lie in blocks that only this sequence holds and that no cache entry names."""
