"""How far a drafted distribution is from the target's, with its gradients, never holding more than a piece of the
logits.

p is the target's distribution over its whole vocabulary; q the drafter's, over the same or over a part of it alone. The
share of drafts that verification accepts is the sum of min(p, q) = 1 - TV(p, q).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from paceline.training.compiled import Compiled
from paceline.training.target import Target, wide_product

PIECE_BYTES = 256 << 20
"""Of float32 logits that are held at once, of each kind."""


@dataclass(frozen=True)
class Weights:
    """What the parts of the loss count."""

    cross_entropy: float
    l1: float
    confidence: float = 1.0


class Judge:
    """Compares drafts with the target. `rows`: the target's head for the tokens `ids` [D], in that order; frozen."""

    def __init__(self, target: Target, ids: torch.Tensor, weights: Weights, compiles: bool,
                 whole: bool = False) -> None:
        """`whole`: over the target's whole vocabulary, the tokens of `ids` first."""
        self.target = target
        self.ids = ids.to(target.device)
        if whole:
            others = torch.ones(len(target.head), dtype=torch.bool, device=target.device)
            others[self.ids] = False
            self.ids = torch.cat([self.ids, others.nonzero()[:, 0]])
        self.rows = target.head.index_select(0, self.ids)
        self.weights = weights
        self._compare = Compiled.of(compare, compiles)
        self.piece = max(16, PIECE_BYTES // (4 * len(self.ids)))

    def loss(self, hidden: torch.Tensor, markov: torch.Tensor | None, up: torch.Tensor | None, final: torch.Tensor,
             normaliser: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Drafts from hidden [N, h] (and markov [N, r] through up, [r] for each of the first ids) against the target's
        final [N, h] with its normaliser [N]; weight [N]. -> (sum of weighted losses, share accepted [N])."""
        if markov is None or up is None:
            markov, up = hidden.new_zeros((len(hidden), 0)), hidden.new_zeros((len(self.rows), 0))
        up = self._padded(up)
        total, accepted = _Loss.apply(hidden, markov, up, final, normaliser, weight, self)  # type: ignore[no-untyped-call]
        return total, accepted

    def logits(self, hidden: torch.Tensor, markov: torch.Tensor | None, up: torch.Tensor | None) -> torch.Tensor:
        """[N, h] -> [N, D] float32; not to be differentiated."""
        out = wide_product(hidden.to(self.rows.dtype), self.rows)
        if markov is not None and up is not None:
            out += wide_product(markov.to(self.rows.dtype), self._padded(up).to(self.rows.dtype))
        return out

    def _padded(self, up: torch.Tensor) -> torch.Tensor:
        """A Markov head has nothing to say of tokens that it does not know."""
        return F.pad(up, (0, 0, 0, len(self.rows) - len(up)))

    def best(self, hidden: torch.Tensor, markov: torch.Tensor | None, up: torch.Tensor | None) -> torch.Tensor:
        """[N, h] -> [N] draft ids of the highest logits."""
        parts = [slice(begin, begin + self.piece) for begin in range(0, len(hidden), self.piece)]
        return torch.cat([self.logits(hidden[part], None if markov is None else markov[part], up).argmax(-1)
                          for part in parts])

    def pieces(self, inputs: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor,
                                                          torch.Tensor]:
        """Loss, share accepted, and the gradients of the loss by hidden, markov and up. Hidden and markov lie side by
        side, and so do the matrices they go through: one product, not two and their sum."""
        hidden, markov, up, final, normaliser, weight = inputs
        dtype, width = self.rows.dtype, hidden.shape[1]
        both = torch.cat([hidden.to(dtype), markov.to(dtype)], 1)
        matrix = torch.cat([self.rows, up.to(dtype)], 1)
        total = normaliser.new_zeros(())
        accepted = torch.empty_like(normaliser)
        by_both = torch.empty_like(both)
        by_up = torch.zeros_like(up, dtype=torch.promote_types(dtype, torch.float32))
        for begin in range(0, len(hidden), self.piece):
            part = slice(begin, begin + self.piece)
            own = both[part]
            count = len(own)
            logits = wide_product(own, matrix)
            teacher = self.target.capped(wide_product(final[part].to(dtype), self.rows))
            size, share = normaliser[part], weight[part]
            if count < self.piece and self._compare.compiles:  # one shape, compiled once
                short = self.piece - count
                logits, teacher = F.pad(logits, (0, 0, 0, short)), F.pad(teacher, (0, 0, 0, short))
                size, share = F.pad(size, (0, short)), F.pad(share, (0, short))
            losses, shares, slope = self._compare(logits, teacher, size, share, self.weights.cross_entropy,
                                                  self.weights.l1, dtype)
            slope = slope[:count]
            total += losses[:count].sum()
            accepted[part] = shares[:count]
            torch.mm(slope, matrix, out=by_both[part])
            by_up += slope.t() @ own[:, width:]
        return total, accepted, by_both[:, :width].to(hidden.dtype), by_both[:, width:].to(markov.dtype), by_up


def compare(logits: torch.Tensor, teacher: torch.Tensor, normaliser: torch.Tensor, weight: torch.Tensor,
            cross_entropy: float, l1: float, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """logits, teacher [N, D] float32 -> weighted losses [N], shares accepted [N], gradient by the logits [N, D].

    Of -sum p log q the gradient is q sum(p) - p; of sum |p - q| it is q (s - sum q s), s the sign of q - p."""
    log_q = torch.log_softmax(logits, -1)
    q, p = log_q.exp(), (teacher - normaliser[:, None]).exp()
    known = p.sum(-1, keepdim=True)
    sign = (q - p).sign()
    distance = (q - p).abs().sum(-1) + (1.0 - known[:, 0])
    losses = cross_entropy * -(p * log_q).sum(-1) + l1 * distance
    slope = cross_entropy * (q * known - p) + l1 * q * (sign - (q * sign).sum(-1, keepdim=True))
    return losses * weight, 1.0 - 0.5 * distance, (slope * weight[:, None]).to(dtype)


class _Loss(torch.autograd.Function):
    """The gradients are made along with the loss, piece by piece, so that logits need not be kept."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, markov: torch.Tensor, up: torch.Tensor, final: torch.Tensor,
                normaliser: torch.Tensor, weight: torch.Tensor, judge: Judge) -> tuple[torch.Tensor, torch.Tensor]:
        total, accepted, *slopes = judge.pieces([hidden, markov, up, final, normaliser, weight])
        ctx.save_for_backward(*slopes)
        ctx.mark_non_differentiable(accepted)
        return total, accepted

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        by_hidden, by_markov, by_up = ctx.saved_tensors
        return by_hidden * grads[0], by_markov * grads[0], by_up * grads[0], None, None, None, None
