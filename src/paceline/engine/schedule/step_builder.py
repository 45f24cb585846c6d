"""StepBuilder: what the next step holds. Spends the token budget, hands out blocks, preempts where they run out."""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Callable
from typing import TYPE_CHECKING

from paceline.cache.allocation import Allocation
from paceline.cache.manager import CacheManager
from paceline.cache.prefix import told_to_all
from paceline.cache.transfers import BlockCopy, Route
from paceline.engine.schedule.limits import SchedulerLimits
from paceline.engine.schedule.pace import LEAST_CHUNK, Pace
from paceline.engine.schedule.preemption import Preemption
from paceline.engine.schedule.queue import WaitingQueue
from paceline.engine.schedule.sequence import PENDING, UNSEATED, Placement, Reach, Sequence, Status
from paceline.engine.schedule.shares import allot, share_of
from paceline.engine.schedule.step import Repeat, RowGroup

if TYPE_CHECKING:
    from paceline.speculation.tree import DraftTree

RUNNING, WAITING = Status.RUNNING, Status.WAITING
PROMPTS_AT_ONCE = 4
"""Of one tenant and priority, where a step has no room for all: a short one need not wait for the end of a long one."""

PASSED = 8
"""Steps in which a prompt's share may be less than a row while those of others are more; then it has some rows."""


