"""What steps told, summed up for a line of progress."""

from __future__ import annotations

import time
from typing import Any

import torch

from paceline.training.trainer import Trainer


class Log:
    """Sums what steps tell, on the device, and reads it now and then. What is no number is counted and left out."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._sums: dict[str, torch.Tensor] = {}
        self._finite: dict[str, torch.Tensor] = {}
        self._lost: torch.Tensor | None = None
        self._count = 0
        self._since, self._tokens = time.monotonic(), trainer.tokens
        self._seconds, self._all = 0.0, 0
        self._lost_before = 0

    def add(self, told: dict[str, torch.Tensor]) -> None:
        self._count += 1
        for name, value in told.items():
            finite = value.isfinite()
            value = value.masked_fill(~finite, 0.0)
            self._sums[name] = self._sums[name] + value if name in self._sums else value
            self._finite[name] = self._finite[name] + finite if name in self._finite else finite.long()
        lost = (~(told["loss"].isfinite() & told["norm"].isfinite())).long()
        self._lost = lost if self._lost is None else self._lost + lost

    def pause(self, seconds: float) -> None:
        """So much of the time was not spent on training."""
        self._since += seconds

    def entry(self, elapsed: float) -> dict[str, Any]:
        """Means over the steps since the last one."""
        told = {name: (value / self._finite[name].clamp(min=1)).tolist() for name, value in self._sums.items()}
        lost = self.lost - self._lost_before
        seconds, tokens = time.monotonic() - self._since, self._trainer.tokens - self._tokens
        self._seconds, self._all = self._seconds + seconds, self._all + tokens
        entry = {"step": self._trainer.step, "tokens": self._trainer.tokens, "seconds": round(elapsed, 2),
                 "lr": self._trainer.optimizer.param_groups[0]["lr"], "steps": self._count, "lost_steps": lost,
                 "tokens_per_second": round(tokens / max(seconds, 1e-6), 1), **told}
        self._lost_before += lost
        self._sums, self._finite, self._lost, self._count = {}, {}, None, 0
        self._since, self._tokens = time.monotonic(), self._trainer.tokens
        return entry

    @property
    def lost(self) -> int:
        """Steps whose loss or gradients were no numbers."""
        return self._lost_before + (0 if self._lost is None else int(self._lost))

    @property
    def rate(self) -> float:
        """Tokens a second, of all that was read."""
        return self._all / max(self._seconds, 1e-6)


def line(entry: dict[str, Any]) -> str:
    shares = " ".join(f"{share:.2f}" for share in entry["accepted"])
    lost = f", {entry['lost_steps']} of {entry['steps']} steps gave no numbers" if entry["lost_steps"] else ""
    answers = f", {entry['texts']:,} answers at {entry['generated_tokens_per_second']:,.0f} tokens/s" \
        if "texts" in entry else ""
    return (f"step {entry['step']}, {entry['tokens'] / 1e6:.2f} M tokens, {entry['tokens_per_second']:,.0f} tokens/s, "
            f"loss {entry['loss']:.4f}, accepted {shares}{answers}{lost}")
