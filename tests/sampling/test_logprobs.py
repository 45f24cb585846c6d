"""Log-probabilities equal those of float64 softmax; ties in ranks and alternatives go by id; no row feels another."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from paceline.errors import RequestError
from paceline.request import SamplingParams
from paceline.sampling import Pipeline, SampleRow, SampleState
from paceline.sampling.logprobs import prompt_logprobs, token_logprobs

pytestmark = pytest.mark.usefixtures("either_sampler")

V = 400


def example(rows: int) -> torch.Tensor:
    return torch.randn(rows, V, generator=torch.Generator().manual_seed(0)) * 3


def exact(logits: torch.Tensor) -> np.ndarray:
    return torch.log_softmax(logits.double(), dim=-1).numpy()


def test_prompt_logprobs():
    logits = example(150)
    logits[3] = logits[3].round()
    targets = [(i * 37) % V for i in range(150)]
    wanted = exact(logits)
    for i, score in enumerate(prompt_logprobs(logits, targets, 5)):
        order = sorted(range(V), key=lambda t: (-logits[i, t].item(), t))
        assert score.token == targets[i] and score.raw == score.processed
        assert score.raw == pytest.approx(wanted[i, targets[i]], abs=1e-5)
        assert list(score.top) == order[:5] and score.rank == order.index(targets[i]) + 1
        assert list(score.top.values()) == pytest.approx([wanted[i, t] for t in order[:5]], abs=1e-5)


def test_prompt_logprobs_without_alternatives_and_of_nothing():
    assert prompt_logprobs(example(1), [3], 0)[0].top == {}
    assert prompt_logprobs(example(0), [], 3) == []
    assert len(prompt_logprobs(example(1), [3], 10_000)[0].top) == V


def test_raw_and_processed_logprobs_of_drawn_tokens():
    kinds = [{"temperature": 0.0}, {"temperature": 0.5}, {"temperature": 0.7, "top_p": 0.6},
             {"repetition_penalty": 1.5, "top_k": 7}, {"logit_bias": {3: 4.0}}]
    logits = example(len(kinds))
    rows = [SampleRow(SampleState(SamplingParams(**kind), [3, 9], i, V), 2) for i, kind in enumerate(kinds)]
    pipeline = Pipeline(V)
    processed = pipeline.process(logits, rows)
    chosen = pipeline.choose(processed)
    found = token_logprobs(logits, processed, range(len(kinds)), chosen, [0, 1, 2, 3, 4])
    wanted = exact(logits)
    for i, score in enumerate(found):
        assert score.token == chosen[i] and len(score.top) == i
        assert score.raw == pytest.approx(wanted[i, chosen[i]], abs=1e-5)
        assert score.processed == pytest.approx(math.log(processed.probs(i)[chosen[i]]), abs=1e-5)
    assert found[0].processed == 0.0
    assert processed.logprob(0, (chosen[0] + 1) % V) == -math.inf


def test_a_rows_logprobs_do_not_depend_on_the_others():
    logits = example(33)
    targets = list(range(33))
    together = prompt_logprobs(logits, targets, 3)
    for i in (0, 7, 32):
        assert prompt_logprobs(logits[i:i + 1].clone(), targets[i:i + 1], 3) == [together[i]]


def test_impossible_tokens_and_nan():
    logits = example(1)
    logits[0, 5] = -torch.inf
    score = prompt_logprobs(logits, [5], 2)[0]
    assert score.raw == -math.inf and score.rank == V
    logits[0, 6] = torch.nan
    with pytest.raises(RequestError, match="NaN"):
        prompt_logprobs(logits, [5], 2)
