"""models: every architecture on a card, here one of them in Triton's interpreter."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

import models
from paceline.bench.report import Row
from paceline.errors import ConfigError
from paceline.models.registry import ARCHITECTURES

TINY: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
    "head_dim": 16, "intermediate_size": 48, "max_position_embeddings": 128}


def test_every_architecture_has_a_shape() -> None:
    assert {shape.get("model_type", name) for name, shape in models.SHAPES.items()} == set(ARCHITECTURES)


def test_a_wrong_name_lists_the_right_ones() -> None:
    with pytest.raises(ConfigError, match="No architecture 'gemma': use some of llama, mistral"):
        models.check(["gemma"])


@pytest.mark.full
def test_the_card_reads_and_decodes_what_the_cpu_wrote(device: torch.device) -> None:
    if device.type != "cpu":
        pytest.skip("all of them run on the card by the command")
    result = models.check(["gemma2"], "cpu", "float32", prompts=1, tokens=6, circumstances=["crowd"],
                              drafters=["plain"], **TINY)
    assert result["failures"] == []
    assert [(row["case"], row["paceline"]) for row in result["rows"]] == [
        ("gemma2 / float32", 6), ("gemma2 / float32 matrix", 2)]


def test_differences_are_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    far = Row("llama / float32", "equal", 3, note="of 4 tokens, worst 3.0e-01")
    monkeypatch.setattr(models, "compared", lambda *given, **more: far)
    monkeypatch.setattr(models, "run", lambda *given, **more: {
        "rows": [{"note": "of 2, 0 drafts accepted"}], "differences": [{"drafter": "plain"}]})
    result = models.check(["llama"], "cpu", "float32", **TINY)
    assert result["failures"] == ["llama: of 4 tokens, worst 3.0e-01", "llama: {'drafter': 'plain'}"]
    assert [row["paceline"] for row in result["rows"]] == [3, 1]
