"""HostExecutor: steps run one after the other, and the host decides what each yields."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Seq

from paceline.engine.decide.decider import Decider
from paceline.engine.execute.executor import Settled, dropped_without_memory
from paceline.engine.execute.model_runner import ModelRunner
from paceline.engine.rows.batch import Batch, BatchBuilder
from paceline.engine.schedule.scheduler import Scheduler
from paceline.engine.schedule.sequence import Sequence
from paceline.engine.schedule.step import Step


class HostExecutor:
    """Implements Executor. A step is laid out when it is submitted and runs when it is settled."""

    stale = False

    def __init__(self, runner: ModelRunner, builder: BatchBuilder, decider: Decider, clock: Callable[[], float],
                 schedule_ahead: bool) -> None:
        """`schedule_ahead`: a step is planned and laid out before the one before it is decided."""
        self._runner = runner
        self._builder = builder
        self._decider = decider
        self._clock = clock
        self._most = 2 if schedule_ahead else 1
        self._flight: deque[tuple[Step, Batch]] = deque()

    def make_room(self, seq: Sequence) -> bool:
        return True

    def has_room(self, running: Seq[Sequence]) -> bool:
        return len(self._flight) < self._most

    def repeats(self, scheduler: Scheduler, since_arrival: float) -> int:
        return 0

    def submit(self, step: Step) -> None:
        self._flight.append((step, self._builder.of_step(step)))

    @property
    def oldest(self) -> Step | None:
        return self._flight[0][0] if self._flight else None

    def settle(self) -> Settled:
        step, batch = self._flight.popleft()
        begun = self._clock()
        batch.fill_pending(step.groups)
        with dropped_without_memory(step):
            out = self._runner.run(batch)
        ran = self._clock()
        decisions = self._decider.decide(step, out)
        return Settled(step, decisions, ran - begun, self._clock() - ran)

    def advance(self) -> None:
        pass

    def forget(self) -> None:
        self._flight.clear()
