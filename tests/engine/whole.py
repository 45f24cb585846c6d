"""What must hold of a whole engine: between any two steps, and when nobody is left."""

from __future__ import annotations

import gc
from collections.abc import Container
from typing import Any

from paceline.engine.core import Engine
from paceline.engine.execute.host_executor import HostExecutor
from paceline.engine.records.record import Record
from paceline.engine.schedule.sequence import UNSEATED, Sequence, Status


class SteppedClock:
    """Seconds that pass by steps alone, so that a run can be run again: a little each time that somebody looks, and
    one where pass_step() says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        self.now += 1e-5
        return self.now

    def pass_step(self, seconds: float = 1.0) -> None:
        self.now += seconds


def live_sequences(engine: Engine) -> list[Sequence]:
    return [seq for own in engine.scheduler._requests.values() for seq in own]


def check_between_steps(engine: Engine) -> None:
    """The cache's own checks over everybody who holds any of it, and the scheduler's lists."""
    scheduler, live = engine.scheduler, live_sequences(engine)
    running = scheduler.running
    engine.cache.check([seq.allocation for seq in running], [seq.swapped for seq in live if seq.swapped is not None])
    assert [seq.rank for seq in running] == sorted(seq.rank for seq in running)
    assert {id(seq) for seq in running} == {id(seq) for seq in live if seq.status is Status.RUNNING}
    assert all(seq.status is not Status.FINISHED for seq in live), "one that has ended is kept among the living"
    for seq in live:
        assert seq.seated == (seq.status is Status.RUNNING) == (seq.allocation is not UNSEATED)
        assert seq.swapped is None or seq.status is Status.WAITING
        assert seq.in_flight or 0 <= seq.computed <= len(seq.tokens), "more is computed than there is"
    drafted = set(engine._drafting._drafters) | set(engine._drafting._forced)
    assert drafted <= set(live), "a drafter keeps something of one that has ended"
    for request_id in scheduler._requests:
        record = engine.record(request_id)
        assert record.open == len(scheduler.sequences(request_id)) > 0, "samples that are open and those that run"


def check_at_rest(engine: Engine) -> None:
    """Nobody is left: everything that was anybody's is given back."""
    assert not engine.has_work
    check_between_steps(engine)
    usage = engine.cache.usage()
    assert usage.used == usage.swap_used == 0
    scheduler, drafting = engine.scheduler, engine._drafting
    kept: dict[str, Any] = {
        "records": engine._records, "requests": scheduler._requests, "held": scheduler._held,
        "drafters": drafting._drafters, "forced": drafting._forced, "controlled": drafting.controller._states,
        "structures": engine.structures._waiting, "flight": scheduler._flight}
    assert not any(kept.values()), {name: value for name, value in kept.items() if value}
    assert engine.executor.oldest is None
    for model in _draft_models(engine):
        assert not model._held, "a draft model keeps somebody's blocks"


def check_nobody_is_remembered(engine: Engine, names: Container[str]) -> None:
    """No sequence or record of these requests is reachable from anything once their engine is at rest and their records
    are dropped; slow. On a device the last one of every seat is, until somebody else sits there: it is told to go. So
    are those whose last drafts no step has accounted for."""
    engine._drafting._seconds.clear()
    if not isinstance(engine.executor, HostExecutor):
        seated = engine.executor.graphs.seats._seated
        seated[:] = [None] * len(seated)
    gc.collect()
    left = [one for one in gc.get_objects() if type(one) in (Sequence, Record) and one.request.id in names]
    assert not left, f"{len(left)} sequences and records are still reachable: {_holders(left[0])}"


def _holders(one: object) -> list[str]:
    return [f"{type(holder).__name__} {str(holder)[:200]}" for holder in gc.get_referrers(one)][:5]


def _draft_models(engine: Engine) -> list[Any]:
    made = engine.draft_models
    return [model for model in (*(loaded for loaded, _ in made._loaded.values()), *made._rounded.values(),
                                *made._shorter.values()) if hasattr(model, "_held")]
