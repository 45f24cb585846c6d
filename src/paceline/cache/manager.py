"""CacheManager: which block of which group holds which position of which sequence. Bookkeeping only, no tensors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt

from paceline.cache.allocation import NEVER, Allocation
from paceline.cache.blocks import BlockPool
from paceline.cache.handover import Handover, Intake, Piece
from paceline.cache.host import NO_HOST, HostLimits
from paceline.cache.invariants import check_cache
from paceline.cache.offload import ColdBlocks
from paceline.cache.prefix import DISABLED, PROMPT_LOGPROBS, TOO_SHORT, HashFunction, PrefixCache, default_hash
from paceline.cache.sharing import Sharing
from paceline.cache.swap import Swapped, SwapSpace
from paceline.cache.transfers import BlockCopy, SlotMove
from paceline.errors import ConfigError
from paceline.kernels.groups import NULL_BLOCK, CacheGroup


@dataclass(frozen=True, slots=True)
class CacheUsage:
    """Blocks are summed over groups. `free` includes cached blocks that nobody holds; used + free == total."""

    total: int
    free: int
    used: int
    cached: int
    shared: int
    hits: int
    """Prompt tokens found in the prefix cache."""
    queries: int
    """Prompt tokens looked up in it."""
    evictions: int
    swap_total: int
    swap_used: int
    """Host blocks for preempted sequences."""
    cold_total: int
    cold_used: int
    """Host blocks for what the prefix cache had no room for."""


class CacheManager:
    """Block tables, sharing, rollback and path compaction for the sequences of one engine.

    Positions are physical: a committed token's position is its index, a draft's row i after `start` committed tokens
    lies at start + i until compact() moves the accepted ones. Blocks change hands only in open, fetch, swap_in,
    reserve, fork, commit (window), rollback and close; because steps run in the order in which they were scheduled, a
    block may be given away while an older step still reads it.
    The copies that fetch, swap_out, swap_in and reserve return take effect in the order of these calls.
    """

    def __init__(self, groups: Sequence[CacheGroup], num_blocks: Sequence[int], block_size: int, max_seats: int,
                 max_blocks_per_seq: int, enable_prefix_caching: bool = True, *,
                 hash_function: HashFunction = default_hash, host: HostLimits = NO_HOST) -> None:
        if len(groups) != len(num_blocks) or not groups:
            raise ConfigError(f"{len(groups)} cache groups need as many block counts, got {len(num_blocks)}.")
        if block_size < 1 or max_seats < 1 or max_blocks_per_seq < 1 or min(num_blocks) < 2:
            raise ConfigError("The cache needs block_size, max_seats and max_blocks_per_seq of at least 1 and at least "
                              "2 blocks in every group (block 0 is never used).")
        self.groups = tuple(groups)
        self.block_size = block_size
        self.max_seats = max_seats
        self.max_blocks_per_seq = max_blocks_per_seq
        self.enable_prefix_caching = enable_prefix_caching
        self.prefix = PrefixCache([group.lookahead for group in groups], block_size, hash_function)
        self.cold = ColdBlocks(self.prefix, self.groups, host.cold_blocks, host.allocate_cold)
        self.swap = SwapSpace(len(groups), host.swap_blocks, host.allocate_swap)
        self.pools = [BlockPool(count, partial(self._evict, g)) for g, count in enumerate(num_blocks)]
        self._copies: list[BlockCopy] = []
        """What the call under way asks for."""
        self.tables: list[npt.NDArray[np.int64]] = [
            np.zeros((max_seats, max_blocks_per_seq), dtype=np.int64) for _ in groups]
        """Per group [max_seats, max_blocks_per_seq]: block of each position's page, NULL_BLOCK where none is held.
        Always current. A runner takes what it needs for a step before the next call into scheduler or manager."""
        self.free_seats = list(range(max_seats - 1, -1, -1))
        self.hits = 0
        self.queries = 0
        self._reach = [None if group.window is None else group.window + group.lookahead - 1 for group in groups]
        """Per group: how far before the next position keys are still read; None: to the beginning."""
        self._lookahead = max(group.lookahead for group in groups)
        self._sharing = Sharing(self.prefix, self.pools, self.groups, self._reach, block_size, self.cold)
        self.handover = Handover(self.prefix, self.pools, block_size, self._sharing)

    def open(self, tokens: Sequence[int], *, salt: str = "", reuse: bool = True,
             counted: bool = True) -> Allocation | None:
        """A seat, and the blocks of the longest cached beginning of `tokens` (whole blocks, never the last token).

        None: every seat is taken. `reuse=False` (prompt logprobs) starts from nothing. `counted`: in hits and queries.
        Call fetch() or abandon() next: some of those blocks may be on the host.
        """
        if not self.free_seats:
            return None
        allocation = Allocation(self.free_seats.pop(), len(self.groups), salt)
        limit = (len(tokens) - 1) // self.block_size
        if not self.enable_prefix_caching:
            allocation.miss = DISABLED
        elif not reuse:
            allocation.miss = PROMPT_LOGPROBS
        else:
            self.queries += len(tokens) if counted else 0
            if limit < 1:
                allocation.miss = TOO_SHORT
            else:
                self._sharing.take_over(allocation, tokens, limit)
                self.hits += allocation.cached if counted else 0
                for table, blocks in zip(self.tables, allocation.blocks):
                    table[allocation.seat, :len(blocks)] = blocks
        self._plan(allocation)
        return allocation

    def abandon(self, allocation: Allocation, tokens: Sequence[int], *, counted: bool = True) -> None:
        """Undo open(tokens) as if it had not been tried: the hit is not counted."""
        if counted and allocation.miss not in (DISABLED, PROMPT_LOGPROBS):
            self.queries -= len(tokens)
            self.hits -= allocation.cached
        self.close(allocation)

    def fetch(self, allocation: Allocation) -> list[BlockCopy]:
        """After open(): bring what the host keeps of the beginning. needed() has counted those blocks and the caller
        knows that they are free."""
        self._sharing.fetch(allocation, self._copies)
        for g, blocks in enumerate(allocation.blocks):
            self.tables[g][allocation.seat, :len(blocks)] = blocks
        return self._taken()

    def swap_out(self, allocation: Allocation, length: int) -> tuple[Swapped, list[BlockCopy]] | None:
        """Copy the first `length` tokens of a sequence that is about to be closed to the host; None: no room there."""
        # Of a window what the next token reads and no more: a chunk in flight holds further blocks, for which nobody
        # makes room when the sequence comes back. The last token may be computed again.
        first = [passed if reach is None else max(passed, max(0, length - 1 - reach) // self.block_size)
                 for passed, reach in zip(allocation.passed, self._reach)]
        swapped = self.swap.swap_out(allocation, length, first, self.block_size, self._copies)
        return None if swapped is None else (swapped, self._taken())

    def swap_in(self, allocation: Allocation, swapped: Swapped) -> tuple[int, list[BlockCopy]]:
        """After open() and fetch(): bring a sequence's own blocks back after what the prefix cache had of it. Returns
        how many of its tokens are there; needed() has counted the blocks. `swapped` is void then."""
        if allocation.cached >= swapped.length:
            self.swap.drop(swapped)
            return allocation.cached, []
        self.swap.swap_in(swapped, allocation, self.pools, self._copies)
        for g, blocks in enumerate(allocation.blocks):
            self.tables[g][allocation.seat, :len(blocks)] = blocks
        self._plan(allocation)
        return swapped.length, self._taken()

    def reserve(self, allocation: Allocation, start: int, end: int) -> list[BlockCopy] | None:
        """Make positions [start, end) writable for this sequence alone; None, and no change, if blocks do not suffice.

        A group with lookahead also gets [start - lookahead, start), except what came from the prefix cache: those
        entries are rewritten once the tokens they depend on are known. The copies returned must run before the rows
        are written. Writing below what was committed takes that block out of the prefix cache (or copies it).
        """
        if allocation.writable_from <= start and end <= allocation.writable_to:
            return []
        size = self.block_size
        stop = -(-end // size)
        if stop > self.max_blocks_per_seq:
            raise ValueError(f"position {end - 1} lies beyond the block table's {self.max_blocks_per_seq * size} "
                             "positions: trim the rows first")
        for g, pool in enumerate(self.pools):
            blocks = allocation.blocks[g]
            first = self._first_written(allocation, g, start)
            refs = pool.refs
            copies = sum(refs[block] > 1 for block in blocks[first:stop])
            if max(0, stop - len(blocks)) + copies > pool.free:
                return None
        for g, pool in enumerate(self.pools):
            blocks = allocation.blocks[g]
            row = self.tables[g][allocation.seat]
            for index in range(self._first_written(allocation, g, start), min(stop, len(blocks))):
                block = blocks[index]
                if block == NULL_BLOCK:
                    raise ValueError(f"position {start} lies in a block that group {self.groups[g].name!r} has freed")
                if pool.refs[block] > 1:
                    target = pool.allocate()
                    self._copies.append(BlockCopy(g, block, target))
                    pool.release(block)
                    blocks[index] = target
                    row[index] = target
                elif pool.cached[block]:
                    self.prefix.detach(g, block)
                    pool.unregister(block)
            while len(blocks) < stop:
                block = pool.allocate()
                row[len(blocks)] = block
                blocks.append(block)
        allocation.writable_from = start
        allocation.writable_to = stop * size
        return self._taken()

    def room(self, allocation: Allocation, start: int) -> int:
        """How many positions from `start` on reserve() could make writable now."""
        size = self.block_size
        reach = self.max_blocks_per_seq
        for g, pool in enumerate(self.pools):
            blocks = allocation.blocks[g]
            index = self._first_written(allocation, g, start)
            free = pool.free
            while index < len(blocks):
                if pool.refs[blocks[index]] > 1:
                    if not free:
                        break
                    free -= 1
                index += 1
            else:
                index = len(blocks) + free
            reach = min(reach, index)
        return max(0, reach * size - start)

    def commit(self, allocation: Allocation, tokens: Sequence[int], length: int) -> None:
        """The first `length` of `tokens` are final and their KV is in the cache (or will be, in step order).

        Whole blocks enter the prefix cache; blocks that no later position's window reaches are freed.
        """
        if length < allocation.due:
            return
        size = self.block_size
        if self.enable_prefix_caching:
            self._sharing.leave(allocation, tokens, length)
        for g, reach in enumerate(self._reach):
            if reach is None:
                continue
            blocks = allocation.blocks[g]
            before = allocation.passed[g]
            passed = min((length - reach) // size, len(blocks))
            if passed > before:
                for index in range(before, passed):
                    self.pools[g].release(blocks[index])
                    blocks[index] = NULL_BLOCK
                self.tables[g][allocation.seat, before:passed] = NULL_BLOCK
                allocation.passed[g] = passed
        allocation.writable_from = max(allocation.writable_from, length)
        self._plan(allocation)

    def rollback(self, allocation: Allocation, length: int) -> None:
        """Keep the first `length` positions: blocks wholly beyond them are given back."""
        size = self.block_size
        keep = -(-length // size)
        for g, reach in enumerate(self._reach):
            if reach is not None and allocation.passed[g] * size > max(0, length - reach):
                raise ValueError(f"cannot roll back to {length} tokens: group {self.groups[g].name!r} has freed the "
                                 "window before them")
        for g, blocks in enumerate(allocation.blocks):
            if len(blocks) > keep:
                self.tables[g][allocation.seat, keep:len(blocks)] = NULL_BLOCK
                self._release(g, blocks[keep:])
                del blocks[keep:]
        allocation.writable_to = min(allocation.writable_to, keep * size)
        allocation.sealed = min(allocation.sealed, max(0, length - self._lookahead))
        lowered = False
        for g, group in enumerate(self.groups):
            most = max(0, length - group.lookahead) // size
            if allocation.registered[g] > most:
                allocation.registered[g] = most
                lowered = True
        if length // size < len(allocation.chain):
            self._sharing.follow(allocation, allocation.chain[:length // size])
            lowered = True
        if lowered:
            self._plan(allocation)

    def fork(self, allocation: Allocation) -> Allocation | None:
        """A second holder of every block: whoever writes first copies. None: every seat is taken."""
        if not self.free_seats:
            return None
        twin = Allocation(self.free_seats.pop(), len(self.groups), allocation.salt)
        for g, blocks in enumerate(allocation.blocks):
            twin.blocks[g] = list(blocks)
            for block in blocks:
                if block != NULL_BLOCK:
                    self.pools[g].share(block)
            self.tables[g][twin.seat] = self.tables[g][allocation.seat]
        twin.cached, twin.miss, twin.due = allocation.cached, allocation.miss, allocation.due
        twin.sealed = allocation.sealed
        twin.registered = list(allocation.registered)
        twin.passed = list(allocation.passed)
        self._sharing.follow(twin, list(allocation.chain))
        allocation.writable_to = 0
        return twin

    def compact(self, allocation: Allocation, start: int, path: Sequence[int]) -> list[SlotMove]:
        """Moves that bring the accepted rows (ascending, at start + row) to start + 1, start + 2, ... in every group.

        Rows already in place are left out. The moves must run before anything later reads or writes those slots.
        """
        size = self.block_size
        moves: list[SlotMove] = []
        for g, blocks in enumerate(allocation.blocks):
            for position, row in enumerate(path, start + 1):
                source = start + row
                if source != position:
                    moves.append(SlotMove(g, blocks[source // size] * size + source % size,
                                          blocks[position // size] * size + position % size))
        return moves

    def close(self, allocation: Allocation) -> None:
        """Everything is given back at once; blocks in the prefix cache can be found until they are needed."""
        if allocation.seat < 0:
            raise ValueError("this allocation is already closed")
        for g, blocks in enumerate(allocation.blocks):
            self.tables[g][allocation.seat, :len(blocks)] = NULL_BLOCK
            self._release(g, blocks)
            allocation.blocks[g] = []
        for absent in allocation.absent:
            self.cold.release(absent.group, absent.cold)
        allocation.absent = []
        self._sharing.follow(allocation, [])
        self.free_seats.append(allocation.seat)
        allocation.seat = -1
        allocation.writable_to = 0

    def forget(self) -> None:
        """Empty the prefix cache: what its blocks hold can no longer be trusted."""
        listener, self.prefix.listener = self.prefix.listener, None  # it is told once, of all
        for g, pool in enumerate(self.pools):
            for block in list(self.prefix.node_of[g]):
                self.prefix.detach(g, block)
                pool.unregister(block)
        self.cold.forget()
        self._copies = []  # of a call that broke off
        self.prefix.listener = listener
        if listener is not None:
            listener.cleared()

    def begin_intake(self, tokens: Sequence[int], salt: str,
                     pieces: Sequence[Piece]) -> tuple[Intake, list[BlockCopy]]:
        """Handover.begin(), with the copies that must run before the blocks are written; handover.end() comes next."""
        return self.handover.begin(tokens, salt, pieces), self._taken()

    def free_blocks(self, group: int) -> int:
        """Blocks that can be taken now, cached ones that nobody holds included."""
        return self.pools[group].free

    def needed(self, allocation: Allocation, group: int, length: int) -> int:
        """Blocks still missing to hold `length` tokens; for a window group, what is alive at any one time."""
        missing = max(0, -(-length // self.block_size) - len(allocation.blocks[group]))
        reach = self._reach[group]
        missing = missing if reach is None else min(missing, self._window_blocks(reach))
        return missing + sum(absent.group == group for absent in allocation.absent)

    def capacity(self) -> int:
        """The longest sequence, in tokens with KV, that fits when it runs alone."""
        longest = self.max_blocks_per_seq * self.block_size
        for pool, reach in zip(self.pools, self._reach):
            usable = pool.num_blocks - 1
            if reach is None or usable < self._window_blocks(reach):
                longest = min(longest, usable * self.block_size)
        return longest

    def usage(self) -> CacheUsage:
        total = sum(pool.num_blocks - 1 for pool in self.pools)
        free = sum(pool.free for pool in self.pools)
        return CacheUsage(total=total, free=free, used=total - free,
                          cached=sum(pool.registered for pool in self.pools),
                          shared=sum(pool.shared for pool in self.pools), hits=self.hits, queries=self.queries,
                          evictions=sum(pool.evictions for pool in self.pools),
                          swap_total=self.swap.most_blocks * len(self.pools), swap_used=self.swap.used,
                          cold_total=self.cold.most_blocks * len(self.pools), cold_used=self.cold.used)

    def check(self, live: Iterable[Allocation], swapped: Iterable[Swapped] = ()) -> None:
        """Raise CacheInvariantError with a sentence if any bookkeeping disagrees; `live` are all open allocations and
        `swapped` all that are on the host."""
        check_cache(self, list(live), list(swapped))

    def _evict(self, group: int, block: int) -> None:
        self.cold.keep(group, block, self._copies)
        self.prefix.detach(group, block)

    def _taken(self) -> list[BlockCopy]:
        copies, self._copies = self._copies, []
        return copies

    def _first_written(self, allocation: Allocation, group: int, start: int) -> int:
        lookahead = self.groups[group].lookahead
        if lookahead:
            start = max(start - lookahead, min(start, allocation.sealed))
        return start // self.block_size

    def _window_blocks(self, reach: int) -> int:
        return -(-reach // self.block_size) + 1

    def _release(self, group: int, blocks: list[int]) -> None:
        """Last block first: of a cached text the end is forgotten before the beginning."""
        release = self.pools[group].release
        for block in reversed(blocks):
            if block != NULL_BLOCK:
                release(block)

    def _plan(self, allocation: Allocation) -> None:
        """Find the next length at which commit has something to do."""
        size = self.block_size
        due = NEVER
        for g, group in enumerate(self.groups):
            if self.enable_prefix_caching:
                due = min(due, (allocation.registered[g] + 1) * size + group.lookahead)
            reach = self._reach[g]
            if reach is not None:
                due = min(due, (allocation.passed[g] + 1) * size + reach)
        allocation.due = due
