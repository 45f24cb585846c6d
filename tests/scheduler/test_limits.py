"""What a step may hold: rows with logits, and how many rows at all where memory ran out."""

from __future__ import annotations

from test_scheduler import make, talker

from paceline.engine.schedule.scheduler import RECOVERY
from paceline.engine.schedule.step import Step


def logit_rows(step: Step | None) -> int:
    assert step is not None
    return sum(len(group.tokens) - group.logits_from for group in step.groups)


def test_prompts_whose_log_probabilities_are_wanted_take_few_rows_of_a_step() -> None:
    world = make(max_logit_rows=6, max_len=128)
    scored = [talker(world, 20, prompt_logprobs=0), talker(world, 9, prompt_logprobs=2)]
    plain = talker(world, 30)
    rows = list(iter(world.turn, None))
    assert all(logit_rows(step) <= 6 + 3 for step in rows), "and one for each that decodes"
    assert len(rows[0].groups[-1].tokens) == 30 and rows[0].groups[-1].seq is plain, "others' prompts are not cut"
    assert all(seq.output_len for seq in scored)
    world.check_outputs()


def test_steps_that_had_to_shrink_grow_again_when_enough_went_well() -> None:
    world = make(budget=64)
    scheduler = world.scheduler
    talker(world, 2, tokens=30)
    assert scheduler.shrink() and scheduler.shrink() and not scheduler.shrink()
    assert scheduler.config.max_batch_tokens == 16
    sizes = []
    while len(sizes) < 3 * RECOVERY:
        if world.turn() is None:
            talker(world, 2, tokens=30)
        else:
            sizes.append(scheduler.config.max_batch_tokens)
    assert sizes.index(32) + 1 == RECOVERY and sizes.index(64) + 1 == 2 * RECOVERY and max(sizes) == 64


def test_larger_steps_that_fail_again_are_tried_less_often() -> None:
    world = make(budget=64)
    scheduler = world.scheduler

    def steps_until_grown() -> int:
        assert scheduler.shrink()
        for count in range(1, 10 * RECOVERY):
            while world.turn() is None:
                talker(world, 2, tokens=30)
            if scheduler.config.max_batch_tokens == 64:
                return count
        raise AssertionError("they never grow")

    assert [steps_until_grown() for _ in range(3)] == [RECOVERY, 2 * RECOVERY, 4 * RECOVERY]
