"""How far a model's predictions are from a reference's on the same text: how often both would choose the same token,
and how much their probabilities differ. Perplexity hides either: errors of both signs cancel in it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch

from paceline.measure.perplexity import windows

TOP = 20
"""Tokens of the reference whose probabilities are compared: those that sampling would choose among."""


class Predictor(Protocol):
    """Whatever has logits: a Scorer, or another engine."""

    def predictions(self, tokens: list[int]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Some positions after others: logits [N, vocabulary] and the tokens [N] that came, over all but the first."""
        ...


@dataclass(frozen=True)
class Best:
    """The reference's most probable tokens at each position, best first."""

    ids: torch.Tensor
    """[positions, TOP]"""
    shares: torch.Tensor
    """[positions, TOP] float64: their log probabilities, made to sum to one among them."""

    @staticmethod
    def of(logits: torch.Tensor) -> Best:
        """logits [N, vocabulary]"""
        values, ids = logits.float().topk(min(TOP, logits.shape[-1]), -1)
        return Best(ids.cpu(), _shares(values))

    def __getitem__(self, positions: slice) -> Best:
        return Best(self.ids[positions], self.shares[positions])

    def compare(self, logits: torch.Tensor) -> tuple[int, float]:
        """Positions whose best token is the same, and the sum of KL(reference || these) over the positions."""
        theirs = _shares(logits.float().cpu().gather(1, self.ids))
        same = int((logits.argmax(-1).cpu() == self.ids[:, 0]).sum())
        return same, float((self.shares.exp() * (self.shares - theirs)).sum())


def _shares(logits: torch.Tensor) -> torch.Tensor:
    return torch.log_softmax(logits.double().cpu(), -1)


@dataclass(frozen=True)
class Judged:
    """What a model makes of a text."""

    perplexity: float
    best: Best
    """Of every position: a reference for others."""
    top1: float
    """Share of positions whose best token is the reference's."""
    kl: float
    """Mean over positions, in nats, of KL(reference || this) among the reference's TOP tokens."""


def judge(model: Predictor, tokens: list[int], window: int, reference: Best | None = None) -> Judged:
    """One pass over the text, every window with nothing before it. Without a reference the model is its own."""
    count = same = 0
    surprise = distance = 0.0
    found: list[Best] = []
    for logits, targets in _predictions(model, tokens, window):
        own = Best.of(logits)
        agreed, apart = (own if reference is None else reference[count:count + len(targets)]).compare(logits)
        surprise -= float(torch.log_softmax(logits, -1).gather(1, targets[:, None]).double().sum())
        count, same, distance = count + len(targets), same + agreed, distance + apart
        found.append(own)
    best = Best(torch.cat([part.ids for part in found]), torch.cat([part.shares for part in found]))
    return Judged(math.exp(surprise / count), best, same / count, distance / count)


def _predictions(model: Predictor, tokens: list[int], window: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    for part in windows(tokens, window):
        yield from model.predictions(part)
