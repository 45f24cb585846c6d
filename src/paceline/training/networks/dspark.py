"""DSpark: a block of tokens in one pass, then a Markov head that knows the token before, and a confidence head.

A row of a block is the embedding of the anchor (the newest token) or of a mask token; it attends to the context, which
is made of the target's states of all tokens before the anchor, and to its whole block.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from paceline.models.heads.config import HeadConfig
from paceline.training.loss import Judge
from paceline.training.networks.parts import GatedMLP, HeadModule, Projections, RMSNorm, Rotation, TapProjection
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


class DSpark(HeadModule):
    def __init__(self, config: HeadConfig, judge: Judge) -> None:
        super().__init__(config)
        self._judge = judge
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
        """[B, A] anchors -> what the slots' logits are made of [B, A, K, h]."""
        context = self.hidden_norm(self.fc(states.taps))
        newest = self._judge.target.embed(batch.tokens.gather(1, anchors))
        masks = self._mask.expand(*anchors.shape, self.config.block_size - 1, -1)
        x = torch.cat([newest[:, :, None], masks], 2)
        for layer in self.layers:
            x = layer(x, context, anchors, self._rotate)
        out: torch.Tensor = self.norm(x)
        return out

    def learn(self, batch: Batch, states: States, drawn: torch.Generator, count: int) -> dict[str, torch.Tensor]:
        """Gradients of the loss at `count` anchors a text. Returns what to report."""
        device = batch.tokens.device
        anchors, there = draw_anchors(batch, count, drawn)
        places, tokens_before, valid = self._slots(batch, anchors)
        valid &= there[..., None]
        with torch.no_grad():
            final, normaliser = self._teacher(batch, states, places)
            steps = torch.exp(-torch.arange(self.config.block_size, device=device) / GAMMA)
            weight = (valid * steps).flatten()
            weight = weight / weight.sum().clamp(min=1e-6)
        hidden = self.hidden(batch, states, anchors).flatten(0, 2)
        before = tokens_before.flatten()
        markov = up = None
        if self.markov_head is not None:
            markov, up = self.markov_head.markov_w1(before).to(hidden.dtype), self.markov_head.markov_w2.weight
        loss, accepted = self._judge.loss(hidden, markov, up, final, normaliser, weight)
        confidence = hidden.new_zeros((), dtype=torch.float32)
        if self.confidence_head is not None:
            told = F.binary_cross_entropy_with_logits(self.confidence(hidden, markov), accepted.clamp(0, 1),
                                                      reduction="none")
            confidence = (told * weight).sum()
        (loss + self._judge.weights.confidence * confidence).backward()  # type: ignore[no-untyped-call]
        with torch.no_grad():
            share = (accepted.view(valid.shape) * valid).sum((0, 1)) / valid.sum((0, 1)).clamp(min=1)
        return {"loss": loss.detach(), "confidence": confidence.detach(), "accepted": share}

    def confidence(self, hidden: torch.Tensor, markov: torch.Tensor | None) -> torch.Tensor:
        """[N, h], [N, r] -> logits [N]."""
        assert self.confidence_head is not None
        seen = hidden if markov is None or not self.config.confidence_head_with_markov else \
            torch.cat([hidden, markov], -1)
        out: torch.Tensor = self.confidence_head.proj(seen)
        return out[:, 0].float()

    def _slots(self, batch: Batch, anchors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Of each slot [B, A, K]: the place whose state tells its token, the token there, and whether what it drafts is
        in the text."""
        places = anchors[..., None] + torch.arange(self.config.block_size, device=anchors.device)
        valid = places + 1 < batch.lengths[:, None, None]
        places = places.clamp(max=batch.tokens.shape[1] - 1)
        tokens = batch.tokens.gather(1, places.flatten(1)).view(places.shape)
        return places, tokens, valid

    def _teacher(self, batch: Batch, states: States, places: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The target's states at these places [N, h], and their normalisers [N], each place's computed once."""
        size, length = batch.tokens.shape
        width = states.final.shape[-1]
        answers = batch.answers.flatten()
        normaliser = torch.zeros(size * length, device=places.device)
        normaliser[answers] = self._judge.target.normalisers(states.final.reshape(-1, width)[answers])
        flat = (places + length * torch.arange(size, device=places.device)[:, None, None]).flatten()
        return states.final.reshape(-1, width)[flat], normaliser[flat]

    @torch.no_grad()
    def runs(self, batch: Batch, states: States, at_once: int = 64) -> torch.Tensor:
        """[B, T]: how many tokens drafted greedily with this place as the anchor are the text's, one after the other.
        What is drafted after a wrong token counts for nothing, so each slot may be told the text's."""
        size, length = batch.tokens.shape
        out = torch.zeros((size, length), dtype=torch.int64, device=batch.tokens.device)
        block = self.config.block_size
        ids = self._judge.ids
        for begin in range(0, length, at_once):
            anchors = torch.arange(begin, min(begin + at_once, length), device=out.device).expand(size, -1)
            _, before, valid = self._slots(batch, anchors)
            hidden = self.hidden(batch, states, anchors).flatten(0, 2)
            markov = up = None
            if self.markov_head is not None:
                markov, up = self.markov_head.markov_w1(before.flatten()), self.markov_head.markov_w2.weight
            after = (anchors[..., None] + 1 + torch.arange(block, device=out.device)).clamp(max=length - 1)
            wanted = batch.tokens.gather(1, after.flatten(1)).view(after.shape)
            drafted = ids[self._judge.best(hidden, markov, up)].view(wanted.shape)
            out[:, begin:begin + at_once] = ((drafted == wanted) & valid).cumprod(-1).sum(-1)
        return out


def draw_anchors(batch: Batch, count: int, drawn: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """[B, count] places of answers that a token follows, each at most once, and which of them are there [B, count]: a
    short answer has fewer."""
    places = torch.arange(batch.tokens.shape[1], device=batch.tokens.device)
    can = (places >= batch.prompts[:, None]) & (places + 1 < batch.lengths[:, None])
    keys = torch.rand(batch.tokens.shape, generator=drawn, device=batch.tokens.device)
    best, anchors = keys.masked_fill(~can, -1.0).topk(min(count, batch.tokens.shape[1]), dim=1)
    return anchors, best >= 0
