"""train(): from options to a head on disk."""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from paceline.engine.build import choose_device
from paceline.errors import ConfigError
from paceline.llm import LLM
from paceline.models.load.opening import open_checkpoint
from paceline.models.load.resolve import resolve
from paceline.models.registry import read_config
from paceline.training import checkpoints, report, vocabulary, written
from paceline.training.acceptance import summary
from paceline.training.generate import AnswerMaker, Order
from paceline.training.interrupts import Stop, watched
from paceline.training.jobs import Jobs, encoder, make_prompts
from paceline.training.loss import Judge, Weights
from paceline.training.networks.build import build_network
from paceline.training.networks.draft import DraftModel, begin_like
from paceline.training.networks.parts import HeadModule
from paceline.training.options import TrainOptions
from paceline.training.pool import Pool
from paceline.training.progress import Log, line
from paceline.training.prompts import read_prompts
from paceline.training.shape import choose_taps, draft_shape, head_config
from paceline.training.shards import Shards, Text, make_folder, replace_file
from paceline.training.target import Batch, Target
from paceline.training.trainer import Trainer

SELF_MADE = "self-made.jsonl"
TURN = 5.0
"""Seconds of making answers, then of training, in turn."""
FIRST_SHARE = 0.3
"""Of the time: then training begins with what answers there are."""


@dataclass(frozen=True)
class News:
    """What a run tells while it goes on."""

    stage: str
    """"rehearsal", "answers", "training" or "measured"."""
    share: float
    """Of the whole that is done."""
    text: str


Show = Callable[[News], None]


class Interrupted(Exception):
    """Asked to stop; what there is has been saved."""


def train(options: TrainOptions, show: Show) -> dict[str, Any]:
    """The report. Goes on from the checkpoint in --out where there is one."""
    options.check()
    prompts = read_prompts(options.data)
    make_folder(options.out)
    with watched() as stop:
        run = Run(options, prompts, show, stop)
        try:
            return run.whole()
        finally:
            run.close()


