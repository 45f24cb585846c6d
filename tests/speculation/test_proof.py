"""Whatever is believed of costs: where steps with drafts lose by the clock, nothing is drafted for a while."""

from __future__ import annotations

import random

import pytest

from paceline.speculation.proof import PAUSE, PLAIN_EVERY, PLAIN_OFTEN, Proof
from paceline.speculation.step_cost import Load
from speculation.simulation import Asked, Simulation, machine


def run(proof: Proof, steps: int, share: float, plain: float = 1.0, noise: float = 0.0,
        running: int = 32) -> list[bool]:
    """Which steps of so many had drafts, if these make a step take such a share of plain decoding's time."""
    chance, drafted = random.Random(5), []
    for _ in range(steps):
        drafts = not proof.goes_without(running)
        proof.observe(running, drafts, (share if drafts else plain) * (1.0 + chance.gauss(0.0, noise)))
        drafted.append(drafts)
    return drafted


def test_where_drafts_lose_there_are_none_for_ever_longer() -> None:
    drafted = run(Proof(), 40 * PAUSE, 1.2)
    assert sum(drafted[:PAUSE]) < 96
    assert sum(drafted) < 0.1 * len(drafted) and any(drafted[20 * PAUSE:])


def test_what_is_wrong_about_all_costs_says_nothing_about_drafts() -> None:
    assert sum(run(Proof(), 2000, 0.9, plain=0.8)) < 500
    assert sum(run(Proof(), 2000, 1.1, plain=1.3)) > 1800


@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_what_wins_goes_on_but_for_few_steps(noise: float) -> None:
    assert run(Proof(), 4000, 0.7, noise=noise).count(False) <= 4000 / PLAIN_EVERY + 1
    assert run(Proof(), 4000, 0.9, noise=noise).count(False) <= 4000 / PLAIN_OFTEN + 1


@pytest.mark.parametrize(("steps", "every"), [(5, 100), (8, 2000)])
def test_bursts_of_other_work_say_nothing_about_drafts(steps: int, every: int) -> None:
    """Nearly all steps have drafts, so nearly all of those that other work slows."""
    proof, drafted = Proof(), 0
    for number in range(8000):
        drafts = not proof.goes_without(1)
        proof.observe(1, drafts, (0.7 if drafts else 1.0) * (6.0 if number % every < steps else 1.0))
        drafted += drafts
    assert drafted > 0.9 * 8000


def test_a_try_now_and_then_is_allowed_whatever_it_loses() -> None:
    proof, tried = Proof(), 0
    for number in range(60_000):
        drafts = number % 60 == 0 and not proof.goes_without(1)
        proof.observe(1, drafts, 1.5 if drafts else 1.0)
        tried += drafts
    assert tried > 900


def test_it_comes_back_when_they_win_again_and_the_next_pause_is_a_short_one() -> None:
    proof = Proof()
    run(proof, 8 * PAUSE, 1.2)
    drafted = run(proof, 24 * PAUSE, 0.7)
    assert sum(drafted[-PAUSE:]) >= PAUSE - 2 * PAUSE // PLAIN_OFTEN
    later = run(proof, 2 * PAUSE, 1.5)
    assert any(later[PAUSE:]), "a pause as after many"


def test_a_company_says_nothing_about_another() -> None:
    proof = Proof()
    run(proof, 2 * PAUSE, 1.2, running=32)
    assert all(run(proof, PLAIN_EVERY, 0.7, running=8))


def test_steps_that_do_not_tell_decide_nothing() -> None:
    proof = Proof()
    for _ in range(8 * PAUSE):
        proof.observe(32, not proof.goes_without(32), None)
    assert not proof._companies[6].paused and not proof._companies[6].drafted


def test_a_controller_that_is_misled_about_rows_does_not_draft_for_long() -> None:
    """It believes that rows of drafts cost nothing: what it expects to win it loses, and only the clock says so."""
    def served(mode: str) -> float:
        simulation = Simulation(mode, 8).calibrated()
        cost = simulation.control.cost
        learn = cost.observe
        cost.observe = lambda load, seconds: learn(load, machine(load._replace(rows=min(8, load.rows))))  # type: ignore[method-assign]
        simulation.control.cost.restore({"table": {"8": machine(Load(8)), "40": machine(Load(8))}, "context": 0.0,
                                         "prompt": [1e-3, 0.0]})
        done = simulation.serve([Asked(0.0, 24, 256, 0.4, seed) for seed in range(64)])
        return sum(one.tokens for one in done) / simulation.now

    never, always, controlled = served("off"), served("on"), served("control")
    assert always < 0.8 * never
    assert controlled > 0.9 * never
