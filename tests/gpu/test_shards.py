"""shards.py on small models in torch: what it checks it can also find wrong."""

from __future__ import annotations

import pytest
import torch

import shards
from paceline.models.shard import Shard


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
             "head_dim": 8, "intermediate_size": 48, "vocab_size": 97, "max_position_embeddings": 64}
    for name, value in {"SHAPE": shards.SHAPE | shape, "MODELS": {"llama": {}}, "LENGTHS": (9, 20), "TOKENS": 5,
                        "DTYPE": torch.float32}.items():
        monkeypatch.setattr(shards, name, value)


def test_every_case_is_checked() -> None:
    found = shards.run(torch.device("cpu"), "reference")
    assert found["failures"] == []
    assert [row["case"] for row in found["rows"]] == [
        f"llama, {size} ranks, {mode}" for mode in ("deterministic", "fast") for size in (2, 4)]


def test_what_is_wrong_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    right = Shard.joined
    monkeypatch.setattr(Shard, "joined", lambda self, part, widths: right(self, part * (1 + 1e-6), widths))
    assert "llama, 2 ranks, deterministic: 4 of 4 differ from one rank's" in shards.run(
        torch.device("cpu"), "reference")["failures"]
