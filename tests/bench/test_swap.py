"""bench swap: both ways of each case are measured, and what is measured is what it says."""

from __future__ import annotations

from typing import Any

import pytest

from engine.tiny import tiny_engine
from paceline.bench import swap
from paceline.engine.core import Engine


def test_swapped_and_fetched_beside_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[Engine] = []

    def build(model: str | None, device: str, tokens: int, **options: Any) -> Engine:
        built.append(tiny_engine(kv_blocks=(tokens + swap.LONGEST) // 8, watermark=0.0, **options))
        return built[-1]

    monkeypatch.setattr(swap, "build", build)
    monkeypatch.setattr(swap, "LONGEST", 16)
    result = swap.run(tokens=40, rounds=2)
    assert [row["case"] for row in result["rows"]] == ["preempted_40", "prefix_40"]
    assert all(row["paceline"] > 0 and row["peers"]["recompute"] > 0 for row in result["rows"])
    swapping, keeping, forgetting = (engine.report() for engine in built)
    assert swapping["preemptions"] == 6 and swapping["swap_blocks_in"] == swapping["swap_blocks_out"] > 0
    assert keeping["host_cache_blocks_in"] > 0 == forgetting["host_cache_blocks_in"]
    assert keeping["prefill_tokens"] < forgetting["prefill_tokens"]
