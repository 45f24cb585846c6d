"""train(): from options to a head on disk."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from paceline.engine.build import choose_device
from paceline.llm import LLM
from paceline.models.load.opening import open_checkpoint
from paceline.models.load.resolve import resolve
from paceline.models.registry import read_config
from paceline.training import checkpoints, vocabulary, written
from paceline.training.clock import Clock
from paceline.training.factory import Factory
from paceline.training.given import GivenTexts, OtherRun
from paceline.training.interrupts import Interrupted, Stop, watched
from paceline.training.jobs import identity
from paceline.training.learning import Learning
from paceline.training.memory import TRAINING, Engines, divide_card
from paceline.training.news import News, Show
from paceline.training.options import TrainOptions
from paceline.training.pool import Pool
from paceline.training.prompts import Prompt, read_prompts
from paceline.training.prune import prune, write_pruned
from paceline.training.rehearsal import rehearse
from paceline.training.shape import choose_taps, shaped_like
from paceline.training.shards import make_folder
from paceline.training.source import Source
from paceline.training.supply import SELF_MADE, Supply, self_made
from paceline.training.target import Batch, Target
from paceline.training.trainer import Trainer
from paceline.training.written import Begun

FEWEST = 64
"""Answers at once that the parent has room for even where workers make most of them."""


def train(options: TrainOptions, show: Show) -> dict[str, Any]:
    """The report. Goes on from the checkpoint in --out where there is one. A script that calls this with workers needs
    the usual `if __name__ == "__main__":`, for each of them is a process that reads the script again."""
    options.check()
    other = None if options.texts is None else OtherRun.open(options.texts)
    if other is not None:
        options = other.fit(options)
    prompts = read_prompts(options.data)
    make_folder(options.out)
    if not options.learns:
        return write_pruned(options, prompts)
    with watched() as stop:
        run = Run(options, prompts, show, stop, other)
        try:
            return run.whole()
        finally:
            run.close()


@dataclass
class Run:
    options: TrainOptions
    prompts: list[Prompt]
    show: Show
    stop: Stop
    other: OtherRun | None = None
    """Whose texts are learned from, in place of new ones."""
    supply: Source | None = None

    def __post_init__(self) -> None:
        self.clock = Clock(self.options.minutes, self.options.steps)

    def whole(self) -> dict[str, Any]:
        options = self.options
        device = choose_device(options.device)
        path = resolve(options.model)
        at_once = options.concurrent or (512 if device.type == "cuda" else 16)
        workers = 0 if self.other is not None else options.workers_on(device.type)
        # Beside workers the parent answers the held-out prompts, and makes prompts; with given texts, nothing.
        own = min(at_once, max(options.held_out, options.self_made, FEWEST)) if workers else at_once
        own = own if self.other is None else 1
        engine = self._engine(path, device)
        # Before answers are made: what cannot be pruned is refused now.
        pruned = prune(path, self.prompts, options) if options.kind == "prune" else None
        self.llm = LLM(**engine, max_num_seqs=own, gpu_memory_utilization=1.0 - TRAINING)
        engines = divide_card(self.llm, at_once, workers)
        if engines.workers < workers:
            self.show(News("workers", 0.0, f"The card has memory for {engines.workers} of {workers} workers beside "
                                           "training."))
        begun = None
        if options.init is not None:
            begun = written.read(options.init, options.kind, self.llm.engine.model.config)
            options = self.options = shaped_like(options, begun.config)
        rows = max(options.target_rows, options.prompt_tokens + options.new_tokens + 32)
        compiles = device.type == "cuda" and options.compile == "auto"
        self.target = Target(self.llm, choose_taps(options, self.llm.engine.model.config), rows, compiles)
        self.factory = Factory(options, self.llm, self.target, path, compiles, pruned,
                               None if begun is None else begun.config)
        saved = checkpoints.load(options.out, options.network_settings(), self.target.device)
        if saved is not None:
            self.clock.go_on(saved["elapsed"])
            begun = None
        if begun is not None:
            self.factory.check(begun)
            behind = [what for what, there in (("embeddings", begun.config.own_embedding),
                                               ("output matrices", begun.config.own_lm_head)) if there]
            if behind:
                self.show(News("init", 0.0, f"{options.init} has {' and '.join(behind)} of its own: they are left "
                                            "behind, and what is trained drafts through the target's."))
        known = not options.self_made or (options.out / "data" / SELF_MADE).exists()
        engine |= {"max_num_seqs": at_once, "kv_blocks": engines.kv_blocks}
        if known:
            self._open(saved, engines, engine)
        if device.type == "cuda":
            rehearse(self.factory, self.show)
        if not known:  # the target has prompts to make first
            self._open(saved, engines, engine)
        supply = self.supply
        assert supply is not None
        held_out = self.target.batches(supply.first_answers(saved is not None))
        learning = self._learning(supply, held_out, saved, begun)
        learning.loop()
        supply.end()
        if self.stop.raised:
            learning.keep()
            raise Interrupted(f"Interrupted at step {learning.trainer.step}; {options.out / checkpoints.NAME} is "
                              "written: the same command goes on from there.")
        return learning.finish()

    def _engine(self, path: Path, device: torch.device) -> dict[str, Any]:
        """Arguments of every LLM of this run."""
        options = self.options
        with open_checkpoint(path) as checkpoint:
            context = read_config(checkpoint.config).context
        # Texts of one batch are short and many: computing one again is cheaper than host memory for each engine.
        return {"model": str(path.absolute()), "device": str(device), "dtype": options.dtype, "speculation": None,
                "heads": (), "enable_prefix_caching": False, "kernels": "auto" if device.type == "cuda" else "eager",
                "max_model_len": min(options.prompt_tokens + options.new_tokens, context), "preemption": "recompute"}

    def _open(self, saved: dict[str, Any] | None, engines: Engines, engine: dict[str, Any]) -> None:
        options = self.options
        pool = Pool(options.seed, options.batch_tokens, self.target.padded)
        if self.other is not None:
            self.supply = GivenTexts(options, pool, self.other, identity(self.llm))
            if saved is not None:
                pool.check(saved["pool"])
            return
        if options.self_made:
            self.prompts = list(dict.fromkeys([*self.prompts, *self_made(options, self.llm, self.show)]))
        self.supply = supply = Supply(options, self.llm, self.prompts, pool, self.clock, self.show, self.stop)
        if saved is not None:
            pool.check(saved["pool"])
        supply.begin(engines.workers, engine)

    def _learning(self, supply: Source, held_out: list[Batch], saved: dict[str, Any] | None,
                  begun: Begun | None) -> Learning:
        options, engine, pool = self.options, self.llm.engine, supply.pool
        vocab, tokenizer = engine.model.config.vocab_size, engine.tokenizer
        assert tokenizer is not None
        if saved is not None:
            ids, mask = np.array(saved["ids"], np.int64), saved["mask"]
        elif begun is not None:
            ids, mask = begun.ids, begun.mask
        else:
            size = vocab if options.makes_model else options.draft_vocab
            ids = vocabulary.choose(pool.texts, vocab, size)
            mask = vocabulary.spare_token(pool.texts, vocab, tokenizer.special_ids, tokenizer.eos_ids)
        coverage = vocabulary.coverage(pool.texts, vocab, ids)
        trainer = Trainer(options, self.target, self.factory.network(ids, mask), pool)
        curve: list[dict[str, Any]] = []
        measured: list[dict[str, Any]] = []
        if saved is not None:
            trainer.restore(saved)
            curve, measured = saved["curve"], saved["measured"]
            self.clock.go_on(saved["elapsed"])
        else:
            trainer.calibrate()
            if begun is not None:
                trainer.begin_from(begun.tensors)
        return Learning(self.factory, supply, trainer, held_out, ids, mask, coverage, self.clock, self.show, self.stop,
                        curve, measured)

    def close(self) -> None:
        if self.supply is not None:
            self.supply.close()
