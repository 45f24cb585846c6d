"""Scheduler: which rows run next. Fills a token budget, hands out cache blocks, takes results back. No torch."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Results
from dataclasses import replace
from heapq import heappop, heappush

from paceline.cache.allocation import Allocation
from paceline.cache.manager import CacheManager
from paceline.cache.transfers import BlockCopy, SlotMove
from paceline.engine.schedule.limits import SchedulerLimits
from paceline.engine.schedule.preemption import Preemption
from paceline.engine.schedule.queue import places_of
from paceline.engine.schedule.sequence import UNSEATED, Branch, Sequence, Status
from paceline.engine.schedule.step import GroupResult, Repeat, RowGroup, Step
from paceline.engine.schedule.step_builder import StepBuilder
from paceline.engine.schedule.targets import any_late
from paceline.errors import QueueFullError, RequestError
from paceline.request import Request
from paceline.speculation.step_cost import StepCost

FINISHED, RUNNING, WAITING = Status.FINISHED, Status.RUNNING, Status.WAITING

MAX_STEPS_IN_FLIGHT = 2
SPARE_DEADLINES = 64
LEAST_ROWS = 16
"""A device without memory for a step of so many rows cannot be helped by smaller ones."""
RECOVERY = 256
"""Steps that go well before larger ones are tried again, where there was no memory for them; each time that they fail
again it takes twice as many, up to MOST_RECOVERY."""
MOST_RECOVERY = 1 << 16


class Scheduler:
    """Moves sequences from waiting to running to finished, one Step at a time.

    Order: a higher `priority` is served first; inside a priority, the tenant that was given the fewest tokens; of one
    tenant, first come, first served. Running sequences come before waiting ones, decodes before prompt chunks; of those
    each tenant has its share of the step (shares.py). When blocks run out, drafts of the step are dropped first, then
    the lowest-priority, last-come running sequence is preempted: its blocks are freed, its tokens are kept, and it
    queues at its old place to be computed again, or to have its KV copied back from the host where that is cheaper.
    A sequence that is itself the last waits for the others. A waiting sequence preempts running ones of strictly lower
    priority only.

    schedule() may be called once more before the previous step is committed; steps are committed in order.
    """

    def __init__(self, config: SchedulerLimits, cache: CacheManager, clock: Callable[[], float],
                 preemption: Preemption | None = None, cost: StepCost | None = None) -> None:
        """`preemption`: who is swapped to the host; None: nobody. `cost`: the engine's model of what steps take."""
        self.config = config
        self.cache = cache
        self.clock = clock
        self._most_rows = config.max_batch_tokens
        self._capacity = cache.capacity()
        self.preemption = preemption or Preemption()
        self._filler = StepBuilder(config, cache, clock, self.preemption, cost)
        self._running = self._filler.running
        self._waiting = self._filler.waiting
        self.pace = self._filler.pace
        self._requests: dict[str, list[Sequence]] = {}
        self._held: dict[str, list[Sequence]] = {}
        """Requests that are not ready to queue, by id: those of their samples that will."""
        self._deadlines: list[tuple[float, int, str]] = []
        self._timely = 0
        """Live requests with a target for their first token."""
        self._flight: deque[Step] = deque()
        self._moves: list[SlotMove] = []
        """Compaction of accepted drafts, for the next step to carry out before anything else. Moves of a sequence
        that has ended or lost its blocks meanwhile may stay: its blocks may be in the prefix cache by now, and where
        they are not, whoever takes them writes after the moves."""
        self._next_order = 0
        self._next_step = 0
        self._went_well = 0
        """Steps since their size was last changed."""
        self._recovery = RECOVERY
        self._grown = False
        """The last change was upwards."""

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
        """Samples that wait, those held back and those whose prompt waits counted, and no shadows."""
        return self._waiting.samples + sum(map(places_of, self._held_back))

    @property
    def _held_back(self) -> list[Sequence]:
        return [seq for own in self._held.values() for seq in own]

    @property
    def queue_full(self) -> bool:
        """Whether add() would raise QueueFullError now, for one sample."""
        return not self.has_room(1)

    def has_room(self, samples: int, tenant: str = "") -> bool:
        """For a request of so many. One that takes more places than there are is let into an empty queue. Where others
        have filled the queue, a tenant that takes less than an equal share of it is let in all the same."""
        most = self.config.max_queue
        if most is None or not self.queue_length or self.queue_length + samples <= most:
            return True
        held = [seq for seq in self._held_back if seq.request.tenant.name == tenant]
        own = self._waiting.places(tenant) + sum(map(places_of, held))
        others = {seq.request.tenant.name for seq in self._held_back}.union(self._waiting.tenants()) - {tenant}
        return bool(others) and (not own or own + samples <= most // (1 + len(others)))

    @property
    def preemptions(self) -> int:
        """How often a running sequence lost its blocks, in all."""
        return self._filler.preemptions

    @property
    def steps_in_flight(self) -> int:
        return len(self._flight)

    def sequences(self, request_id: str) -> Results[Sequence]:
        """The samples of a request that have not ended."""
        return self._requests.get(request_id, ())

    def has_work(self) -> bool:
        """Whether anything runs, waits, or is still to be committed."""
        return bool(self._running or self._waiting or self._flight or self._held)

    @property
    def only_held(self) -> bool:
        """Whether requests are held back and there is nothing else to do."""
        return bool(self._held) and not (self._running or self._waiting or self._flight)

    def add(self, request: Request, seeds: list[int], *, held: bool = False, accepted: bool = False,
            said: Results[Results[int] | None] = ()) -> list[Sequence]:
        """Queue a request; one sequence per seed (params.samples). Raises RequestError if it can never run. `held`: it
        takes no part until release(), keeps its place by arrival, and can be cancelled or expire. `accepted`: however
        full the queue is. `said`: the output that each sample comes with; None: that one has ended."""
        if len(seeds) != request.params.samples:
            raise ValueError(f"{request.params.samples} samples need as many seeds, got {len(seeds)}")
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
        if not accepted and not self.has_room(len(seeds), request.tenant.name):
            missing = self.queue_length + len(seeds) - (config.max_queue or 0)
            raise QueueFullError(f"{self.queue_length} samples are waiting, {len(seeds)} more were to, and the limit "
                                 f"is {config.max_queue}: try again later or raise max_queue.",
                                 self._waiting.seconds_until_free(min(missing, self.queue_length)))
        sequences = []
        for sample, seed in enumerate(seeds):
            seq = Sequence(request, sample, seed, self._next_order)
            seq.limit = min(seq.limit, config.max_model_len, self._capacity + 1)
            self._next_order += 1
            sequences.append(seq)
        entering = self._begun(sequences, said) if said else None
        if entering is None:
            sequences[0].siblings = sequences[1:]
            entering = sequences[:1]
        living = [seq for seq in sequences if seq.status is not FINISHED]
        if not living:
            return sequences
        self._requests[request.id] = living
        self._timely += request.target_ttft_s is not None
        self._held[request.id] = entering
        if not held:
            self.release(request.id)
        if request.deadline is not None:
            if len(self._deadlines) > 2 * len(self._requests) + SPARE_DEADLINES:
                self._forget_deadlines()
            heappush(self._deadlines, (request.deadline, sequences[0].order, request.id))
        return sequences

    def _begun(self, sequences: list[Sequence], said: Results[Results[int] | None]) -> list[Sequence] | None:
        """Give samples what they come with, which may be all that there is room for. Those that queue: their texts have
        parted, so each by itself; None: not one of them has begun."""
        for seq, own in zip(sequences, said, strict=True):
            if own is not None:
                seq.tokens += own
                seq.said = len(own)
            if own is None or (own and len(seq.tokens) >= seq.limit):
                seq.status = FINISHED
                seq.finish_reason = None if own is None else "length"
        begun = any(seq.said or seq.status is FINISHED for seq in sequences)
        return [seq for seq in sequences if seq.status is not FINISHED] if begun else None

    def release(self, request_id: str) -> None:
        """A request that was held back queues."""
        for seq in self._held.pop(request_id, ()):
            self._waiting.push(seq)

    def cancel(self, request_id: str, reason: str = "cancelled") -> list[Sequence]:
        """End all samples of a request now, at any moment; its blocks are free at once. Returns those it ended."""
        sequences = list(self._requests.get(request_id, ()))
        self._held.pop(request_id, None)
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

    def _forget_deadlines(self) -> None:
        """Those of requests that have ended: they may lie in a far future."""
        living = {(own[0].order - own[0].sample, name) for name, own in self._requests.items() if own}
        self._deadlines = sorted(entry for entry in self._deadlines if entry[1:] in living)

    def preempt(self, seq: Sequence) -> None:
        """Take a running sequence's seat and blocks between two steps, as if they had run out; it queues again."""
        if seq.status is RUNNING:
            self._filler.preempt(seq)

    def can_repeat(self) -> bool:
        """Whether a step that is repeated could hold everybody."""
        return len(self._flight) < MAX_STEPS_IN_FLIGHT and self._filler.can_repeat()

    def due(self) -> list[Sequence]:
        """Those of the running sequences who take part in the next step. A view: do not change it."""
        return self._filler.due()

    def draft_rows(self, apart: bool = False) -> int:
        """Rows that drafts may have in the next step, planned `apart` or not."""
        return 0 if self.pressed else self._filler.draft_rows(apart)

    @property
    def pressed(self) -> bool:
        """Whether drafts would make some prompt's first token come later than its target. Who has to wait for a seat
        waits for those who run to end, and drafts that pay bring that nearer."""
        if not self._timely:
            return False
        prompts = [seq for seq in self._running if seq.computed < seq.prompt_len]
        decoding = len(self._running) - len(prompts)
        seats = self._filler.max_seqs - len(self._running)
        waiting = self._waiting.snapshot()[:seats] if seats > 0 else []
        return any_late([*prompts, *waiting], self.pace, decoding, self.clock())

    def free(self) -> list[Sequence]:
        """Those who are not in flight and whose next step could be repeated."""
        return self._filler.free(apart=True)

    def schedule(self, repeat: Repeat | None = None, apart: bool = False) -> Step | None:
        """The next step, or None if nothing can run before a commit (or at all). With `repeat` it is one that is
        repeated, at most so often. `apart`: it is one of those who are free() only; not repeated: of the others."""
        if len(self._flight) >= MAX_STEPS_IN_FLIGHT:
            return None
        planned = Repeat(0)
        if repeat is not None:
            groups, copies, preempted, planned = self._filler.fill_repeated(repeat, apart)
        else:
            groups, copies, preempted = self._filler.fill(apart)
        if not groups and apart and not self._flight:  # one of both cannot run: all who can
            groups, copies, preempted = self._filler.fill()
            planned = Repeat(0)
        if not groups:
            return None
        step = Step(self._next_step, groups, copies, self._moves, preempted, planned.times,
                    planned.drafted_rows, planned.heads)
        self._next_step += 1
        self._moves = []
        self._flight.append(step)
        return step

    def take_transfers(self) -> tuple[list[SlotMove], list[BlockCopy]]:
        """The moves and copies that would travel with the next step, for whoever uses the cache before it: carry them
        out now."""
        moves, self._moves = self._moves, []
        return moves, self._filler.take_copies()

    def commit(self, step: Step, results: Results[GroupResult]) -> None:
        """Take back what the oldest uncommitted step yielded, one result per group.

        A group whose sequence has ended meanwhile is ignored; one whose sequence was preempted keeps its tokens but
        leaves the cache alone.
        """
        if not self._flight or self._flight[0] is not step:
            raise ValueError("steps must be committed once each, in the order in which they were scheduled")
        if len(results) != len(step.groups):
            raise ValueError(f"the step has {len(step.groups)} groups and {len(results)} results were given")
        self._flight.popleft()
        if self.config.max_batch_tokens < self._most_rows:
            self._grow()
        cache, shared = self.cache, self._waiting.shared
        for group, result in zip(step.groups, results):
            seq = group.seq
            seq.in_flight -= 1
            if group.draft is not None or group.drifts:
                seq.in_flight_drafts -= 1
            if seq.status is FINISHED:
                continue
            tokens = seq.tokens
            tokens.extend(result.tokens)
            if shared and result.tokens:
                self._waiting.serve(seq, len(result.tokens))
            if seq.epoch == group.epoch:
                if seq.drifting:
                    del seq.drifting[0]
                if step.repeat:
                    self._progress(group)
                elif group.draft is None:
                    length = group.start + len(group.tokens)
                    if length >= seq.allocation.due:
                        cache.commit(seq.allocation, tokens, length)
                else:
                    self._accept(group, result)
            if result.waits:
                self._park(seq)
            elif result.branches:
                self._branch(result.branches)
            elif group.siblings:
                self._fork(group, result)
            if result.finish is not None:
                self._finish(seq, result.finish)
            elif len(tokens) >= seq.limit and group.start + len(group.tokens) >= seq.prompt_len:
                self._finish(seq, "length")

    def fail(self, step: Step) -> None:
        """The oldest uncommitted step broke. It and those scheduled after it are dropped and must not be committed.

        Moves, copies and rows may or may not have run, so nothing in the cache can be trusted: the prefix cache is
        emptied and everyone who ran or was swapped out is computed again.
        """
        if not self._flight or self._flight[0] is not step:
            raise ValueError("only the oldest uncommitted step can fail; those after it fail with it")
        self.abandon()

    def abandon(self) -> None:
        """Like fail(), at any moment: also after schedule() or commit() themselves were broken off."""
        self._flight.clear()
        self._filler.abandon()
        for sequences in self._requests.values():
            for seq in sequences:
                seq.in_flight = 0
                seq.in_flight_drafts = 0
                seq.drifting = []
                self._filler.forget_swapped(seq)
        self._moves = []
        while self._running:
            self._filler.preempt(self._running[-1], swap=False)
        self.cache.forget()

    def shrink(self) -> bool:
        """Steps have at most half as many rows, until many of them have gone well; False: they are that small
        already."""
        rows = self.config.max_batch_tokens // 2
        if rows < LEAST_ROWS:
            return False
        if self._grown:
            self._recovery = min(2 * self._recovery, MOST_RECOVERY)
        self._resize(rows, grown=False)
        return True

    def _grow(self) -> None:
        """A step went well. Where they had to be made smaller, larger ones are tried again after some."""
        self._went_well += 1
        if self._went_well >= self._recovery:
            self._resize(min(2 * self.config.max_batch_tokens, self._most_rows), grown=True)

    def _resize(self, rows: int, grown: bool) -> None:
        self.config = self._filler.config = replace(self.config, max_batch_tokens=rows)
        self._went_well, self._grown = 0, grown

    def _progress(self, group: RowGroup) -> None:
        """A repeated step of a sequence that still holds its blocks is over: all its tokens but the newest are in the
        cache. What was reserved beyond is given back, unless another step may be writing there."""
        seq = group.seq
        length = len(seq.tokens) - 1
        if length >= seq.allocation.due:
            self.cache.commit(seq.allocation, seq.tokens, length)
        if group.drifts:
            seq.drift()
            if not seq.in_flight:
                self.cache.rollback(seq.allocation, length)

    def _accept(self, group: RowGroup, result: GroupResult) -> None:
        """Keep the accepted rows of a draft (its sequence still holds its blocks) and roll the rest back."""
        seq = group.seq
        path = result.path[:max(0, len(seq.tokens) - group.start - 1)]
        length = group.start + 1 + len(path)
        if path and not result.moved:
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
            self._waiting.serve(sibling, len(own.tokens))
            sibling.cached_tokens, sibling.cache_miss = seq.cached_tokens, seq.cache_miss
            if own.finish is not None:
                self._finish(sibling, own.finish)
            elif len(sibling.tokens) >= sibling.limit:
                self._finish(sibling, "length")
            else:
                self._place_beside(seq, sibling, seq.prompt_len if seq.epoch == group.epoch else 0)

    def _park(self, seq: Sequence) -> None:
        """What comes next is decided with others: until then it neither runs nor queues."""
        seq.parked = True
        if seq.status is WAITING:
            self._waiting.discard(seq)

    def _branch(self, branches: Results[Branch]) -> None:
        """Sequences that were decided together go on, end or rest. Those that leave their text let go of what they hold
        before the first of them is given a seat, and follow their source before it grows."""
        for branch in branches:
            seq = branch.seq
            seq.siblings = []
            if branch.finish is not None:
                self._finish(seq, branch.finish)
            elif seq is not branch.source or not branch.tokens:
                self._let_go(seq)
                seq.status = WAITING
                seq.computed = 0
                seq.epoch += 1
        for branch in branches:
            seq = branch.seq
            if seq is not branch.source:
                self._follow(seq, branch.source)
            elif seq.parked and branch.tokens and seq.status is WAITING:
                self._waiting.push(seq)
        for branch in branches:
            branch.seq.parked = False
            branch.seq.tokens.extend(branch.tokens)
            self._waiting.serve(branch.seq, len(branch.tokens))

    def _follow(self, seq: Sequence, source: Sequence) -> None:
        seq.tokens = list(source.tokens)
        seq.cached_tokens, seq.cache_miss = source.cached_tokens, source.cache_miss
        self._place_beside(source, seq, source.computed if source.status is RUNNING else 0)

    def _place_beside(self, source: Sequence, seq: Sequence, shared: int) -> None:
        """Give a sequence that has nothing in the cache the first `shared` tokens of another, or let it queue."""
        allocation: Allocation | None = None
        if shared and len(self._running) < self._filler.max_seqs:
            allocation = self.cache.fork(source.allocation)
        if allocation is None:
            self._waiting.push(seq)
            return
        self.cache.rollback(allocation, shared)
        self._filler.join(seq, allocation, shared)

    def _finish(self, seq: Sequence, reason: str) -> None:
        if seq.status is FINISHED:
            return
        self._let_go(seq)
        seq.status = FINISHED
        seq.finish_reason = reason
        siblings = self._requests[seq.request.id]
        siblings.remove(seq)
        if not siblings:
            del self._requests[seq.request.id]
            self._timely -= seq.request.target_ttft_s is not None
        for sibling in seq.siblings:
            self._finish(sibling, reason)
        seq.siblings = []

    def _let_go(self, seq: Sequence) -> None:
        """Take its seat and blocks, or its place in the queue."""
        if seq.status is RUNNING:
            self._running.remove(seq)
            self.cache.close(seq.allocation)
            seq.allocation = UNSEATED
        else:
            self._waiting.discard(seq)
            self._filler.forget_swapped(seq)
        seq.draft = None
