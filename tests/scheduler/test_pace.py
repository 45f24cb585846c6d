"""Steps are sized by measured time: chunks of prompts, and who decodes."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.cache.manager import CacheManager
from paceline.engine.schedule.limits import SchedulerLimits
from paceline.engine.schedule.pace import LEAST_CHUNK, Pace
from paceline.engine.schedule.scheduler import Scheduler
from paceline.engine.schedule.sequence import Sequence
from paceline.engine.schedule.step import GroupResult, RowGroup, Step
from paceline.request import Request, SamplingParams
from paceline.speculation.costs import Line
from scheduler.simulation import group as cache_group

DECODE, FIXED, ROW, PAIR = 1e-3, 5e-3, 1.4e-3, 1e-6
"""Seconds of a decoding row, of any step, of a row of a prompt, and for each token before it."""


def request(name: str, prompt: list[int], samples: int = 1) -> Request:
    return Request(name, prompt, SamplingParams(max_tokens=400, n=samples, ignore_eos=True), 0, 400, 0.0)


def make_scheduler(rows: int, limit: float | None = None) -> Scheduler:
    cache = CacheManager([cache_group("full")], [4001], 16, max_seats=256, max_blocks_per_seq=1250)
    return Scheduler(SchedulerLimits(max_batch_tokens=rows, max_num_seqs=256, max_model_len=20_000, max_step_s=limit),
                     cache, lambda: 0.0)


def chunk(start: int, rows: int, prompt: int = 100_000) -> RowGroup:
    return RowGroup(Sequence(request("a", [1] * prompt), 0, 0), start, [1] * rows)


def decode(tokens: int = 8) -> RowGroup:
    return RowGroup(Sequence(request("b", [1] * tokens), 0, 0), tokens, [1])


def seconds(step: Step) -> float:
    """What a machine of this kind takes."""
    total = FIXED
    for group in step.groups:
        if group.start < group.seq.prompt_len:
            rows = len(group.tokens)
            total += rows * (ROW + PAIR * (group.start + rows / 2))
        else:
            total += DECODE * len(group.tokens)
    return total


def measured(limit: float | None = 0.1) -> Pace:
    pace = Pace(limit)
    for rows in (1, 2, 4, 8, 16, 3, 5):
        step = Step(0, [decode() for _ in range(rows)])
        pace.observe(step, seconds(step))
    for start in (0, 512, 1024, 2048, 4096):
        step = Step(0, [decode(), chunk(start, 128)])
        pace.observe(step, seconds(step))
    return pace


@given(st.floats(0.0, 1e-2), st.floats(0.0, 1e-5), st.lists(st.floats(0, 5000), min_size=2, max_size=40))
def test_a_line_is_found(level: float, slope: float, places: list[float]) -> None:
    line = Line(2048.0, 1024.0)
    for _ in range(30):
        for x in places:
            line.observe(x, level + slope * x, 64.0)
    if max(places) - min(places) > 500:
        middle = sum(places[-8:]) / len(places[-8:])
        assert line(middle) == pytest.approx(level + slope * middle, rel=0.3, abs=1e-5)


def test_a_slope_that_cannot_be_told_stays() -> None:
    line = Line(2048.0, 1024.0)
    for x in (0, 1000, 2000, 3000):
        line.observe(x, 1.0 + 0.001 * x, 256.0)
    before = line.slope
    for noise in (-0.3, 0.3, 0.3, -0.3) * 4:
        line.observe(3000 + 10 * noise, 4.0 - noise, 8.0)
    assert line.slope == pytest.approx(before, rel=0.2)


def test_one_slow_step_is_not_believed() -> None:
    pace, slow = measured(), Step(0, [decode(), chunk(0, 64)])
    before = pace.rows_within(0.09, 0)
    pace.observe(slow, 100 * seconds(slow))
    assert pace.rows_within(0.09, 0) > before / 2


@pytest.mark.parametrize("start", [0, 500, 2000, 6000])
def test_a_chunk_takes_as_long_as_a_step_may(start: int) -> None:
    pace = measured()
    rows = pace.rows_within(pace.left_for_prompts(1, True), start)
    took = seconds(Step(0, [decode(), chunk(start, rows)]))
    assert 0.08 < took < 0.12
    assert pace.prompt_seconds(start, rows) == pytest.approx(took - FIXED - DECODE, rel=0.2)


def test_without_a_limit_or_a_measurement_nothing_is_held_back() -> None:
    for pace in (measured(None), Pace(0.1)):
        assert pace.left_for_prompts(3, True) == math.inf and pace.decoding_rows(1000) == 1000
        assert pace.rows_within(math.inf, 0) > 1 << 40


def test_prompts_get_at_least_what_those_who_decode_take_and_more_when_nobody_does() -> None:
    pace = measured()
    assert pace.left_for_prompts(200, True) == pytest.approx(FIXED + 200 * DECODE, rel=0.1)
    assert pace.left_for_prompts(0, False) == pytest.approx(0.4)


def test_too_many_to_decode_in_one_step() -> None:
    pace = measured()
    assert pace.decoding_rows(1000) == pytest.approx(95, abs=5)
    assert pace.decoding_rows(20) == 20


def test_a_large_model_decodes_in_batches_all_the_same() -> None:
    """A step of one row takes three times as long as a step may: eight rows in one step are still the best."""
    pace = Pace(0.1)
    for rows in (1, 2, 8, 4, 8, 8):
        pace.observe(Step(0, [decode() for _ in range(rows)]), 0.2 + 0.1 * rows)
    assert 6 <= pace.decoding_rows(64) <= 10
    alone = Pace(0.1)
    alone.observe(Step(0, [decode()]), 0.3)
    assert alone.decoding_rows(8) == 8  # what more rows take must be seen first


def driven(limit: float | None, prompts: dict[str, tuple[int, int]], steps: int) -> list[dict[str, tuple[int, int]]]:
    """Requests by id with the length of the prompt and samples; what each had of every step: rows and sequences."""
    scheduler = make_scheduler(512, limit)
    for number, (name, (length, samples)) in enumerate(prompts.items()):
        scheduler.add(request(name, [number, *range(100, 99 + length)], samples), list(range(samples)))
    seen: list[dict[str, tuple[int, int]]] = []
    for _ in range(steps):
        step = scheduler.schedule()
        if step is None:
            break
        scheduler.pace.observe(step, seconds(step))
        rows: dict[str, tuple[int, int]] = {}
        for group in step.groups:
            had = rows.get(group.seq.request.id, (0, 0))
            rows[group.seq.request.id] = had[0] + len(group.tokens), had[1] + 1
        seen.append(rows)
        scheduler.commit(step, [GroupResult([7] if group.sampled_rows else [],
                                            siblings=[GroupResult([7]) for _ in group.siblings])
                                for group in step.groups])
    return seen


def test_a_neighbour_has_its_token_in_every_step_beside_a_long_prompt() -> None:
    seen = driven(0.1, {"neighbour": (8, 1), "long": (6000, 1)}, 500)
    beside = [rows for rows in seen[2:] if rows.get("long", (0, 0))[0] > 1]
    assert len(beside) > 20 and all("neighbour" in rows for rows in beside)
    sizes = [rows["long"][0] for rows in beside]
    assert 40 < sizes[3] < 80 and LEAST_CHUNK <= sizes[-2] < sizes[3]  # the more stands before it, the fewer
    assert sum(sizes) > 5400


def test_samples_take_turns_and_a_neighbour_waits_for_none_of_them() -> None:
    seen = driven(0.05, {"neighbour": (8, 1), "many": (8, 128)}, 60)
    late = seen[-20:]
    assert all(rows["neighbour"] == (1, 1) for rows in late)
    assert all(20 < rows["many"][1] < 60 for rows in late)
    assert sum(rows["many"][1] for rows in seen) > 128 * 10  # all of them come on


def test_a_short_prompt_passes_a_long_one() -> None:
    seen = driven(0.1, {"neighbour": (8, 1), "long": (6000, 1), "longer": (7000, 1), "short": (30, 1)}, 40)
    first = next(index for index, rows in enumerate(seen) if "short" in rows)
    assert first <= 2 and seen[first + 2]["short"] == (1, 1)
    assert all(rows["long"][0] >= LEAST_CHUNK for rows in seen[first:])  # which goes on meanwhile


def test_one_that_will_find_it_in_the_cache_waits_for_who_computes_it() -> None:
    scheduler = make_scheduler(64)
    for name in ("first", "second"):
        scheduler.add(request(name, [3] * 500), [0])
    scheduler.add(request("other", [4] * 500), [0])
    while (step := scheduler.schedule()) is not None and len(step.groups) < 2:
        scheduler.commit(step, [GroupResult([7] if group.sampled_rows else []) for group in step.groups])
    assert step is not None
    second = scheduler.sequences("second")[0]
    assert second.cached_tokens >= 440


def slow_rows(scheduler: Scheduler) -> None:
    """From now on a step has time for one row only."""
    for rows in (1, 2, 4, 3, 2, 1, 5) * 60:
        scheduler.pace.observe(Step(0, [decode() for _ in range(rows)]), 0.3 * rows)
    assert scheduler.pace.decoding_rows(8) == 1


def go_on(scheduler: Scheduler, step: Step) -> None:
    scheduler.commit(step, [GroupResult([7] if group.sampled_rows else [],
                                        siblings=[GroupResult([7]) for _ in group.siblings]) for group in step.groups])


def test_requests_take_turns_where_they_are_more_than_the_rows() -> None:
    scheduler = make_scheduler(512, 0.1)
    slow_rows(scheduler)
    for number in range(6):
        scheduler.add(request(f"r{number}", [number] * 8), [0])
    had: dict[str, int] = {}
    for _ in range(60):
        step = scheduler.schedule()
        assert step is not None
        for group in step.groups:
            had[group.seq.request.id] = had.get(group.seq.request.id, 0) + 1
        go_on(scheduler, step)
    assert len(had) == 6 and min(had.values()) >= max(had.values()) - 2


def test_one_whose_turn_it_is_and_that_waits_for_blocks_stops_nobody() -> None:
    cache = CacheManager([cache_group("full")], [9], 4, max_seats=64, max_blocks_per_seq=50,
                         enable_prefix_caching=False)
    scheduler = Scheduler(SchedulerLimits(max_batch_tokens=64, max_num_seqs=64, max_model_len=200, max_step_s=0.1,
                                          watermark=0.0), cache, lambda: 0.0)
    slow_rows(scheduler)
    scheduler.add(Request("a", [1, 2, 3], SamplingParams(max_tokens=26, n=3, ignore_eos=True), 0, 26, 0.0), [0, 1, 2])
    while scheduler.has_work():
        step = scheduler.schedule()
        assert step is not None
        go_on(scheduler, step)


@pytest.mark.parametrize("why", ["masking", "parked"])
def test_who_has_nothing_to_run_takes_nobodys_turn(why: str) -> None:
    scheduler = make_scheduler(512, 0.1)
    slow_rows(scheduler)
    first, = scheduler.add(request("first", [1] * 8), [0])
    second, = scheduler.add(request("second", [2] * 8), [0])
    while not (first.output_len and second.output_len):
        step = scheduler.schedule()
        assert step is not None
        go_on(scheduler, step)
    setattr(first, why, True)
    first.wait_for_commit = True
    first.last_step = 0  # longer ago than anybody's
    if why == "parked":  # as the commit of a beam leaves it: all that it knows has run
        first.computed = len(first.tokens)
    for _ in range(5):
        step = scheduler.schedule()
        assert step is not None and [group.seq for group in step.groups] == [second]
        go_on(scheduler, step)
    assert first.seated and second.seated


def test_prompts_take_turns_where_no_share_is_a_row() -> None:
    """A row of a prompt takes as long as half of what a step has for prompts."""
    scheduler = make_scheduler(512, 0.1)
    for rows in (1, 2, 3, 4) * 20:
        scheduler.pace.observe(Step(0, [decode() for _ in range(rows)]), 0.02 + 0.02 * rows)
    for start in (0, 2000, 4000, 6000) * 10:
        scheduler.pace.observe(Step(0, [chunk(start, 16)]), 0.02 + 16 * (0.03 + 6e-6 * start))
    scheduler.add(request("neighbour", [9] * 4), [0])
    long, = scheduler.add(request("long", [1] * 7000), [0])
    short, = scheduler.add(request("short", [2] * 40), [0])
    for _ in range(30):
        step = scheduler.schedule()
        assert step is not None
        go_on(scheduler, step)
    assert short.output_len and long.computed >= 8 * LEAST_CHUNK
