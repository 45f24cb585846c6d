"""Agreement with a reference: what it says of equal models, and of distributions that can be computed by hand."""

from __future__ import annotations

import math

import pytest
import torch

from engine.tiny import VOCAB, tiny_model
from paceline.kernels.eager import EagerKernels
from paceline.measure.agreement import TOP, Best, judge
from paceline.measure.perplexity import Scorer, perplexity
from paceline.measure.rounding import RoundedKernels


def tokens_of(count: int) -> list[int]:
    return torch.randint(0, VOCAB, (count,), generator=torch.Generator().manual_seed(3)).tolist()


def test_a_model_agrees_with_itself():
    tokens = tokens_of(75)
    scorer = Scorer(tiny_model(), EagerKernels(), 30)
    reference = judge(scorer, tokens, 30)
    again = judge(scorer, tokens, 30, reference.best)
    assert (reference.top1, reference.kl) == (again.top1, again.kl) == (1.0, 0.0)
    assert again.perplexity == reference.perplexity == pytest.approx(perplexity(scorer, tokens, 30), 1e-9)
    assert len(reference.best.ids) == 29 + 29 + 14, "every position of a window but the last"


def test_rounding_is_seen_and_finer_rounding_is_nearer():
    tokens = tokens_of(75)
    reference = judge(Scorer(tiny_model(), EagerKernels(), 30), tokens, 30).best
    coarse, fine = (judge(Scorer(tiny_model(), RoundedKernels(size), 30), tokens, 30, reference) for size in (0, 8))
    assert 0 < fine.kl < coarse.kl
    assert 0 < coarse.top1 <= fine.top1 <= 1


def test_two_tokens_by_hand():
    """p = (3/4, 1/4) and q = (1/4, 3/4), then p = q: KL = ln 3 / 2 at the first position, nothing at the second."""
    low = torch.full((2, TOP), -math.inf)
    mine, theirs = low.clone(), low.clone()
    mine[:, :2] = torch.tensor([0.75, 0.25]).log()
    theirs[0, :2], theirs[1, :2] = torch.tensor([0.25, 0.75]).log(), torch.tensor([0.75, 0.25]).log()
    best = Best.of(mine[:, :2])
    assert best.ids.tolist() == [[0, 1], [0, 1]]
    same, distance = best.compare(theirs)
    assert same == 1
    assert distance == pytest.approx(math.log(3) / 2)


def test_only_the_reference_s_best_tokens_are_compared():
    """What the others get of the probability shows in neither figure, unless one of them becomes the best."""
    logits = torch.arange(2.0 * TOP).flip(0)[None].clone()
    best = Best.of(logits)
    assert best.ids.tolist() == [list(range(TOP))]
    lifted = logits.clone()
    lifted[0, TOP:] += 10.0
    same, distance = best.compare(lifted)
    assert (same, distance) == (1, pytest.approx(0.0, abs=1e-12))
    lifted[0, -1] = 1000.0
    assert best.compare(lifted)[0] == 0
