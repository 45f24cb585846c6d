"""Requests come, wait, are preempted, cancelled, time out or break; the engine lives on and no block leaks."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import pytest

from engine.tiny import tiny_engine, tiny_llm
from paceline import SamplingParams
from paceline.engine.core import Engine
from paceline.errors import EmptySupportError, QueueFullError, StepError
from paceline.speculation.drafter import DraftedSequence, Needs, Observation
from paceline.speculation.stats import SpeculationStats
from paceline.speculation.tree import DraftTree
from speculation.worded import tokenizer

PROMPT = list(range(1, 40))
GREEDY = SamplingParams(max_tokens=10, temperature=0.0)


def drain(engine: Engine, limit: int = 2000) -> None:
    for _ in range(limit):
        if not engine.has_work:
            return
        engine.step()
    raise AssertionError("the engine did not come to rest")


def assert_clean(engine: Engine) -> None:
    engine.cache.check([])
    assert engine.cache.usage().used == 0


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("moment", [0, 1, 2, 5])
def test_cancel_at_any_moment_frees_blocks_at_once(moment: int, ahead: bool) -> None:
    engine = tiny_engine(schedule_ahead=ahead, max_prefill_chunk=16)
    victim = engine.add(PROMPT, SamplingParams(max_tokens=50, temperature=0.0, n=3))
    other = engine.add(PROMPT[::-1], GREEDY)
    for _ in range(moment):
        engine.step()
    engine.cancel(victim)
    engine.cache.check([seq.allocation for seq in engine.scheduler.running])
    drain(engine)
    assert [c.finish_reason for c in engine.take(victim).snapshot().outputs] == ["cancelled"] * 3
    expected = tiny_llm().generate([PROMPT[::-1]], GREEDY)[0].outputs[0].token_ids
    assert engine.take(other).snapshot().outputs[0].token_ids == expected
    assert_clean(engine)


def break_third_call(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, problem: BaseException) -> None:
    healthy, calls = getattr(owner, name), itertools.count(1)

    def flaky(*args: Any) -> Any:
        if next(calls) == 3:
            raise problem
        return healthy(*args)

    monkeypatch.setattr(owner, name, flaky)


def test_a_deadline_ends_a_request_and_keeps_what_it_had() -> None:
    now = [0.0]
    engine = tiny_engine()
    engine.clock = engine.scheduler.clock = lambda: now[0]
    name = engine.add(PROMPT, SamplingParams(max_tokens=100, temperature=0.0, timeout_s=5.0))
    for _ in range(4):
        engine.step()
    now[0] = 6.0
    drain(engine)
    out = engine.take(name).snapshot().outputs[0]
    assert out.finish_reason == "timeout"
    assert len(out.token_ids) == 4
    assert_clean(engine)


@pytest.mark.parametrize("where", ["_text_stream", "_drafting.controller.begin", "structures.compiler.compile"])
def test_a_request_that_breaks_when_it_is_admitted_leaves_nothing(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = tiny_engine(tokenizer=tokenizer())
    owner, _, name = where.rpartition(".")

    def broken(*_: Any) -> Any:
        raise MemoryError("no room")

    with monkeypatch.context() as patch:
        patch.setattr(attrgetter(owner)(engine) if owner else engine, name, broken)
        with pytest.raises(MemoryError):
            engine.add(PROMPT, SamplingParams(max_tokens=8, regex="a*"), request_id="mine", speculation="ngram")
    assert not engine.has_work and not engine._records and not engine._drafting._drafters
    engine.add(PROMPT, GREEDY, request_id="mine")
    drain(engine)
    assert engine.take("mine").snapshot().outputs[0].finish_reason == "length"
    assert_clean(engine)


class BrokenStream:
    """A detokenizer that fails on its third token, or at the end."""

    def __init__(self, where: str) -> None:
        self._where = where
        self._pushed = 0

    def push(self, token: int) -> str:
        self._pushed += 1
        if self._where == "push" and self._pushed == 3:
            raise UnicodeError("no text")
        return "x"

    def flush(self) -> str:
        if self._where == "flush":
            raise UnicodeError("no text")
        return ""


@pytest.mark.parametrize("where", ["push", "flush"])
@pytest.mark.parametrize("read", [False, True])
def test_a_text_that_cannot_be_made_ends_its_request_alone(where: str, read: bool,
                                                           monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where somebody asks for the text between steps, who has nothing to do with it."""
    engine = tiny_engine()
    with monkeypatch.context() as patch:
        patch.setattr(engine, "_text_stream", lambda *_: BrokenStream(where))
        bad = engine.add(PROMPT, GREEDY)
    good = engine.add(PROMPT, GREEDY)
    while engine.has_work:
        engine.step()
        if read:
            engine.record(bad).snapshot()
    failed = engine.take(bad).snapshot()
    assert isinstance(failed.error, StepError) and "no text" in str(failed.error) and "no text" not in failed.error.told
    assert failed.outputs[0].finish_reason == "error"
    assert failed.outputs[0].text == ("xx" if where == "push" else "x" * 10)
    done = engine.take(good).snapshot()
    assert done.error is None and done.outputs[0].finish_reason == "length"
    assert_clean(engine)


