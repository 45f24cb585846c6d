"""Supply: the texts of a run, from prompts to the pool that is learned from. The only one that writes them to disk."""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from paceline.errors import ConfigError
from paceline.llm import LLM
from paceline.training.clock import Clock
from paceline.training.generate import AnswerMaker, Order
from paceline.training.interrupts import Interrupted, Stop
from paceline.training.jobs import Jobs, encoder, identity, make_prompts
from paceline.training.news import News, Show
from paceline.training.options import TrainOptions
from paceline.training.pool import Pool
from paceline.training.prompts import Prompt, read_prompts
from paceline.training.shards import Shards, Text, make_folder, replace_file
from paceline.training.worker import Work
from paceline.training.workers import PATIENCE, Workers

SELF_MADE = "self-made.jsonl"
TURN = 5.0
"""Seconds of making answers, then of training, in turn, where there are no workers."""
SHARD = 10.0
"""Seconds of workers' texts in a shard."""
WAIT = 0.25
"""Seconds until somebody who waits for texts looks whether it shall stop."""
FIRST_SHARE = 0.3
"""Of the time: then training begins with what answers there are."""


def self_made(options: TrainOptions, llm: LLM, show: Show) -> Sequence[Prompt]:
    """Prompts by the target itself, made once."""
    path = options.out / "data" / SELF_MADE
    if path.exists():
        return read_prompts([path])
    show(News("answers", 0.0, f"{options.self_made} prompts by the target itself"))
    prompts = make_prompts(llm, options.self_made, options.seed, options.prompt_tokens)
    make_folder(path.parent)
    text = "".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts)
    replace_file(path, lambda beside: beside.write_text(text, encoding="utf-8"))
    return prompts


