"""bench gaps, small: a tiny model, a neighbour and one dear request."""

from __future__ import annotations

from pathlib import Path

import pytest
from serving import write_model

from paceline.bench import gaps
from paceline.errors import ConfigError


def test_gaps_are_those_that_the_time_touches() -> None:
    times = [0.0, 1.0, 2.0, 5.0, 6.0]
    assert gaps.gaps(times, 1.5, 4.0) == [1.0, 3.0]
    assert gaps.gaps(times, 0.0, 9.0) == [1.0, 1.0, 3.0, 1.0]
    assert gaps.gaps([1.0], 0.0, 9.0) == []


def test_prompts_come_once() -> None:
    prompts = [str(one.body["prompt"]) for one in gaps.troubles()]
    assert len({one.name for one in gaps.troubles()}) == len(prompts)
    assert gaps.prose(50, 1) == gaps.prose(50, 1) != gaps.prose(50, 2)


def test_a_neighbour_beside_somebody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gaps, "ALONE_S", 0.2)
    monkeypatch.setattr(gaps, "AFTER_S", 0.1)
    monkeypatch.setattr(gaps, "SETTLED", 3)
    with pytest.raises(ConfigError, match="No trouble is called 'mice'"):
        gaps.run(str(tmp_path), only="mice")
    found = gaps.run(str(write_model(tmp_path)), "none", "log-probabilities", 5.0)
    rows = {row["case"]: row for row in found["rows"]}
    for name in ("alone", "n = 16 with 20 log-probabilities"):
        assert 0 < rows[f"{name}: p50"]["paceline"] <= rows[f"{name}: p99"]["paceline"] <= rows[f"{name}: max"][
            "paceline"]
    assert "status 200" in rows["n = 16 with 20 log-probabilities: max"]["note"]