def test_a_full_queue_is_refused_clearly() -> None:
    engine = tiny_engine(max_queue=2)
    engine.add(PROMPT, GREEDY)
    engine.add(PROMPT, GREEDY)
    with pytest.raises(QueueFullError, match="try again later"):
        engine.add(PROMPT, GREEDY)
    drain(engine)
    engine.add(PROMPT, GREEDY)
    drain(engine)
    assert_clean(engine)


def test_a_step_that_breaks_fails_its_requests_and_no_others(caplog: pytest.LogCaptureFixture) -> None:
    engine = tiny_engine(max_num_seqs=1)
    doomed = engine.add(PROMPT, GREEDY)
    later = engine.add(PROMPT, GREEDY)
    engine.step()
    healthy = engine.model.forward

    def broken(*_: Any) -> Any:
        raise MemoryError("no room")

    engine.model.forward = broken  # type: ignore[method-assign]
    engine.step()
    engine.model.forward = healthy  # type: ignore[method-assign]
    drain(engine)
    failed = engine.take(doomed).snapshot()
    assert isinstance(failed.error, StepError) and "no room" in str(failed.error)
    assert "no room" not in failed.error.told, "what broke inside is none of a client's business"
    assert [record.request_ids for record in caplog.records if record.exc_info] == [[doomed]]
    assert failed.outputs[0].finish_reason == "error"
    assert engine.take(later).snapshot().outputs[0].finish_reason == "length"
    assert_clean(engine)