@dataclass
class Supply:
    """Held-out prompts are answered first, by the parent's own engine, the others while there is time: by workers, or
    where there are none (any more) by the same engine. Texts lie on disk in the order in which the pool got them, so
    that a checkpoint means the same texts when it is read."""

    options: TrainOptions
    llm: LLM
    prompts: list[Prompt]
    pool: Pool
    clock: Clock
    show: Show
    stop: Stop
    workers: Workers | None = None
    _here: Order | None = None
    """What the parent itself makes of the texts to learn from."""
    _waiting: tuple[list[Text], list[int]] = field(default_factory=lambda: ([], []))
    """In the pool (or left out), and not yet on disk."""
    _next_shard: float = 0.0
    _next_turn: float = 0.0
    _tokens: int = 0
    _seconds: float = 0.0

    def __post_init__(self) -> None:
        options, folder = self.options, self.options.out / "data"
        count = min(options.held_out, len(self.prompts) // 4)
        if count < 1:
            raise ConfigError(f"{len(self.prompts)} prompts are too few to learn from: give at least 4.")
        order = np.random.default_rng([options.seed, 3]).permutation(len(self.prompts))
        vocab = self.llm.engine.model.config.vocab_size
        digest = hashlib.sha256(json.dumps(self.prompts).encode()).hexdigest()
        settings = options.data_settings() | {"prompts": digest} | identity(self.llm)
        held_out = [self.prompts[place] for place in order[:count]]
        self.held_shards = Shards(folder / "held_out", settings, vocab)
        self.held = Order(self._jobs(held_out), self.held_shards, 0, count, greedy=True)
        self.learned = [self.prompts[place] for place in order[count:]]
        """Prompts."""
        self.shards = Shards(folder / "texts", settings, vocab)
        self.first = options.first_job
        self.last = self.first + (options.answers or options.samples * len(self.learned))
        self.maker = AnswerMaker(self.llm, [self.held], options.new_tokens)
        self.pool.add(list(self.shards.read()))

    def _jobs(self, prompts: list[Prompt]) -> Jobs:
        options = self.options
        return Jobs(prompts, encoder(self.llm), options.seed, options.temperatures, options.prompt_tokens)

    # ---------------------------------------------------------------- who makes them

    def begin(self, workers: int, engine: dict[str, Any]) -> None:
        """`engine`: of each worker, the arguments of its LLM."""
        missing = any(index not in self.shards.done for index in range(self.first, self.last))
        if not workers or not missing or self.clock.share(0) >= self.options.generate_until:
            self._make_here()
            return
        options = self.options
        self.workers = Workers(Work(
            engine=engine, prompts=self.learned, seed=options.seed, temperatures=options.temperatures,
            prompt_tokens=options.prompt_tokens, new_tokens=options.new_tokens, first=self.first, last=self.last,
            done=np.array(sorted(self.shards.done), np.int64), workers=workers,
            threads=max(1, torch.get_num_threads() // (workers + 1))))
        self._next_shard = time.monotonic() + SHARD

    def _make_here(self) -> None:
        """What is missing of the texts is the parent's to make, in turn with training."""
        self.flush()
        self._here = Order(self._jobs(self.learned), self.shards, self.first, self.last)
        self.maker.orders.append(self._here)

    @property
    def beside(self) -> bool:
        """Are answers made beside training?"""
        return self.workers is not None and self.workers.alive

    @property
    def finished(self) -> bool:
        return self.held.finished and self._here is not None and self._here.finished

    # ---------------------------------------------------------------- what is made

    def first_answers(self, resumed: bool) -> list[Text]:
        """The held-out texts, when there are so many others that the draft vocabulary can be chosen, or what there are
        when time presses; all of them, where nobody counts minutes."""
        timed = self.options.minutes is not None
        wanted = math.inf if not timed else 1 if resumed else self.options.first_answers
        while not self.finished and (len(self.pool.texts) < wanted or not self.held.finished):
            if timed and self.clock.share(0) >= FIRST_SHARE and self.pool.texts and self.held.finished:
                break
            if timed and self.clock.share(0) >= 1.0:
                raise self.too_short()
            if self.beside and self.held.finished:
                self._await()
            else:
                self.turn()
            if self.stop.raised:
                self.end()
                raise Interrupted(f"Interrupted; the answers so far are in {self.options.out / 'data'}: the same "
                                  "command goes on from there.")
        held_out = [text for text in self.held_shards.read() if text.answer > 2]
        if not self.pool.texts or not held_out:
            raise ConfigError("The prompts got no answers to learn from: raise --prompt-tokens and --new-tokens, or "
                              "give other prompts.")
        self._next_turn = time.monotonic() + TURN
        return held_out

    def too_short(self) -> ConfigError:
        return ConfigError(f"{self.options.minutes:g} minutes were over before the first step "
                           f"({len(self.pool.texts):,} answers were made, and are kept in "
                           f"{self.options.out / 'data'}), so no head is written: give more --minutes, or fewer "
                           "--first-answers and --held-out.")

    def between_steps(self, step: int) -> float:
        """What workers have made comes into the pool; without them, now and then, a turn of making answers. How many
        seconds training waited."""
        begin, wanted = time.monotonic(), self._wanted(step)
        if self.workers is not None and self.workers.alive:
            if not wanted:
                self.workers.stop()
            self._take()
        elif wanted and begin > self._next_turn:
            self.turn()
            share = self.options.generate_share
            self._next_turn = time.monotonic() + TURN * (1.0 - share) / max(share, 0.01)
        return time.monotonic() - begin

    def _wanted(self, step: int) -> bool:
        return self.options.minutes is not None and not self.finished \
            and self.options.generate_share > 0 and self.clock.share(step) < self.options.generate_until

    def turn(self) -> None:
        """The parent makes answers itself, for a while."""
        end, begin, before = time.monotonic() + TURN, time.monotonic(), self.maker.tokens
        made = self.maker.run(lambda: self.stop.raised or time.monotonic() > end)
        for order, texts in zip(self.maker.orders, made):
            if order is self._here:
                self.pool.add(texts)
        if self.beside:
            self._take()
        else:
            self._tokens += self.maker.tokens - before
            self._seconds += time.monotonic() - begin
        self._tell()

    def _await(self) -> None:
        """Until workers have made some more."""
        end = time.monotonic() + TURN
        while self.beside and time.monotonic() < end and not self.stop.raised:
            self._take(WAIT)
            if len(self.pool.texts) >= self.options.first_answers:
                break
        self._tell()

    def _take(self, wait: float = 0.0) -> None:
        assert self.workers is not None
        came = self.workers.take(wait)
        if came.texts:
            self.pool.add(came.texts)
        self._tokens += sum(text.answer for text in came.texts)
        texts, left_out = self._waiting
        texts += came.texts
        left_out += came.left_out
        if time.monotonic() > self._next_shard:
            self.flush()
        if came.lost:
            then = "The others go on" if self.workers.alive else "None is left: answers are made in turn with training"
            self.show(News("workers", self.clock.share(0), f"{'; '.join(came.lost)}. {then}."))
        if not self.workers.alive and not self.workers.stopped:
            self._make_here()

    def _tell(self) -> None:
        self.show(News("answers", self.clock.share(0), f"{len(self.pool.texts):,} answers, {self.rate:,.0f} tokens/s"))

    @property
    def rate(self) -> float:
        """Tokens a second: of workers together and by the clock, or of the parent while it makes them itself."""
        seconds = self._seconds + (0.0 if self.workers is None else self.workers.seconds)
        return self._tokens / seconds if seconds > 0 else 0.0

    # ---------------------------------------------------------------- the end

    def flush(self) -> None:
        """All that is in the pool is on disk when this returns."""
        self.shards.add(*self._waiting)
        self._waiting = [], []
        self._next_shard = time.monotonic() + SHARD

    def end(self) -> None:
        """No more answers are made; those that are get on disk."""
        if self.workers is not None:
            self.workers.stop()
            end = time.monotonic() + PATIENCE
            while self.beside and time.monotonic() < end:
                self._take(WAIT)
        self.flush()

    def close(self) -> None:
        """At once, whatever is going on."""
        try:
            if self.workers is not None:
                self.workers.close()
        finally:
            self.maker.close()