class StepBuilder:
    """Owns who runs and who waits, and the step being built; the rules of order stand at Scheduler."""

    def __init__(self, config: SchedulerLimits, cache: CacheManager, clock: Callable[[], float],
                 preemption: Preemption) -> None:
        self.config = config
        self.cache = cache
        self.clock = clock
        self.preemption = preemption
        self.pace = Pace(config.max_step_s)
        self.running: list[Sequence] = []
        """Sorted by rank."""
        self.waiting = WaitingQueue(clock)
        self.preemptions = 0
        self.max_seqs = min(config.max_num_seqs, cache.max_seats)
        self._watermarks = [int(config.watermark * (pool.num_blocks - 1)) for pool in cache.pools]
        self._groups: list[RowGroup] = []
        self._copies: list[BlockCopy] = []
        """For the next step, in order. Some outlive those they were made for: what they write is written again."""
        self._preempted: list[Sequence] = []
        self._spare = 0
        """The step being built may have so many groups: the budget less all rows beyond each group's first."""
        self._seconds = 0.0
        """That it has for prompts; math.inf: it takes as long as it takes."""
        self._logit_rows = 0
        """Rows of prompts that may still have their logits computed in it."""
        self._steps = 0
        self._blocked: tuple[int, int, int] | None = None
        """The head of the queue did not fit with so many blocks free and so many sequences running."""

    def fill(self, apart: bool = False, turns: bool = True) -> tuple[list[RowGroup], list[BlockCopy], list[Sequence]]:
        """The next step's groups, its copies, and who was preempted since the last one. No groups: nothing can run.
        `apart`: without those whose steps can be repeated. Without `turns` all take part who can."""
        groups = self._groups = []
        self._spare = self.config.max_batch_tokens
        self._steps += 1
        self._logit_rows = self.config.max_logit_rows or self._spare
        due = self.due() if turns else self.running
        running = [seq for seq in due if not self.repeatable(seq)] if apart else due
        draft_rows = self.pace.decoding_rows(self._spare, drafts=True) - len(running)
        """What drafts may use: everyone gets one row first."""
        preempted_before = len(self._preempted)
        prompts: list[Sequence] = []
        for seq in running:
            if seq.in_flight_drafts or seq.masking or seq.status is not RUNNING:
                continue
            start = seq.computed
            tokens = seq.tokens
            missing = len(tokens) - start
            if missing == 1 and start >= seq.prompt_len:
                token = tokens[-1]
                if seq.draft is not None and draft_rows > 0:
                    draft_rows -= self._add_draft(seq, seq.draft, start, draft_rows)
                    continue
            elif missing > 0:
                prompts.append(seq)
                continue
            elif seq.wait_for_commit or start + 1 >= seq.limit:
                continue
            else:
                token = PENDING
            if len(groups) >= self._spare:
                break
            allocation = seq.allocation
            if ((start < allocation.writable_from or start >= allocation.writable_to)
                    and not self._reserve(seq, start, 1)):
                seq.last_step = self._steps  # it had its turn, and keeps nobody from theirs
                continue
            groups.append(RowGroup(seq, start, [token], None, None, 0, seq.epoch))
            seq.draft = None
            seq.computed = start + 1
            seq.in_flight += 1
            seq.last_step = self._steps
        self._seconds = self.pace.left_for_prompts(sum(len(group.tokens) for group in groups),
                                                   any(seq.computed >= seq.prompt_len for seq in self.running))
        if self.waiting and len(groups) < self._spare and len(self._preempted) == preempted_before:
            self._admit(prompts)
        self._add_chunks(prompts)
        if not groups and not apart and not any(seq.in_flight for seq in self.running):
            if due is not self.running:  # whose turn it is cannot run: it may wait for blocks of those who sit out
                return self.fill(turns=False)
            if self._unlock():
                return self.fill()
        return groups, *self._filled()

    def due(self) -> list[Sequence]:
        """Who takes part in the next step: all who run; but where so many decode that everybody would wait long for a
        token, each request gets its share of the rows, and its samples take turns; so do requests, where they are more
        than the rows. Who has nothing to run now takes nobody's turn."""
        if self.pace.seconds is None:
            return self.running
        decoding = [seq for seq in self.running
                    if seq.computed >= seq.prompt_len and not seq.masking and not seq.parked]
        most = self.pace.decoding_rows(len(decoding))
        if most >= len(decoding):
            return self.running
        by_request: dict[str, list[Sequence]] = {}
        for seq in sorted(decoding, key=lambda seq: seq.last_step):
            by_request.setdefault(seq.request.id, []).append(seq)
        turns = [(turn, seq.rank[0], seq.last_step, seq.order, seq)
                 for own in by_request.values() for turn, seq in enumerate(own)]
        waits = {seq for *_, seq in sorted(turns)[most:]}
        return [seq for seq in self.running if seq not in waits]

    def _filled(self) -> tuple[list[BlockCopy], list[Sequence]]:
        """What travels with the groups of the step just built; without any it waits for the next step."""
        groups, self._groups = self._groups, []
        if not groups:
            return [], []
        preempted, self._preempted = self._preempted, []
        return self.take_copies(), preempted

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

    def repeatable(self, seq: Sequence) -> bool:
        """Whether a step of it could be repeated without the host: it has one token to run, known or on its way, and is
        sampled freely."""
        return (seq.placement is Placement.FREE and (not seq.in_flight_drafts or seq.lookup > 0) and seq.draft is None
                and seq.computed >= max(len(seq.tokens) - 1, seq.prompt_len))

    def free(self, apart: bool = False) -> list[Sequence]:
        """Who is repeatable(); `apart`: and not in flight."""
        return [seq for seq in self.running if self.repeatable(seq) and not (apart and seq.in_flight)]

    def can_repeat(self) -> bool:
        """Whether the next step could be repeated: everybody's could, and nobody who waits could be let in."""
        if not all(self.repeatable(seq) for seq in self.running):
            return False
        first = self.waiting.peek()
        return bool(self.running) and (first is None or self._shut_out(first))

    def fill_repeated(self, repeat: Repeat, apart: bool = False,
                      ) -> tuple[list[RowGroup], list[BlockCopy], list[Sequence], Repeat]:
        """Like fill() for a step that is repeated, of those who can be; the last of the results is what there were
        blocks for. `apart`: of those only who are not in flight."""
        groups = self._groups = []
        running = self.free(apart)[:self.config.max_batch_tokens]
        repeat = self._affordable(running, repeat)
        times, lookahead = repeat.times, repeat.lookahead
        for seq in running:
            start = seq.computed
            if seq.least_computed >= seq.limit - 1 or seq.status is not RUNNING:  # what is in flight ends it
                continue
            most = 1 + lookahead if seq.lookup else 1
            wanted = min(times * most, seq.limit - 1 - start)
            end = seq.limit - 1
            if wanted > 0:  # else all that it may still write is reserved
                rows = self._reserve(seq, start, wanted)
                if not rows:
                    continue
                if rows < wanted:  # the blocks are few: nobody waits for who has used them up
                    times = min(times, rows)
                end = start + rows
            token = seq.tokens[-1] if start < len(seq.tokens) else PENDING
            drifts = most > 1 or seq.in_flight_drafts > 0
            groups.append(RowGroup(seq, start, [token], None, None, 0, seq.epoch, (), end, drifts))
            seq.in_flight += 1
            seq.in_flight_drafts += drifts
        for group in groups:
            seq = group.seq
            if group.drifts:
                if seq.in_flight > 1 and not seq.drifting:  # the one before it gets exactly there
                    seq.drifting.append(Reach(group.start - len(seq.tokens) + 1, 1, group.start))
                seq.drifting.append(Reach(times, 1 + lookahead if seq.lookup else 1, group.end))
                seq.drift()
            else:
                group.end = seq.computed = min(group.end, group.start + times)
        return groups, *self._filled(), repeat._replace(times=times)

    def _affordable(self, running: list[Sequence], repeat: Repeat) -> Repeat:
        """How often a step can be repeated, and with how much lookahead, without taking blocks from anybody for drafts
        that may come to nothing."""
        times, lookahead = repeat.times, repeat.lookahead
        while lookahead:
            ends = [(seq.allocation, min(seq.computed + times * (1 + lookahead if seq.lookup else 1), seq.limit - 1))
                    for seq in running]
            if all(sum(self.cache.needed(allocation, g, end) for allocation, end in ends) <= pool.free
                   for g, pool in enumerate(self.cache.pools)):
                break
            if times == 1:
                return Repeat(repeat.times)
            times //= 2
        return repeat._replace(times=times)

    def abandon(self) -> None:
        """Forget the step being built, if fill() was broken off, and the copies for it."""
        self._groups, self._copies = [], []

    def join(self, seq: Sequence, allocation: Allocation, computed: int) -> None:
        """From now on the sequence runs, with `computed` tokens in the cache."""
        seq.allocation = allocation
        seq.computed = computed
        seq.status = RUNNING
        seq.last_step = max(seq.last_step, self._steps)
        if seq.admitted is None:
            seq.admitted = self.clock()
        insort(self.running, seq, key=_rank)

    def _add_draft(self, seq: Sequence, draft: DraftTree, start: int, most: int) -> int:
        """Schedule a known token and its draft, trimmed to `most` rows, the sequence's end and the free blocks.
        Returns the draft rows used."""
        left = seq.limit - len(seq.tokens) - 1
        nodes = min(len(draft), most, self.cache.max_blocks_per_seq * self.cache.block_size - start - 1)
        if nodes > left:
            nodes = next((i for i, depth in enumerate(draft.depths()[:nodes]) if depth > left), nodes)
        rows = self._reserve(seq, start, 1 + nodes)
        if not rows:
            seq.last_step = self._steps
            return 0
        seq.draft = None
        group = RowGroup(seq, start, [seq.tokens[-1]], None, None, 0, seq.epoch)
        if rows > 1:
            group.draft = draft = draft.trimmed(rows - 1)
            group.tokens += draft.tokens
            if not draft.is_chain:
                group.parents = [-1, *(parent + 1 for parent in draft.parents)]
            seq.in_flight_drafts += 1
        self._groups.append(group)
        seq.computed = start + 1
        seq.in_flight += 1
        seq.last_step = self._steps
        self._spare -= rows - 1
        return rows - 1

    def _add_chunks(self, prompts: list[Sequence]) -> None:
        """Spend what the step has for prompts: seconds, where steps are sized by time, else rows."""
        timed = self._timed
        budget = self._seconds if timed else self._spare - len(self._groups)
        added = [self._add_chunk(seq, self.pace.rows_within(allowed, seq.computed) if timed else int(allowed))
                 for seq, allowed in allot(budget, prompts, self._cost)]
        passed = [seq for seq, had in zip(prompts, added) if not had]
        for seq in sorted(passed, key=lambda seq: seq.last_step):  # shares may be less than a row: then they take turns
            if any(added) and self._steps - seq.last_step <= PASSED:
                break
            if self._add_chunk(seq, LEAST_CHUNK if timed else int(budget)):
                break

    @property
    def _timed(self) -> bool:
        return not math.isinf(self._seconds)

    def _cost(self, seq: Sequence) -> float:
        """Of all that is left of a prompt, in what a step spends."""
        left = len(seq.tokens) - seq.computed
        return self.pace.prompt_seconds(seq.computed, left) if self._timed else left

    def _add_chunk(self, seq: Sequence, most: int) -> bool:
        """Schedule as much of the uncomputed tokens as `most`, the step's rows, max_chunk and blocks allow. Whether
        that is anything."""
        if seq.status is not RUNNING:
            return False
        start, known = seq.computed, len(seq.tokens)
        rows = min(known - start, most, self._spare - len(self._groups))
        if self.config.max_chunk is not None:
            rows = min(rows, self.config.max_chunk)
        scored = seq.request.params.prompt_logprobs is not None and known == seq.prompt_len
        if scored:
            rows = min(rows, self._logit_rows)
        rows = self._reserve(seq, start, rows) if rows > 0 else 0
        if not rows:
            return False
        end = start + rows
        group = RowGroup(seq, start, seq.tokens[start:end], None, None, rows, seq.epoch)
        if scored:
            group.logits_from = 0
            self._logit_rows -= rows
        elif end == known:
            group.logits_from = rows - 1
        if end == known and seq.siblings:
            group.siblings = list(seq.siblings)
        self._groups.append(group)
        seq.draft = None
        seq.computed = end
        seq.in_flight += 1
        seq.last_step = self._steps
        self._spare -= rows - 1
        return True

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
        if swap:
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
        self.preemptions += 1

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

    def _admit(self, prompts: list[Sequence]) -> None:
        """Give seats to waiting sequences, strictly in order, while rows, seats and blocks last. They join `prompts`,
        those whose prompts are in work."""
        rows = self._spare - len(self._groups)
        while True:
            seq = self.waiting.peek()
            if seq is None or seq.in_flight or self._shut_out(seq) or not self._has_room_for(seq, prompts, rows):
                return
            free = self._free()
            if not self._seat(seq):
                self._blocked = (seq.order, free, len(self.running))
                return
            self._blocked = None
            prompts.append(seq)

    def _has_room_for(self, seq: Sequence, prompts: list[Sequence], rows: int) -> bool:
        """Whether a step that has so many rows for prompts has some left for one more; or it may be the shortest of
        some, unless it will find in the cache what another one is computing now."""
        budget = self._seconds if self._timed else rows
        if sum(map(self._cost, prompts)) < budget:
            return True
        head = seq.tokens[:self.cache.block_size]
        own = [other for other in prompts if share_of(other) == share_of(seq)]
        return len(own) < PROMPTS_AT_ONCE and all(
            other.scope != seq.scope or other.tokens[:len(head)] != head for other in own)

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
        params = seq.request.params
        reuse = params.prompt_logprobs is None or len(seq.tokens) > seq.prompt_len
        allocation = self.cache.open(seq.tokens, salt=seq.scope, reuse=reuse)
        if allocation is None:
            return False
        if not self._fits(seq, allocation):
            self.cache.abandon(allocation, seq.tokens)
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
