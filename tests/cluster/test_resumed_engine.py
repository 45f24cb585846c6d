"""An engine that goes on from what was said elsewhere: with drafts, adapters, a device; and odd beginnings."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from adapters.test_equality import llm_with
from engine.tiny import tiny_engine, tiny_llm
from engine.whole import SteppedClock, check_at_rest, check_between_steps, check_nobody_is_remembered
from paceline.engine.core import Engine
from paceline.engine.records.deltas import Delta, DeltaCursor
from paceline.errors import RequestError
from paceline.request import SamplingParams, TokenLogprob
from paceline.so_far import Past, SampleSoFar
from speculation.model_drafting import METHODS, drafting_llm

PROMPT = [(i * 31 + 7) % 97 for i in range(21)]
NEW = 18
PARAMS = SamplingParams(n=2, max_tokens=NEW, seed=99, temperature=0.8, top_k=50, repetition_penalty=1.2,
                        no_repeat_ngram_size=3)


def carry_out(engine: Engine, params: SamplingParams, past: Past | None = None, **more: Any) -> list[Delta]:
    """All that is told of one request, while whatever must hold does."""
    prepared = engine.prepare(PROMPT, params, **({} if past is None else {"past": past}))
    name = engine.admit(prepared, **more)
    cursor = DeltaCursor(engine.record(name))
    told: list[Delta] = []
    while engine.has_work:
        told += [cursor.advance() for _ in engine.step()]
        check_between_steps(engine)
    engine.take(name)
    check_at_rest(engine)
    return told


def tokens_of(told: list[Delta], index: int) -> list[int]:
    return [token for delta in told for sample in delta.samples if sample.index == index for token in sample.token_ids]


def cut(told: list[Delta], *counts: int) -> Past:
    """What samples have said after so many tokens each."""
    return Past(tuple(SampleSoFar(tuple(tokens_of(told, index)[:count])) for index, count in enumerate(counts)))


@functools.cache
def calm() -> list[Delta]:
    return carry_out(tiny_engine(), PARAMS)


def check_rest(told: list[Delta], whole: list[Delta], past: Past) -> None:
    for index, so_far in enumerate(past.so_far):
        assert list(so_far.token_ids) + tokens_of(told, index) == tokens_of(whole, index)
    ours, theirs = told[-1].output, whole[-1].output
    assert ours is not None and theirs is not None
    assert [one.token_ids for one in ours.outputs] == [one.token_ids for one in theirs.outputs]
    assert [one.finish_reason for one in ours.outputs] == [one.finish_reason for one in theirs.outputs]
    assert ours.metrics.output_tokens == theirs.metrics.output_tokens


@pytest.mark.parametrize(("options", "counts"), [
    ({}, (1, 1)), ({}, (0, 5)), ({}, (NEW - 1, NEW - 1)), ({}, (0, 0)), ({"kernels": "stepped"}, (7, 2)),
    ({"kernels": "stepped"}, (NEW - 1, 4)), ({"kv_blocks": 9, "max_num_seqs": 2}, (7, 9)),
    ({"max_batch_tokens": 5}, (7, 2)), ({"max_num_seqs": 1}, (12, 1))], ids=str)
def test_samples_cut_anywhere(options: dict[str, Any], counts: tuple[int, int]) -> None:
    past = cut(calm(), *counts)
    check_rest(carry_out(tiny_engine(**options), PARAMS, past), calm(), past)


@pytest.mark.parametrize("options", [{}, {"kernels": "stepped"}], ids=str)
@pytest.mark.parametrize("right", [True, False])
def test_drafts_go_on_where_others_were_verified(right: bool, options: dict[str, Any]) -> None:
    params = SamplingParams(max_tokens=NEW, seed=4, temperature=0.9, logprobs=2)
    whole = carry_out(tiny_engine(**options), params)
    text = tokens_of(whole, 0)
    wish = {"method": "oracle" if right else "wrong", "k": 4, "tokens": text, "adaptive": False}
    for count in (1, 9):
        past = cut(whole, count)
        told = carry_out(tiny_engine(**options), params, past, speculation=wish)
        check_rest(told, whole, past)
        scores: list[TokenLogprob] = [score for delta in told for sample in delta.samples
                                      for score in sample.logprobs or ()]
        assert scores == whole[-1].output.outputs[0].logprobs[count:]  # type: ignore[union-attr, index]
        origins = [origin for delta in told for sample in delta.samples for origin in sample.origins or ()]
        assert len(origins) == NEW - count
        assert any(origin.outcome == "accepted" for origin in origins) == right


@pytest.mark.parametrize("wish", ["ngram", "auto", "suffix"])
def test_drafts_looked_up_in_a_text_that_began_elsewhere(wish: str) -> None:
    """A device has the whole text in its seats."""
    params = SamplingParams(max_tokens=30, seed=4, temperature=0.0, allowed_token_ids=(1, 2, 3))
    whole = carry_out(tiny_engine(), params)
    past = cut(whole, 11)
    for options in ({}, {"kernels": "stepped"}):
        told = carry_out(tiny_engine(**options), params, past, speculation={"method": wish, "adaptive": False})
        check_rest(told, whole, past)
        assert told[-1].output.speculation.accepted > 0  # type: ignore[union-attr]


@pytest.mark.parametrize("method", ["draft, same weights", "draft, dynamic tree", "skip", "exit", "precision",
                                    "cascade of ngram"])
def test_models_that_draft_read_what_was_said(method: str) -> None:
    params = SamplingParams(max_tokens=NEW, seed=4, temperature=0.9)
    whole = carry_out(drafting_llm().engine, params, speculation=None)
    past = cut(whole, 7)
    told = carry_out(drafting_llm().engine, params, past, speculation=METHODS[method] | {"adaptive": False, "k": 3})
    check_rest(told, whole, past)
    stats = told[-1].output.speculation  # type: ignore[union-attr]
    assert stats.failure is None and stats.drafted > 0


def test_adapters() -> None:
    whole = carry_out(llm_with(adapters=["one"]).engine, PARAMS, adapter="one")
    assert tokens_of(whole, 0) != tokens_of(carry_out(llm_with(adapters=["one"]).engine, PARAMS), 0)
    past = cut(whole, 5, 5)
    check_rest(carry_out(llm_with(adapters=["one", "two"]).engine, PARAMS, past, adapter="one"), whole, past)


def test_a_warm_cache_knows_what_was_said() -> None:
    engine = tiny_engine()
    whole = carry_out(engine, PARAMS)
    before = engine.report()["prefill_tokens"]
    past = cut(whole, 9, 9)
    check_rest(carry_out(engine, PARAMS, past), whole, past)
    assert engine.report()["prefill_tokens"] - before < len(PROMPT)


def test_nobody_computes_what_has_ended() -> None:
    whole = carry_out(tiny_engine(), PARAMS)
    past = cut(whole, NEW, 4)
    past = Past((SampleSoFar(past.so_far[0].token_ids, finish_reason="length"), past.so_far[1]))
    engine = tiny_engine()
    told = carry_out(engine, PARAMS, past)
    check_rest(told, whole, past)
    assert all(sample.index == 1 for delta in told for sample in delta.samples)
    assert engine.metrics.output_tokens == NEW - 4


@pytest.mark.parametrize("said", [True, False])
def test_a_request_that_comes_with_its_whole_text_has_nothing_to_run(said: bool) -> None:
    whole = carry_out(tiny_engine(), PARAMS)
    reason = "length" if said else None
    past = Past(tuple(SampleSoFar(one.token_ids, finish_reason=reason) for one in cut(whole, NEW, NEW).so_far))
    engine = tiny_engine()
    told = carry_out(engine, PARAMS, past)
    assert len(told) == 1 and told[0].output is not None and told[0].output.finished
    assert [sample.finish_reason for sample in told[0].samples] == ([] if said else ["length", "length"])
    check_rest(told, whole, past)
    assert engine.metrics.steps == 0


def test_more_than_the_cache_holds_ends_with_its_length() -> None:
    """As it would have ended there from the beginning."""
    fresh = carry_out(tiny_engine(kv_blocks=4), PARAMS)
    told = carry_out(tiny_engine(kv_blocks=4), PARAMS, cut(calm(), NEW - 2, 3))
    assert told[-1].output is not None
    assert [one.finish_reason for one in told[-1].output.outputs] == ["length", "length"]
    assert [len(one.token_ids) for one in told[-1].output.outputs] == [NEW - 2, len(tokens_of(fresh, 1))]
    assert len(tokens_of(fresh, 1)) < NEW - 2


def test_deadline_and_times_count_from_the_arrival() -> None:
    clock = SteppedClock()
    engine = tiny_engine(clock=clock)
    params = SamplingParams(max_tokens=NEW, seed=1, timeout_s=30.0, ignore_eos=True)
    past = Past((SampleSoFar((5, 6, 7), 3),), arrival=clock.now - 25.0)
    name = engine.admit(engine.prepare(PROMPT, params, past=past))
    engine.step()
    assert engine.record(name).metrics.queue_time > 25.0  # type: ignore[operator]
    assert engine.record(name).request.target_ttft_s is None
    clock.pass_step(6.0)
    engine.step()
    assert engine.record(name).emitters[0].finish_reason == "timeout"
    engine.take(name)
    check_at_rest(engine)


def test_odd_beginnings_are_refused() -> None:
    engine = tiny_engine()
    for params, samples in ((SamplingParams(best_of=2, seed=1), 2), (SamplingParams(beam_width=2), 2),
                            (SamplingParams(seed=1), 2), (SamplingParams(), 1)):
        with pytest.raises(RequestError):
            engine.prepare(PROMPT, params, past=Past((SampleSoFar((1,)),) * samples))
    for token in (-1, 97):
        with pytest.raises(RequestError, match="same model"):
            engine.prepare(PROMPT, SamplingParams(seed=1), past=Past((SampleSoFar((1, token)),)))


def test_a_resumed_request_is_forgotten_like_any_other() -> None:
    engine = tiny_llm().engine
    told = carry_out(engine, PARAMS, cut(calm(), 4, 4), request_id="it", speculation="ngram")
    assert told[-1].output is not None
    del told
    check_nobody_is_remembered(engine, ["it"])
