"""Trained draft heads on Triton's kernels: what was published, and in deterministic mode bits without company."""

from __future__ import annotations

import pytest
import torch
from harness import Rows
from head_models import CONFIGS, DraftHand, choices, longest, made, published, target, text

from paceline.kernels import select

TEXTS = [text(1, 9), text(2, 5)]
EAGER = select(False, torch.device("cpu"))


@pytest.mark.parametrize("name", ["dspark", "eagle3", "medusa",
                                  *(pytest.param(name, marks=pytest.mark.full) for name in sorted(CONFIGS)
                                    if name not in ("dspark", "eagle3", "medusa"))])
def test_drafts_are_the_published_ones(kernels, device, name):
    if device.type != "cpu":
        pytest.skip("the tiny target lies on the CPU")
    hand = DraftHand(target(), made(name), kernels)
    seqs = [hand.new() for _ in TEXTS]
    hand.step([Rows(seq, tokens[:-1]) for seq, tokens in zip(seqs, TEXTS)])
    drafted = choices(seqs, longest(CONFIGS[name], 2))
    logits, _ = hand.draft(seqs, [tokens[-1] for tokens in TEXTS], drafted)
    for index, tokens in enumerate(TEXTS):
        expected, _ = published(name, tokens, tapped_by=EAGER).draft(drafted[index])
        torch.testing.assert_close(logits[index].double(), expected, atol=1e-3, rtol=1e-3)
