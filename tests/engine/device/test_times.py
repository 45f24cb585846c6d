"""What users are told of time: of drafts that the device looks up, and of the device that waits for the host."""

from __future__ import annotations

import time
from typing import Any

import pytest

from engine.device.on_device import PROMPTS, executor_of, full, made, outs, run
from paceline import LLM, SamplingParams
from paceline.engine.execute.graphs.capture import GraphCapture
from paceline.engine.execute.graphs.draft_rows import PLAIN, DraftPlan, DraftRows
from paceline.engine.execute.graphs.host_gaps import HostGaps, StepKind
from paceline.engine.execute.graphs.in_flight import RepeatedInFlight
from paceline.engine.execute.graphs.moment import Moment
from paceline.request import RequestOutput
from paceline.speculation.stats import SpeculationStats

GREEDY: dict[str, Any] = {"temperature": 0.0}
NGRAM: dict[str, Any] = {"method": "ngram", "adaptive": False, "k": 4}
PLAIN_S, DRAFTED_S = 1.0, 1.5


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every time a step runs it takes so long."""
    monkeypatch.setattr(RepeatedInFlight, "seconds",
                        property(lambda reading: DRAFTED_S if reading._drafted else PLAIN_S))


def told(out: RequestOutput) -> SpeculationStats:
    assert out.speculation is not None
    return out.speculation


def test_what_was_spent_is_told_and_nothing_is_claimed_without_a_plain_step(timed: None) -> None:
    """Whoever insists on drafts never runs without: nobody knows what that would have taken."""
    (out,) = outs(made(4), [GREEDY], 30, NGRAM)
    stats = told(out)
    assert stats.spent_s == pytest.approx(DRAFTED_S * (stats.cycles + stats.plain))
    assert stats.plain_s == stats.compared_s == 0.0 and stats.net_speed is None and stats.won_s is None


def test_against_plain_steps_that_others_have_run(timed: None) -> None:
    llm = made(4)
    outs(llm, [GREEDY], 9)
    (out,) = outs(llm, [GREEDY], 30, NGRAM)
    stats = told(out)
    tokens = len(out.outputs[0].token_ids) - 1  # the first comes with the prompt
    assert stats.accepted > 0 and stats.compared_s == stats.spent_s > 0
    assert stats.plain_s == pytest.approx(PLAIN_S * tokens)
    assert stats.net_speed == pytest.approx(tokens / (stats.cycles + stats.plain) * PLAIN_S / DRAFTED_S)
    assert stats.net_speed == pytest.approx(stats.tokens_per_step / DRAFTED_S)
    assert stats.draft_s == stats.verify_s == stats.sample_s == 0.0, "parts that nobody measured"
    total = llm.engine.report()["speculation"]["ngram"]
    assert (total["spent_s"], total["plain_s"], total["net_speed"]) == pytest.approx(
        (stats.spent_s, stats.plain_s, stats.net_speed))


def test_plain_steps_of_who_speculates_are_its_time_too(timed: None) -> None:
    """Drafts are tried and left: the texts of some never repeat themselves, and a step with drafts is dear."""
    llm = made(4)
    (out,) = outs(llm, [{"temperature": 1.5, "seed": 3}], 60, "ngram")
    stats = told(out)
    assert stats.plain > 0 and stats.net_speed is not None and 0.6 < stats.net_speed <= 1.0
    tokens = len(out.outputs[0].token_ids) - 1
    assert stats.compared_s == stats.spent_s <= DRAFTED_S * tokens and stats.plain_s == pytest.approx(PLAIN_S * tokens)


def test_a_step_is_shared_by_all_in_it(timed: None) -> None:
    llm = made(4)
    outs(llm, [GREEDY] * 3, 9)
    found = outs(llm, [GREEDY] * 3, 30, [NGRAM, None, NGRAM])
    for out in (found[0], found[2]):
        stats = told(out)
        assert stats.net_speed == pytest.approx(stats.tokens_per_step / DRAFTED_S)
        assert stats.spent_s < DRAFTED_S * 30 / 2, "not all of it is one request's"
    assert found[1].speculation is None
    total = llm.engine.report()["speculation"]["ngram"]
    assert total["spent_s"] == pytest.approx(sum(told(out).spent_s for out in (found[0], found[2])))


def test_by_the_real_clock_there_is_something_to_tell() -> None:
    llm = made(4)
    outs(llm, [GREEDY], 9)
    (out,) = outs(llm, [GREEDY], 30, NGRAM)
    stats = told(out)
    assert stats.spent_s > 0 and stats.net_speed is not None and stats.net_speed > 0


def test_plain_steps_are_known_once_they_were_measured() -> None:
    draft_rows = DraftRows()
    assert draft_rows.plain(3) is None
    draft_rows.learn(3, DraftPlan(8), 2.0, 1.5)
    assert draft_rows.plain(3) is None
    draft_rows.learn(3, PLAIN, 1.0, 0.5)
    assert draft_rows.plain(3) == draft_rows.plain(4) == 0.5 and draft_rows.plain(5) is None
    assert draft_rows.plain(1000) is None
    draft_rows.learn(1000, PLAIN, 1.0, 0.5)
    assert draft_rows.plain(1000) is None


# -------------------------------------------------------------------- the device waits for the host


def gaps(llm: LLM) -> dict[StepKind, int]:
    return {kind: executor_of(llm).host_gaps[kind].count for kind in StepKind}


def test_gaps_are_kept_by_the_kind_of_step() -> None:
    llm = made(4)
    (plain,) = outs(llm, [GREEDY], 13)
    assert gaps(llm) == {StepKind.REPEATED: 3, StepKind.DRAFTED: 0, StepKind.VERIFIED: 0, StepKind.SINGLE: 0}
    executor_of(llm).host_gaps = HostGaps()
    outs(llm, [GREEDY], 13, NGRAM)
    assert gaps(llm)[StepKind.DRAFTED] > 0 and sum(gaps(llm).values()) == gaps(llm)[StepKind.DRAFTED]
    executor_of(llm).host_gaps = HostGaps()
    outs(llm, [GREEDY], 13, {"method": "oracle", "k": 3, "tokens": plain.outputs[0].token_ids})
    assert gaps(llm) == {StepKind.REPEATED: 0, StepKind.DRAFTED: 0, StepKind.VERIFIED: 3, StepKind.SINGLE: 0}
    executor_of(llm).host_gaps = HostGaps()
    outs(llm, [GREEDY | {"no_repeat_ngram_size": 1}], 5)
    assert gaps(llm) == {StepKind.REPEATED: 0, StepKind.DRAFTED: 0, StepKind.VERIFIED: 0, StepKind.SINGLE: 4}


def test_a_gap_is_what_the_host_took(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own clock, which only proposing a draft moves."""
    now = 0.0
    monkeypatch.setattr("paceline.engine.execute.graphs.moment.time.perf_counter", lambda: now)
    llm = made(1)
    propose = llm.engine._drafting.propose

    def slow(*given: Any) -> None:
        nonlocal now
        now += 2.0
        propose(*given)

    monkeypatch.setattr(llm.engine._drafting, "propose", slow)
    outs(llm, [GREEDY], 6, {"method": "wrong", "k": 2, "tokens": [1] * 6})
    gap = executor_of(llm).host_gaps[StepKind.VERIFIED]
    assert gap.count > 2 and gap.mean == pytest.approx(2.0)


