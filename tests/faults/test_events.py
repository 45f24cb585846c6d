"""Nobody's failures, at every step boundary: clocks that jump, requests that leave, blocks that are taken away."""

from __future__ import annotations

from typing import Any

import pytest

from engine.whole import check_nobody_is_remembered
from faults.cases import CIRCUMSTANCES, STEPS, judge, undisturbed, unheard, workload
from faults.points import Cost
from fuzz.mixes import Mix, Run, Said
from paceline.engine.core import Engine

BACK, FORWARD = -500.0, 1e9


def run_of(circumstances: str) -> Run:
    kind, options = CIRCUMSTANCES[circumstances]
    return Run(Mix(kind, options, workload(kind)))


def marked(few: set[int]) -> list[Any]:
    return [step if step in few else pytest.param(step, marks=pytest.mark.full) for step in range(STEPS)]


@pytest.mark.parametrize("step", marked({3}))
@pytest.mark.parametrize("circumstances", ["crowded ahead", pytest.param("device", marks=pytest.mark.full)])
def test_a_clock_that_goes_back_changes_nothing(circumstances: str, step: int) -> None:
    run = run_of(circumstances)

    def jump(now: int, _: Engine) -> None:
        if now == step:
            run.clock.pass_step(BACK)

    judge(run.mix.kind, run.go(jump), undisturbed(run.mix.kind), Cost.NOBODY)


@pytest.mark.parametrize("step", marked({8}))
def test_a_clock_that_jumps_ends_those_whose_time_is_up_and_no_others(step: int) -> None:
    run = run_of("crowded ahead")
    kind = run.mix.kind

    def jump(now: int, _: Engine) -> None:
        if now == step:
            run.clock.pass_step(FORWARD)

    for ask, out, want in zip(run.mix.asks, run.go(jump), undisturbed(kind), strict=True):
        ends = {one.finish_reason for one in out.outputs}
        if out.error is not None:
            assert "regex" in ask.params and "within 10 seconds" in str(out.error), "it was being compiled"
        elif "timeout" in ends:
            assert "timeout_s" in ask.params
        else:
            assert Said.of(out) == want


@pytest.mark.parametrize("step", marked({4}))
@pytest.mark.parametrize("circumstances", ["ahead", *(pytest.param(name, marks=pytest.mark.full)
                                                      for name in ("crowded ahead", "device crowded"))])
def test_whoever_leaves_at_any_moment_is_missed_by_nobody(circumstances: str, step: int) -> None:
    kind = CIRCUMSTANCES[circumstances][0]
    for victim in range(step % 3, len(workload(kind)), 3):
        run = run_of(circumstances)

        def leave(now: int, engine: Engine, run: Run = run, victim: int = victim) -> None:
            if now == step and run.names[victim] in engine._records:
                engine.cancel(run.names[victim])
                run._take(victim)

        outs, expected = run.go(leave), undisturbed(kind)
        others = [place for place in range(len(outs)) if place != victim]
        judge(kind, [outs[place] for place in others], [expected[place] for place in others], Cost.NOBODY)
        del outs
        run.outs.clear()
        with unheard():
            check_nobody_is_remembered(run.engine, set(run.names))


@pytest.mark.parametrize("step", marked({5}))
@pytest.mark.parametrize("circumstances", ["crowded", *(pytest.param(name, marks=pytest.mark.full)
                                                        for name in ("ahead", "device", "device crowded"))])
def test_whoever_loses_its_blocks_at_any_moment_says_the_same(circumstances: str, step: int) -> None:
    run = run_of(circumstances)

    def preempt(now: int, engine: Engine) -> None:
        if now >= step and (now - step) % 4 == 0 and now < step + 12:
            for seq in list(engine.scheduler.running):
                engine.scheduler.preempt(seq)

    judge(run.mix.kind, run.go(preempt), undisturbed(run.mix.kind), Cost.NOBODY)
