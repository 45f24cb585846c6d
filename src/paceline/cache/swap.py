"""SwapSpace: host blocks for sequences that were preempted, so that they need not be computed again."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from paceline.cache.allocation import Allocation
from paceline.cache.blocks import BlockPool
from paceline.cache.transfers import BlockCopy, Route
from paceline.kernels.groups import NULL_BLOCK


class Swapped:
    """What the host holds of one sequence: the KV of its first `length` tokens."""

    __slots__ = ("blocks", "first", "length")

    def __init__(self, length: int, first: list[int], blocks: list[list[int]]) -> None:
        self.length = length
        self.first = first
        """Per group: leading blocks that the window had left behind; they are not kept."""
        self.blocks = blocks
        """Per group: host blocks, from `first` on in logical order."""


class SwapSpace:
    """A bounded number of host blocks in every cache group. Bookkeeping only: the copies it returns fill and read them.

    The memory is asked for once, when it is first needed: a server that never preempts does without it.
    """

    def __init__(self, groups: int, most_blocks: int, allocate: Callable[[], bool]) -> None:
        """`allocate`: gets the memory; False: there is none, and nothing is ever swapped."""
        self.most_blocks = most_blocks
        self._groups = groups
        self._allocate: Callable[[], bool] | None = allocate if most_blocks > 0 else None
        self.pools: list[BlockPool] = []
        """Empty until the memory is there."""
        self.sequences = 0
        """How many sequences are swapped out."""
        self.blocks_out = 0
        self.blocks_in = 0
        """Blocks copied since the start, all groups together."""

    @property
    def ready(self) -> bool:
        """Whether there is memory to swap to; asks for it the first time."""
        if self._allocate is not None:
            allocate, self._allocate = self._allocate, None
            if allocate():
                self.pools = [BlockPool(self.most_blocks + 1, _nothing_cached) for _ in range(self._groups)]
        return bool(self.pools)

    @property
    def used(self) -> int:
        """Blocks that hold something, all groups together."""
        return sum(pool.num_blocks - 1 - pool.free for pool in self.pools)

    def swap_out(self, allocation: Allocation, length: int, first: Sequence[int], block_size: int,
                 copies: list[BlockCopy]) -> Swapped | None:
        """Keep the first `length` tokens of a sequence, of each group the blocks from `first` on, with copies added to
        the list; None: there is no room."""
        end = -(-length // block_size)
        sources = [blocks[begin:end] for blocks, begin in zip(allocation.blocks, first)]
        if not self.ready or any(len(blocks) > pool.free for blocks, pool in zip(sources, self.pools)):
            return None
        kept = [[pool.allocate() for _ in blocks] for blocks, pool in zip(sources, self.pools)]
        for g, (blocks, targets) in enumerate(zip(sources, kept)):
            copies += [BlockCopy(g, source, target, Route.SWAP_OUT) for source, target in zip(blocks, targets)]
            self.blocks_out += len(blocks)
        self.sequences += 1
        return Swapped(length, [min(begin, end) for begin in first], kept)

    def swap_in(self, swapped: Swapped, allocation: Allocation, pools: Sequence[BlockPool],
                copies: list[BlockCopy]) -> None:
        """Bring a sequence's blocks back after those that its new allocation already holds, with copies added to the
        list; `swapped` is void then. Blocks that its window had left behind are let go."""
        for g, pool in enumerate(pools):
            blocks, first = allocation.blocks[g], swapped.first[g]
            for index in range(allocation.passed[g], min(first, len(blocks))):
                pool.release(blocks[index])
                blocks[index] = NULL_BLOCK
            blocks += [NULL_BLOCK] * (first - len(blocks))
            sources = swapped.blocks[g][len(blocks) - first:]
            targets = [pool.allocate() for _ in sources]  # which may add copies of what they held
            blocks += targets
            copies += [BlockCopy(g, source, target, Route.SWAP_IN) for source, target in zip(sources, targets)]
            self.blocks_in += len(sources)
            allocation.passed[g] = max(allocation.passed[g], first)
            allocation.registered[g] = max(allocation.registered[g], first)
        self.drop(swapped)

    def drop(self, swapped: Swapped) -> None:
        """The sequence has ended or was computed again."""
        for pool, blocks in zip(self.pools, swapped.blocks):
            for block in blocks:
                pool.release(block)
        self.sequences -= 1


def _nothing_cached(block: int) -> None:
    raise RuntimeError(f"swap block {block} was taken for cached: the prefix cache has other host blocks")
