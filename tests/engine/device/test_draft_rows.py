"""How many rows drafts get: what was measured decides, and what loses is left soon."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from engine.device.on_device import executor_of, made
from paceline import SamplingParams
from paceline.engine.execute.graphs.draft_rows import (
    GROUPS,
    MOST_ROWS,
    PLAIN,
    DraftPlan,
    DraftRows,
    Sources,
    choices,
)


def choose(draft_rows: DraftRows, running: int, steps: int, tokens: Callable[[int], float],
           seconds: Callable[[int], float]) -> Counter[int]:
    chosen = Counter[int]()
    for _ in range(steps):
        plan = draft_rows.choose(running)
        chosen[plan.rows] += 1
        draft_rows.learn(running, plan, tokens(plan.rows), seconds(plan.rows))
    return chosen


def test_choices_have_room_for_a_draft_each() -> None:
    for groups in GROUPS:
        assert all(2 * groups <= rows <= MOST_ROWS for rows in choices(groups))


def test_what_pays_best_is_chosen() -> None:
    chosen = choose(DraftRows(), 8, 200, lambda rows: {0: 1.0, 16: 1.5, 32: 1.8}[rows],
                    lambda rows: {0: 1.0, 16: 1.1, 32: 1.5}[rows])
    assert chosen[16] > 180 and set(chosen) == {0, 16, 32}


def test_drafts_that_lose_are_left_and_tried_rarely() -> None:
    draft_rows = DraftRows()
    chosen = choose(draft_rows, 1, 1000, lambda rows: 1.2 if rows else 1.0, lambda rows: 1.5 if rows else 1.0)
    assert chosen[0] > 960 and sum(chosen.values()) == 1000


def test_texts_that_begin_to_repeat_themselves_are_found_out() -> None:
    draft_rows = DraftRows()
    choose(draft_rows, 1, 300, lambda rows: 1.0, lambda rows: 1.5 if rows else 1.0)
    chosen = choose(draft_rows, 1, 600, lambda rows: 4.0 if rows == 8 else 1.0, lambda rows: 1.5 if rows else 1.0)
    assert chosen[8] > 250


@pytest.mark.parametrize("dear", [3.0, 30.0])
def test_tries_of_what_loses_take_a_small_share_of_the_time(dear: float) -> None:
    """However dear they are: the dearer, the rarer."""
    chosen = choose(DraftRows(), 64, 4000, lambda rows: 1.0, lambda rows: dear if rows else 1.0)
    tried = sum(count for rows, count in chosen.items() if rows)
    assert tried > 2 and (tried - 2) * (dear - 1.0) <= 0.016 * 4000 + dear


def test_what_is_as_good_as_the_best_may_be_tried_freely() -> None:
    chosen = choose(DraftRows(), 64, 4000, lambda rows: 1.0, lambda rows: 1.0)
    assert min(chosen.values()) > 10


def test_everything_is_tried_and_what_pays_is_repeated() -> None:
    llm = made(repeat=8)
    executor = executor_of(llm)
    planned: list[tuple[int, int]] = []
    plan = executor.plan

    def seen(*given: Any) -> Any:
        found = plan(*given)
        if found.repeat is not None:
            planned.append((found.repeat.times, found.repeat.drafted_rows))
        return found

    executor.plan = seen
    prompts, params = [[7, 8, 9] * 6] * 2, SamplingParams(max_tokens=80, temperature=0.0, ignore_eos=True)
    drafted = llm.generate(prompts, params, speculation="ngram")
    assert {rows for _, rows in planned} == {0, *choices(2)} and 8 in [times for times, _ in planned]
    planned.clear()
    plain = llm.generate(prompts, params)
    assert {pair for pair in planned if pair[0] > 1} == {(8, 0)}
    assert [out.outputs[0].token_ids for out in drafted] == [out.outputs[0].token_ids for out in plain]


def test_what_the_host_has_to_do_counts_where_it_takes_longer() -> None:
    draft_rows = DraftRows()
    for _ in range(3):
        plan = draft_rows.choose(64)
        draft_rows.learn(64, plan, {0: 1.0, 128: 1.6, 256: 1.5}[plan.rows], 1.0)
        draft_rows.learn_host(64, plan, {0: 0.5, 128: 2.0, 256: 1.2}[plan.rows])
    assert draft_rows.choose(64) == DraftPlan(256)  # 1.25 a second beside 1.0 and 0.8
    draft_rows.learn_host(64, DraftPlan(99), 1.0)
    draft_rows.learn_host(1, PLAIN, 1.0)


def test_heads_take_part_where_that_pays_beside_lookups_alone() -> None:
    """The head's drafts are better; its passes cost something, which many sequences do not notice."""
    draft_rows, sources = DraftRows(), Sources(("it",))
    mostly: dict[int, DraftPlan] = {}
    for running, passes in ((2, 0.1), (64, 0.6)):
        chosen = Counter[DraftPlan]()
        for _ in range(100):
            plan = draft_rows.choose(running, sources)
            chosen[plan] += 1
            tokens = 1.0 if not plan.rows else 2.0 if plan.heads else 1.6
            draft_rows.learn(running, plan, tokens, 1.0 + 0.1 * (plan.rows > 0) + passes * bool(plan.heads), sources)
        mostly[running] = chosen.most_common(1)[0][0]
    assert mostly[2].heads == ("it",) and mostly[64].heads == () and mostly[64].rows > 0
    assert all(plan.heads for plan in (draft_rows.choose(2, Sources(("it",), lookups=False)) for _ in range(20))
               if plan.rows)


