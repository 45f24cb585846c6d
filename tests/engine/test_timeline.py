"""Timelines record what requests went through: all of it, within bounds, and without a trace in the tokens."""

from __future__ import annotations

from typing import Any

import pytest

from engine.tiny import tiny_llm
from paceline.engine.observe.timeline import DECODE, PREEMPTED, PREFILL, Timelines
from paceline.llm import LLM
from paceline.request import SamplingParams

PROMPT = [5, 9, 5, 9, 5, 9, 11, 5, 9, 5, 9]
EXIT = {"method": "exit", "k": 3, "adaptive": False}


def watched(**bounds: int) -> tuple[LLM, Timelines]:
    llm = tiny_llm(kv_blocks=60, max_batch_tokens=16)
    timelines = Timelines(**bounds)
    llm.engine.observers.add(timelines)
    return llm, timelines


def run(llm: LLM, count: int = 1, length: int = 24, **more: Any) -> Any:
    params = [SamplingParams(max_tokens=length, seed=seed, temperature=0.8, ignore_eos=True) for seed in range(count)]
    return llm.generate([PROMPT] * count, params, **more)


def test_events_hold_every_token_once_and_in_order() -> None:
    llm, timelines = watched()
    outs = run(llm, 3, speculation="ngram")
    assert [one.reason for one in timelines.requests.values()] == ["length"] * 3
    for out, timeline in zip(outs, timelines.requests.values()):
        assert [token for event in timeline.events for token in event.tokens] == out.outputs[0].token_ids
        origins = [origin for event in timeline.events for origin in event.origins]
        assert origins == out.speculation.provenance
        begins = [event.started for event in timeline.events]
        assert begins == sorted(begins)
        assert all(event.started <= event.ended for event in timeline.events)


def test_prompt_chunks_are_told_from_steps() -> None:
    llm, timelines = watched()
    llm.generate([list(range(40))], SamplingParams(max_tokens=4, ignore_eos=True))
    events = list(timelines.requests["", "request-0"].events)
    assert [(event.kind, event.start, event.rows) for event in events] == [
        (PREFILL, 0, 16), (PREFILL, 16, 16), (PREFILL, 32, 8), (DECODE, 40, 1), (DECODE, 41, 1), (DECODE, 42, 1)]


def test_drafts_are_kept_with_the_path_that_stood() -> None:
    llm, timelines = watched()
    run(llm, speculation=EXIT)
    drafts = [event for event in timelines.requests["", "request-0"].events if event.draft is not None]
    assert drafts
    for event in drafts:
        assert event.draft is not None
        accepted = [event.draft.tokens[node] for node in event.draft.path]
        assert accepted == list(event.tokens[:len(accepted)])
        assert [origin.outcome for origin in event.origins][:len(accepted)] == ["accepted"] * len(accepted)
    assert any(event.draft and event.draft.path for event in drafts)


@pytest.mark.parametrize(("preemption", "what_follows"), [("recompute", PREFILL), ("swap", DECODE)])
def test_a_preemption_shows_and_what_follows_is_a_chunk_or_where_it_left_off(preemption: str,
                                                                            what_follows: str) -> None:
    llm = tiny_llm(kv_blocks=12, max_batch_tokens=64, enable_prefix_caching=False, preemption=preemption)
    timelines = Timelines()
    llm.engine.observers.add(timelines)
    run(llm, 4, length=30)
    assert llm.engine.scheduler.preemptions > 0
    kinds = [[event.kind for event in one.events] for one in timelines.requests.values()]
    assert sum(kind.count(PREEMPTED) for kind in kinds) == llm.engine.scheduler.preemptions
    for one in kinds:
        for at, kind in enumerate(one):
            if kind == PREEMPTED and at + 1 < len(one):
                assert one[at + 1] == what_follows


def test_further_samples_have_events_of_their_own() -> None:
    llm, timelines = watched()
    out = llm.generate([PROMPT], SamplingParams(max_tokens=6, n=3, seed=1, ignore_eos=True))[0]
    events = timelines.requests["", "request-0"].events
    for completion in out.outputs:
        assert [token for event in events if event.sample == completion.index
                for token in event.tokens] == completion.token_ids


@pytest.mark.parametrize("speculation", [None, "ngram", EXIT])
def test_being_watched_changes_no_token(speculation: Any) -> None:
    llm, _ = watched()
    alone = tiny_llm(kv_blocks=60, max_batch_tokens=16)
    seen, unseen = run(llm, 3, speculation=speculation), run(alone, 3, speculation=speculation)
    assert [out.outputs[0].token_ids for out in seen] == [out.outputs[0].token_ids for out in unseen]


def test_memory_is_bounded_for_one_request_and_for_all() -> None:
    llm, timelines = watched(most_requests=4, most_weight=40, request_weight=20)
    for _ in range(6):
        run(llm, length=24)
        assert len(timelines.requests) <= 4
        assert timelines.weight <= 40
        assert timelines.weight == sum(one.weight for one in timelines.requests.values())
    newest = list(timelines.requests.values())[-1]
    assert newest.id == "request-5"
    assert newest.weight <= 20
    assert newest.dropped == 24 - len(newest.events)
    assert newest.record is None


def test_a_trace_heavier_than_a_request_may_be_costs_no_events() -> None:
    llm, timelines = watched(request_weight=20)
    for _ in range(2):
        llm.generate([PROMPT], SamplingParams(max_tokens=8, trace=True, ignore_eos=True))
    assert len(timelines.requests) == 2, "still told after the first"
    for timeline in timelines.requests.values():
        assert timeline.trace is not None and timeline.trace_weight > 20
        assert len(timeline.events) == 8 and timeline.dropped == 0
    assert timelines.weight == sum(one.weight + one.trace_weight for one in timelines.requests.values())


def test_figures_of_a_finished_request_stay_and_its_record_does_not() -> None:
    llm, timelines = watched()
    llm.generate([PROMPT], SamplingParams(max_tokens=8, trace=True, ignore_eos=True), speculation="ngram")
    timeline = timelines.requests["", "request-0"]
    assert timeline.record is None
    assert timeline.summary["output_tokens"] == 8
    assert timeline.speculation is not None and timeline.speculation["method"] == "ngram"
    assert timeline.trace is not None and len(timeline.trace.tokens) == 8
    assert len(timelines.latencies) == 1
    assert sum(second.tokens for second in timelines.seconds) == 8
    assert sum(second.prompt_rows for second in timelines.seconds) == len(PROMPT)


def test_an_observer_that_raises_is_told_no_more_and_the_text_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(Timelines):
        calls = 0

        def stepped(self, *_: Any) -> None:
            self.calls += 1
            raise RuntimeError("no")

    llm, timelines = watched()
    broken = Broken()
    llm.engine.observers.add(broken)
    out = run(llm)[0]
    assert len(out.outputs[0].token_ids) == 24
    assert broken.calls == 1
    assert timelines.requests["", "request-0"].reason == "length"
    assert "called no more" in caplog.text