@dataclass
class Run:
    options: TrainOptions
    prompts: list[str]
    show: Show
    stop: Stop
    begin: float = field(default_factory=time.monotonic)
    before: float = 0.0
    """Seconds of the runs that this one goes on from."""
    curve: list[dict[str, Any]] = field(default_factory=list)
    measured: list[dict[str, Any]] = field(default_factory=list)
    maker: Any = None

    # ---------------------------------------------------------------- the whole of it

    def whole(self) -> dict[str, Any]:
        options = self.options
        device = choose_device(options.device)
        self.compiles = device.type == "cuda" and options.compile == "auto"
        self.path = resolve(options.model)
        with open_checkpoint(self.path) as checkpoint:
            context = read_config(checkpoint.config).context
        self.llm = LLM(
            options.model, device=str(device), dtype=options.dtype, speculation=None, heads=(),
            enable_prefix_caching=False,
            kernels="auto" if device.type == "cuda" else "eager",
            max_model_len=min(options.prompt_tokens + options.new_tokens, context),
            max_num_seqs=options.concurrent or (512 if device.type == "cuda" else 16),
            gpu_memory_utilization=0.5)  # the other half is for training
        shape = self.llm.engine.model.config
        rows = max(options.target_rows, options.prompt_tokens + options.new_tokens + 32)
        self.target = Target(self.llm, choose_taps(options, shape), rows, self.compiles)
        saved = checkpoints.load(options.out, options.network_settings(), self.target.device)
        begun = self._begun() if saved is None else None
        if not options.self_made or (options.out / "data" / SELF_MADE).exists():
            self._order()
        if device.type == "cuda":
            self.rehearse()
        if self.maker is None:
            self._order()  # the target has prompts to make first
        pool = Pool(options.seed, options.batch_tokens, self.target.padded)
        pool.add(list(self.learned.shards.read()))
        if saved is not None:
            pool.check(saved["pool"])
        self._first_answers(pool)
        trainer = self._trainer(pool, saved, begun)
        self._loop(trainer)
        if self.stop.raised:
            self._keep(trainer)
            raise Interrupted(f"Interrupted at step {trainer.step}; {options.out / checkpoints.NAME} is written: the "
                              "same command goes on from there.")
        return self._finish(trainer)

    def rehearse(self) -> None:
        """A step on invented texts as long as any will be, and one on as many short ones as a batch can have: what
        cannot work fails now, not when all the answers have been made, and what is compiled is compiled."""
        options, shape, target = self.options, self.llm.engine.model.config, self.target
        longest = min(options.prompt_tokens + options.new_tokens, shape.context)
        drawn = np.random.default_rng(0)
        count = shape.vocab_size if options.kind == "draft" else min(options.draft_vocab, shape.vocab_size)
        trainer: Trainer | None = None
        for length in (longest, min(longest, target.padded(1))):
            begin = time.monotonic()
            prompt = max(1, length - options.new_tokens)
            texts = [Text(place, drawn.integers(0, shape.vocab_size, length).astype(np.int32), prompt)
                     for place in range(max(1, options.batch_tokens // target.padded(length)))]
            pool = Pool(options.seed, options.batch_tokens, target.padded)
            pool.add(texts)
            if trainer is None:
                trainer = Trainer(options, target, self._network(np.arange(count), 0), pool)
                trainer.calibrate()
                trainer.measure(self._batches(texts[:4]))
            trainer.pool = pool
            if not torch.isfinite(trainer.train_step(0.0)["loss"]):  # which also waits for the device
                raise ConfigError("The loss of a first trial step is no number: the target's states are not finite.")
            memory = f", {torch.cuda.max_memory_allocated() / 2 ** 30:.1f} GiB of memory at most" \
                if target.device.type == "cuda" else ""
            self.show(News("rehearsal", 0.0, f"a step on {len(texts)} texts of {length} tokens works: "
                                             f"{time.monotonic() - begin:.1f} s{memory}"))

    def close(self) -> None:
        if self.maker is not None:
            self.maker.close()

    @property
    def elapsed(self) -> float:
        return self.before + time.monotonic() - self.begin

    # ---------------------------------------------------------------- texts

    def _order(self) -> None:
        """Held-out prompts are answered first, the others while there is time."""
        options, folder = self.options, self.options.out / "data"
        if options.self_made:
            self.prompts = list(dict.fromkeys([*self.prompts, *self._self_made(folder)]))
        count = min(options.held_out, len(self.prompts) // 4)
        if count < 1:
            raise ConfigError(f"{len(self.prompts)} prompts are too few to learn from: give at least 4.")
        order = np.random.default_rng([options.seed, 3]).permutation(len(self.prompts))
        encode, vocab = encoder(self.llm), self.llm.engine.model.config.vocab_size
        digest = hashlib.sha256(json.dumps(self.prompts).encode()).hexdigest()
        settings = options.data_settings() | {"prompts": digest, "revision": self.llm.engine.revision}

        def jobs(places: np.ndarray) -> Jobs:
            return Jobs([self.prompts[place] for place in places], encode, options.seed, options.temperatures,
                        options.prompt_tokens)

        self.held = Order(jobs(order[:count]), Shards(folder / "held_out", settings, vocab), 0, count, greedy=True)
        last = options.first_job + (options.answers or options.samples * (len(order) - count))
        self.learned = Order(jobs(order[count:]), Shards(folder / "texts", settings, vocab), options.first_job, last)
        self.maker = AnswerMaker(self.llm, [self.held, self.learned], options.new_tokens)

    def _self_made(self, folder: Path) -> list[str]:
        path = folder / SELF_MADE
        if path.exists():
            return read_prompts([path])
        self.show(News("answers", 0.0, f"{self.options.self_made} prompts by the target itself"))
        prompts = make_prompts(self.llm, self.options.self_made, self.options.seed, self.options.prompt_tokens)
        make_folder(folder)
        text = "".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts)
        replace_file(path, lambda beside: beside.write_text(text, encoding="utf-8"))
        return prompts

    def _batches(self, texts: list[Text]) -> list[Batch]:
        ordered = sorted(texts, key=lambda text: len(text.tokens))
        size = max(1, min(16, self.target.rows // len(ordered[-1].tokens)))
        return [self.target.batch(ordered[begin:begin + size]) for begin in range(0, len(ordered), size)]

    def _first_answers(self, pool: Pool) -> None:
        """So many that the draft vocabulary can be chosen, or what there are when time presses; all of them, where
        nobody counts minutes."""
        timed = self.options.minutes is not None
        wanted = self.options.first_answers if timed else math.inf
        while not self.maker.finished and (len(pool.texts) < wanted or not self.held.finished):
            if timed and self._share(0) >= FIRST_SHARE and pool.texts and self.held.finished:
                break
            if timed and self._share(0) >= 1.0:
                raise self._too_short(len(pool.texts))
            self._answer(pool)
            if self.stop.raised:
                raise Interrupted(f"Interrupted; the answers so far are in {self.options.out / 'data'}: the same "
                                  "command goes on from there.")
        held_out = [text for text in self.held.shards.read() if text.answer > 2]
        if not pool.texts or not held_out:
            raise ConfigError("The prompts got no answers to learn from: raise --prompt-tokens and --new-tokens, or "
                              "give other prompts.")
        self.held_out = self._batches(held_out)

    def _too_short(self, texts: int) -> ConfigError:
        return ConfigError(f"{self.options.minutes:g} minutes were over before the first step ({texts:,} answers were "
                           f"made, and are kept in {self.options.out / 'data'}), so no head is written: give more "
                           "--minutes, or fewer --first-answers and --held-out.")

    def _answer(self, pool: Pool) -> None:
        """One turn."""
        end = time.monotonic() + TURN
        _, texts = self.maker.run(lambda: self.stop.raised or time.monotonic() > end)
        pool.add(texts)
        self.show(News("answers", self._share(0), f"{len(pool.texts):,} answers, {self.generated_rate:,.0f} tokens/s"))

    @property
    def generated_rate(self) -> float:
        return float(self.maker.tokens / max(self.maker.seconds, 1e-6))

    # ---------------------------------------------------------------- learning

    def _begun(self) -> written.Begun | None:
        """The head of --init, which must be of the shape that is trained."""
        if self.options.init is None:
            return None
        begun = written.read(self.options.init, self.options.kind, self.llm.engine.model.config)
        self._network(begun.ids, begun.mask).take(begun.tensors)
        return begun

    def _trainer(self, pool: Pool, saved: dict[str, Any] | None, begun: written.Begun | None) -> Trainer:
        options, engine = self.options, self.llm.engine
        vocab, tokenizer = engine.model.config.vocab_size, engine.tokenizer
        assert tokenizer is not None
        if saved is not None:
            ids, mask = np.array(saved["ids"], np.int64), saved["mask"]
        elif begun is not None:
            ids, mask = begun.ids, begun.mask
        else:
            size = vocab if options.kind == "draft" else options.draft_vocab
            ids = vocabulary.choose(pool.texts, vocab, size)
            mask = vocabulary.spare_token(pool.texts, vocab, tokenizer.special_ids, tokenizer.eos_ids)
        self.ids, self.mask = ids, mask
        self.coverage = vocabulary.coverage(pool.texts, vocab, ids)
        trainer = Trainer(options, self.target, self._network(ids, mask), pool)
        if saved is not None:
            trainer.restore(saved)
            self.before, self.curve, self.measured = saved["elapsed"], saved["curve"], saved["measured"]
            self.begin = time.monotonic()
        else:
            trainer.calibrate()
            if begun is not None:
                trainer.begin_from(begun.tensors)
        return trainer

    def _network(self, ids: np.ndarray, mask: int | None) -> HeadModule:
        options, engine = self.options, self.llm.engine
        tokenizer = None if engine.tokenizer is None else engine.tokenizer.fingerprint()
        judge = Judge(self.target, torch.from_numpy(ids), Weights(*options.loss_weights), self.compiles)
        torch.manual_seed(options.seed)
        if options.kind == "draft":
            model = DraftModel(draft_shape(options, engine.model.config), judge, options.depth)
            begin_like(model, self.path, engine.model.config)
            return model
        config = head_config(options, engine.model.config, len(ids), mask, tokenizer, options.model or "default")
        return build_network(config, judge)

    def _share(self, step: int) -> float:
        """Of the way to the end."""
        if self.options.minutes is not None:
            return self.elapsed / (60.0 * self.options.minutes)
        return step / (self.options.steps or 1)

    def _loop(self, trainer: Trainer) -> None:
        options = self.options
        next_measure, next_save = self.elapsed + options.evaluate_seconds / 4, self.elapsed + options.save_seconds
        turn = time.monotonic() + TURN
        log = self.log = Log(trainer)
        while self._share(trainer.step) < 1.0 and not self.stop.raised:
            if time.monotonic() > turn and self._wants_answers(trainer.step):
                pause = time.monotonic()
                self._answer(trainer.pool)
                turn = time.monotonic() + TURN * (1.0 - options.generate_share) / max(options.generate_share, 0.01)
                log.pause(time.monotonic() - pause)
            log.add(trainer.train_step(self._share(trainer.step)))
            if trainer.step % options.log_steps == 0:
                entry = log.entry(self.elapsed)
                if entry["lost_steps"] == entry["steps"]:
                    self._keep(trainer)
                    raise self._lost(trainer)
                self.curve.append(entry)
                self.show(News("training", self._share(trainer.step), line(entry)))
            if self.elapsed > next_measure:
                pause = time.monotonic()
                self._measure(trainer)
                next_measure = self.elapsed + options.evaluate_seconds
                log.pause(time.monotonic() - pause)
            if self.elapsed > next_save:
                pause = time.monotonic()
                self._keep(trainer)
                next_save = self.elapsed + options.save_seconds
                log.pause(time.monotonic() - pause)
        if trainer.step == 0 and not self.stop.raised:
            raise self._too_short(len(trainer.pool.texts))

    def _wants_answers(self, step: int) -> bool:
        return self.options.minutes is not None and not self.maker.finished \
            and self.options.generate_share > 0 and self._share(step) < self.options.generate_until

    def _measure(self, trainer: Trainer) -> dict[str, Any]:
        found = summary(trainer.measure(self.held_out))
        entry = {"step": trainer.step, "tokens": trainer.tokens, "seconds": round(self.elapsed, 1), **found}
        self.measured.append(entry)
        cycles = ", ".join(f"K {depth}: {value:.3f}" for depth, value in found["tokens_per_cycle"].items())
        shares = " ".join(f"{share:.2f}" for share in found["by_position"])
        self.show(News("measured", self._share(trainer.step), f"tokens a cycle, held-out: {cycles}; by position "
                                                              f"{shares}"))
        return entry

    def _keep(self, trainer: Trainer) -> dict[str, Any]:
        """Checkpoint, head and report as they are now; no head where nothing was learned yet."""
        self._save(trainer)
        if trainer.step > self.log.lost:
            self._write(trainer)
        found = self._report(trainer)
        report.write(self.options.out, found)
        return found

    def _save(self, trainer: Trainer) -> None:
        checkpoints.save(self.options.out, trainer.state() | {
            "settings": self.options.network_settings(), "ids": self.ids.tolist(), "mask": self.mask,
            "elapsed": self.elapsed, "curve": self.curve, "measured": self.measured})

    def _write(self, trainer: Trainer) -> None:
        config = trainer.network.config
        if self.options.kind == "draft":
            written.write_model(self.options.out, config.config(), trainer.weights(), self.path)
        else:
            written.write(self.options.out, config, trainer.weights(), self.ids)

    def _lost(self, trainer: Trainer) -> ConfigError:
        return ConfigError(f"Loss or gradients are no numbers any more at step {trainer.step}: begin again with a "
                           f"lower --lr and another --out. What was learned until then is in {self.options.out}.")

    def _finish(self, trainer: Trainer) -> dict[str, Any]:
        self._measure(trainer)
        found = self._keep(trainer)
        if trainer.step <= self.log.lost:
            raise self._lost(trainer)
        report.draw(self.options.out / "curves.png", found)
        return found

    def _report(self, trainer: Trainer) -> dict[str, Any]:
        options = self.options
        last = self.measured[-1] if self.measured else {"tokens_per_cycle": {}, "by_position": []}
        name = written.MODEL if options.kind == "draft" else written.NAME
        return {
            "kind": options.kind, "target": options.model or "default", "head": str(options.out / name),
            "parameters": sum(one.numel() for one in trainer.network.parameters()), "steps": trainer.step,
            "lost_steps": self.log.lost,
            "seconds": round(self.elapsed, 1), "texts": len(trainer.pool.texts),
            "answer_tokens": trainer.pool.answer_tokens, "tokens_learned_from": trainer.tokens,
            "generated_tokens_per_second": round(self.generated_rate, 1),
            "trained_tokens_per_second": round(self.log.rate, 1),
            "draft_vocabulary": len(self.ids), "coverage": round(self.coverage, 5),
            "tokens_per_cycle": last["tokens_per_cycle"], "by_position": last["by_position"],
            "settings": {name: str(value) for name, value in vars(options).items()},
            "curve": self.curve, "measured": self.measured}
