"""DSpark: a block of tokens in one pass, then a Markov head that knows the token before, and a confidence head.

A row of a block is the embedding of the anchor (the newest token) or of a mask token; it attends to the context, which
is made of the target's states of all tokens before the anchor, and to its whole block.
"""

from __future__ import annotations

import math

import torch
from torch import nn

from paceline.models.heads.config import HeadConfig
from paceline.training.loss import Judge
from paceline.training.networks.parts import GatedMLP, Projections, RMSNorm, Rotation, TapProjection
from paceline.training.networks.slots import SlotHead
from paceline.training.target import Batch, States

GAMMA = 4.0
"""Slot j of a block counts exp(-j / GAMMA) in the loss."""


class MarkovHead(nn.Module):
    """Low-rank logits of a token after another: W2 W1[token before]."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(config.vocab_size, config.markov_rank)
        self.markov_w2 = nn.Linear(config.markov_rank, config.draft_vocab_size, bias=False)


class ConfidenceHead(nn.Module):
    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.proj = nn.Linear(inputs, 1)


class BlockLayer(nn.Module):
    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.self_attn = Projections(config, config.hidden_size)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.mlp = GatedMLP(config)

    def forward(self, x: torch.Tensor, context: torch.Tensor, anchors: torch.Tensor, rotate: Rotation) -> torch.Tensor:
        """x [B, A, K, h], context [B, T, h], anchors [B, A]."""
        normed = self.input_layernorm(x)
        attention = self.self_attn
        places = torch.arange(context.shape[1], device=x.device).expand(len(x), -1)
        rows = anchors[..., None] + torch.arange(x.shape[2], device=x.device)
        mixed = attend(
            rotate(attention.queries(normed), rows),
            rotate(attention.keys(context), places), attention.values(context),
            rotate(attention.keys(normed), rows), attention.values(normed), anchors)
        x = x + attention.o_proj(mixed)
        out: torch.Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


def attend(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, own_keys: torch.Tensor, own_values: torch.Tensor,
           anchors: torch.Tensor) -> torch.Tensor:
    """q [B, A, K, H, d] over context [B, T, G, d] before the anchors [B, A] and over its block [B, A, K, G, d]
    -> [B, A, K, H * d]. Two sums under one softmax, so that the block's keys need not be laid beside the context's."""
    size, count, block, heads, dim = q.shape
    groups, length = keys.shape[2], keys.shape[1]
    shared = heads // groups
    rows = shared * block
    q = q.view(size, count, block, groups, shared, dim) * dim ** -0.5  # [B, A, K, G, R, d]
    by_group = q.permute(0, 3, 1, 4, 2, 5).reshape(size, groups, count * rows, dim)
    far = (by_group @ keys.permute(0, 2, 3, 1)).view(size, groups, count, rows, length)
    before = torch.arange(length, device=q.device) < anchors[:, None, :, None, None]
    far = far.float().masked_fill(~before, -torch.inf)
    by_block = q.permute(0, 1, 3, 4, 2, 5).reshape(size, count, groups, rows, dim)
    near = (by_block @ own_keys.permute(0, 1, 3, 4, 2)).float().transpose(1, 2)  # [B, G, A, R K, K]
    peak = torch.maximum(far.amax(-1, keepdim=True), near.amax(-1, keepdim=True)).detach()
    far, near = (far - peak).exp(), (near - peak).exp()
    total = far.sum(-1, keepdim=True) + near.sum(-1, keepdim=True)
    mixed = (far.to(q.dtype).flatten(2, 3) @ values.transpose(1, 2)).view(size, groups, count, rows, dim)
    mixed = mixed + (near.to(q.dtype).transpose(1, 2) @ own_values.permute(0, 1, 3, 2, 4)).transpose(1, 2)
    mixed = (mixed / total).to(q.dtype).view(size, groups, count, shared, block, dim)
    return mixed.permute(0, 2, 4, 1, 3, 5).reshape(size, count, block, heads * dim)


class DSpark(SlotHead):
    def __init__(self, config: HeadConfig, judge: Judge) -> None:
        super().__init__(config, judge, config.block_size, math.exp(-1.0 / GAMMA))
        target = judge.target
        self._rotate = Rotation(config, target.rows + config.block_size, target.device)
        self._mask = target.embed(torch.tensor([config.mask_token_id], device=target.device))
        self.fc = TapProjection(len(config.taps) * config.hidden_size, config.hidden_size)
        self.hidden_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.layers = nn.ModuleList(BlockLayer(config) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.markov_head = MarkovHead(config) if config.markov_rank else None
        seen = config.markov_rank if config.confidence_head_with_markov else 0
        self.confidence_head = ConfidenceHead(config.hidden_size + seen) if config.confidence_head else None
        self.initialise()
        with torch.no_grad():
            self.norm.weight.copy_(target.final_norm)
            if self.markov_head is not None:
                nn.init.normal_(self.markov_head.markov_w1.weight, std=config.markov_rank ** -0.5)
                nn.init.zeros_(self.markov_head.markov_w2.weight)
            if self.confidence_head is not None:
                nn.init.zeros_(self.confidence_head.proj.weight)

    def hidden(self, batch: Batch, states: States, anchors: torch.Tensor) -> torch.Tensor:
        context = self.hidden_norm(self.fc(states.taps))
        newest = self._judge.target.embed(batch.tokens.gather(1, anchors))
        masks = self._mask.expand(*anchors.shape, self.config.block_size - 1, -1)
        x = torch.cat([newest[:, :, None], masks], 2)
        for layer in self.layers:
            x = layer(x, context, anchors, self._rotate)
        out: torch.Tensor = self.norm(x)
        return out

    def markov(self, before: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        if self.markov_head is None:
            return None, None
        return self.markov_head.markov_w1(before), self.markov_head.markov_w2.weight

    def confidence(self, hidden: torch.Tensor, markov: torch.Tensor | None) -> torch.Tensor | None:
        if self.confidence_head is None:
            return None
        seen = hidden if markov is None or not self.config.confidence_head_with_markov else \
            torch.cat([hidden, markov], -1)
        out: torch.Tensor = self.confidence_head.proj(seen)
        return out[:, 0].float()
