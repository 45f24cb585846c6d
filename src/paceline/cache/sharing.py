"""Sharing: how sequences use the prefix cache. What a new one takes over from it, what a running one leaves in it."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.cache.allocation import Absent, Allocation
from paceline.cache.blocks import BlockPool
from paceline.cache.offload import ColdBlocks
from paceline.cache.prefix import Node, PrefixCache
from paceline.cache.transfers import BlockCopy, Route
from paceline.kernels.groups import NULL_BLOCK, CacheGroup


class Sharing:
    """A part of CacheManager, which owns what it is given here and keeps the block tables."""

    def __init__(self, prefix: PrefixCache, pools: Sequence[BlockPool], groups: Sequence[CacheGroup],
                 reach: Sequence[int | None], block_size: int, cold: ColdBlocks) -> None:
        """`reach`: per group, how far before the next position keys are still read; None: to the beginning."""
        self._prefix = prefix
        self._pools = pools
        self._groups = groups
        self._reach = reach
        self._block_size = block_size
        self._cold = cold

    def take_over(self, allocation: Allocation, tokens: Sequence[int], limit: int) -> None:
        """Let a new sequence hold the cached beginning of its tokens, at most `limit` blocks, or say what it missed.
        What only the host has of it is claimed there, for fetch()."""
        nodes = self._prefix.match(tokens, allocation.salt, limit)
        usable = self.agreed(tokens, nodes)
        if usable < limit:
            allocation.miss = self._prefix.explain(tokens, allocation.salt, nodes, usable)
        if not usable:
            return
        for g, pool in enumerate(self._pools):
            first = self.first_needed(g, usable)
            blocks = [NULL_BLOCK] * usable
            for index in range(first, usable):
                node = nodes[index]
                if self._prefix.covers(node, g, tokens, (index + 1) * self._block_size):
                    blocks[index] = node.blocks[g]
                    pool.share(node.blocks[g])
                elif node.cold:
                    self._cold.claim(g, node.cold[g].block)
                    allocation.absent.append(Absent(g, index, node, *node.cold[g]))
            allocation.blocks[g] = blocks
            allocation.registered[g] = usable
            allocation.passed[g] = first
        self.follow(allocation, nodes[:usable])
        allocation.cached = allocation.sealed = usable * self._block_size

    def fetch(self, allocation: Allocation, copies: list[BlockCopy]) -> None:
        """Bring what the host keeps of the beginning, with copies added to the list. The caller knows that the blocks
        are to be had."""
        # May add copies of what they held.
        taken = [self._pools[absent.group].allocate() for absent in allocation.absent]
        for absent, block in zip(allocation.absent, taken):
            group, pool = absent.group, self._pools[absent.group]
            copies.append(BlockCopy(group, absent.cold, block, Route.FETCH))
            allocation.blocks[group][absent.place] = block
            if self._prefix.attach(absent.node, group, block, absent.ahead):
                pool.register(block)
            self._cold.release(group, absent.cold)
            self._cold.blocks_in += 1
        allocation.absent = []

    def leave(self, allocation: Allocation, tokens: Sequence[int], length: int) -> None:
        """Enter the whole blocks of the first `length` tokens, which are final, into the prefix cache."""
        size = self._block_size
        chain = allocation.chain
        if length // size > len(chain):
            tip = chain[-1] if chain else None
            node = tip or self._prefix.root(allocation.salt)
            for end in range((len(chain) + 1) * size, length + 1, size):
                node = self._prefix.child(node, tuple(tokens[end - size:end]))
                chain.append(node)
            node.pins += 1
            if tip is not None:
                tip.pins -= 1
        for g, group in enumerate(self._groups):
            blocks, pool = allocation.blocks[g], self._pools[g]
            ahead: tuple[int, ...] = ()
            while (allocation.registered[g] + 1) * size + group.lookahead <= length:
                index = allocation.registered[g]
                block = blocks[index]
                if group.lookahead:
                    end = (index + 1) * size
                    ahead = tuple(tokens[end:end + group.lookahead])
                if not pool.cached[block] and self._prefix.attach(chain[index], g, block, ahead):
                    pool.register(block)
                allocation.registered[g] = index + 1

    def follow(self, allocation: Allocation, chain: list[Node]) -> None:
        """Make `chain` the sequence's nodes. The new tip is pinned before the old one is let go, so that common
        ancestors survive."""
        old = allocation.chain
        allocation.chain = chain
        if chain:
            self._prefix.pin(chain[-1])
        if old:
            self._prefix.unpin(old[-1])

    def agreed(self, tokens: Sequence[int], nodes: list[Node], cold: bool = True) -> int:
        """The largest number of blocks for which every group still has all the KV that the next token reads. `cold`:
        or the host has."""
        runs: list[list[int]] = []
        for g in range(len(self._groups)):
            run, ends = 0, [0]
            for index, node in enumerate(nodes):
                end = (index + 1) * self._block_size
                covered = self._prefix.covers(node, g, tokens, end) or (
                    cold and self._prefix.covers_cold(node, g, tokens, end))
                run = run + 1 if covered else 0
                ends.append(run)
            runs.append(ends)
        for count in range(len(nodes), 0, -1):
            if all(ends[count] >= count - self.first_needed(g, count) for g, ends in enumerate(runs)):
                return count
        return 0

    def first_needed(self, group: int, blocks: int) -> int:
        """With `blocks` whole blocks committed: the first block that the next position still reads."""
        reach = self._reach[group]
        return 0 if reach is None else max(0, blocks * self._block_size - reach) // self._block_size
