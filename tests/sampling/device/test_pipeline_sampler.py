"""The sampler of a device without sampling kernels: the tokens of Triton's and the numbers of the host's pipeline."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from device_rows import Both, Case

from paceline.kernels.device import columns
from paceline.request import SamplingParams
from paceline.sampling.device.sampler import PipelineSampler
from paceline.sampling.logprobs import unpacked

WIDTH = 70
HEAVY: dict[str, Any] = {"repetition_penalty": 1.4, "presence_penalty": 0.5, "frequency_penalty": 0.3}
PARAMS: list[dict[str, Any]] = [
    {"temperature": 0.0}, {"temperature": 1.1}, {"top_k": 7, "top_p": 0.8}, {"top_p": 0.6}, {"min_p": 0.05},
    {"temperature": 0.0} | HEAVY, {"temperature": 0.7, "top_k": 20} | HEAVY, {"logit_bias": {3: 5.0, 4: -math.inf}},
    {"min_tokens": 9, "stop_token_ids": [6, 7], "logit_bias": {6: 9.0}},
    {"allowed_token_ids": list(range(0, 70, 2)), "min_p": 0.01}]


def cases() -> list[Case]:
    rng = np.random.default_rng(5)
    made = []
    for at, params in enumerate(PARAMS):
        made.append(Case(SamplingParams(**params), rng.standard_normal(WIDTH).astype(np.float32) * 3, output=[8, 8, 9],
                         path=[[], [11], [12, 12]][at % 3], seed=(1 << 63) + 77 * at,
                         mask=None if at % 4 else (rng.random(WIDTH) < 0.6).tolist()))
    return made


@pytest.fixture
def both(device: torch.device) -> Both:
    return Both(cases(), WIDTH, device)


def test_it_samples_what_the_kernels_and_the_host_do(both: Both) -> None:
    kernels = both.device()
    both.sampler = PipelineSampler(both.tables)
    assert both.device() == kernels == both.host()


def test_it_scores_as_the_kernels_do(both: Both) -> None:
    number = 5
    sampled = both.draw(logprobs=number).clone()
    theirs = both.sampler.logprobs(both.device_logits, both.device_rows, sampled, both.controls).cpu().numpy()
    ours = PipelineSampler(both.tables).logprobs(both.device_logits, both.device_rows, sampled, both.controls)
    for at in both.at:
        left, right = (unpacked(own[at], int(sampled[at]), number) for own in (ours.cpu().numpy(), theirs))
        assert (left.rank, list(left.top)) == (right.rank, list(right.top))
        assert [left.raw, left.processed, *left.top.values()] == pytest.approx(
            [right.raw, right.processed, *right.top.values()], abs=1e-4)


def test_it_finds_the_same_siblings(device: torch.device) -> None:
    both = Both(cases()[::3], WIDTH, device)
    both.draw()
    controls = replace(both.controls, logprobs=1, further=2)
    theirs, scores = both.sampler.several(both.device_logits, both.device_rows, controls)
    ours, own = PipelineSampler(both.tables).several(both.device_logits, both.device_rows, controls)
    assert ours.tolist() == theirs.tolist()
    there = (theirs[:, both.at] >= 0).cpu()
    left, right = (part[:, both.at, :2].cpu().contiguous().view(torch.float32)[there] for part in (own, scores))
    torch.testing.assert_close(left, right, atol=1e-4, rtol=0)


def test_it_says_why_there_is_no_token(device: torch.device) -> None:
    broken, empty = np.zeros(WIDTH, dtype=np.float32), np.zeros(WIDTH, dtype=np.float32)
    broken[5] = np.nan
    nothing = SamplingParams(allowed_token_ids=[3], logit_bias={3: -math.inf})
    both = Both([Case(SamplingParams(), broken), Case(nothing, broken), Case(nothing, empty)], WIDTH, device)
    both.draw()
    kernels = both.drawn_or_why_not()
    both.sampler = PipelineSampler(both.tables)
    both.draw()
    assert both.drawn_or_why_not() == kernels == [columns.NAN, columns.NAN, columns.EMPTY]
