"""One model of what a step takes, learnt from every step: decoding rows, what stands before them, rows of prompts."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from paceline.speculation.step_cost import Load, StepCost

ROW, FIXED, PROMPT, BEFORE = 1.2e-3, 4e-3, 1.5e-3, 4e-7


def seconds(load: Load) -> float:
    return FIXED + ROW * load.rows + PROMPT * load.prompt_rows + BEFORE * load.context + 1e-7 * load.prompt_context


def test_rows_are_learnt_from_steps_that_hold_prompts() -> None:
    """After the first two steps none comes without."""
    cost, chance = StepCost(), random.Random(1)
    for load in (Load(0, 0.0, 32, 500.0), Load(1), Load(1), Load(2)):
        cost.observe(load, seconds(load))
    for _ in range(400):
        load = Load(chance.choice([2, 4, 8, 16]), 0.0, chance.choice([0, 4, 8, 16, 40]), 200.0)
        if load.prompt_rows:
            cost.observe(load, chance.uniform(0.95, 1.05) * seconds(load))
    for rows in (2, 4, 8, 16):
        assert cost(rows) == pytest.approx(FIXED + ROW * rows, rel=0.2), rows
    assert cost.prompt_seconds(40, 200.0) == pytest.approx(40 * PROMPT, rel=0.25)


def test_prompts_do_not_make_decoding_seem_dear() -> None:
    cost = StepCost()
    for _ in range(10):
        for rows in (1, 4):
            cost.observe(Load(rows), seconds(Load(rows)))
    before = cost(4)
    for _ in range(100):
        load = Load(4, 0.0, 200, 20_000.0)
        cost.observe(load, seconds(load))
    assert cost(4) == pytest.approx(before, rel=0.05)


def test_what_stands_before_rows_is_told_from_the_rows() -> None:
    cost, chance = StepCost(), random.Random(2)
    for _ in range(400):
        rows = chance.choice([1, 2, 4, 8])
        load = Load(rows, rows * chance.choice([200.0, 2000.0, 8000.0]))
        cost.observe(load, chance.uniform(0.9, 1.1) * seconds(load))
    assert cost.context.seconds == pytest.approx(BEFORE, rel=0.3)
    assert cost(8, 8 * 8000.0) == pytest.approx(seconds(Load(8, 8 * 8000.0)), rel=0.15)
    assert cost(8, 8 * 200.0) == pytest.approx(seconds(Load(8, 8 * 200.0)), rel=0.25)


def test_noise_behind_short_texts_is_not_taken_for_it() -> None:
    cost, chance = StepCost(), random.Random(3)
    for _ in range(200):
        load = Load(1, chance.uniform(100.0, 200.0))
        cost.observe(load, chance.uniform(0.8, 1.2) * seconds(Load(1)))
    assert cost.context.seconds * 4000 < 0.3 * seconds(Load(1))


def test_a_slow_moment_of_the_machine_moves_all_sizes_of_a_profile_together() -> None:
    known, cost = StepCost(), StepCost()
    for rows in (1, 2, 4, 8):
        for _ in range(3):
            known.observe(Load(rows), 2.0 * seconds(Load(rows)))  # measured while something else ran
    cost.restore(known.as_dict())
    for _ in range(60):
        cost.observe(Load(1), seconds(Load(1)))
    assert cost(4) / cost(1) == pytest.approx(seconds(Load(4)) / seconds(Load(1)), rel=0.15)


def test_a_clock_that_stands_still_teaches_nothing() -> None:
    cost = StepCost()
    cost.observe(Load(2), 0.0)
    assert not cost.measured


def test_one_odd_step_of_a_size_says_little_of_all_others() -> None:
    for odd in (0.1, 0.7, 10.0):
        cost = StepCost()
        for rows in (1, 2, 4, 8, 16, 32, 64):
            for _ in range(20):
                cost.observe(Load(rows), seconds(Load(rows)))
        for rows in (24, 66) if odd < 1.0 else (24,):
            cost.observe(Load(rows), odd * seconds(Load(rows)))
        for rows in (1, 8, 16, 20, 32, 48, 64):
            assert cost(rows) == pytest.approx(seconds(Load(rows)), rel=0.3), (odd, rows)


def test_of_what_is_measured_on_purpose_the_best_sample_holds() -> None:
    cost = StepCost()
    for rows in (1, 4, 8):
        for slower in (1.0, 1.6, 1.5):  # something else was running
            cost.observe(Load(rows), slower * seconds(Load(rows)))
    cost.anchor()
    assert [cost(rows) for rows in (1, 4, 8)] == pytest.approx([seconds(Load(rows)) for rows in (1, 4, 8)])


def test_what_is_measured_on_purpose_takes_no_longer_than_more_of_it_does() -> None:
    cost = StepCost()
    for rows in (1, 4, 8):
        for _ in range(3):
            cost.observe(Load(rows), (2.0 if rows == 4 else 1.0) * seconds(Load(rows)))  # a bad moment, all of it
    for _ in range(3):
        cost.observe(Load(5), 0.1 * seconds(Load(5)))  # came by the way
    cost.anchor((1, 4, 8))
    assert cost(4) == cost(8) == pytest.approx(seconds(Load(8))) and cost(5) == cost(4)


def test_a_few_odd_samples_do_not_outvote_a_count_that_is_seen_often() -> None:
    cost = StepCost()
    for rows in (1, 8, 32):
        for _ in range(3):
            cost.observe(Load(rows), seconds(Load(rows)))
    for _ in range(10):
        cost.observe(Load(26), 1.5 * seconds(Load(32)))
    for _ in range(200):
        cost.observe(Load(32), seconds(Load(32)))
    assert cost(32) == pytest.approx(seconds(Load(32)), rel=0.06)


def test_how_counts_differ_outlives_changes_of_the_machines_speed() -> None:
    """Only one count is seen while the machine slows down and speeds up: what four more rows take goes with it."""
    cost = StepCost()
    for rows in (1, 8, 32, 48):
        for _ in range(3):
            cost.observe(Load(rows), seconds(Load(rows)))
    cost.anchor()
    for speed in (1.0, 1.4, 0.8, 1.0):
        for _ in range(60):
            cost.observe(Load(38), speed * seconds(Load(38)))
        assert cost(42) - cost(38) == pytest.approx(speed * (seconds(Load(42)) - seconds(Load(38))), rel=0.25)
        assert cost(38) - cost(32) == pytest.approx(speed * (seconds(Load(38)) - seconds(Load(32))), rel=0.25)


def test_rows_of_short_prompts_beside_many_that_decode_tell_little_of_prompts() -> None:
    cost = StepCost()
    cost.observe(Load(0, 0.0, 2, 2.0), 5e-3)  # the first step of all, whose fixed cost nobody knows yet
    for _ in range(3):
        cost.observe(Load(1), seconds(Load(1)))
    cost.observe(Load(1, 0.0, 96, 96 * 48.0), seconds(Load(1)) + 96 * 6e-4)
    for rows in (8, 16, 32):
        for _ in range(3):
            cost.observe(Load(rows), seconds(Load(rows)))
        cost.observe(Load(rows, 0.0, 2, 2.0), 1.3 * seconds(Load(rows)))
    assert cost.prompt_seconds(96, 96 * 48.0) == pytest.approx(96 * 6e-4, rel=0.25)


@pytest.mark.parametrize("step", [lambda rows: 4e-3 + 8e-3 * -(-rows // 8), lambda rows: 5e-3 + 2e-5 * rows,
                                  lambda rows: 1e-3 * (3 + rows)])
def test_calibration_on_a_machine_without_noise_finds_what_there_is(step: Callable[[int], float]) -> None:
    """Steps as the engine makes them: those in which more requests come in tell nothing of the rows that decode."""
    cost, counts = StepCost(), (1, 2, 4, 8, 16, 32, 64)
    cost.calibrating = True
    for round in (1.3, 1.0):  # the machine was busy, once
        before = 0
        for rows in counts:
            cost.observe(Load(before, 0.0, 2 * (rows - before), 2.0 * (rows - before)),
                         round * (step(before) + 6e-4 * 2 * (rows - before)))
            for _ in range(2):
                cost.observe(Load(rows), round * step(rows))
            if rows == 1:
                cost.observe(Load(1, 0.0, 96, 96 * 48.0), round * (step(1) + 96 * 6e-4))
            before = rows
    cost.calibrating = False
    cost.anchor(counts)
    assert [cost(rows) for rows in counts] == pytest.approx([step(rows) for rows in counts], rel=0.01)


def test_what_others_are_expected_to_take_moves_no_other_count() -> None:
    """Stairs of eight rows: 33 take as many as 40 do, which no count beside it shows."""
    def step(rows: int) -> float:
        return 4e-3 + 8e-3 * -(-rows // 8)

    cost = StepCost()
    for rows in (1, 8, 16, 32, 48):
        for _ in range(3):
            cost.observe(Load(rows), step(rows))
    cost.anchor()
    for _ in range(400):
        cost.observe(Load(33), step(33))
    assert cost(33) == pytest.approx(step(33), rel=0.02)
    assert [cost(rows) for rows in (8, 32, 48)] == pytest.approx([step(rows) for rows in (8, 32, 48)], rel=0.05)