@pytest.mark.parametrize("samples", [1, 3])
def test_drafters_forget_a_request_whose_last_commit_broke(samples: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The scheduler has let go of its sequences by then, and nobody was told."""
    engine = tiny_engine()
    doomed = engine.add(PROMPT, SamplingParams(max_tokens=1, n=samples, seed=1), speculation="suffix")
    beside = engine.add(PROMPT[::-1], GREEDY, speculation="suffix")

    def broken(*_: Any) -> int:
        raise MemoryError("no room")

    with monkeypatch.context() as patch:
        patch.setattr(engine._bookkeeping, "decided", broken)
        while engine.record(doomed).open:
            engine.step()
    drain(engine)
    assert all(isinstance(engine.take(name).error, StepError) for name in (doomed, beside))
    assert not engine._drafting._drafters, "what drafters know of them is given back"
    assert engine.metrics.finished == {"error": samples + 1}
    assert_clean(engine)


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("where", ["forward", "sampling", "commit"])
def test_an_interrupted_call_leaves_an_engine_that_works(where: str, ahead: bool,
                                                         monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C may come at any moment of a step; what comes after it is as if it had never been."""
    llm = tiny_llm(schedule_ahead=ahead)
    owner, name = {"forward": (llm.engine.model, "forward"), "sampling": (llm.engine.decider, "decide"),
                   "commit": (llm.engine.scheduler, "commit")}[where]
    break_third_call(monkeypatch, owner, name, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        llm.generate([PROMPT, PROMPT[5:]], GREEDY)
    assert llm.generate([PROMPT], GREEDY)[0].outputs[0].token_ids == tiny_llm().generate(
        [PROMPT], GREEDY)[0].outputs[0].token_ids
    drain(llm.engine)
    assert_clean(llm.engine)


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("where", ["sampling", "planning", "layout", "commit"])
def test_wherever_a_step_breaks_the_engine_goes_on(where: str, ahead: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = tiny_llm(schedule_ahead=ahead)
    owner, name = {"sampling": (llm.engine.decider, "decide"),
                   "planning": (llm.engine.scheduler._filler, "_reserve"),
                   "layout": (llm.engine.batches, "build"), "commit": (llm.engine.scheduler, "commit")}[where]
    break_third_call(monkeypatch, owner, name, MemoryError("no room"))
    outs = llm.generate([PROMPT, PROMPT[5:]], GREEDY)
    assert all("no room" in str(out.error) for out in outs)
    assert llm.generate([PROMPT], GREEDY)[0].outputs[0].token_ids == tiny_llm().generate(
        [PROMPT], GREEDY)[0].outputs[0].token_ids
    drain(llm.engine)
    assert_clean(llm.engine)


def test_more_prompts_than_the_queue_holds_are_fed_as_it_drains() -> None:
    llm = tiny_llm(max_queue=3, max_num_seqs=2)
    outs = llm.generate([[1 + i, 2] for i in range(11)], GREEDY)
    assert [out.error for out in outs] == [None] * 11
    assert [out.prompt_token_ids[0] for out in outs] == list(range(1, 12))
    assert_clean(llm.engine)


def test_prompts_with_more_samples_than_the_queue_holds_are_fed_as_it_drains() -> None:
    llm = tiny_llm(max_queue=3, max_num_seqs=2)
    outs = llm.generate([[1 + i, 2] for i in range(5)], SamplingParams(max_tokens=4, n=5))
    assert [out.error for out in outs] == [None] * 5
    assert_clean(llm.engine)


def test_prompt_tokens_are_counted_whether_computed_or_found_and_once() -> None:
    llm = tiny_llm(kv_blocks=8, block_size=8, max_num_seqs=4)
    prompts = [[1 + i] * 20 for i in range(4)]
    for _ in range(2):
        llm.generate(prompts, SamplingParams(max_tokens=24))
    report = llm.metrics()
    assert report["preemptions"] > 0, "rows are computed twice"
    assert report["prompt_tokens"] == 8 * 20
    fresh = tiny_llm()
    outs = [fresh.generate([7] * 20, SamplingParams(max_tokens=2))[0] for _ in range(2)]
    assert fresh.metrics()["prompt_tokens"] == 40
    assert fresh.metrics()["cached_tokens"] == outs[1].metrics.cached_tokens == 16
    assert fresh.metrics()["prefill_tokens"] == 40 - 16


def test_parameters_of_another_kind_fail_their_request_alone() -> None:
    outs = tiny_llm().generate([[1], [2]], [GREEDY, {"max_tokens": 3}])  # type: ignore[list-item]
    assert outs[0].error is None
    assert "SamplingParams" in str(outs[1].error)


def test_an_empty_support_is_that_requests_error() -> None:
    llm = tiny_llm()
    banned = SamplingParams(max_tokens=3, allowed_token_ids=[5], logit_bias={5: float("-inf")})
    outs = llm.generate([PROMPT, PROMPT], [banned, GREEDY])
    assert isinstance(outs[0].error, EmptySupportError)
    assert outs[0].outputs[0].finish_reason == "error"
    assert outs[1].error is None
    stop = SamplingParams(max_tokens=3, allowed_token_ids=[5], logit_bias={5: float("-inf")}, on_empty_support="stop")
    assert llm.generate([PROMPT], stop)[0].outputs[0].finish_reason == "stop"
    assert_clean(llm.engine)


class BrokenDrafter:
    name = "broken"
    needs = Needs()

    def __init__(self, where: str) -> None:
        self._where = where

    def _maybe(self, where: str) -> None:
        if where == self._where:
            raise RuntimeError(f"broken in {where}")

    def begin(self, sequence: DraftedSequence) -> None:
        self._maybe("begin")

    def propose(self, sequences: Sequence[DraftedSequence], budget: int) -> list[DraftTree | None]:
        self._maybe("propose")
        if self._where == "vocabulary":
            return [DraftTree.chain([1, 97], self.name) for _ in sequences]
        return [DraftTree.chain([1, 2], self.name) for _ in sequences]

    def observe(self, sequence: DraftedSequence, observation: Observation) -> None:
        self._maybe("observe")

    def release(self, sequence: DraftedSequence) -> None:
        self._maybe("release")


@pytest.mark.parametrize("where", ["begin", "propose", "observe", "release", "vocabulary"])
def test_a_drafter_that_raises_is_switched_off_and_the_text_is_right(where: str) -> None:
    engine = tiny_engine()
    name = engine.add(PROMPT, GREEDY)
    record = engine.record(name)
    record.speculation = SpeculationStats("broken")
    engine._drafting.begin(engine.scheduler.sequences(record.request.id)[0], BrokenDrafter(where), record.speculation)
    drain(engine)
    out = engine.take(name).snapshot()
    assert out.outputs[0].token_ids == tiny_llm().generate([PROMPT], GREEDY)[0].outputs[0].token_ids
    assert where in out.speculation.failure
    assert engine._drafting.failures == 1
    assert_clean(engine)


def test_metrics_tell_what_a_request_went_through() -> None:
    llm = tiny_llm()
    first = llm.generate([PROMPT], GREEDY)[0].metrics
    second = llm.generate([PROMPT], GREEDY)[0].metrics
    assert first.cached_tokens == 0 and first.cache_miss == "never seen"
    assert second.cached_tokens == 32
    assert 0 <= first.queue_time <= first.ttft
    assert len(first.inter_token) == 9 and first.tpot > 0 and first.decode_rate > 0 and first.prefill_rate > 0
    assert first.output_tokens == 10 and first.prompt_tokens == len(PROMPT)
    assert set(first.as_dict()) >= {"ttft_s", "tpot_s", "queue_time_s", "cache_miss", "preemptions"}
    engine = llm.engine.metrics.as_dict()
    assert engine["output_tokens"] == 20 and engine["requests"] == 2 and engine["finished"] == {"length": 2}
    assert engine["prefill_tokens"] == len(PROMPT) + len(PROMPT) - 32
    usage = llm.engine.cache.usage()
    assert usage.hits == 32 and usage.queries == 2 * len(PROMPT)


def test_the_engine_reports_totals_and_its_state_in_plain_types() -> None:
    llm = tiny_llm(kv_blocks=100)
    assert llm.metrics()["cache_hit_rate"] is None
    llm.generate([PROMPT], GREEDY)
    llm.engine.add(PROMPT, GREEDY)
    llm.engine.add(PROMPT[::-1], GREEDY)
    llm.engine.step()
    llm.engine.add(PROMPT, GREEDY)
    now = llm.metrics()
    assert json.loads(json.dumps(now)) == now
    assert now["requests"] == 4 and now["finished"] == {"length": 1}
    assert (now["running"], now["waiting"], now["preemptions"]) == (2, 1, 0)
    assert now["cache_blocks"] == 100 and now["cache_use"] == now["cache_blocks_used"] / 100 > 0
    assert now["cache_hit_rate"] == 32 / (3 * len(PROMPT))
    llm.engine.scheduler.preempt(llm.engine.scheduler.running[-1])
    assert llm.metrics()["preemptions"] == 1
    drain(llm.engine)
    assert (llm.metrics()["running"], llm.metrics()["waiting"], llm.metrics()["cache_use"]) == (0, 0, 0.0)


def test_a_salt_keeps_prefixes_apart() -> None:
    llm = tiny_llm()
    llm.generate([PROMPT], SamplingParams(max_tokens=2, temperature=0.0, cache_salt="mine"))
    foreign = llm.generate([PROMPT], SamplingParams(max_tokens=2, temperature=0.0, cache_salt="yours"))[0]
    own = llm.generate([PROMPT], SamplingParams(max_tokens=2, temperature=0.0, cache_salt="mine"))[0]
    assert foreign.metrics.cached_tokens == 0
    assert own.metrics.cached_tokens == 32


def test_higher_priority_goes_first() -> None:
    engine = tiny_engine(max_num_seqs=1)
    low = engine.add(PROMPT, SamplingParams(max_tokens=3, temperature=0.0))
    high = engine.add(PROMPT, SamplingParams(max_tokens=3, temperature=0.0, priority=1))
    order = []
    while engine.has_work:
        order += [record.request.id for record in engine.step() if record.open == 0]
    assert order == [high, low]


def test_a_text_that_ends_inside_a_draft_counts_what_it_emitted() -> None:
    llm = tiny_llm()
    script = llm.generate([PROMPT], GREEDY)[0].outputs[0].token_ids
    stop = SamplingParams(max_tokens=10, temperature=0.0, stop_token_ids=[script[3]])
    out = llm.generate([PROMPT], stop, speculation={"method": "oracle", "tokens": script, "k": 8})[0]
    assert out.outputs[0].token_ids == script[:script.index(script[3]) + 1]
    plain = out.speculation.provenance.count(("plain", None))
    assert out.speculation.emitted == len(out.outputs[0].token_ids) - plain


def test_speculation_statistics() -> None:
    llm = tiny_llm()
    script = llm.generate([PROMPT], GREEDY)[0].outputs[0].token_ids
    out = llm.generate([PROMPT], GREEDY, speculation={"method": "oracle", "tokens": script, "k": 4})[0]
    stats = out.speculation
    assert out.outputs[0].token_ids == script
    assert stats.accepted == stats.drafted > 0
    assert stats.mean_accepted_length > 3
    assert len(stats.provenance) == len(script)
    assert [str(origin) for origin in stats.provenance[:2]] == ["plain", "accepted (oracle)"]
    assert ("bonus", None) in stats.provenance
    wrong = llm.generate([PROMPT], GREEDY, speculation={"method": "wrong", "tokens": script, "k": 4})[0].speculation
    assert wrong.accepted == 0 and wrong.mean_accepted_length == 1.0
    assert {origin.outcome for origin in wrong.provenance[1:]} <= {"corrected", "plain"}
