"""Learning: steps until the end, what is measured and kept on the way, and the report."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from paceline.errors import ConfigError
from paceline.training import checkpoints, report, written
from paceline.training.acceptance import summary
from paceline.training.clock import Clock
from paceline.training.factory import Factory
from paceline.training.interrupts import Stop
from paceline.training.news import News, Show
from paceline.training.progress import Log, line
from paceline.training.source import Source
from paceline.training.target import Batch
from paceline.training.trainer import Trainer


@dataclass
class Learning:
    factory: Factory
    supply: Source
    trainer: Trainer
    held_out: list[Batch]
    ids: np.ndarray
    """Tokens that the head drafts."""
    mask: int | None
    coverage: float
    """Share of the answers' tokens that are among `ids`."""
    clock: Clock
    show: Show
    stop: Stop
    curve: list[dict[str, Any]] = field(default_factory=list)
    measured: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.options = self.factory.options
        self.log = Log(self.trainer)

    @property
    def _share(self) -> float:
        return self.clock.share(self.trainer.step)

    def loop(self) -> None:
        options, trainer, clock, log = self.options, self.trainer, self.clock, self.log
        next_measure, next_save = clock.elapsed + options.evaluate_seconds / 4, clock.elapsed + options.save_seconds
        while self._share < 1.0 and not self.stop.raised:
            log.pause(self.supply.between_steps(trainer.step))
            log.add(trainer.train_step(self._share))
            if trainer.step % options.log_steps == 0:
                self._tell()
            if clock.elapsed > next_measure:
                pause = time.monotonic()
                self._measure()
                next_measure = clock.elapsed + options.evaluate_seconds
                log.pause(time.monotonic() - pause)
            if clock.elapsed > next_save:
                pause = time.monotonic()
                self.keep()
                next_save = clock.elapsed + options.save_seconds
                log.pause(time.monotonic() - pause)
        if trainer.step == 0 and not self.stop.raised:
            raise self.supply.too_short()

    def _tell(self) -> None:
        entry = self.log.entry(self.clock.elapsed)
        if self.supply.beside:
            entry |= {"texts": len(self.trainer.pool.texts), "generated_tokens_per_second": round(self.supply.rate, 1)}
        if entry["lost_steps"] == entry["steps"]:
            self.keep()
            raise self._lost()
        self.curve.append(entry)
        self.show(News("training", self._share, line(entry)))

    def _measure(self) -> None:
        found = summary(self.trainer.measure(self.held_out))
        self.measured.append({"step": self.trainer.step, "tokens": self.trainer.tokens,
                              "seconds": round(self.clock.elapsed, 1), **found})
        cycles = ", ".join(f"K {depth}: {value:.3f}" for depth, value in found["tokens_per_cycle"].items())
        shares = " ".join(f"{share:.2f}" for share in found["by_position"])
        self.show(News("measured", self._share, f"tokens a cycle, held-out: {cycles}; by position {shares}"))

    def keep(self) -> dict[str, Any]:
        """Checkpoint, head and report as they are now; no head where nothing was learned yet."""
        self.supply.flush()  # a checkpoint needs its texts
        checkpoints.save(self.options.out, self.trainer.state() | {
            "settings": self.options.network_settings(), "ids": self.ids.tolist(), "mask": self.mask,
            "elapsed": self.clock.elapsed, "curve": self.curve, "measured": self.measured})
        if self.trainer.step > self.log.lost:
            self._write()
        found = self._report()
        report.write(self.options.out, found)
        return found

    def _write(self) -> None:
        config, weights = self.trainer.network.config, self.trainer.weights()
        if self.options.makes_model:
            written.write_model(self.options.out, config.config(), weights, self.factory.path)
        else:
            written.write(self.options.out, config, weights, self.ids)

    def _lost(self) -> ConfigError:
        return ConfigError(f"Loss or gradients are no numbers any more at step {self.trainer.step}: begin again with a "
                           f"lower --lr and another --out. What was learned until then is in {self.options.out}.")

    def finish(self) -> dict[str, Any]:
        self._measure()
        found = self.keep()
        if self.trainer.step <= self.log.lost:
            raise self._lost()
        report.draw(self.options.out / "curves.png", found)
        return found

    def _report(self) -> dict[str, Any]:
        options, trainer = self.options, self.trainer
        last = self.measured[-1] if self.measured else {"tokens_per_cycle": {}, "by_position": []}
        name = written.MODEL if options.makes_model else written.NAME
        return {
            "kind": options.kind, "target": options.model or "default", "head": str(options.out / name),
            "parameters": sum(one.numel() for one in trainer.network.parameters()), "steps": trainer.step,
            "lost_steps": self.log.lost,
            "seconds": round(self.clock.elapsed, 1), "texts": len(trainer.pool.texts),
            "answer_tokens": trainer.pool.answer_tokens, "tokens_learned_from": trainer.tokens,
            "generated_tokens_per_second": round(self.supply.rate, 1),
            "trained_tokens_per_second": round(self.log.rate, 1),
            "draft_vocabulary": len(self.ids), "coverage": round(self.coverage, 5),
            "tokens_per_cycle": last["tokens_per_cycle"], "by_position": last["by_position"],
            "settings": {name: str(value) for name, value in vars(options).items()},
            "curve": self.curve, "measured": self.measured}
