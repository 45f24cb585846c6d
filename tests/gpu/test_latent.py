"""latent.py on small shapes, in Triton's interpreter: what it checks it can also find wrong."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

import latent
from paceline.kernels.triton import latent as kernel


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    # The interpreter multiplies bfloat16 matrices as integers.
    for name, value in {"HEADS": {"small": 3}, "RANK": 16, "ROPE": 8, "DTYPE": torch.float16,
                        "CASES": ((2, 20, 1), (1, 0, 5)), "copies": lambda size: 1,
                        "microseconds": lambda calls: float(len(calls))}.items():
        monkeypatch.setattr(latent, name, value)


def test_every_case_is_checked_and_timed(device: torch.device) -> None:
    found = latent.run(device)
    assert found["failures"] == []
    assert [row["case"] for row in found["rows"]] == ["small: 2 x 1 after 20", "small: 1 x 5 after 0"]


def test_what_is_wrong_is_named(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums that depend on how many rows there are."""
    right = kernel.attend
    monkeypatch.setattr(kernel, "attend", lambda q, *rest: right(q, *rest) + 0.1 * q.shape[0])
    failures = latent.run(device)["failures"]
    assert "small: 2 x 1 after 20: bits depend on the company" in failures
    assert any("triton is off by" in failure for failure in failures)
