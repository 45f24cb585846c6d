"""The loop: draft -> schedule -> run -> decide -> commit, for all requests at once. Steps that a device draws by itself
are launched ahead of what the host has read."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

from paceline.engine.bookkeeping import Bookkeeping, Touched
from paceline.engine.decide.decider import Decider
from paceline.engine.decide.decision import Decision
from paceline.engine.drafting.drafting import Drafting
from paceline.engine.execute.graphs.device_steps import DeviceSteps
from paceline.engine.execute.runner import Batch, Runner, StepLogits
from paceline.engine.records.metrics import StepTimes
from paceline.engine.rows.sample_rows import row_masks
from paceline.engine.schedule.scheduler import Scheduler
from paceline.engine.schedule.sequence import Status
from paceline.engine.schedule.step import Step

log = logging.getLogger("paceline.engine")


class Loop:
    """Drives the scheduler and the runner, and tells the books what came of it."""

    def __init__(self, scheduler: Scheduler, runner: Runner, drafting: Drafting, decider: Decider, books: Bookkeeping,
                 device_steps: DeviceSteps | None, end_requests: Callable[[Step | None, BaseException, Touched], None],
                 clock: Callable[[], float], schedule_ahead: bool) -> None:
        """`end_requests`: those of a step that broke; None: of all steps."""
        self.decider = decider
        self.device_steps = device_steps
        self._scheduler = scheduler
        self._runner = runner
        self._drafting = drafting
        self._books = books
        self._end_requests = end_requests
        self._clock = clock
        self._schedule_ahead = schedule_ahead
        self._ahead: Batch | None = None
        """A batch laid out before the step in front of it was decided."""

    @property
    def is_ahead(self) -> bool:
        return self._ahead is not None

    def step(self, begun: float, since_arrival: float, touched: Touched) -> None:
        """One pass, which began when the clock said `begun`, so long after the last request came. The records that got
        something new are added to `touched`."""
        if self.device_steps is None or not self._step_on_device(self.device_steps, begun, since_arrival, touched):
            self._step_on_host(begun, touched)

    def _step_on_host(self, begun: float, touched: Touched) -> None:
        """One whose tokens the host must know before the next."""
        batch = self._ahead
        self._ahead = None
        try:
            batch = batch or self._plan()
            if batch is None:
                return
            planned = self._clock()
            step = batch.step
            self._books.scheduled(step, planned)
            out = self._execute(batch)
            if out is None:
                return
            ran = self._clock()
            if self._schedule_ahead:
                self._ahead = self._plan()
            decisions = self.decider.decide(step, out)
            decided = self._clock()
            tokens = self._commit(step, decisions, decided, touched)
        except BaseException as problem:
            self._fail(None if batch is None else batch.step, problem, touched)
            return
        draft = self._drafting.seconds
        ahead = draft if self._ahead is not None else 0.0  # drafted while this step was being decided
        times = StepTimes(planned - begun - draft + ahead, ran - planned, decided - ran - ahead,
                          self._clock() - decided, draft)
        self._scheduler.preemption.observe_prompt(step.rows, step.prompt_rows, sum(times))
        self._drafting.account(step, decisions, step.rows, step.prompt_rows, times)
        self._books.stepped(step, decisions, tokens, begun, times)

    def _step_on_device(self, device: DeviceSteps, begun: float, since_arrival: float, touched: Touched) -> bool:
        """Launch what the device can run by itself, then book the oldest step launched. False: there is none."""
        step: Step | None = None
        try:
            while self._ahead is None:
                step = None  # if planning breaks nobody can say on whose account
                step = device.plan(self._scheduler, since_arrival)
                if step is None:
                    break
                self._books.preempted(step)
                try:
                    launched = device.launch(step, self._runner)
                except torch.OutOfMemoryError:
                    if step.repeated:
                        device.give_up_repeating()
                        self._start_over()
                    elif not self._shrunk(step.rows):
                        raise
                    return True
                if launched:
                    self._books.scheduled(step, self._clock())
                    self._finish_begun(device, touched)
                else:
                    self._ahead = self._runner.prepare(step)
            if not device.launched:
                return False
            step = device.launched[0].step
            planned = self._clock()
            drawn = device.read()
            ran = self._clock()
            decisions = self.decider.decide_sampled(step, drawn)
            decided = self._clock()
            tokens = self._commit(step, decisions, decided, touched)
            while (stale := device.stale()) is not None:
                self._scheduler.commit(stale, [Decision([]) for _ in stale.groups])
        except BaseException as problem:
            self._fail(step, problem, touched)
            return True
        times = StepTimes(planned - begun, ran - planned, decided - ran, self._clock() - decided, 0.0)
        self._scheduler.preemption.observe_prompt(step.rows, step.prompt_rows, sum(times))
        self._books.stepped(step, decisions, tokens, begun, times)
        self._finish_begun(device, touched)
        return True

    def _finish_begun(self, device: DeviceSteps, touched: Touched) -> None:
        """A step whose forward runs already draws once all tokens in front of it are booked: now, if there is one."""
        waiting = device.begun
        if waiting is None or device.launched:
            return
        device.begun = None
        step, begun = waiting.batch.step, self._clock()
        try:
            if all(group.seq.status is Status.FINISHED for group in step.groups):
                self._scheduler.commit(step, [Decision([]) for _ in step.groups])
                return
            masks = row_masks(step.groups)
            if masks is not None:
                if device.finish(waiting, masks):
                    return
                self._runner.give_up_captures(waiting.batch)
            # A grammar failed, or there is no memory to draw: the host decides from the logits.
            decisions = self.decider.decide(step, self._runner.undrawn(waiting))
            decided = self._clock()
            tokens = self._commit(step, decisions, decided, touched)
        except BaseException as problem:
            self._fail(step, problem, touched)
            return
        self._books.stepped(step, decisions, tokens, begun,
                            StepTimes(0.0, 0.0, decided - begun, self._clock() - decided, 0.0))

    def _plan(self) -> Batch | None:
        self._drafting.propose(self._scheduler.running)
        step = self._scheduler.schedule()
        if step is None:
            return None
        self._books.preempted(step)
        return self._runner.prepare(step)

    def _execute(self, batch: Batch) -> StepLogits | None:
        """None: there was no memory for the step. Those in it are computed again, in smaller ones."""
        try:
            return self._runner.execute(batch)
        except torch.OutOfMemoryError:
            if not self._shrunk(batch.step.rows):
                raise
            return None

    def _shrunk(self, rows: int) -> bool:
        """There was no memory for a step of so many rows: start over with smaller ones. False: there are none."""
        if not self._scheduler.shrink():
            return False
        log.warning("no memory for a step of %d rows: those who ran are computed again, in steps of at most %d; "
                    "give the cache fewer kv_blocks", rows, self._scheduler.config.max_batch_tokens)
        self._start_over()
        return True

    def _commit(self, step: Step, decisions: list[Decision], now: float, touched: Touched) -> int:
        """Book what was decided; how many tokens that was."""
        alive = [group.seq.status is not Status.FINISHED for group in step.groups]
        self._scheduler.commit(step, decisions)
        count = self._books.decided(step, decisions, alive, now, touched)
        if self._ahead is not None:
            for group in self._ahead.step.groups:
                if group.seq.allocation is not None:
                    self._runner.remember(group.seq.allocation.seat, group.seq.tokens[-1])
        return count

    def _fail(self, step: Step | None, problem: BaseException, touched: Touched) -> None:
        try:
            self._end_requests(step, problem, touched)
        finally:
            self._start_over()

    def _start_over(self) -> None:
        """Forget the steps that are planned or under way."""
        self._ahead = None
        if self.device_steps is not None:
            self.device_steps.forget()
        self._scheduler.abandon()
