"""Whole models on the Triton kernels: the reference's logits for prompts, decodes and trees in one step."""

from __future__ import annotations

import pytest
import torch
from harness import Hand, Rows
from oracles import oracle, text

from paceline.kernels import select

ALWAYS = ("fast", "llama"), ("deterministic", "qwen3")
"""The interpreter is slow: the others come with the long matrices."""


@pytest.mark.parametrize(("kernels", "name"), [
    pytest.param(kind == "deterministic", name, id=f"{kind}-{name}",
                 marks=() if (kind, name) in ALWAYS else pytest.mark.full)
    for name in ("llama", "qwen3", "deepseek_v3", "gemma2", "gemma3", "gpt2", "gpt_neox", "olmo2", "phi3", "qwen3_moe")
    for kind in ("fast", "deterministic")], indirect=["kernels"])
def test_logits_are_the_references(kernels, device, name):
    if device.type != "cpu":
        pytest.skip("the models of these tests live on the CPU")
    model = oracle(name).ours
    results = []
    for backend in (select(True, device), kernels):
        hand = Hand(model, backend)
        first, second = hand.new(), hand.new()
        prompt = hand.step([Rows(first, text(5))])
        alone = hand.step([Rows(first, [5])])
        mixed = hand.step([Rows(second, text(4)), Rows(first, [3, 4, 5], [-1, 0, 0])])
        results.append(torch.cat([*prompt, *alone, *mixed]))
    torch.testing.assert_close(results[1], results[0], atol=1e-4, rtol=1e-4)
