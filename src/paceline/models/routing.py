"""Routers that know more than a softmax: experts in groups, sigmoid scores, a correction that balances the load."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from paceline.kernels.interface import Kernels
from paceline.kernels.reference.ordered import exp, ordered_sum


@dataclass(frozen=True, slots=True)
class RoutingRule:
    """How `chosen` experts of a row are found and weighed.

    Experts may lie in `groups` of equal size: the `kept` groups with the best sum over their `sample` best experts are
    looked at, the others are not. Weights are the experts' scores, scaled so that they sum up to one where `normalise`,
    then times `scale`.
    """

    chosen: int
    sigmoid: bool = False
    """Scores are sigmoids of the logits, not their softmax."""
    groups: int = 1
    kept: int = 1
    sample: int = 1
    normalise: bool = False
    scale: float = 1.0


class GroupedRouter:
    """Rows to experts by a rule. Scores are float32 whatever the model computes in: a rounded one could send a row to
    another expert. Everything it sums, it sums in a fixed order, so it suits every backend."""

    def __init__(self, weight: torch.Tensor, correction: torch.Tensor | None, rule: RoutingRule) -> None:
        """weight [E, h] and correction [E] float32; the correction decides who is chosen, never what they weigh."""
        self.weight = weight
        self.correction = correction
        self.rule = rule

    def __call__(self, x: torch.Tensor, kernels: Kernels) -> tuple[torch.Tensor, torch.Tensor]:
        """[N, h] -> weights [N, chosen] float32 and expert ids [N, chosen] int64."""
        return self.route(kernels.linear(x.float(), self.weight).contiguous())

    def route(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The same from the logits [N, E]."""
        rule = self.rule
        if rule.sigmoid:
            scores = 1.0 / (1.0 + exp(-logits))
        else:
            scores = exp(logits - logits.amax(-1, keepdim=True))
            scores = scores / ordered_sum(scores)[:, None]
        ranked = scores if self.correction is None else scores + self.correction
        if rule.groups > 1:
            ranked = self._among_the_best_groups(ranked)
        ids = best(ranked, rule.chosen)
        weights = scores.gather(1, ids)
        if rule.normalise:
            weights = weights / (ordered_sum(weights)[:, None] + 1e-20)
        return weights * rule.scale, ids

    def _among_the_best_groups(self, ranked: torch.Tensor) -> torch.Tensor:
        rule = self.rule
        by_group = ranked.view(ranked.shape[0], rule.groups, -1)
        sampled = ordered_sum(by_group.gather(2, best(by_group, rule.sample)))
        left_out = torch.ones_like(sampled, dtype=torch.bool).scatter_(1, best(sampled, rule.kept), False)
        return by_group.masked_fill(left_out[..., None], -torch.inf).flatten(1)


def best(scores: torch.Tensor, count: int) -> torch.Tensor:
    """Places of the `count` highest along the last axis, highest first; a stable sort gives ties to the lowest."""
    return torch.sort(scores, dim=-1, descending=True, stable=True).indices[..., :count]
