"""SlotHead: whatever drafts a row of tokens behind an anchor learns and is measured in the same way.

Slot j of an anchor a drafts token a + 1 + j. What the target would have said there follows from its state of token
a + j, and each slot may be told the text's tokens up to that one: what comes after a wrong draft counts for nothing.
"""

from __future__ import annotations

from abc import abstractmethod

import torch
import torch.nn.functional as F

from paceline.training.loss import Judge
from paceline.training.networks.parts import HeadModule, LayerShape
from paceline.training.target import Batch, States


class SlotHead(HeadModule):
    slots: int
    """Tokens that are drafted behind an anchor."""
    decay: float
    """Slot j counts decay ** j in the loss."""

    def __init__(self, config: LayerShape, judge: Judge, slots: int, decay: float) -> None:
        super().__init__(config)
        self._judge = judge
        self.slots, self.decay = slots, decay

    @abstractmethod
    def hidden(self, batch: Batch, states: States, anchors: torch.Tensor) -> torch.Tensor:
        """[B, A] anchors -> what the slots' logits are made of [B, A, K, h]."""

    def markov(self, before: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Of the tokens before slots [N]: W1 [N, r] and W2 [D, r], where there is a Markov head."""
        return None, None

    def confidence(self, hidden: torch.Tensor, markov: torch.Tensor | None) -> torch.Tensor | None:
        """[N, h], [N, r] -> logits [N] of being accepted, where that is told."""
        return None

    def learn(self, batch: Batch, states: States, drawn: torch.Generator, count: int) -> dict[str, torch.Tensor]:
        """Gradients of the loss at `count` anchors a text. Returns what to report."""
        anchors, there = draw_anchors(batch, count, drawn)
        places, tokens_before, valid = self._slots(batch, anchors)
        valid &= there[..., None]
        with torch.no_grad():
            index = valid.flatten().nonzero()[:, 0]  # the rest would cost as much and count for nothing
            final, normaliser = self._teacher(batch, states, places, index)
            weight = self.decay ** (index % self.slots)
            weight = weight / weight.sum().clamp(min=1e-6)
        hidden = self.hidden(batch, states, anchors).flatten(0, 2).index_select(0, index)
        markov, up = self.markov(tokens_before.flatten()[index])
        markov = None if markov is None else markov.to(hidden.dtype)
        loss, accepted = self._judge.loss(hidden, markov, up, final, normaliser, weight)
        confidence = hidden.new_zeros((), dtype=torch.float32)
        guess = self.confidence(hidden, markov)
        if guess is not None:
            lost = F.binary_cross_entropy_with_logits(guess, accepted.clamp(0, 1), reduction="none")
            confidence = (lost * weight).sum()
        (loss + self._judge.weights.confidence * confidence).backward()  # type: ignore[no-untyped-call]
        with torch.no_grad():
            every = accepted.new_zeros(valid.numel()).index_copy_(0, index, accepted).view(valid.shape)
            share = every.sum((0, 1)) / valid.sum((0, 1)).clamp(min=1)
        return {"loss": loss.detach(), "confidence": confidence.detach(), "accepted": share}

    def _slots(self, batch: Batch, anchors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Of each slot [B, A, K]: the place whose state tells its token, the token there, and whether what it drafts is
        in the text."""
        places = anchors[..., None] + torch.arange(self.slots, device=anchors.device)
        valid = places + 1 < batch.lengths[:, None, None]
        places = places.clamp(max=batch.tokens.shape[1] - 1)
        tokens = batch.tokens.gather(1, places.flatten(1)).view(places.shape)
        return places, tokens, valid

    def _teacher(self, batch: Batch, states: States, places: torch.Tensor,
                 index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The target's states at those of the places that `index` [N] names [N, h], and their normalisers [N], each
        place's computed once. Outside answers they are infinite: nothing is likely there."""
        size, length = batch.tokens.shape
        width = states.final.shape[-1]
        answers = batch.answers.flatten()
        normaliser = torch.full((size * length,), torch.inf, device=places.device)
        normaliser[answers] = self._judge.target.normalisers(states.final.reshape(-1, width)[answers])
        flat = (places + length * torch.arange(size, device=places.device)[:, None, None]).flatten()[index]
        return states.final.reshape(-1, width)[flat], normaliser[flat]

    @torch.no_grad()
    def runs(self, batch: Batch, states: States, at_once: int = 64) -> torch.Tensor:
        """[B, T]: how many tokens drafted greedily with this place as the anchor are the text's, one after the
        other."""
        size, length = batch.tokens.shape
        out = torch.zeros((size, length), dtype=torch.int64, device=batch.tokens.device)
        ids = self._judge.ids
        for begin in range(0, length, at_once):
            anchors = torch.arange(begin, min(begin + at_once, length), device=out.device).expand(size, -1)
            _, before, valid = self._slots(batch, anchors)
            hidden = self.hidden(batch, states, anchors).flatten(0, 2)
            markov, up = self.markov(before.flatten())
            after = (anchors[..., None] + 1 + torch.arange(self.slots, device=out.device)).clamp(max=length - 1)
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
