"""The check of blocks that are handed over on a card, run on the device path of the CPU."""

from __future__ import annotations

from typing import Any

import pytest

import handover
from paceline.cache.block_bytes import BlockBytes

TINY: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
    "head_dim": 16, "intermediate_size": 48, "max_position_embeddings": 512}


def checked() -> dict[str, Any]:
    return handover.check(["mistral"], "cpu", "float32", crowd=1, changes=TINY, kernels="stepped")


@pytest.mark.full
def test_it_passes_here() -> None:
    assert checked()["failures"] == []


@pytest.mark.full
def test_it_finds_blocks_that_hold_something_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BlockBytes, "write", lambda *_: None)
    assert "the text differs" in str(checked()["failures"])
