"""StepBuilder: what the next step holds. Spends rows, and seconds, on those who decode and on prompts."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from paceline.cache.manager import CacheManager
from paceline.cache.transfers import BlockCopy
from paceline.engine.schedule.limits import SchedulerLimits
from paceline.engine.schedule.pace import LEAST_CHUNK, Pace
from paceline.engine.schedule.preemption import Preemption
from paceline.engine.schedule.seats import Seats
from paceline.engine.schedule.sequence import PENDING, Placement, Reach, Sequence, Status
from paceline.engine.schedule.shares import allot, share_of
from paceline.engine.schedule.step import Repeat, RowGroup
from paceline.speculation.step_cost import StepCost

if TYPE_CHECKING:
    from paceline.speculation.tree import DraftTree

RUNNING = Status.RUNNING
PROMPTS_AT_ONCE = 4
"""Of one tenant and priority, where a step has no room for all: a short one need not wait for the end of a long one."""
PASSED = 8
"""Steps in which a prompt's share may be less than a row while those of others are more; then it has some rows."""


class StepBuilder(Seats):
    """Builds steps, of those who have seats and of those whom it lets in."""

    def __init__(self, config: SchedulerLimits, cache: CacheManager, clock: Callable[[], float],
                 preemption: Preemption, cost: StepCost | None = None) -> None:
        super().__init__(config, cache, clock, preemption)
        self.pace = Pace(config.max_step_s, cost)
        self._seconds = 0.0
        """That the step being built has for prompts; math.inf: it takes as long as it takes."""
        self._logit_rows = 0
        """Rows of prompts that may still have their logits computed in it."""

    def fill(self, apart: bool = False, turns: bool = True) -> tuple[list[RowGroup], list[BlockCopy], list[Sequence]]:
        """The next step's groups, its copies, and who was preempted since the last one. No groups: nothing can run.
        `apart`: without those whose steps can be repeated. Without `turns` all take part who can."""
        groups = self._groups = []
        self._spare = self.config.max_batch_tokens
        self._steps += 1
        self._logit_rows = self.config.max_logit_rows or self._spare
        running = self._taking_part(apart, turns)
        draft_rows = self._draft_rows(running)
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
            if running is not self.running:  # whose turn it is cannot run: it may wait for blocks of those who sit out
                return self.fill(turns=False)
            if self._unlock():
                return self.fill()
        return groups, *self._filled()

    def _taking_part(self, apart: bool, turns: bool = True) -> list[Sequence]:
        due = self.due() if turns else self.running
        return [seq for seq in due if not self.repeatable(seq)] if apart else due

    def draft_rows(self, apart: bool = False) -> int:
        """What drafts may use in the step that fill() would build now."""
        return self._draft_rows(self._taking_part(apart))

    def _draft_rows(self, running: list[Sequence]) -> int:
        """Everyone gets one row first."""
        return max(0, self.pace.decoding_rows(self.config.max_batch_tokens, drafts=True) - len(running))

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
        scored = seq.scores_prompt and start < seq.prompt_len
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
