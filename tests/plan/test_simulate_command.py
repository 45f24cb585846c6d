"""`paceline plan --simulate` as it is typed."""

from __future__ import annotations

import inspect
import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from paceline.cli.main import main
from plan.test_traffic import load_test

TRAFFIC = "poisson:rate=8,seconds=5,prompt=300,output=20,prefixes=4"


def test_fleets_are_set_beside_each_other(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    chart = tmp_path / "fleets.svg"
    assert main(["plan", "llama-3.1-8b", "--hardware", "h100", "--simulate", TRAFFIC, "--replicas", "1,2",
                 "--prefill-replicas", "1", "--decode-replicas", "1", "--ttft", "100", "--tpot", "50",
                 "--chart", str(chart)]) == 0
    out = capsys.readouterr().out
    assert "1, prefix" in out and "2, random" in out and "1 prefill + 1 decode, prefix" in out
    assert "Best: 1, prefix. 100.0% of requests keep to the targets" in out
    assert ElementTree.parse(chart).getroot().tag.endswith("svg")


def test_as_json_with_speculation(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["plan", "llama-3.1-8b", "--hardware", "l4", "--dtype", "int4", "--simulate", TRAFFIC,
                 "--replicas", "3", "--routing", "round-robin", "--max-num-seqs", "8", "--kv-blocks", "900", "--json"]
    found = []
    for more in ([], ["--drafter", "eagle3", "--acceptance", "0.8", "--k", "3"]):
        assert main([*arguments, *more]) == 0
        found.append(json.loads(capsys.readouterr().out))
    plain, drafted = found
    assert plain["engine"]["kv_blocks"] == 900 and plain["engine"]["max_num_seqs"] == 8
    assert [one["fleet"] for one in plain["fleets"]] == ["3, round-robin"] and plain["fleets"][0]["goodput"] is None
    assert "eagle3 at 0.80" in drafted["costs"]
    assert drafted["fleets"][0]["tpot"]["50"] < 0.7 * plain["fleets"][0]["tpot"]["50"]


def test_a_real_run_is_set_beside_it(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "real.json"
    path.write_text(json.dumps(load_test()))
    assert main(["plan", "llama-3.1-8b", "--simulate", str(path), "--json"]) == 0
    found = {one["what"]: one for one in json.loads(capsys.readouterr().out)["compared"]}
    assert found["output_rate"]["measured"] == 150.0 and found["ttft_p99"]["simulated"] > 0.0
    assert found["ttft_p50"]["error"] == pytest.approx(found["ttft_p50"]["simulated"] / 5.0 - 1.0)
    assert main(["plan", "llama-3.1-8b", "--simulate", TRAFFIC, "--compare", str(path), "--replicas", "2"]) == 0
    assert "measured  simulated" in capsys.readouterr().out


def test_replicas_are_as_serve_would_have_them(capsys: pytest.CaptureFixture[str]) -> None:
    from paceline.cli.serve import serve

    assert main(["plan", "llama-3.1-8b", "--simulate", TRAFFIC, "--routing", "prefix", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["engine"]
    for name in ("max_step_ms", "max_queue"):
        assert found[name] == inspect.signature(serve).parameters[name].default


def test_a_machine_that_is_shared(capsys: pytest.CaptureFixture[str]) -> None:
    found = []
    for more in ([], ["--cores", "1"], ["--cores", "4", "--memory-gb-s", "1000"]):
        assert main(["plan", "llama-3.1-8b", "--simulate", TRAFFIC, "--routing", "prefix", "--replicas", "4", "--json",
                     *more]) == 0
        found.append(json.loads(capsys.readouterr().out)["fleets"][0])
    apart, cores, memory = (one["e2e"]["50"] for one in found)
    assert cores > 1.2 * apart and memory > 1.2 * apart and found[0]["front"] > 0.0


@pytest.mark.parametrize(("arguments", "problem"), [
    (["--simulate", TRAFFIC, "--transfer-gb-s", "inf"], "--transfer-gb-s must be a number"),
    (["--simulate", TRAFFIC, "--time-scale", "inf"], "--time-scale must be a number"),
    (["--simulate", TRAFFIC, "--memory-gb-s", "20"], "give --cores"), (["--memory-gb-s", "20"], "are for --simulate"),
    (["--replicas", "2"], "are for --simulate"), (["--compare", "x.json"], "are for --simulate"),
    (["--simulate", TRAFFIC, "--replicas", "0"], "--replicas must be numbers from 1"),
    (["--simulate", TRAFFIC, "--replicas", "many"], "--replicas must be numbers"),
    (["--simulate", TRAFFIC, "--routing", "best"], "--routing must be one of prefix, round-robin, random"),
    (["--simulate", TRAFFIC, "--prefill-replicas", "2"], "go together"),
    (["--simulate", "nowhere.jsonl"], "Cannot read nowhere.jsonl"),
    (["--simulate", TRAFFIC, "--compare", "nowhere.json"], "is not what"),
    (["--simulate", "poisson:rate=1,prompt=200000"], "the context holds 131072"),
    (["--simulate", TRAFFIC, "--kv-blocks", "16"], "a replica's cache holds 256"),
    (["--simulate", TRAFFIC, "--hardware", "t4"], "The weights take")])
def test_what_cannot_be_is_said(arguments: list[str], problem: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "llama-3.1-8b", *arguments]) != 0
    assert problem in capsys.readouterr().err.replace("\n", " ")
