"""A rehearsal: what cannot work fails now, not when all the answers have been made; what is compiled is compiled."""

from __future__ import annotations

import time

import numpy as np
import torch

from paceline.errors import ConfigError
from paceline.training.factory import Factory
from paceline.training.news import News, Show
from paceline.training.pool import Pool
from paceline.training.shards import Text
from paceline.training.trainer import Trainer


def rehearse(factory: Factory, show: Show) -> None:
    """A step on invented texts as long as any will be, and one on as many short ones as a batch can have."""
    options, target = factory.options, factory.target
    shape = target.config
    longest = min(options.prompt_tokens + options.new_tokens, shape.context)
    drawn = np.random.default_rng(0)
    count = shape.vocab_size if options.makes_model else min(options.draft_vocab, shape.vocab_size)
    trainer: Trainer | None = None
    for length in (longest, min(longest, target.padded(1))):
        begin = time.monotonic()
        prompt = max(1, length - options.new_tokens)
        texts = [Text(place, drawn.integers(0, shape.vocab_size, length).astype(np.int32), prompt)
                 for place in range(max(1, options.batch_tokens // target.padded(length)))]
        pool = Pool(options.seed, options.batch_tokens, target.padded)
        pool.add(texts)
        if trainer is None:
            trainer = Trainer(options, target, factory.network(np.arange(count), 0), pool)
            trainer.calibrate()
            trainer.measure(target.batches(texts[:4]))
        trainer.pool = pool
        if not torch.isfinite(trainer.train_step(0.0)["loss"]):  # which also waits for the device
            raise ConfigError("The loss of a first trial step is no number: the target's states are not finite.")
        memory = f", {torch.cuda.max_memory_allocated() / 2 ** 30:.1f} GiB of memory at most" \
            if target.device.type == "cuda" else ""
        show(News("rehearsal", 0.0, f"a step on {len(texts)} texts of {length} tokens works: "
                                    f"{time.monotonic() - begin:.1f} s{memory}"))
