"""BlockPool: the blocks of one cache group, who holds them, and which to give out next."""

from __future__ import annotations

from collections.abc import Callable

from paceline.kernels.groups import NULL_BLOCK


class BlockPool:
    """`num_blocks` numbered blocks with reference counts and one doubly linked free list.

    Block 0 (NULL_BLOCK) is never handed out; it serves as the head of the circular free list. Free blocks without
    content worth keeping are put at the front, free blocks of the prefix cache at the back, so taking from the front
    uses plain blocks first and then the least recently used cached one. Every operation is O(1).
    """

    __slots__ = ("_next", "_on_evict", "_previous", "cached", "evictions", "free", "num_blocks", "refs", "registered",
                 "shared")

    def __init__(self, num_blocks: int, on_evict: Callable[[int], None]) -> None:
        """`on_evict(block)` is called when a cached block is about to be given out for other content."""
        self.num_blocks = num_blocks
        self._on_evict = on_evict
        self.refs = [0] * num_blocks
        """How many sequences hold each block; 0 for free ones (and for the null block)."""
        self.cached = bytearray(num_blocks)
        """1 where the prefix cache has an entry for the block's content, held or free."""
        self.free = num_blocks - 1
        """Blocks that can be taken, cached ones included."""
        self.registered = 0
        """Blocks with an entry in the prefix cache."""
        self.shared = 0
        """Blocks held by more than one sequence."""
        self.evictions = 0
        numbers = [*range(num_blocks)]  # one object for each number: a simulation has thousands of pools
        self._next: list[int] = [*numbers[1:], NULL_BLOCK]
        self._previous: list[int] = [numbers[-1], *numbers[:-1]]

    def allocate(self) -> int:
        """A block for new content, held once. The caller has checked `free`."""
        block = self._next[NULL_BLOCK]
        if block == NULL_BLOCK:
            raise RuntimeError("a block was taken from an empty pool: check `free` before taking")
        if self.cached[block]:
            self.evictions += 1
            self._on_evict(block)
            self.cached[block] = 0
            self.registered -= 1
        self._unlink(block)
        self.refs[block] = 1
        return block

    def share(self, block: int) -> None:
        """One more holder; a cached block that nobody held comes back from the free list."""
        refs = self.refs[block]
        if refs == 0:
            if not self.cached[block]:
                raise RuntimeError(f"block {block} is free and holds nothing: it cannot be shared")
            self._unlink(block)
        elif refs == 1:
            self.shared += 1
        self.refs[block] = refs + 1

    def release(self, block: int) -> None:
        """One holder less; the last one puts the block on the free list (its content stays cached, if it was)."""
        refs = self.refs[block] - 1
        if refs < 0:
            raise RuntimeError(f"block {block} was released more often than held")
        self.refs[block] = refs
        if refs == 0:
            self._link(block)
        elif refs == 1:
            self.shared -= 1

    def register(self, block: int) -> None:
        """The prefix cache has an entry for this held block from now on."""
        self.cached[block] = 1
        self.registered += 1

    def unregister(self, block: int) -> None:
        """The entry is gone; if the block is free it is the next to be taken."""
        self.cached[block] = 0
        self.registered -= 1
        if self.refs[block] == 0:
            self._unlink(block)
            self._link(block)

    def free_list(self) -> list[int]:
        """Free blocks in the order in which they would be taken. For checks and tests: O(free)."""
        blocks: list[int] = []
        block = self._next[NULL_BLOCK]
        while block != NULL_BLOCK and len(blocks) <= self.num_blocks:
            if self._previous[self._next[block]] != block:
                raise RuntimeError(f"the free list is torn at block {block}")
            blocks.append(block)
            block = self._next[block]
        return blocks

    def _link(self, block: int) -> None:
        if self.cached[block]:
            left, right = self._previous[NULL_BLOCK], NULL_BLOCK
        else:
            left, right = NULL_BLOCK, self._next[NULL_BLOCK]
        self._next[left] = self._previous[right] = block
        self._previous[block] = left
        self._next[block] = right
        self.free += 1

    def _unlink(self, block: int) -> None:
        left, right = self._previous[block], self._next[block]
        self._next[left] = right
        self._previous[right] = left
        self.free -= 1
