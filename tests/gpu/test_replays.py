"""The check of traces and proofs on a card, run on the device path of the CPU."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import replays
from paceline.engine.replay import ReplayReport

FAMILY = Path(__file__).parents[1] / "family"
HERE = {"device": "cpu", "dtype": "float32", "kernels": "stepped"}


def test_it_passes_here() -> None:
    result = replays.check(FAMILY, rules=["rejection"], caches=["auto"], positions=4, **HERE)
    assert result["failures"] == []
    assert [row["paceline"] > 0 for row in result["rows"]] == [True, True]


def test_it_finds_a_text_that_does_not_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    real = replays.replay_on

    def other(engine: object, trace: object) -> ReplayReport:
        return replace(real(engine, trace), equal=False)  # type: ignore[arg-type]

    monkeypatch.setattr(replays, "replay_on", other)
    assert "1 of 3" in str(replays.check(FAMILY, rules=["coupled"], caches=[], **HERE)["failures"])
