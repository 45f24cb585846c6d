"""With the reference kernels a row's logits are a function of its own tokens: to the bit, whatever else happens."""

from __future__ import annotations

import functools
import random

import pytest
import torch
from harness import Hand, Rows
from oracles import ARCHITECTURES, oracle, text

from paceline.kernels import select

REFERENCE = select(True, torch.device("cpu"))
LATER = ("deepseek_v2-lite", "gemma3", "gpt2", "olmo2", "phi3", "qwen3_moe")
"""Only under `make test-full`: others have what they are made of."""
NAMES = [pytest.param(name, marks=pytest.mark.full) if name in LATER else name
         for name in ARCHITECTURES if name != "llama-biased-tied"]

pytestmark = pytest.mark.parametrize("name", NAMES)


@functools.cache
def read(name) -> torch.Tensor:
    return Hand(oracle(name).ours, REFERENCE).run(text(80))


@pytest.fixture
def alone(name) -> torch.Tensor:
    return read(name)


@pytest.mark.parametrize("chunk", [7, 64])
def test_chunking_does_not_change_a_bit(name, alone, chunk):
    assert torch.equal(Hand(oracle(name).ours, REFERENCE, seed=chunk).run(text(80), chunk), alone)


def test_decoding_token_by_token_does_not_change_a_bit(name, alone):
    hand = Hand(oracle(name).ours, REFERENCE, seed=3)
    seq = hand.new()
    hand.step([Rows(seq, text(80)[:60])])
    decoded = torch.cat([hand.step([Rows(seq, [token])])[0] for token in text(80)[60:]])
    assert torch.equal(decoded, alone[60:])


@pytest.mark.parametrize("strangers", [1, 7, pytest.param(31, marks=pytest.mark.full)])
def test_strangers_in_the_batch_do_not_change_a_bit(name, alone, strangers):
    """The others come with prompts, decodes and trees, before and after; block size and placement differ too."""
    hand = Hand(oracle(name).ours, REFERENCE, block_size=8, blocks=2000, seed=strangers)
    rng = random.Random(strangers)
    seq, tokens, got = hand.new(), text(80), []
    others = [hand.new() for _ in range(strangers)]
    for chunk in (50, 1, 5, 24):
        groups = []
        for index, other in enumerate(others):
            count = rng.choice([1, 1, 1, 3, 30])
            parents = [-1, 0, 0] if count == 3 and index % 2 else None
            groups.append(Rows(other, text(count, seed=rng.randrange(1000)), parents))
        place = rng.randrange(len(groups) + 1)
        done = sum(len(part) for part in got)
        groups.insert(place, Rows(seq, tokens[done:done + chunk]))
        got.append(hand.step(groups)[place])
    assert torch.equal(torch.cat(got), alone)


def test_the_number_of_threads_does_not_change_a_bit(name, alone):
    before = torch.get_num_threads()
    try:
        for threads in (2, 3):
            torch.set_num_threads(threads)
            assert torch.equal(Hand(oracle(name).ours, REFERENCE).run(text(80)[:50], 33), alone[:50])
    finally:
        torch.set_num_threads(before)


def test_a_verify_pass_of_any_width_gives_the_bits_of_decoding(name, alone):
    for width in (2, 5, 17):
        hand = Hand(oracle(name).ours, REFERENCE, seed=width)
        seq = hand.new()
        hand.step([Rows(seq, text(80)[:60])])
        verified = hand.step([Rows(seq, text(80)[60:60 + width])])[0]
        assert torch.equal(verified, alone[60:60 + width])


@torch.inference_mode()
def test_rows_that_leave_the_last_layer_alone_have_the_same_bits(name, alone):
    hand = Hand(oracle(name).ours, REFERENCE, seed=5)
    context = hand.forward([Rows(hand.new(), text(80))])
    context.leaving = torch.tensor([79, 3, 40, 3])
    left = hand.model.logits(hand.model.forward(torch.tensor(text(80)), context), REFERENCE)
    assert torch.equal(left, alone[context.leaving])
