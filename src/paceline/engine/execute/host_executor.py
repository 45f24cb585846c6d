"""HostExecutor: steps run one after the other, and the host decides what each yields."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from paceline.engine.decide.decider import Decider
from paceline.engine.execute.executor import Settled, dropped_without_memory
from paceline.engine.execute.model_runner import ModelRunner
from paceline.engine.rows.batch import Batch, BatchBuilder, StepLogits
from paceline.engine.schedule.scheduler import Scheduler
from paceline.engine.schedule.sequence import Sequence
from paceline.engine.schedule.step import Planned, Step


class HostExecutor:
    """Implements Executor. A step runs when it is submitted, or, where one before it is undecided, when that is
    committed; it is decided when it is settled."""

    stale = False

    looks_up = False
    goes_on = False

    def __init__(self, runner: ModelRunner, builder: BatchBuilder, decider: Decider, clock: Callable[[], float],
                 schedule_ahead: bool) -> None:
        """`schedule_ahead`: a step is planned and laid out after the one before it has run, before that is decided."""
        self._runner = runner
        self._builder = builder
        self._decider = decider
        self._clock = clock
        self._most = 2 if schedule_ahead else 1
        self._flight: deque[Step] = deque()
        self._waiting: Batch | None = None
        """The newest step, laid out, if it does not run yet."""
        self._out: StepLogits | None = None
        """Of the oldest step, once it has run."""
        self._forward_s = 0.0

    def make_room(self, seq: Sequence) -> bool:
        return True

    def has_room(self, scheduler: Scheduler) -> bool:
        return len(self._flight) < self._most

    def plan(self, scheduler: Scheduler, since_arrival: float) -> Planned:
        return Planned()

    def start(self) -> None:
        if self._waiting is not None and self._out is None:
            batch, self._waiting = self._waiting, None
            self._run(self._flight[0], batch)

    @property
    def underway(self) -> bool:
        return self._waiting is None

    def submit(self, step: Step) -> None:
        batch = self._builder.of_step(step)
        if self._flight:
            self._waiting = batch
        else:
            self._run(step, batch)
        self._flight.append(step)

    @property
    def oldest(self) -> Step | None:
        return self._flight[0] if self._flight else None

    def settle(self) -> Settled:
        step, out, started = self._flight.popleft(), self._out, self._clock()
        assert out is not None
        self._out = None
        decisions = self._decider.decide(step, out)
        return Settled(step, decisions, self._forward_s, self._clock() - started)

    def advance(self) -> None:
        pass

    def forget(self) -> None:
        self._flight.clear()
        self._waiting = self._out = None

    def _run(self, step: Step, batch: Batch) -> None:
        started = self._clock()
        batch.fill_pending(step.groups)
        with dropped_without_memory(step):
            self._out = self._runner.run_batch(batch, step.taps)
        self._forward_s = self._clock() - started
