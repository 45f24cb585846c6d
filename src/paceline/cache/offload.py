"""ColdBlocks: where blocks of the prefix cache go when they have to make room, and come back from on a hit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from paceline.cache.blocks import BlockPool
from paceline.cache.prefix import Node, PrefixCache
from paceline.cache.transfers import BlockCopy, Route
from paceline.kernels.groups import CacheGroup


class ColdBlocks:
    """A bounded number of host blocks in every cache group, the least recently used given up first.

    A block that came back stays here as well: its text does not change, so it can make room again without a copy.
    The memory is asked for once, when it is first needed.
    """

    def __init__(self, prefix: PrefixCache, groups: Sequence[CacheGroup], most_blocks: int,
                 allocate: Callable[[], bool]) -> None:
        """`allocate`: gets the memory; False: there is none, and nothing is kept."""
        self.most_blocks = most_blocks
        self._prefix = prefix
        self._windowed = [group.window is not None for group in groups]
        self._allocate: Callable[[], bool] | None = allocate if most_blocks > 0 else None
        self.pools: list[BlockPool] = []
        """Empty until the memory is there. Nobody holds its blocks but sequences that are about to fetch them."""
        self.blocks_out = 0
        self.blocks_in = 0
        """Blocks copied since the start, all groups together."""

    @property
    def used(self) -> int:
        """Blocks that hold something, all groups together."""
        return sum(pool.registered for pool in self.pools)

    def keep(self, group: int, block: int, copies: list[BlockCopy]) -> None:
        """The cache's `block` is about to hold something else: keep what it holds, if that is of use."""
        node = self._prefix.node_of[group][block]
        if not self._ready() or not self._reachable(node, group):
            return
        pool, ahead = self.pools[group], self._prefix.ahead_of(node, group)
        cold = node.cold.get(group) if node.cold else None
        if cold is not None and cold.ahead == ahead:
            self.touch(group, cold.block)
            return
        if cold is not None or not pool.free:
            return  # the entry for other tokens that follow is as good, and may be on its way back
        target = pool.allocate()
        self._prefix.attach_cold(node, group, target, ahead)
        pool.register(target)
        pool.release(target)
        self.blocks_out += 1
        copies.append(BlockCopy(group, block, target, Route.OFFLOAD))

    def claim(self, group: int, block: int) -> None:
        """A sequence is about to fetch the block: it stays until release()."""
        self.pools[group].share(block)

    def release(self, group: int, block: int) -> None:
        self.pools[group].release(block)

    def touch(self, group: int, block: int) -> None:
        """The block was of use: it is the last to go."""
        self.pools[group].share(block)
        self.pools[group].release(block)

    def forget(self) -> None:
        """What the blocks hold can no longer be trusted."""
        for group, pool in enumerate(self.pools):
            for block in list(self._prefix.cold_node_of[group]):
                self._prefix.detach_cold(group, block)
                pool.unregister(block)

    def _ready(self) -> bool:
        if self._allocate is not None:
            allocate, self._allocate = self._allocate, None
            if allocate():
                self.pools = [BlockPool(self.most_blocks + 1, partial(self._prefix.detach_cold, group))
                              for group in range(len(self._windowed))]
        return bool(self.pools)

    def _reachable(self, node: Node, group: int) -> bool:
        """Whether a prompt could still hit the block: what comes before it is there as well, or no longer read."""
        before = node.parent
        return before is None or before.parent is None or self._windowed[group] or before.keeps(group)