def test_a_step_that_was_not_chosen_teaches_nothing() -> None:
    draft_rows = DraftRows()
    draft_rows.learn(3, DraftPlan(99), 5.0, 1.0)
    assert draft_rows.choose(3) == PLAIN  # plain comes first: all is measured against it


def test_more_sequences_than_there_are_steps_for_are_not_drafted_for() -> None:
    assert DraftRows().choose(GROUPS[-1] + 1) == PLAIN


def test_what_there_is_no_memory_for_is_not_chosen_again() -> None:
    draft_rows = DraftRows()
    choose(draft_rows, 1, 10, lambda rows: 4.0, lambda rows: 1.0)
    draft_rows.refuse(DraftPlan(4))
    assert set(choose(draft_rows, 1, 50, lambda rows: 4.0, lambda rows: 1.0)) == {0, 2}
    assert draft_rows.choose(32) == PLAIN
    assert draft_rows.insist(1, 15) == DraftPlan(3) and draft_rows.insist(4, 1) == PLAIN


def test_where_heads_have_no_memory_lookups_may() -> None:
    draft_rows, sources = DraftRows(), Sources(("it",))
    draft_rows.refuse(DraftPlan(4, ("it",)))
    found = {draft_rows.choose(1, sources)}
    for _ in range(50):
        plan = draft_rows.choose(1, sources)
        draft_rows.learn(1, plan, 1.0, 1.0, sources)
        found.add(plan)
    assert found == {PLAIN, DraftPlan(2, ("it",)), DraftPlan(2), DraftPlan(4), DraftPlan(8)}
    assert draft_rows.insist(2, 7, ("it",)) == PLAIN and draft_rows.insist(2, 7) == DraftPlan(16)


def test_who_insists_gets_one_of_few_numbers_of_rows() -> None:
    draft_rows = DraftRows()
    assert [draft_rows.insist(3, depth).rows for depth in (1, 2, 7, 15, 1024)] == [8, 12, 32, 64, 64]
    assert draft_rows.insist(200, 15) == DraftPlan(MOST_ROWS)
    assert draft_rows.insist(GROUPS[-1] + 1, 3, ("it",)) == PLAIN
