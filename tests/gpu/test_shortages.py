"""shortages: faults at captures, replays and copies, here in plain torch on a tiny model, on a card all of them."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import shortages
from subjects import RandomSubject

TINY = {"vocab_size": 97, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "intermediate_size": 48, "num_hidden_layers": 1}


def test_a_fault_without_a_card() -> None:
    subject = dataclasses.replace(RandomSubject.small("cpu", "float32", **TINY), kernels="stepped")
    result = shortages.run(subject, ["capture without memory", "replay breaks"], [2])
    assert result["failures"] == [] and [row["paceline"] for row in result["rows"]] == [1, 1]


def test_a_loss_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = shortages.texts
    monkeypatch.setattr(shortages, "texts", lambda *given: [None, *texts(*given)[1:]])
    subject = dataclasses.replace(RandomSubject.small("cpu", "float32", **TINY), kernels="stepped")
    assert len(shortages.run(subject, ["capture without memory"], [2])["failures"]) == 2


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_all_faults_on_a_card() -> None:
    assert shortages.run(RandomSubject.small("cuda", "bfloat16"))["failures"] == []