def test_a_device_that_has_nothing_to_do_waits_for_nobody() -> None:
    """The time between requests is not the host's."""
    llm = made(4)
    params = SamplingParams(max_tokens=1, ignore_eos=True, **GREEDY)
    for prompt in PROMPTS:
        llm.generate([prompt], params)
    assert sum(gaps(llm).values()) == 0


@pytest.mark.parametrize("captured", [True, False])
def test_what_is_left_to_the_host_has_its_gap_too(captured: bool) -> None:
    """Logits of captured forwards, and of those that are launched kernel by kernel."""
    llm = made(4)
    if not captured:
        executor_of(llm).graphs.decode._graphs.capture = full
    outs(llm, [GREEDY | {"trace": True}], 6)
    gap = executor_of(llm).host_gaps[StepKind.SINGLE]
    assert gap.count == 5 and gap.mean is not None and gap.mean > 0


def test_after_a_step_that_was_dropped_nothing_is_measured_from_before_it() -> None:
    llm = made(4)
    llm.engine.add(PROMPTS[0], SamplingParams(max_tokens=9, ignore_eos=True, **GREEDY))
    llm.engine.step()
    executor = executor_of(llm)
    assert isinstance(executor._ended, Moment)
    executor.forget()
    assert executor._ended is None
    llm.engine.scheduler.abandon()
    run(llm)


def test_a_mean_of_nothing_is_none() -> None:
    found = HostGaps()
    assert found[StepKind.SINGLE].mean is None
    found.note(StepKind.SINGLE, 3.0)
    found.note(StepKind.SINGLE, -1.0)
    assert found[StepKind.SINGLE].mean == 1.5, "events may be told a little out of order"


def beside_a_text(llm: LLM, prompt: list[int]) -> list[int]:
    """The rows of this prompt in each step that had some, while somebody else's text grows."""
    engine = llm.engine
    engine.add(PROMPTS[0], SamplingParams(max_tokens=150, ignore_eos=True, temperature=0.0))
    for _ in range(3):
        engine.step()
    found: list[int] = []
    scheduler: Any = engine.scheduler
    schedule = scheduler.schedule

    def noted(*planned: Any) -> Any:
        step = schedule(*planned)
        if step is not None and step.prompt_rows:
            found.append(step.prompt_rows)
        return step

    scheduler.schedule = noted
    name = engine.add(prompt, SamplingParams(max_tokens=2, ignore_eos=True, temperature=0.0))
    while engine.record(name).open:
        engine.step()
    return found


def test_what_was_captured_on_the_way_makes_no_later_step_smaller(monkeypatch: pytest.MonkeyPatch) -> None:
    capture = GraphCapture.capture
    monkeypatch.setattr(GraphCapture, "capture", lambda *given: (time.sleep(0.2), capture(*given))[1])
    llm = made(4, kv_blocks=80, max_model_len=256, max_step_ms=100.0)
    assert beside_a_text(llm, list(range(1, 81))) == [80]


def test_steps_that_run_behind_others_tell_what_they_take() -> None:
    """Nearly all do on a device, as soon as there are two requests. With times of their own: by the real clock rows of
    so small a model may well take nothing."""
    llm = made(4, kv_blocks=80, max_model_len=256, max_step_ms=1000.0, max_prefill_chunk=8)
    executor = executor_of(llm)
    settle, behind = executor.settle, list[bool]()

    def noted() -> Any:
        settled = settle()
        if settled.device_s is not None:
            behind.append(not settled.by_itself)
            settled.device_s, settled.by_itself = 0.1 + 0.01 * settled.step.rows, False
        return settled

    executor.settle = noted
    pace = llm.engine.scheduler.pace
    beside_a_text(llm, list(range(1, 90)))
    assert any(behind) and 0.05 < pace.prompt_seconds(0, 8) < 0.5
