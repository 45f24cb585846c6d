"""The loop: while there is room and a plan, submit a step; settle the oldest; commit."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager

from paceline.cache.storage import KVStorage
from paceline.cache.transfers import BlockCopy
from paceline.engine.bookkeeping import Bookkeeping, Touched
from paceline.engine.drafting.drafting import Drafting
from paceline.engine.execute.executor import Executor, Settled, StepDropped, bring_into_place
from paceline.engine.records.metrics import StepTimes
from paceline.engine.schedule.scheduler import Scheduler
from paceline.engine.schedule.sequence import Placement, Status
from paceline.engine.schedule.step import Step

log = logging.getLogger("paceline.engine")


class Loop:
    """Drives scheduler and executor, and tells the bookkeeping what came of it."""

    def __init__(self, scheduler: Scheduler, executor: Executor, drafting: Drafting, bookkeeping: Bookkeeping,
                 end_requests: Callable[[Step | None, BaseException, Touched], None],
                 prepare: Callable[[Scheduler], None], clock: Callable[[], float]) -> None:
        """`end_requests`: those of a step that broke; None: of all steps. `prepare`: called before one is planned."""
        self._prepare = prepare
        self.executor = executor
        self._scheduler = scheduler
        self._drafting = drafting
        self._bookkeeping = bookkeeping
        self._end_requests = end_requests
        self._clock = clock
        self._schedule_s = 0.0
        """What it took to plan steps that nothing was settled after yet."""
        self._suspect: Step | None = None
        """On whose account things break now; None: nobody can say."""

    def step(self, started: float, since_arrival: float, touched: Touched) -> None:
        """One pass, which began at `started`, so long after the last request came. The records that got something new
        are added to `touched`."""
        with self._failing(touched):
            self._suspect = self.executor.oldest
            self.executor.start()
            self._schedule_s += self._submit(since_arrival)
            schedule_s, self._schedule_s = self._schedule_s, 0.0
            self._suspect = self.executor.oldest
            if self._suspect is None:
                return
            self._commit(self.executor.settle(), started, schedule_s, touched)
            while self.executor.stale:
                self._suspect = self.executor.oldest
                self._commit(self.executor.settle(), started, 0.0, touched)
            self._suspect = self.executor.oldest
            self.executor.advance()
            if self.executor.goes_on:
                self._schedule_s = self._submit(since_arrival)

    def catch_up(self, storage: KVStorage, touched: Touched, copies: Seq[BlockCopy] = ()) -> bool:
        """Between two passes, for who reads or writes the cache by itself: have begun what was submitted, and carry out
        what waits for the next step, and then these copies, so that the storage holds what the bookkeeping says. False:
        that is not to be had now; it may be after the next pass."""
        with self._failing(touched):
            self._suspect = self.executor.oldest
            self.executor.start()
            if self.executor.underway:
                moves, waiting = self._scheduler.take_transfers()
                bring_into_place(storage, moves, [*waiting, *copies])
                return True
        return False

    @contextmanager
    def _failing(self, touched: Touched) -> Iterator[None]:
        """Whatever breaks costs those on whose account it broke."""
        try:
            yield
        except StepDropped as dropped:
            self._start_over(dropped, touched)
        except BaseException as problem:
            self._fail(self._suspect, problem, touched)

    def _submit(self, since_arrival: float) -> float:
        """All that there is room for; the seconds it took to plan that, drafting included."""
        seconds = 0.0
        while self.executor.has_room(self._scheduler):
            self._suspect, started = None, self._clock()
            self._prepare(self._scheduler)
            self._drafting.lose_heads(self._scheduler.running)
            planned = self.executor.plan(self._scheduler, since_arrival)
            if planned is not None and planned.repeat is None:
                self._drafting.propose([seq for seq in self._scheduler.due()
                                        if not (planned.apart and seq.placement is Placement.FREE)],
                                       self._scheduler.draft_rows(planned.apart))
            step = None if planned is None else self._scheduler.schedule(*planned)
            now = self._clock()
            seconds += now - started
            if step is None:
                break
            self._suspect = step
            self._bookkeeping.preempted(step)
            self._bookkeeping.scheduled(step, now)
            self.executor.submit(step)
        return seconds

    def _commit(self, settled: Settled, started: float, schedule_s: float, touched: Touched) -> None:
        step, decisions = settled.step, settled.decisions
        if settled.stale:  # nobody is left to be told of it
            self._scheduler.commit(step, decisions)
            return
        decided = self._clock()
        alive = [group.seq.status is not Status.FINISHED for group in step.groups]
        self._scheduler.commit(step, decisions)
        tokens = self._bookkeeping.decided(step, decisions, alive, decided, touched)
        draft = self._drafting.seconds
        times = StepTimes(max(0.0, schedule_s - draft), settled.forward_s, settled.sample_s, self._clock() - decided,
                          draft)
        self._scheduler.preemption.observe_prompt(step.rows, step.prompt_rows, sum(times))
        took = sum(times) - draft if settled.by_itself else settled.device_s
        if settled.repeats is not None:
            self._scheduler.pace.observe_repeated(step, settled.repeats.seconds)
        elif took is not None and not step.repeated:
            self._scheduler.pace.observe(step, took)
        self._drafting.account(step, decisions, times, settled.by_itself, settled.repeats)
        self._bookkeeping.stepped(step, decisions, tokens, started, times)

    def _start_over(self, dropped: StepDropped, touched: Touched) -> None:
        """There was no memory for a step: those who ran are computed again, in smaller steps if that may help."""
        if dropped.too_large:
            if not self._scheduler.shrink():
                self._fail(dropped.step, dropped.__cause__ or dropped, touched)
                return
            log.warning("%s: those who ran are computed again, in steps of at most %d; give the cache fewer kv_blocks",
                        dropped, self._scheduler.config.max_batch_tokens)
        self._forget()

    def _fail(self, step: Step | None, problem: BaseException, touched: Touched) -> None:
        try:
            self._end_requests(step, problem, touched)
        finally:
            self._forget()

    def _forget(self) -> None:
        """Whatever is planned or in flight."""
        self.executor.forget()
        self._scheduler.abandon()
