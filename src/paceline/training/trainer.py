"""Trainer: one network, its optimiser and where it stands. Everything drawn in a step follows from the seed and the
step's number, so that a run which goes on from a checkpoint computes the very same."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import nn

from paceline.errors import ConfigError
from paceline.models.heads.config import HeadConfig
from paceline.training.acceptance import DEPTHS, Acceptance
from paceline.training.options import TrainOptions
from paceline.training.pool import Pool, anchor_count
from paceline.training.target import Batch, States, Target

LOWEST = 0.03
"""Of the learning rate, at the end."""


class Network(Protocol):
    """A head that learns. An nn.Module besides."""

    config: HeadConfig
    slots: int
    """Tokens that it drafts in a row."""

    def learn(self, batch: Batch, states: States, drawn: torch.Generator, count: int) -> dict[str, torch.Tensor]:
        """Add to the gradients; what is returned is reported: "loss", and "accepted" [depth], the share that the target
        would accept of each token."""
        ...

    def runs(self, batch: Batch, states: States) -> torch.Tensor:
        """[B, T]: drafted tokens in a row that are the text's, with each place as the newest token."""
        ...


class Trainer:
    def __init__(self, options: TrainOptions, target: Target, network: Any, pool: Pool) -> None:
        self.options = options
        self.target = target
        self.network: Any = network.to(target.device)
        self.pool = pool
        matrices = [one for one in network.parameters() if one.dim() > 1]
        others = [one for one in network.parameters() if one.dim() <= 1]
        self.optimizer = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": 0.01}, {"params": others, "weight_decay": 0.0}], lr=options.lr,
            betas=(0.9, 0.95), fused=target.device.type == "cuda")
        self.average = [one.detach().clone() for one in network.parameters()] if options.ema else None
        self.step = 0
        self.tokens = 0
        """Of answers, learned from so far."""
        self._drawn = torch.Generator(device=target.device)

    def train_step(self, progress: float) -> dict[str, torch.Tensor]:
        """`progress`: share of the way to the end, for the learning rate."""
        texts = self.pool.next()
        batch = self.target.batch(texts)
        count = anchor_count(texts, self.options.anchors)
        self._drawn.manual_seed((self.options.seed << 32) + self.step)
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate(progress)
        try:
            states = self.target.states(batch)
            with self._narrow():
                told: dict[str, torch.Tensor] = self.network.learn(batch, states, self._drawn, count)
        except torch.OutOfMemoryError:
            raise ConfigError("A step does not fit into the device's memory: lower --batch-tokens, --anchors or "
                              "--target-rows.") from None
        told["norm"] = nn.utils.clip_grad_norm_(self.network.parameters(), 1.0)
        for one in self.network.parameters():
            if one.grad is not None:  # a step whose gradients are no numbers counts for nothing
                one.grad.nan_to_num_(0.0, 0.0, 0.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if self.average is not None:
            with torch.no_grad():
                decay = min(self.options.ema, (1 + self.step) / (10 + self.step))
                torch._foreach_lerp_(self.average, list(self.network.parameters()), 1.0 - decay)
        self.step += 1
        self.tokens += batch.answer_tokens
        return told

    def rate(self, progress: float) -> float:
        start = min(1.0, (self.step + 1) / max(1, self.options.warmup))
        fall = 0.5 * (1.0 + math.cos(math.pi * min(1.0, max(0.0, progress))))
        return self.options.lr * start * (LOWEST + (1.0 - LOWEST) * fall)

    def _narrow(self) -> AbstractContextManager[Any]:
        """Products in 16 bits where the target's are."""
        if self.target.dtype == torch.float32:
            return nullcontext()
        return torch.autocast(self.target.device.type, self.target.dtype)

    def measure(self, held_out: list[Batch]) -> list[Acceptance]:
        """Acceptance on texts that nothing was learned from, with the averaged weights where there are any."""
        slots = self.network.slots
        found = [Acceptance(depth) for depth in DEPTHS if depth <= slots] or [Acceptance(slots)]
        kept = self._swap_average()
        try:
            for batch in held_out:
                states = self.target.states(batch)
                with self._narrow():
                    runs = self.network.runs(batch, states).cpu().numpy()
                for row, prompt, length in zip(runs, batch.prompts.tolist(), batch.lengths.tolist()):
                    for one in found:
                        one.replay(row, prompt, length)
        finally:
            self._restore(kept)
        return found

    def weights(self) -> dict[str, torch.Tensor]:
        """By their names, float32: the averaged ones where there are any."""
        kept = self._swap_average()
        try:
            found: dict[str, torch.Tensor] = self.network.exported()
            return found
        finally:
            self._restore(kept)

    @torch.no_grad()
    def _swap_average(self) -> list[torch.Tensor] | None:
        if self.average is None:
            return None
        kept = [one.detach().clone() for one in self.network.parameters()]
        for one, average in zip(self.network.parameters(), self.average):
            one.copy_(average)
        return kept

    @torch.no_grad()
    def _restore(self, kept: list[torch.Tensor] | None) -> None:
        for one, before in zip(self.network.parameters(), kept or []):
            one.copy_(before)

    def begin_from(self, tensors: dict[str, torch.Tensor]) -> None:
        """Weights of another head of the same shape."""
        self.network.take(tensors)
        with torch.no_grad():
            for average, one in zip(self.average or [], self.network.parameters()):
                average.copy_(one)

    def calibrate(self) -> None:
        """Once, before the first step, on some of the texts."""
        batch = self.target.batch(self.pool.texts[:max(1, min(64, self.target.rows // 512))])
        self.network.calibrate(self.target.states(batch).taps[batch.answers])

    def state(self) -> dict[str, Any]:
        return {"step": self.step, "tokens": self.tokens, "network": self.network.state_dict(),
                "optimizer": self.optimizer.state_dict(), "average": self.average, "pool": self.pool.state()}

    def restore(self, state: dict[str, Any]) -> None:
        self.step, self.tokens = state["step"], state["tokens"]
        self.network.load_state_dict(state["network"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.average = state["average"]
        self.pool.restore(state["pool"])
