"""Seats: who runs and who waits, and whose the cache's blocks are. Where blocks run out, drafts go, then sequences."""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable

from paceline.cache.allocation import Allocation
from paceline.cache.manager import CacheManager
from paceline.cache.prefix import told_to_all
from paceline.cache.transfers import BlockCopy, Route
from paceline.engine.schedule.limits import SchedulerLimits
from paceline.engine.schedule.preemption import Preemption
from paceline.engine.schedule.queue import WaitingQueue
from paceline.engine.schedule.sequence import UNSEATED, Sequence, Status
from paceline.engine.schedule.step import RowGroup

RUNNING, WAITING = Status.RUNNING, Status.WAITING


class Seats:
    """Hands out seats and blocks, and takes them back; the rules of order stand at Scheduler."""

    def __init__(self, config: SchedulerLimits, cache: CacheManager, clock: Callable[[], float],
                 preemption: Preemption) -> None:
        self.config = config
        self.cache = cache
        self.clock = clock
        self.preemption = preemption
        self.running: list[Sequence] = []
        """Sorted by rank."""
        self.waiting = WaitingQueue(clock)
        self.preemptions = 0
        self.max_seqs = min(config.max_num_seqs, cache.max_seats)
        self._watermarks = [int(config.watermark * (pool.num_blocks - 1)) for pool in cache.pools]
        self._groups: list[RowGroup] = []
        """Of the step being built."""
        self._spare = 0
        """It may have so many groups: the budget less all rows beyond each group's first."""
        self._copies: list[BlockCopy] = []
        """For the next step, in order. Some outlive those they were made for: what they write is written again."""
        self._preempted: list[Sequence] = []
        self._steps = 0
        self._blocked: tuple[int, int, int] | None = None
        """The head of the queue did not fit with so many blocks free and so many sequences running."""

    def take_copies(self) -> list[BlockCopy]:
        """The copies that would travel with the next step."""
        copies, self._copies = self._copies, []
        return copies

    def _unlock(self) -> bool:
        """Nobody can run, nor is in flight. Someone who is parked may be in their way: one such gives its blocks up.
        False: nobody is."""
        parked = next((seq for seq in reversed(self.running) if seq.parked), None)
        if parked is not None:
            self.preempt(parked)
        return parked is not None

    def join(self, seq: Sequence, allocation: Allocation, computed: int) -> None:
        """From now on the sequence runs, with `computed` tokens in the cache."""
        seq.allocation = allocation
        seq.computed = computed
        seq.status = RUNNING
        seq.last_step = max(seq.last_step, self._steps)
        if seq.admitted is None:
            seq.admitted = self.clock()
        insort(self.running, seq, key=_rank)

    def _reserve(self, seq: Sequence, start: int, rows: int) -> int:
        """Make up to `rows` positions writable: fewer if blocks are short; room for one is made at others' cost.
        Returns how many; 0: the sequence has to wait."""
        allocation: Allocation = seq.allocation
        while True:
            copies = self.cache.reserve(allocation, start, start + rows)
            if copies is not None:
                self._copies += copies
                return rows
            room = self.cache.room(allocation, start)
            if room:
                rows = min(rows, room)
            elif not self._drop_draft():
                victim = self.running[-1]
                if victim is seq:
                    return 0
                self.preempt(victim)

    def _drop_draft(self) -> bool:
        """Turn the step's last draft that occupies blocks of its own into a plain decode."""
        for group in reversed(self._groups):
            if group.draft is None:
                continue
            seq, kept = group.seq, group.start + 1
            blocks = seq.allocation.blocks[0]
            if len(blocks) * self.cache.block_size - kept >= self.cache.block_size:
                self._spare += len(group.tokens) - 1
                del group.tokens[1:]
                group.parents = group.draft = None
                seq.in_flight_drafts -= 1
                self.cache.rollback(seq.allocation, kept)
                self._drop_copies()
                return True
        return False

    def preempt(self, victim: Sequence, swap: bool = True) -> None:
        """Take a sequence's seat and blocks, and its rows in the step being built. It will be computed again, unless
        swapping it to the host is possible, cheaper, and not ruled out by the caller."""
        for index, group in enumerate(self._groups):
            if group.seq is victim:
                del self._groups[index]
                self._spare += len(group.tokens) - 1
                victim.computed = group.start
                victim.in_flight -= 1
                victim.in_flight_drafts -= group.draft is not None or group.drifts
                break
        if swap and not victim.request.shadow:
            self._swap_out(victim)
        self.running.remove(victim)
        self.cache.close(victim.allocation)
        self._drop_copies()
        victim.allocation = UNSEATED
        victim.computed = 0
        victim.drifting = []
        victim.draft = None
        victim.epoch += 1
        victim.preemptions += 1
        victim.status = WAITING
        if not victim.parked:
            self.waiting.push(victim)
        self._preempted.append(victim)
        self.preemptions += not victim.request.shadow

    def _drop_copies(self) -> None:
        """Forget copies on write into blocks that have just been given back, unless they go on to the host."""
        pools = self.cache.pools
        sent = {(copy.group, copy.source) for copy in self._copies if copy.route is Route.SWAP_OUT}
        self._copies = [copy for copy in self._copies if copy.route is not Route.WITHIN
                        or pools[copy.group].refs[copy.target] or (copy.group, copy.target) in sent]

    def forget_swapped(self, seq: Sequence) -> None:
        """What the host keeps of a sequence is not needed, or not to be trusted."""
        if seq.swapped is not None:
            self.cache.swap.drop(seq.swapped)
            seq.swapped = None

    def _swap_out(self, victim: Sequence) -> None:
        """Send the KV of a sequence to the host if that pays. Steps in flight write theirs before it is copied; of a
        draft in flight only the token it starts from counts, its moves are never made."""
        length, preemption = victim.computed, self.preemption
        if victim.in_flight_drafts:
            length = min(length, len(victim.tokens))
        if not length or not preemption.may_swap or not self.cache.swap.ready:
            return
        allocation: Allocation = victim.allocation
        blocks = [len(own) - passed for own, passed in zip(allocation.blocks, allocation.passed)]
        if not preemption.swaps(length - self._shared(allocation), blocks):
            return
        out = self.cache.swap_out(allocation, length)
        if out is not None:
            victim.swapped, copies = out
            self._copies += copies

    def _shared(self, allocation: Allocation) -> int:
        """Leading tokens that would be found again in the prefix cache: others hold their blocks as well."""
        refs, blocks = self.cache.pools[0].refs, allocation.blocks[0]
        count = 0
        while count < min(allocation.registered[0], len(blocks)) and refs[blocks[count]] > 1:
            count += 1
        return count * self.cache.block_size

    def _shut_out(self, seq: Sequence) -> bool:
        """Whether the head of the queue certainly cannot get a seat now."""
        weaker = bool(self.running) and self.running[-1].rank[0] > seq.rank[0]
        if len(self.running) >= self.max_seqs and not weaker:
            return True
        return (self._blocked is not None and self._blocked[0] == seq.order and self._free() <= self._blocked[1]
                and len(self.running) >= self._blocked[2])

    def _free(self) -> int:
        return sum(pool.free for pool in self.cache.pools)

    def _seat(self, seq: Sequence) -> bool:
        """Open the cache for a waiting sequence if it fits, preempting lower priorities if that makes it fit."""
        if len(self.running) >= self.max_seqs:
            self.preempt(self.running[-1])
        counted = not seq.request.shadow
        allocation = self.cache.open(seq.tokens, salt=seq.scope, reuse=not seq.wants_every_row, counted=counted)
        if allocation is None:
            return False
        if not self._fits(seq, allocation):
            self.cache.abandon(allocation, seq.tokens, counted=counted)
            return False
        self.waiting.seat(seq, len(seq.tokens) - allocation.cached if seq.admitted is None else 0)
        if seq.admitted is None:
            seq.cached_tokens = allocation.cached
            seq.cache_miss = told_to_all(allocation.miss) if seq.request.tenant.shares_cache else allocation.miss
        try:
            self._copies += self.cache.fetch(allocation)
            computed = allocation.cached
            if seq.swapped is not None:
                computed, copies = self.cache.swap_in(allocation, seq.swapped)
                computed = min(computed, len(seq.tokens) - 1)  # as ever, the last token is computed
                self._copies += copies
                seq.swapped = None
        except BaseException:
            self.cache.close(allocation)  # nobody else knows of it yet
            raise
        self.join(seq, allocation, computed)
        return True

    def _fits(self, seq: Sequence, allocation: Allocation) -> bool:
        """Whether all known tokens will find blocks, with the watermark and what running prompts still need left."""
        cache = self.cache
        weaker = [other for other in self.running if other.rank[0] > seq.rank[0]]
        stronger = [other for other in self.running if other.rank[0] <= seq.rank[0]]
        while self.running:
            short = yieldable = False
            for g, pool in enumerate(cache.pools):
                need = cache.needed(allocation, g, len(seq.tokens)) + self._watermarks[g]
                if need + len(stronger) * cache.max_blocks_per_seq <= pool.free:
                    continue  # however long they are
                for other in stronger:
                    need += cache.needed(other.allocation, g, len(other.tokens))
                if need > pool.free:
                    short = True
                    held = sum(len(other.allocation.blocks[g]) for other in weaker)
                    yieldable = need <= pool.free + held
                    if not yieldable:
                        return False
            if not short:
                return True
            self.preempt(weaker.pop())
        return True


def _rank(seq: Sequence) -> tuple[int, int]:
    return seq.rank
