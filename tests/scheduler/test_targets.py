"""A prompt whose first token would be late has nobody's drafts before it, and who is slower than its target is drafted
for before others."""

from __future__ import annotations

from typing import Any

import pytest

from engine.tiny import tiny_engine
from paceline.engine.schedule.pace import Pace
from paceline.engine.schedule.sequence import Sequence
from paceline.engine.schedule.targets import any_late
from paceline.request import Request, SamplingParams, Tenant
from paceline.speculation.control import AdaptiveController
from paceline.speculation.controller import Ahead, Ask
from paceline.speculation.costs import Line
from paceline.speculation.drafter import Needs, Observation
from paceline.speculation.spec import Speculation
from paceline.speculation.step_cost import Load
from paceline.speculation.tree import DraftTree


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
    engine._drafting.propose(engine.scheduler.due(), engine.scheduler.draft_rows())
    assert seq.draft is None and engine.record(first).speculation.cycles == before
    engine.cancel(second)
    assert not engine.scheduler.pressed and engine.scheduler._timely == 0
    engine._drafting.propose(engine.scheduler.due(), engine.scheduler.draft_rows())
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


@pytest.mark.parametrize(("target_ms", "gap_s", "behind"), [
    (10.0, 0.02, True), (10.0, 0.005, False), (None, 0.02, False), (10.0, None, False)])
def test_whose_tokens_come_more_slowly_than_their_target_is_behind(target_ms: float | None, gap_s: float | None,
                                                                   behind: bool) -> None:
    """None: it has one token, and no time between two. The controller hears of it with the next draft."""
    engine: Any = tiny_engine(speculation={"method": "ngram", "k": 3})
    names = [engine.add([5, 6, 7] * 8, SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True,
                                                      target_tpot_ms=own)) for own in (None, target_ms)]
    for _ in range(4):
        engine.step()
    metrics = engine.record(names[1]).metrics
    metrics.token_times[:] = [1.0] if gap_s is None else [1.0 + gap_s * place for place in range(5)]
    engine.record(names[0]).metrics.token_times[:] = [1.0, 9.0]  # however slow: it has no target
    assert engine.record(names[1]).behind is behind
    heard: dict[Any, bool] = {}
    controller = engine._drafting.controller
    budgets = controller.budgets
    controller.budgets = lambda asks, ahead: heard.update(
        (ask.sequence.request.id, ask.behind) for ask in asks) or budgets(asks, ahead)
    engine._drafting.propose(engine.scheduler.due(), 64)
    assert heard == {names[0]: False, names[1]: behind}


class Guesser:
    name, needs = "guesser", Needs()


@pytest.mark.parametrize(("rate", "drafted", "when_behind"), [
    (0.1, False, False), (0.4, False, True), (0.9, True, True)])
def test_a_draft_that_does_not_pay_by_itself_is_made_for_who_is_behind(rate: float, drafted: bool,
                                                                       when_behind: bool) -> None:
    """Its tokens count twice, and a row costs half a token: what is accepted four times of ten is made for it alone."""
    for behind, wanted in ((False, drafted), (True, when_behind)):
        control = AdaptiveController()
        for rows in range(1, 9):
            for _ in range(3):
                control.cost.observe(Load(rows), 5e-3 + 2.5e-3 * (rows - 1))
        control.begin("s", Guesser(), Speculation("guesser", k=1))  # type: ignore[arg-type]
        draft, ahead = DraftTree.chain([1]), Ahead(1, 1)
        for turn in range(200):  # learn what is accepted
            hit = int((turn + 1) * rate) > int(turn * rate)
            control.judge(Ask("s"), draft, ahead)
            control.learn("s", Observation([1, 2] if hit else [2], [0] if hit else [], draft))
            control.stepped(Load(2), 1, 1 + hit, 0.0)
        control.stepped(Load(1), 1, 1, 0.0)  # the one of many that goes without
        given = 0
        for _ in range(60):  # nothing is learned from now on
            given += control.budgets([Ask("s", 0, behind)], ahead)[0] is not None
            control.stepped(Load(1), 1, 1, 0.0)
        assert given == 60 if wanted else given < 10, "tried now and then, whatever it promises"
