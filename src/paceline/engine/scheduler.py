"""Scheduler: which rows run next. Fills a token budget, hands out cache blocks, takes results back. No torch."""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from heapq import heappop, heappush

from paceline.cache.manager import Allocation, CacheManager
from paceline.cache.transfers import BlockCopy, SlotMove
from paceline.engine.queue import WaitingQueue
from paceline.engine.sequence import PENDING, Sequence, Status
from paceline.engine.step import GroupResult, RowGroup, Step
from paceline.errors import ConfigError, QueueFullError, RequestError
from paceline.request import Request

FINISHED, RUNNING, WAITING = Status.FINISHED, Status.RUNNING, Status.WAITING

MAX_STEPS_IN_FLIGHT = 2


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    max_batch_tokens: int
    """Rows of one step, at most."""
    max_num_seqs: int
    """Sequences that hold cache at the same time, at most."""
    max_model_len: int
    """Tokens of one sequence (prompt + output), at most."""
    watermark: float = 0.01
    """Fraction of every group's blocks that an admission must leave free while others run."""
    max_queue: int | None = None
    """Sequences that may wait; adding a request beyond raises QueueFullError. None: no limit."""
    max_chunk: int | None = None
    """Prompt tokens of one sequence in one step, at most. None: what the budget leaves."""

    def __post_init__(self) -> None:
        for name in ("max_batch_tokens", "max_num_seqs", "max_model_len"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}.")
        if self.max_chunk is not None and self.max_chunk < 1:
            raise ConfigError(f"max_chunk must be at least 1 or None, got {self.max_chunk}.")
        if not 0 <= self.watermark < 1:
            raise ConfigError(f"watermark must be from 0 up to (not including) 1, got {self.watermark}.")
        if self.max_queue is not None and self.max_queue < 1:
            raise ConfigError(f"max_queue must be at least 1 or None, got {self.max_queue}.")


