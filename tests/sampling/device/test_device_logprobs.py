"""Log-probabilities from the device agree with the host's, and so do ranks and alternatives."""

from __future__ import annotations

import math

import numpy as np
import pytest
from device_rows import Both, Case

from paceline.request import SamplingParams
from paceline.sampling.logprobs import token_logprobs, unpacked

PARAMS = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.6),
    SamplingParams(top_k=7, top_p=0.9),
    SamplingParams(min_p=0.1, repetition_penalty=1.4),
    SamplingParams(logit_bias={4: 30.0}, temperature=2.0),
]


@pytest.mark.parametrize("asked", [0, 5, 20])
def test_scores_agree_with_the_host(device, asked):
    width = 90
    rng = np.random.default_rng(asked)
    both = Both([Case(p, (rng.standard_normal(width) * 3).astype(np.float32), seed=i) for i, p in enumerate(PARAMS)],
                width, device)
    both.draw(logprobs=asked)
    tokens = both.host()
    assert both.drawn_or_why_not() == tokens
    found = both.sampler.logprobs(both.device_logits, both.device_rows, both.drawn, both.controls).cpu().numpy()
    expected = token_logprobs(both.logits, both.processed, list(range(len(tokens))), tokens, [asked] * len(tokens))
    for i, (at, score) in enumerate(zip(both.at, expected)):
        own = unpacked(found[at], tokens[i], asked)
        assert own.raw == pytest.approx(score.raw, abs=1e-5)
        assert own.processed == pytest.approx(score.processed, abs=1e-5), PARAMS[i]
        assert (own.token, own.rank) == (score.token, score.rank)
        assert list(own.top) == list(score.top)
        assert list(own.top.values()) == pytest.approx(list(score.top.values()), abs=1e-5)


def test_ties_dead_tokens_and_rows_without_a_token(device):
    width = 40
    tied = np.full(width, -np.inf, dtype=np.float32)
    tied[[30, 3, 11]] = 2.0
    both = Both([Case(SamplingParams(temperature=0.0), tied),
                 Case(SamplingParams(), np.full(width, -np.inf, dtype=np.float32))], width, device, block=16)
    both.draw(logprobs=5)
    found = both.sampler.logprobs(both.device_logits, both.device_rows, both.drawn, both.controls).cpu().numpy()
    first, second = (unpacked(found[at], 3, 5) for at in both.at)
    assert list(first.top) == [3, 11, 30]
    assert list(first.top.values()) == pytest.approx([-math.log(3)] * 3)
    assert (first.raw, first.processed) == pytest.approx((-math.log(3), 0.0)) and first.rank == 1
    assert list(unpacked(found[both.at[0]], 3, 2).top) == [3, 11]
    assert math.isnan(second.raw) and math.isnan(second.processed) and second.rank == 0


def test_more_alternatives_than_there_is_room_for_are_refused(device):
    both = Both([Case(SamplingParams(), np.zeros(40))], 40, device)
    both.draw(logprobs=21)
    with pytest.raises(ValueError, match="at most 20"):
        both.sampler.logprobs(both.device_logits, both.device_rows, both.drawn, both.controls)
