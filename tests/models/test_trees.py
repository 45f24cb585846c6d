"""A tree row is the plain chain of its ancestors: to the bit in the reference, to 1e-4 in the eager backend."""

from __future__ import annotations

import random

import pytest
import torch
from harness import Hand, Rows, Sequence
from oracles import oracle, text

from paceline.kernels import select
from paceline.kernels.trees import ancestry
from pairwise import pairwise

CPU = torch.device("cpu")
FAMILIES = [name if name in ("gemma2", "gpt_neox") else pytest.param(name, marks=pytest.mark.full)
            for name in ("gemma2", "gemma3", "gpt2", "gpt_neox", "olmo2", "phi3", "qwen3_moe")]
BINARY = [-1, 0, 0, 1, 1, 2, 2]
COMB = [-1, 0, 1, 1, 2, 2, 4, 4, 6]
STAR = [-1, 0, 0, 0, 0, 0]


def random_tree(size: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [-1] + [rng.randrange(row) for row in range(1, size)]


def check(hand: Hand, prompt: list[int], parents: list[int], logits: torch.Tensor, tokens: list[int]) -> None:
    for row, path in enumerate(ancestry(parents)):
        chain = hand.run(prompt + [tokens[ancestor] for ancestor in path])[-1]
        if hand.kernels.deterministic:
            assert torch.equal(logits[row], chain), f"row {row}"
        else:
            torch.testing.assert_close(logits[row], chain, atol=1e-4, rtol=0)


@pairwise(name=["llama", "qwen2", "deepseek_v3", *FAMILIES],
          parents={"binary": BINARY, "comb": COMB, "star": STAR, "random": random_tree(13, 5)},
          deterministic={"reference": True, "eager": False})
def test_each_row_of_a_tree_equals_its_chain(name, parents, deterministic):
    """Blocks of 4, so every tree crosses block boundaries; qwen2's second group has a window of 11."""
    hand = Hand(oracle(name).ours, select(deterministic, CPU), block_size=4)
    for start in (0, 62):
        prompt, tokens = text(start, seed=start), text(len(parents), seed=9)
        seq = prefilled(hand, prompt)
        check(hand, prompt, parents, hand.step([Rows(seq, tokens, parents)])[0], tokens)


@pytest.mark.parametrize("deterministic", [True, False], ids=["reference", "eager"])
def test_trees_chains_prompts_and_decodes_in_one_step(deterministic):
    hand = Hand(oracle("qwen2").ours, select(deterministic, CPU), block_size=4, blocks=400)
    shapes: list[tuple[int, list[int] | None, int]] = [
        (20, BINARY, 7), (0, None, 9), (33, None, 1), (5, [-1, 0, 0, 2, 3, 3, 1], 7), (66, None, 1), (12, COMB, 9),
        (31, None, 7)]
    prompts = [text(start, seed=start) for start, _, _ in shapes]
    rows = [text(count, seed=100 + index) for index, (_, _, count) in enumerate(shapes)]
    groups = [Rows(prefilled(hand, prompt), tokens, parents)
              for prompt, tokens, (_, parents, _) in zip(prompts, rows, shapes)]
    for prompt, tokens, (_, parents, count), logits in zip(prompts, rows, shapes, hand.step(groups)):
        check(hand, prompt, parents or list(range(-1, count - 1)), logits, tokens)


def test_a_chain_written_as_a_tree_is_a_chain():
    hand = Hand(oracle("llama").ours, select(True, CPU))
    prompt, tokens = text(10), text(6, seed=1)
    as_tree = hand.step([Rows(prefilled(hand, prompt), tokens, list(range(-1, 5)))])[0]
    assert torch.equal(as_tree, hand.step([Rows(prefilled(hand, prompt), tokens)])[0])


def prefilled(hand: Hand, prompt: list[int]) -> Sequence:
    seq = hand.new()
    if prompt:
        hand.step([Rows(seq, prompt)])
    return seq
