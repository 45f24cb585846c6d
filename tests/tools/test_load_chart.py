"""The picture of servers beside each other: every way by how it stood to the server that both pairs had."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import load_chart


def pair(rates: dict[float, tuple[list[float], list[float]]]) -> dict[str, Any]:
    rows = [{"case": f"poisson_{rate:g}_goodput", "a": {"turns": first}, "b": {"turns": second}}
            for rate, (first, second) in rates.items()]
    rows.append({"case": "poisson_1_tpot_p50", "a": {"turns": [5.0]}, "b": {"turns": [6.0]}})
    return {"servers": {}, "rows": rows}


def test_ways_of_pairs_stand_to_the_mean_of_their_first_servers(tmp_path: Path) -> None:
    off, on = tmp_path / "off.json", tmp_path / "on.json"
    off.write_text(json.dumps(pair({1.0: ([1.0, 1.0], [0.9, 0.7]), 4.0: ([4.0, 2.0], [3.0, 0.0])})))
    on.write_text(json.dumps(pair({4.0: ([1.0, 1.0], [0.5, 0.5]), 1.0: ([0.5, 0.5], [0.5, 0.5]), 9.0: ([0.0], [0.0])})))
    found = load_chart.lines([f"off={off}", f"on={on}"])
    assert list(found) == ["off", "on", "control"]
    assert found["control"] == [(1.0, 0.75), (4.0, 2.0)]
    assert found["off"] == [(1.0, pytest.approx(0.6)), (4.0, pytest.approx(1.0))]
    assert found["on"] == [(1.0, pytest.approx(0.75)), (4.0, pytest.approx(1.0))]


def test_who_is_never_in_time_is_no_measure(tmp_path: Path) -> None:
    off = tmp_path / "off.json"
    off.write_text(json.dumps(pair({9.0: ([0.0, 0.0], [0.0, 0.2])})))
    assert load_chart.lines([f"off={off}"]) == {"off": [(9.0, 0.1)], "control": [(9.0, 0.0)]}
