"""bench serve-cost, small: a tiny model, a few clients, a second or two."""

from __future__ import annotations

from pathlib import Path

import pytest
from serving import write_model

from paceline.bench.report import percentile, table
from paceline.bench.serve_cost import lags, quantile, run
from paceline.bench.serving.exchange import Exchange, read


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> dict:
    folder: Path = write_model(tmp_path_factory.mktemp("tiny"))
    return run(str(folder), clients=5, seconds=1.0, streams=2, new_tokens=4, repeats=1)


def test_a_small_soak_leaves_nothing_behind(result: dict) -> None:
    rows = {row["case"]: row for row in result["rows"]}
    for case in ("soak_errors", "soak_blocks_left", "soak_texts_that_differ"):
        assert rows[case]["paceline"] == 0, rows[case]
    assert "hung up" in rows["soak_errors"]["note"] and ", 0 completed" not in rows["soak_errors"]["note"]
    assert rows["soak_ttft_p50"]["paceline"] <= rows["soak_ttft_p99"]["paceline"]
    assert rows["soak_loop_lag_p99"]["paceline"] > 0
    assert rows["serve_rate"]["paceline"] > 0 and rows["serve_rate"]["peers"]["offline"] > 0
    assert rows["serve_rate_client_deducted"]["paceline"] >= rows["serve_rate"]["paceline"]
    assert "soak_rate" in table(result)


def test_quantiles() -> None:
    histogram = lags({'paceline_event_loop_lag_seconds_bucket{le="0.1"}': 90.0,
                      'paceline_event_loop_lag_seconds_bucket{le="0.2"}': 100.0,
                      'paceline_event_loop_lag_seconds_bucket{le="+Inf"}': 100.0, "other": 1.0})
    assert quantile(histogram, 0.5) == pytest.approx(0.1 * 50 / 90)
    assert quantile(histogram, 0.95) == pytest.approx(0.15)
    assert quantile({}, 0.9) == 0.0
    assert percentile([3.0, 1.0, 2.0], 0.5) == 2.0 and percentile([], 0.5) == 0.0


def test_what_went_wrong_is_noticed() -> None:
    made = object.__new__(Exchange)
    made.started, made.hung_up, made.pieces = 0.0, False, [(1.0, b"HTTP/1.1 429 Too Many\r\n\r\nfull")]
    assert read(made)["error"] == "full"
    made.pieces = [(1.0, b'HTTP/1.1 200 OK\r\n\r\n5\r\ndata: {"choices":[{"text":"a","finish_reason":null}]}\n\n')]
    assert read(made)["error"] == "the stream ended early"
    made.pieces = []
    assert read(made)["error"] == "no answer"
