"""Medusa and Hydra: small networks side by side, one for each token to be drafted, on the hidden state that the
target's head read last. Hydra's also see the tokens drafted so far."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from paceline.kernels.device.head_rounds import DraftSlot
from paceline.kernels.interface import Kernels
from paceline.kernels.layout import Layout
from paceline.models.heads.base import BaseHead
from paceline.models.heads.chain import FEATURES
from paceline.models.heads.config import HeadConfig
from paceline.models.heads.interface import Best, Draw, Opened, Pass, Plane, Planes, StoredRows
from paceline.models.heads.target import Target, head_rows
from paceline.models.heads.tensors import lm_heads
from paceline.models.layers import Linear, load_linear
from paceline.models.weight_source import WeightSource

MOST_AT_ONCE = 64
"""Rows of one product for all tokens to be drafted: more gain nothing by being together, and take memory."""


class Residual:
    """past(x) + silu(linear(x)), where nothing changes x on its way past unless its width has to change."""

    def __init__(self, linear: Linear, past: Linear | None) -> None:
        self.linear = linear
        self.past = past

    def __call__(self, x: torch.Tensor, kernels: Kernels) -> torch.Tensor:
        more = kernels.activate(self.linear(x, kernels).contiguous(), "silu")
        return (x if self.past is None else self.past(x, kernels)) + more


class StackedHead(BaseHead):
    """Keeps the hidden state of every token, and needs no rows of its own to draft."""

    def __init__(self, config: HeadConfig, weights: WeightSource, target: Target, target_ids: torch.Tensor | None,
                 max_model_len: int) -> None:
        self.sees_tokens = config.kind == "hydra"
        super().__init__(config, weights, target, target_ids)
        self.blocks = [[self._residual(weights, head, layer) for layer in range(config.num_layers)]
                       for head in range(config.heads)]
        self.outs = [self.lm_head] * config.heads
        if config.own_lm_head:
            self.outs = [load_linear(weights, [name], [config.draft_vocab_size], config.hidden_size, self.sees_tokens)
                         for name in lm_heads(config.kind, config.heads, config.num_layers)]

    def _load_head(self, config: HeadConfig, weights: WeightSource, ids: torch.Tensor | None) -> Linear:
        # Where each has one of its own nothing of the target's is copied.
        return Linear(self._target.head.weight) if config.own_lm_head else head_rows(self._target, ids)

    def _residual(self, weights: WeightSource, head: int, layer: int) -> Residual:
        name, hidden = f"{'hydra_mlp.' if self.sees_tokens else ''}{head}.{layer}", self.config.hidden_size
        wide = (2 + head) * hidden if self.sees_tokens and layer == 0 else hidden
        past = load_linear(weights, [f"{name}.res_connection"], [hidden], wide, True) if wide > hidden else None
        return Residual(load_linear(weights, [f"{name}.linear"], [hidden], wide, True), past)

    def planes(self, cache: torch.dtype, activations: torch.dtype) -> tuple[Plane, ...]:
        return (Plane(FEATURES, (1, self.config.hidden_size), activations),)

    def passes(self, depth: int) -> tuple[Pass, ...]:
        return ()

    def store(self, tapped: Mapping[int, torch.Tensor], rows: StoredRows, planes: Planes, kernels: Kernels) -> None:
        feature = kernels.norm(tapped[self.config.taps[0]], self._target.norm)
        kernels.store_keys(planes[FEATURES], rows.view.slots, feature[:, None])

    def open(self, opened: Opened, planes: Planes, kernels: Kernels) -> StackedRound:
        feature = planes[FEATURES].index_select(0, opened.before)[:, 0]
        return StackedRound(self, feature.to(self.embed(opened.anchors[:1]).dtype), opened.depth, kernels)


class StackedRound:
    """What a network says of its token is computed when it is asked for: Hydra's have to know the token before. Where
    none is seen and one matrix serves all, few rows are all asked in one product."""

    def __init__(self, head: StackedHead, feature: torch.Tensor, depth: int, kernels: Kernels) -> None:
        self._head, self._kernels = head, kernels
        self._seen = [feature]
        self._next = 0
        self._told: list[torch.Tensor] = []
        depth = min(depth, head.config.heads)
        if not head.sees_tokens and not head.config.own_lm_head and 0 < depth * len(feature) <= MOST_AT_ONCE:
            rows = torch.cat([self._state(index) for index in range(depth)])
            self._told = list(torch.split(head.lm_head(rows, kernels).float(), len(feature)))

    def logits(self, previous: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        head, index = self._head, self._next
        self._next += 1
        if self._told:
            return self._told[index].contiguous(), None
        if head.sees_tokens:
            self._seen.append(head.embed(previous))
        return head.outs[index](self._state(index), self._kernels).float().contiguous(), None

    def _state(self, index: int) -> torch.Tensor:
        x = torch.cat(self._seen, dim=-1)
        for block in self._head.blocks[index]:
            x = block(x, self._kernels)
        return x

    def slot(self, previous: torch.Tensor) -> DraftSlot:
        return DraftSlot(self.logits(previous)[0])

    def chain(self, previous: Sequence[int], least: Sequence[float],
              draws: Sequence[Draw] = ()) -> list[Best] | None:
        return None

    def fork(self, lines: torch.Tensor, layout: Layout | None) -> None:
        self._seen = [seen.index_select(0, lines) for seen in self._seen]
        self._told = [told.index_select(0, lines) for told in self._told]
