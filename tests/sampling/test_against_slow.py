"""The vectorised pipeline gives what a slow, per-token reading of the contract gives, whatever rows are mixed."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from slow_pipeline import choose, edited, support

from paceline.errors import EmptySupportError
from paceline.request import SamplingParams
from paceline.sampling import NO_TOKEN, Pipeline, SampleRow, SampleState

pytestmark = pytest.mark.usefixtures("either_sampler")

V = 24
token = st.integers(0, V - 1)
tokens = st.lists(token, max_size=8)


def maybe(strategy, default):
    return st.one_of(st.just(default), strategy)


@st.composite
def params(draw) -> SamplingParams:
    return SamplingParams(
        max_tokens=None,
        min_tokens=draw(maybe(st.integers(0, 6), 0)),
        temperature=draw(st.sampled_from([0.0, 1e-30, 1e-9, 0.3, 0.8, 1.0, 2.5, 1e6, 1e39])),
        top_k=draw(maybe(st.integers(0, V + 3), 0)),
        top_p=draw(maybe(st.sampled_from([1e-6, 0.1, 0.3, 0.5, 0.75, 0.95, 0.999999]), 1.0)),
        min_p=draw(maybe(st.sampled_from([1e-9, 0.05, 0.3, 1.0]), 0.0)),
        repetition_penalty=draw(maybe(st.sampled_from([0.5, 1.1, 2.0]), 1.0)),
        presence_penalty=draw(maybe(st.sampled_from([-1.0, 0.6]), 0.0)),
        frequency_penalty=draw(maybe(st.sampled_from([-0.5, 0.25]), 0.0)),
        logit_bias=draw(maybe(st.dictionaries(token, st.sampled_from([-np.inf, -3.0, 0.0, 1.5, 100.0, np.inf]),
                                              max_size=4), None)),
        no_repeat_ngram_size=draw(maybe(st.integers(1, 4), 0)),
        allowed_token_ids=draw(maybe(st.lists(token, min_size=1, max_size=8).map(tuple), None)),
        stop_token_ids=draw(maybe(tokens.map(tuple), ())),
        ignore_eos=draw(st.booleans()),
        on_empty_support=draw(st.sampled_from(["error", "stop", "unmasked"])))


@st.composite
def cases(draw):
    # Few distinct logits, so that ties are common.
    values = st.sampled_from([-40.0, -2.0, -1.0, -0.0, 0.0, 0.5, 1.0, 2.0, 2.0000002, 3.0, 30.0, -np.inf])
    return {"params": draw(params()), "prompt": draw(st.lists(token, min_size=1, max_size=10)), "output": draw(tokens),
                "path": draw(st.lists(token, max_size=4)), "seed": draw(st.integers(0, 2**64 - 1)),
                "bad": draw(maybe(st.lists(st.lists(token, min_size=1, max_size=3).map(tuple), max_size=3), [])),
                "mask": draw(maybe(st.lists(st.booleans(), min_size=V, max_size=V), None)),
                "logits": draw(st.lists(values, min_size=V, max_size=V))}


def expected(case, eos):
    p, output = case["params"], case["output"] + case["path"]
    logits = np.array(case["logits"], dtype=np.float32)
    args = (logits, p, case["prompt"], output, eos, case["bad"], case["mask"])
    scores = support(edited(*args), p)
    if not scores and p.on_empty_support == "unmasked":
        scores = support(edited(*args, masks=False), p)
    return scores, choose(scores, p, case["seed"], len(case["prompt"]) + len(output))


BATCHES = given(st.lists(cases(), min_size=1, max_size=6), st.sampled_from([[], [3], [0, 5]]))


@settings(max_examples=40, deadline=None)
@BATCHES
def test_vectorised_rows_equal_the_slow_reading(batch, eos):
    check(batch, eos)


@pytest.mark.full
@settings(max_examples=500, deadline=None)
@BATCHES
def test_very_many_rows_equal_the_slow_reading(batch, eos):
    check(batch, eos)


def check(batch, eos):
    rows = []
    for case in batch:
        state = SampleState(case["params"], case["prompt"], case["seed"], V, eos, case["bad"])
        for i in range(0, len(case["output"]), 3):
            state.append(case["output"][i:i + 3])
        mask = None if case["mask"] is None else np.array(case["mask"])
        rows.append(SampleRow(state, len(case["prompt"]) + len(case["output"]) + len(case["path"]), case["path"], mask))
    logits = torch.tensor([case["logits"] for case in batch], dtype=torch.float32)
    before = logits.clone()
    pipeline = Pipeline(V)
    processed = pipeline.process(logits, rows)
    chosen = pipeline.choose(processed)
    assert torch.equal(logits, before), "the caller's logits are never written"
    for i, case in enumerate(batch):
        scores, winner = expected(case, eos)
        assert chosen[i] == winner
        if not scores:
            assert winner == NO_TOKEN
            stops = case["params"].on_empty_support == "stop"
            assert (i in processed.stopped) == stops and (i in processed.errors) == (not stops)
            assert stops or isinstance(processed.errors[i], EmptySupportError)
            continue
        assert i not in processed.errors and i not in processed.stopped
        dense = np.full(V, -np.inf, dtype=np.float32)
        dense[list(scores)] = list(scores.values())
        np.testing.assert_array_equal(processed.scores[i].numpy(), dense)
        assert processed.support_size(i) == len(scores)
        weights = np.exp(np.array(list(scores.values()), dtype=np.float64) - max(map(float, scores.values())))
        probs = processed.probs(i)
        np.testing.assert_allclose(probs[list(scores)], weights / weights.sum(), rtol=1e-12)
        assert np.count_nonzero(probs) <= len(scores) and abs(probs.sum() - 1) < 1e-12
        for one in range(V):
            wanted = np.log(probs[one]) if probs[one] > 1e-300 else None
            if one not in scores:
                assert processed.logprob(i, one) == -np.inf
            elif wanted is not None:
                assert abs(processed.logprob(i, one) - wanted) < 1e-5