class Scheduler:
    """Moves sequences from waiting to running to finished, one Step at a time.

    Order: a higher `priority` is served first; inside a priority, first come, first served. Running sequences come
    before waiting ones, decodes before prompt chunks. When blocks run out, drafts of the step are dropped first, then
    the lowest-priority, last-come running sequence is preempted: its blocks are freed, its tokens are kept, and it
    queues at its old place to be computed again. A sequence that is itself the last waits for the others. A waiting
    sequence preempts running ones of strictly lower priority only.

    schedule() may be called once more before the previous step is committed; steps are committed in order.
    """

    def __init__(self, config: SchedulerConfig, cache: CacheManager, clock: Callable[[], float]) -> None:
        self.config = config
        self.cache = cache
        self.clock = clock
        self.preemptions = 0
        self._capacity = cache.capacity()
        self._watermarks = [int(config.watermark * (pool.num_blocks - 1)) for pool in cache.pools]
        self._max_seqs = min(config.max_num_seqs, cache.max_seats)
        self._running: list[Sequence] = []
        self._waiting = WaitingQueue()
        self._requests: dict[str, list[Sequence]] = {}
        self._deadlines: list[tuple[float, int, str]] = []
        self._flight: deque[Step] = deque()
        self._moves: list[SlotMove] = []
        """Compaction of accepted drafts, for the next step to carry out before anything else. Moves of a sequence
        that has ended or lost its blocks meanwhile may stay: its blocks may be in the prefix cache by now, and where
        they are not, whoever takes them writes after the moves."""
        self._preempted: list[Sequence] = []
        self._groups: list[RowGroup] = []
        self._copies: list[BlockCopy] = []
        self._spare = 0
        """The step being built may have so many groups: the budget less all rows beyond each group's first."""
        self._blocked: tuple[Sequence, int, int] | None = None
        """The head of the queue did not fit with so many blocks free and so many sequences running."""
        self._next_order = 0
        self._next_step = 0

    @property
    def running(self) -> list[Sequence]:
        """Sequences that hold cache, first served first. A view: do not change it."""
        return self._running

    @property
    def waiting(self) -> list[Sequence]:
        """Sequences in the queue, first served first (a sorted copy)."""
        return self._waiting.snapshot()

    @property
    def queue_length(self) -> int:
        return len(self._waiting)

    @property
    def steps_in_flight(self) -> int:
        return len(self._flight)

    def has_work(self) -> bool:
        """Whether anything runs, waits, or is still to be committed."""
        return bool(self._running or self._waiting or self._flight)

    def add(self, request: Request, seeds: list[int]) -> list[Sequence]:
        """Queue a request; one sequence per seed (params.n of them). Raises RequestError if it can never run."""
        if len(seeds) != request.params.n:
            raise ValueError(f"{request.params.n} samples need as many seeds, got {len(seeds)}")
        config, prompt_len = self.config, len(request.prompt)
        if request.id in self._requests:
            raise RequestError(f"Request id {request.id!r} is already in use: choose another.", "request_id")
        if not prompt_len:
            raise RequestError("The prompt is empty: give at least one token.", "prompt")
        if prompt_len + min(request.max_tokens, 1) > config.max_model_len:
            raise RequestError(f"The prompt has {prompt_len} tokens and the context holds {config.max_model_len}: "
                               "shorten the prompt.", "prompt")
        if prompt_len > self._capacity:
            raise RequestError(f"The prompt has {prompt_len} tokens and the cache holds {self._capacity}: shorten the "
                               "prompt or give the engine more kv_blocks.", "prompt")
        if config.max_queue is not None and len(self._waiting) >= config.max_queue:
            raise QueueFullError(f"{len(self._waiting)} sequences are waiting and the limit is {config.max_queue}: try "
                                 "again later or raise max_queue.")
        sequences = []
        for sample, seed in enumerate(seeds):
            seq = Sequence(request, sample, seed, self._next_order)
            seq.limit = min(seq.limit, config.max_model_len, self._capacity + 1)
            self._next_order += 1
            sequences.append(seq)
        sequences[0].siblings = sequences[1:]
        self._requests[request.id] = list(sequences)
        self._waiting.push(sequences[0])
        if request.deadline is not None:
            heappush(self._deadlines, (request.deadline, sequences[0].order, request.id))
        return sequences

    def cancel(self, request_id: str, reason: str = "cancelled") -> list[Sequence]:
        """End all samples of a request now, at any moment; its blocks are free at once. Returns those it ended."""
        sequences = list(self._requests.get(request_id, ()))
        for seq in sequences:
            self._finish(seq, reason)
        return sequences

    def expire(self, now: float | None = None) -> list[Sequence]:
        """End every request whose deadline has passed, with finish_reason "timeout"."""
        if not self._deadlines:
            return []
        now = self.clock() if now is None else now
        expired: list[Sequence] = []
        while self._deadlines and self._deadlines[0][0] <= now:
            _, order, request_id = heappop(self._deadlines)
            sequences = self._requests.get(request_id)
            if sequences and sequences[0].order - sequences[0].sample == order:
                expired += self.cancel(request_id, "timeout")
        return expired

    def preempt(self, seq: Sequence) -> None:
        """Take a running sequence's seat and blocks between two steps, as if they had run out; it queues again."""
        if seq.status is RUNNING:
            self._preempt(seq)

    def schedule(self) -> Step | None:
        """The next step, or None if nothing can run before a commit (or at all)."""
        if len(self._flight) >= MAX_STEPS_IN_FLIGHT:
            return None
        groups = self._groups = []
        self._copies = []
        self._spare = self.config.max_batch_tokens
        running = self._running
        draft_rows = self._spare - len(running)
        """What drafts may use: everyone gets one row first."""
        preempted_before = len(self._preempted)
        prompts: list[Sequence] = []
        for seq in running:
            start = seq.computed
            tokens = seq.tokens
            missing = len(tokens) - start
            if missing == 1 and start >= seq.prompt_len:
                token = tokens[-1]
                if seq.draft is not None and draft_rows > 0:
                    draft_rows -= self._add_draft(seq, start, draft_rows)
                    continue
            elif missing > 0:
                prompts.append(seq)
                continue
            elif seq.in_flight_draft or seq.wait_for_commit or len(tokens) + 1 >= seq.limit:
                continue
            else:
                token = PENDING
            if len(groups) >= self._spare:
                break
            allocation = seq.allocation
            if ((start < allocation.writable_from or start >= allocation.writable_to)
                    and not self._reserve(seq, start, 1)):
                continue
            groups.append(RowGroup(seq, start, [token], None, None, 0, seq.epoch))
            seq.draft = None
            seq.computed = start + 1
            seq.in_flight += 1
        for seq in prompts:
            if len(groups) >= self._spare:
                break
            if seq.status is RUNNING:
                self._add_chunk(seq)
        if self._waiting and len(groups) < self._spare and len(self._preempted) == preempted_before:
            self._admit()
        if not groups:
            return None  # what was preempted or moved is told with the next step
        step = Step(self._next_step, groups, self._copies, self._moves, self._preempted)
        self._next_step += 1
        self._groups, self._copies, self._moves, self._preempted = [], [], [], []
        self._flight.append(step)
        return step

    def commit(self, step: Step, results: list[GroupResult]) -> None:
        """Take back what the oldest uncommitted step yielded, one result a group.

        A group whose sequence has ended meanwhile is ignored; one whose sequence was preempted keeps its tokens but
        leaves the cache alone.
        """
        if not self._flight or self._flight[0] is not step:
            raise ValueError("steps must be committed once each, in the order in which they were scheduled")
        if len(results) != len(step.groups):
            raise ValueError(f"the step has {len(step.groups)} groups and {len(results)} results were given")
        self._flight.popleft()
        cache = self.cache
        for group, result in zip(step.groups, results):
            seq = group.seq
            seq.in_flight -= 1
            draft = group.draft
            if draft is not None:
                seq.in_flight_draft = False
            if seq.status is FINISHED:
                continue
            tokens = seq.tokens
            tokens.extend(result.tokens)
            if seq.epoch == group.epoch:
                if draft is None:
                    length = group.start + len(group.tokens)
                    if length >= seq.allocation.due:
                        cache.commit(seq.allocation, tokens, length)
                else:
                    self._accept(group, result)
            if group.siblings:
                self._fork(group, result)
            if result.finish is not None:
                self._finish(seq, result.finish)
            elif len(tokens) >= seq.limit and group.start + len(group.tokens) >= seq.prompt_len:
                self._finish(seq, "length")

    def fail(self, step: Step) -> None:
        """The oldest uncommitted step broke. It and those scheduled after it are dropped and must not be committed.

        Moves, copies and rows may or may not have run, so nothing in the cache can be trusted: the prefix cache is
        emptied and everyone still running is preempted, to be computed again.
        """
        if not self._flight or self._flight[0] is not step:
            raise ValueError("only the oldest uncommitted step can fail; those after it fail with it")
        for dropped in self._flight:
            for group in dropped.groups:
                group.seq.in_flight -= 1
                group.seq.in_flight_draft = False
        self._flight.clear()
        self._moves = []
        while self._running:
            self._preempt(self._running[-1])
        self.cache.forget()

    def _add_draft(self, seq: Sequence, start: int, most: int) -> int:
        """Schedule a known token and its draft, trimmed to `most` rows, the sequence's end and the free blocks.
        Returns the draft rows used."""
        draft = seq.draft
        left = seq.limit - len(seq.tokens) - 1
        nodes = min(len(draft), most, self.cache.max_blocks_per_seq * self.cache.block_size - start - 1)
        if nodes > left:
            nodes = next((i for i, depth in enumerate(draft.depths()[:nodes]) if depth > left), nodes)
        rows = self._reserve(seq, start, 1 + nodes)
        if not rows:
            return 0
        draft = draft.trimmed(rows - 1) if rows > 1 else None
        seq.draft = None
        group = RowGroup(seq, start, [seq.tokens[-1]], None, draft, 0, seq.epoch)
        if draft is not None:
            group.tokens += draft.tokens
            if not draft.is_chain:
                group.parents = [-1, *(parent + 1 for parent in draft.parents)]
            seq.in_flight_draft = True
        self._groups.append(group)
        seq.computed = start + 1
        seq.in_flight += 1
        self._spare -= rows - 1
        return rows - 1

    def _add_chunk(self, seq: Sequence) -> None:
        """Schedule as much of the uncomputed tokens as budget, max_chunk and blocks allow."""
        start, known = seq.computed, len(seq.tokens)
        rows = min(known - start, self._spare - len(self._groups))
        if self.config.max_chunk is not None:
            rows = min(rows, self.config.max_chunk)
        rows = self._reserve(seq, start, rows)
        if not rows:
            return
        end = start + rows
        group = RowGroup(seq, start, seq.tokens[start:end], None, None, rows, seq.epoch)
        if seq.request.params.prompt_logprobs is not None and known == seq.prompt_len:
            group.logits_from = 0
        elif end == known:
            group.logits_from = rows - 1
        if end == known and seq.siblings:
            group.siblings = list(seq.siblings)
        self._groups.append(group)
        seq.draft = None
        seq.computed = end
        seq.in_flight += 1
        self._spare -= rows - 1

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
                victim = self._running[-1]
                if victim is seq:
                    return 0
                self._preempt(victim)

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
                seq.in_flight_draft = False
                self.cache.rollback(seq.allocation, kept)
                self._drop_copies()
                return True
        return False

    def _preempt(self, victim: Sequence) -> None:
        """Take a sequence's seat and blocks, and its rows in the step being built; it will be computed again."""
        for index, group in enumerate(self._groups):
            if group.seq is victim:
                del self._groups[index]
                self._spare += len(group.tokens) - 1
                victim.in_flight -= 1
                if group.draft is not None:
                    victim.in_flight_draft = False
                break
        self._running.remove(victim)
        self.cache.close(victim.allocation)
        self._drop_copies()
        victim.allocation = None
        victim.computed = 0
        victim.draft = None
        victim.epoch += 1
        victim.preemptions += 1
        victim.status = WAITING
        self._waiting.push(victim)
        self._preempted.append(victim)
        self.preemptions += 1

    def _drop_copies(self) -> None:
        """Forget this step's copies into blocks that have just been given back."""
        pools = self.cache.pools
        self._copies = [copy for copy in self._copies if pools[copy.group].refs[copy.target]]

    def _admit(self) -> None:
        """Give seats to waiting sequences, strictly in order, while rows, seats and blocks last."""
        while len(self._groups) < self._spare:
            seq = self._waiting.peek()
            if seq is None or seq.in_flight:
                return
            free = sum(pool.free for pool in self.cache.pools)
            weaker = bool(self._running) and self._running[-1].rank[0] > seq.rank[0]
            if len(self._running) >= self._max_seqs and not weaker:
                return
            if (self._blocked is not None and self._blocked[0] is seq and free <= self._blocked[1]
                    and len(self._running) >= self._blocked[2]):
                return
            if not self._seat(seq):
                self._blocked = (seq, free, len(self._running))
                return
            self._blocked = None
            self._add_chunk(seq)

    def _seat(self, seq: Sequence) -> bool:
        """Open the cache for a waiting sequence if it fits, preempting lower priorities if that makes it fit."""
        if len(self._running) >= self._max_seqs:
            self._preempt(self._running[-1])
        params = seq.request.params
        reuse = params.prompt_logprobs is None or len(seq.tokens) > seq.prompt_len
        allocation = self.cache.open(seq.tokens, salt=params.cache_salt, reuse=reuse)
        if allocation is None:
            return False
        if not self._fits(seq, allocation):
            self.cache.abandon(allocation, seq.tokens)
            return False
        self._waiting.discard(seq)
        seq.allocation = allocation
        seq.computed = allocation.cached
        seq.status = RUNNING
        if seq.admitted is None:
            seq.admitted = self.clock()
            seq.cached_tokens = allocation.cached
            seq.cache_miss = allocation.miss
        insort(self._running, seq, key=_rank)
        return True

    def _fits(self, seq: Sequence, allocation: Allocation) -> bool:
        """Whether all known tokens will find blocks, with the watermark and what running prompts still need left."""
        cache = self.cache
        weaker = [other for other in self._running if other.rank[0] > seq.rank[0]]
        stronger = [other for other in self._running if other.rank[0] <= seq.rank[0]]
        while self._running:
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
            self._preempt(weaker.pop())
        return True

    def _accept(self, group: RowGroup, result: GroupResult) -> None:
        """Keep the accepted rows of a draft (its sequence still holds its blocks) and roll the rest back."""
        seq = group.seq
        path = result.path[:max(0, len(seq.tokens) - group.start - 1)]
        length = group.start + 1 + len(path)
        if path:
            self._moves += self.cache.compact(seq.allocation, group.start, path)
        self.cache.commit(seq.allocation, seq.tokens, length)
        self.cache.rollback(seq.allocation, length)
        seq.computed = length

    def _fork(self, group: RowGroup, result: GroupResult) -> None:
        """The prompt is computed: further samples share its blocks, or queue if there is no seat."""
        seq = group.seq
        seq.siblings = []
        alive = [sibling for sibling in group.siblings if sibling.status is not FINISHED]
        if result.finish is not None and not result.siblings:
            for sibling in alive:
                self._finish(sibling, result.finish)
            return
        if len(result.siblings) != len(group.siblings):
            raise ValueError(f"{len(group.siblings)} siblings need as many results, got {len(result.siblings)}")
        for sibling, own in zip(group.siblings, result.siblings):
            if sibling.status is FINISHED:
                continue
            sibling.tokens.extend(own.tokens)
            sibling.cached_tokens, sibling.cache_miss = seq.cached_tokens, seq.cache_miss
            if own.finish is not None:
                self._finish(sibling, own.finish)
            elif len(sibling.tokens) >= sibling.limit:
                self._finish(sibling, "length")
            else:
                self._place_sibling(seq, sibling, seq.epoch == group.epoch)

    def _place_sibling(self, seq: Sequence, sibling: Sequence, shareable: bool) -> None:
        allocation: Allocation | None = None
        if shareable and len(self._running) < self._max_seqs:
            allocation = self.cache.fork(seq.allocation)
        if allocation is None:
            self._waiting.push(sibling)
            return
        self.cache.rollback(allocation, seq.prompt_len)
        sibling.allocation = allocation
        sibling.computed = seq.prompt_len
        sibling.status = RUNNING
        sibling.admitted = self.clock()
        insort(self._running, sibling, key=_rank)

    def _finish(self, seq: Sequence, reason: str) -> None:
        if seq.status is FINISHED:
            return
        if seq.status is RUNNING:
            self._running.remove(seq)
            self.cache.close(seq.allocation)
            seq.allocation = None
        else:
            self._waiting.discard(seq)
        seq.status = FINISHED
        seq.finish_reason = reason
        seq.draft = None
        siblings = self._requests[seq.request.id]
        siblings.remove(seq)
        if not siblings:
            del self._requests[seq.request.id]
        for sibling in seq.siblings:
            self._finish(sibling, reason)
        seq.siblings = []


def _rank(seq: Sequence) -> tuple[int, int]:
    return seq.rank


__all__ = ["Scheduler", "SchedulerConfig"]
