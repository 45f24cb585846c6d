"""Every architecture agrees with transformers to 1e-4, however its rows are cut, mixed and placed."""

from __future__ import annotations

import random

import torch
from harness import Hand, Rows
from oracles import ARCHITECTURES, oracle, text

from paceline.kernels import select
from pairwise import each

CPU = torch.device("cpu")
BACKENDS = {"reference": select(True, CPU), "eager": select(False, CPU)}
EITHER = each(name=ARCHITECTURES, kernels=BACKENDS)
"""What is read in chunks meets both."""


def close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)


@each(name=ARCHITECTURES, way={f"{chunk}-{kernels}": (chunk, backend) for chunk in (None, 32, 7, 1)
                               for kernels, backend in BACKENDS.items()})
def test_prefill_in_chunks_of_any_size(name, way):
    chunk, kernels = way
    tokens = text(70 if chunk != 1 else 24)
    close(Hand(oracle(name).ours, kernels).run(tokens, chunk), oracle(name).logits(tokens))


@EITHER
def test_decode_after_prefill_equals_recompute(name, kernels):
    tokens = text(50)
    hand = Hand(oracle(name).ours, kernels)
    seq = hand.new()
    parts = [hand.step([Rows(seq, tokens[:31])])[0]]
    parts += [hand.step([Rows(seq, [token])])[0] for token in tokens[31:]]
    close(torch.cat(parts), oracle(name).logits(tokens))


@EITHER
def test_ragged_steps_that_mix_chunks_and_decodes(name, kernels):
    """Seven sequences of other lengths, each step feeds each of them a random number of tokens, or none."""
    texts = [text(length, seed=length) for length in (3, 10, 17, 40, 41, 64, 75)]
    hand = Hand(oracle(name).ours, kernels)
    rng = random.Random(1)
    seqs = [hand.new() for _ in texts]
    got: list[list[torch.Tensor]] = [[] for _ in texts]
    while any(len(seq.tokens) < len(tokens) for seq, tokens in zip(seqs, texts)):
        feeding, groups = [], []
        for index in rng.sample(range(len(texts)), len(texts)):
            done = len(seqs[index].tokens)
            chunk = texts[index][done:done + rng.choice([0, 1, 1, 1, 4, 4, 15])]
            if chunk:
                feeding.append(index)
                groups.append(Rows(seqs[index], chunk))
        if groups:
            for index, logits in zip(feeding, hand.step(groups)):
                got[index].append(logits)
    for tokens, parts in zip(texts, got):
        close(torch.cat(parts), oracle(name).logits(tokens))


@EITHER
def test_block_size_and_placement_do_not_matter(name, kernels):
    tokens = text(45)
    for block_size, seed in ((1, 1), (16, 2), (64, 3)):
        hand = Hand(oracle(name).ours, kernels, block_size=block_size, seed=seed)
        close(hand.run(tokens, 20), oracle(name).logits(tokens))
