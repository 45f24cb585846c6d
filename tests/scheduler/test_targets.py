"""A prompt whose first token would be late has nobody's drafts before it."""

from __future__ import annotations

from typing import Any

import pytest

from engine.tiny import tiny_engine
from paceline.engine.schedule.pace import Pace
from paceline.engine.schedule.sequence import Sequence
from paceline.engine.schedule.targets import any_late
from paceline.request import Request, SamplingParams, Tenant
from paceline.speculation.costs import Line
from paceline.speculation.step_cost import Load


def prompt(tokens: int, target: float | None, arrival: float = 0.0) -> Sequence:
    return Sequence(Request("a", [1] * tokens, SamplingParams(max_tokens=4), 0, 4, arrival, target_ttft_s=target), 0, 0)


def pace() -> Pace:
    """10 ms for those who decode, 1 ms a row of a prompt, steps of 100 ms."""
    pace = Pace(0.1)
    for _ in range(3):
        pace.cost.observe(Load(4), 0.01)
        pace.cost.observe(Load(0, 0.0, 64, 0.0), 0.064)
    return pace


def test_who_would_be_late_presses_and_who_is_late_or_has_time_does_not() -> None:
    for target, pressed in ((None, False), (0.11, True), (10.0, False)):
        assert any_late([prompt(100, target)], pace(), 4, now=0.01) is pressed, target
    assert not any_late([prompt(100, 0.11)], pace(), 4, now=0.2), "it is too late already"
    assert any_late([prompt(500, None), prompt(100, 0.5)], pace(), 4, now=0.01), "it waits behind another"
    assert not any_late([prompt(100, 0.5), prompt(500, None)], pace(), 4, now=0.01)


def test_without_targets_nobody_looks_and_with_one_drafts_wait() -> None:
    engine: Any = tiny_engine(speculation={"method": "ngram", "adaptive": False, "k": 3})
    params = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
    first = engine.add([5, 6, 7] * 8, params)
    for _ in range(4):
        engine.step()
    assert not engine.scheduler.pressed
    engine.cost.prompts = Line(64.0, 64.0)
    engine.cost.prompts.observe(0.0, 1.0, 64.0)  # a second a row: nobody could be in time
    second = engine.add([1] * 30, SamplingParams(max_tokens=2, target_ttft_ms=20_000.0))
    assert engine.scheduler.pressed
    before = engine.record(first).speculation.cycles
    seq = engine.scheduler.sequences(first)[0]
    engine._drafting.propose(engine.scheduler.due(), engine.scheduler.pressed)
    assert seq.draft is None and engine.record(first).speculation.cycles == before
    engine.cancel(second)
    assert not engine.scheduler.pressed and engine.scheduler._timely == 0
    engine._drafting.propose(engine.scheduler.due(), engine.scheduler.pressed)
    assert seq.draft is not None


def test_who_waits_for_a_seat_takes_nobodys_drafts() -> None:
    """It waits for those who run to end, and the longer without their drafts."""
    engine: Any = tiny_engine(max_num_seqs=2)
    params = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True, target_ttft_ms=20_000.0)
    names = [engine.add([5, 6, 7] * 3, params) for _ in range(3)]
    for _ in range(3):
        engine.step()
    engine.cost.prompts = Line(64.0, 64.0)
    engine.cost.prompts.observe(0.0, 10.0, 64.0)
    assert engine.scheduler.queue_length == 1 and not engine.scheduler.pressed
    engine.cancel(names[0])
    assert engine.scheduler.pressed, "now it could have one"


@pytest.mark.parametrize(("usual", "own", "found"), [
    (None, 20.0, None), (500.0, 20.0, 0.5), (500.0, 800.0, 0.8), (500.0, None, 0.5), (None, None, None)])
def test_a_tenant_among_others_cannot_take_their_drafts_by_its_haste(usual: float | None, own: float | None,
                                                                     found: float | None) -> None:
    engine = tiny_engine(target_ttft_ms=usual)
    params = SamplingParams(max_tokens=2, target_ttft_ms=own)
    name = engine.add([1, 2, 3], params, tenant=Tenant("a key's"))
    assert engine.record(name).request.target_ttft_s == found
    alone = engine.add([1, 2, 3], params)
    asked = usual if own is None else own
    assert engine.record(alone).request.target_ttft_s == (None if asked is None else pytest.approx(asked / 1000))
