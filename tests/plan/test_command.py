"""`paceline plan` as it is typed, and its pictures."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from paceline.cli.main import main
from paceline.plan.charts import Chart, Line, charts, svg
from paceline.plan.planner import plan


def test_the_command_prints_tables(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "llama-2-13b", "--hardware", "h100", "--context", "4096", "--batch", "1,64,256"]) == 0
    out = capsys.readouterr().out
    assert "13.016 billion parameters" in out and "819,200 bytes a token" in out and "295 FLOP/byte" in out
    assert "264.15" in out  # the floor at 256 in ms


def test_the_default_is_the_default_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--drafter", "none", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["model"]["name"] == "smollm2-135m" and found["speculation"] == []


def test_options_reach_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "llama-3.1-8b", "--hardware", "l4x2", "--dtype", "int4", "--kv-dtype", "fp8", "--rate", "2",
                 "--k", "3", "--acceptance", "0.6,0.8", "--drafter", "eagle3", "--prompt-tokens", "100",
                 "--output-tokens", "50", "--tpot", "100", "--ttft", "900", "--price", "1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["hardware"]["count"] == 2 and found["model"]["dtype"] == "int4" and found["model"]["kv_dtype"] == "fp8"
    assert {row["acceptance"] for row in found["speculation"]} == {0.6, 0.8}
    assert {row["k"] for row in found["speculation"]} == {3}
    assert found["workload"] | {"batches": None} == {
        "context": 4096, "prompt": 100, "output": 50, "batches": None, "rate": 2.0, "ttft_s": 0.9, "tpot_s": 0.1}
    assert found["cards"] % 2 == 0


@pytest.mark.parametrize("arguments", [
    ["--batch", "1,x"], ["--batch", "0"], ["--hardware", "h101"], ["--acceptance", "2"], ["--drafter", "none",
    "--drafter", "ngram"], ["--chart", "x.bmp"], ["--chart", "/no/such/folder/x.svg"], ["--context", "-5"]])
def test_mistakes_are_one_sentence(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "llama-3-8b", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ") and captured.out == ""


def test_pictures_are_well_formed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for ending in ("svg", "html"):
        target = tmp_path / f"plan.{ending}"
        assert main(["plan", "llama-3-8b", "--chart", str(target)]) == 0
        written = target.read_text()
        for title in ("Roofline of h100", "Speed-up by draft length", "Time per token by batch"):
            assert title in written
    ElementTree.parse(tmp_path / "plan.svg")
    assert "What to switch on" in (tmp_path / "plan.html").read_text()
    assert "What to switch on" in capsys.readouterr().out


def test_a_png_needs_matplotlib(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    target = tmp_path / "plan.png"
    assert main(["plan", "llama-3-8b", "--chart", str(target)]) == 0
    assert target.read_bytes().startswith(b"\x89PNG")


def test_names_are_escaped() -> None:
    drawn = svg(Chart("<a>&", "x", "y", [Line("<script>", [(1.0, 1.0), (2.0, 3.0)])]))
    assert "<script>" not in drawn and "&lt;a&gt;&amp;" in drawn
    ElementTree.fromstring(drawn)


def test_lines_are_those_of_the_plan() -> None:
    found = plan("llama-3-8b", "h100", drafters=("eagle3",))
    roof, depths, batches = charts(found)
    assert max(y for _, y in roof.lines[0].points) == pytest.approx(989)
    best = max(y for _, y in depths.lines[1].points)
    assert best == pytest.approx(found.drafts[0].speed_up)
    assert dict(batches.lines[0].points)[64.0] == pytest.approx(1e3 * found.rows[2].tpot_s)
