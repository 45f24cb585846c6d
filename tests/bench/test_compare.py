"""bench compare: ratios, intervals and verdicts, of every kind of file that a benchmark writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from paceline.bench.compare import Figure, compare, figures, ratio, verdict
from paceline.bench.report import Row
from paceline.bench.serving.paired import Pair, paired
from paceline.cli.main import main


def document(*rows: Row, **settings: Any) -> dict[str, Any]:
    return {"machine": {"cpu": "one"}, "settings": settings, "rows": [row.as_dict() for row in rows]}


def lower(case: str, value: float, low: float, high: float) -> Row:
    return Row(case, "ms", value, higher_is_better=False, interval=(low, high))


def test_verdicts() -> None:
    old = document(lower("fast", 10, 9, 11), lower("slow", 10, 9, 11), lower("even", 10, 9, 11),
                   Row("rate", "tok/s", 100.0, interval=(99.0, 101.0)), Row("once", "tok/s", 5.0),
                   Row("zero", "x", 0.0))
    new = document(lower("fast", 7, 6.5, 7.5), lower("slow", 14, 13, 15), lower("even", 10.5, 9.5, 11.5),
                   Row("rate", "tok/s", 90.0, interval=(89.0, 91.0)), Row("once", "tok/s", 6.0),
                   Row("zero", "x", 0.0))
    found = {row["case"]: row for row in compare([old], [new])["rows"]}
    assert {name: row["verdict"] for name, row in found.items()} == {
        "fast": "better", "slow": "worse", "even": "within noise", "rate": "worse", "once": "noise unknown",
        "zero": "same"}
    assert found["fast"]["ratio"] == pytest.approx(0.7) and found["once"]["ratio"] == pytest.approx(1.2)
    assert found["zero"]["ratio"] is None


def test_the_interval_of_a_ratio() -> None:
    """Alone, one side's interval is the ratio's; two of the same width are sqrt(2) as wide, in logarithms."""
    sharp, vague = Figure(2.0, "", "higher", (2.0, 2.0)), Figure(4.0, "", "higher", (3.0, 5.0))
    assert ratio(sharp, vague) == (2.0, pytest.approx((1.5, 2.5)))
    assert ratio(vague, sharp)[1] == pytest.approx((0.4, 2 / 3))
    one = Figure(1.0, "", "higher", (0.5, 2.0))
    assert ratio(one, one)[1] == pytest.approx((2 ** -(2 ** 0.5), 2 ** (2 ** 0.5)))
    perhaps_none = Figure(1.0, "", "higher", (0.0, 2.0))
    assert verdict(perhaps_none, Figure(9.0, "", "higher", (8.0, 10.0))) == "better"
    assert verdict(perhaps_none, Figure(1.5, "", "higher", (1.4, 1.6))) == "within noise"
    assert verdict(Figure(9.0, "", "higher", (8.0, 10.0)), perhaps_none) == "worse"
    assert verdict(Figure(0.0, "", "lower"), Figure(3.0, "", "lower")) == "noise unknown"


def test_several_runs_tell_the_noise_of_figures_without_intervals() -> None:
    def runs(*values: float) -> list[dict[str, Any]]:
        return [document(Row("decode", "tok/s", value)) for value in values]

    assert compare(runs(100, 101, 99), runs(110, 111, 109))["rows"][0]["verdict"] == "better"
    assert compare(runs(100, 120, 80), runs(110, 131, 89))["rows"][0]["verdict"] == "within noise"


def test_every_kind_of_row() -> None:
    spec = Row("ngram/qa", "tok/s", 50.0, {"plain": 40.0}).as_dict() | {"mean_accepted_tokens": 1.5, "questions": 3}
    accepted = {"method": "dspark", "draft": "chain 3", "temperature": 0.0, "category": "qa",
                "mean_accepted_tokens": 2.1}
    before = {"case": "step", "unit": "us/step", "paceline": 3.0, "peers": {}, "ratio": None}
    found = figures({"rows": [spec, accepted, before, before, {"case": "none", "unit": "x", "paceline": None}]})
    assert list(found) == ["ngram/qa", "ngram/qa mean_accepted_tokens", "dspark chain 3 0.0 qa mean_accepted_tokens",
                           "step", "step #2"]
    assert found["step"].better == "lower" and found["ngram/qa"].better == "higher"


def test_two_servers_beside_each_other_are_compared_by_their_ratios(tmp_path: Path,
                                                                    capsys: pytest.CaptureFixture[str]) -> None:
    """Both servers' own figures drift with the machine, and the interval of a ratio is of 90 %: it is not taken."""
    def beside(*ratios: float) -> dict[str, Any]:
        pairs = [Pair([Row("rate", "tok/s", 100 * ratio), Row("failed", "requests", 0)],
                      [Row("rate", "tok/s", 100), Row("failed", "requests", 0)], place % 2 == 0)
                 for place, ratio in enumerate(ratios)]
        return document() | {"measured": "two servers", "rows": paired(pairs, 0)}

    row, = compare([beside(*[1.2] * 6)], [beside(*[1.5] * 6)])["rows"]
    assert (row["case"], row["a"], row["b"]) == ("rate ratio", pytest.approx(1.2), pytest.approx(1.5))
    assert row["ratio"] == pytest.approx(1.25) and row["verdict"] == "noise unknown"
    row, = compare([beside(1.2, 1.2), beside(1.21, 1.21)], [beside(1.5, 1.5), beside(1.51, 1.51)])["rows"]
    assert row["verdict"] == "better"
    pair, single = tmp_path / "pair", tmp_path / "single"
    pair.write_text(json.dumps(beside(1.2)))
    single.write_text(json.dumps(document(Row("rate", "tok/s", 1.0))))
    assert main(["bench", "compare", str(pair), str(single)]) == 2
    assert "no figure in common: compare two runs of the same benchmark" in " ".join(capsys.readouterr().err.split())


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [str(tmp_path / name) for name in ("a.json", "b.json")]
    for path, value, seed in zip(paths, (10.0, 20.0), (1, 2)):
        Path(path).write_text(json.dumps(document(lower("ttft", value, value - 1, value + 1), seed=seed)))
    assert main(["bench", "compare", *paths]) == 0
    out = capsys.readouterr().out
    assert "2.000" in out and "worse" in out and "different settings: seed: 1 / 2" in out and "1 of 1 figures" in out
    assert main(["bench", "compare", *paths, "--check"]) == 1
    assert "worse beyond noise: ttft" in capsys.readouterr().err
    assert main(["bench", "compare", *reversed(paths), "--check", "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["rows"][0]["verdict"] == "better"


def test_what_cannot_be_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good, other, bad = tmp_path / "good", tmp_path / "other", tmp_path / "bad"
    good.write_text(json.dumps(document(Row("a", "tok/s", 1.0))))
    other.write_text(json.dumps(document(Row("b", "tok/s", 1.0))))
    bad.write_text("[1]")
    for pair, said in (((good, other), "no figure in common"), ((good, bad), "not what a benchmark writes"),
                       ((good, tmp_path / "missing"), "Cannot read")):
        assert main(["bench", "compare", *map(str, pair)]) == 2
        assert said in " ".join(capsys.readouterr().err.split())
