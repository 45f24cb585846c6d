"""latent.py on small shapes, in Triton's interpreter: what it checks it can also find wrong."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

import latent
from paceline.kernels.triton import latent as kernel

MODEL = latent.MODEL | {
    "kv_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 6, "hidden_size": 16,
    "num_attention_heads": 2, "num_key_value_heads": 2, "num_hidden_layers": 1, "intermediate_size": 16,
    "max_position_embeddings": 64, "vocab_size": 97}


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    # The interpreter multiplies bfloat16 matrices as integers.
    for name, value in {"HEADS": {"small": 3}, "RANK": 16, "ROPE": 8, "DTYPE": torch.float16,
                        "CASES": ((2, 20, 1), (1, 0, 5)), "copies": lambda size: 1, "SPARE_ROWS": 3, "SPARE_PAGES": 40,
                        "LENGTHS": (3, 7), "TOKENS": 4, "MODEL": MODEL, "DRAFTERS": ("plain", "right trees"),
                        "microseconds": lambda calls: float(len(calls))}.items():
        monkeypatch.setattr(latent, name, value)


def test_every_case_is_checked_and_timed(device: torch.device) -> None:
    found = latent.run(device)
    assert found["failures"] == []
    assert [row["case"] for row in found["rows"]] == ["small: 2 x 1 after 20", "small: 1 x 5 after 0", *(
        f"engine, {way}: {name}" for way in ("captured", "launched")
        for name in ("plain", "right trees"))]
    repeated = [not row["note"].startswith("of 2; 0 of") for row in found["rows"][2:]]
    assert repeated == [True, False, False, False], "plain steps, where they are captured"


def test_what_is_wrong_is_named(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums that depend on how many rows there are."""
    right = kernel.attend
    monkeypatch.setattr(latent, "DRAFTERS", ("right trees",))
    monkeypatch.setattr(kernel, "attend", lambda q, *rest: right(q, *rest) + q[..., :16] * len(q))
    failures = latent.run(device)["failures"]
    assert "small: 1 x 5 after 0: bits depend on the room of a captured step" in failures
    assert any(failure.startswith("engine, captured: ") for failure in failures)
    assert "small: 2 x 1 after 20: bits depend on the company" in failures
    assert any("triton is off by" in failure for failure in failures)
