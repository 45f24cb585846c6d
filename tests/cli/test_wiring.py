"""Commands that hand over to other parts (bench, replay), and what commands share."""

from __future__ import annotations

import inspect
import io
import json
import sys
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest
from rich.console import Console
from rich.progress import Progress, TextColumn

from paceline.cli import terminal
from paceline.cli.main import main
from paceline.cli.plain import plain
from paceline.engine.replay import ReplayReport
from paceline.sampling.setup import Difference

RESULT = {
    "machine": {"cpu": "Some CPU", "cores": 2, "threads": 2, "torch": "2.13.0"},
    "rows": [
        {"case": "decode", "unit": "tok/s", "paceline": 30.0, "peers": {"transformers": 15.0}, "ratio": 2.0},
        {"case": "step", "unit": "us", "paceline": 120.5, "peers": {}, "ratio": None},
    ],
}


def report(equal, tokens, expected, at, **more):
    return ReplayReport(True, equal, tokens, expected, len(expected), at, **more)


def install_replay(monkeypatch, outcome):
    calls = []

    def replay(trace, *, model=None, adapters=None, anyway=False, progress=None):
        calls.append((trace, model))
        return outcome

    module = ModuleType("paceline.engine.replay")
    module.replay = replay
    monkeypatch.setitem(sys.modules, "paceline.engine.replay", module)
    monkeypatch.setattr("paceline.engine.replay", module, raising=False)
    return calls


def test_replay_of_the_same_tokens(monkeypatch, capsys):
    calls = install_replay(monkeypatch, report(True, [1, 2], [1, 2], None))
    assert main(["replay", "t.json", "--model", "m"]) == 0
    assert calls == [(Path("t.json"), "m")]
    assert "the same 2 tokens" in capsys.readouterr().out


@pytest.mark.parametrize(("tokens", "at", "said"), [
    ([1, 5], 1, "expected 2, got 5"), ([1], 1, "expected 2, got the end"),
    ([1], None, "expected 2 tokens, got 1 tokens")])
def test_replay_of_other_tokens_is_exit_code_1(tokens, at, said, monkeypatch, capsys):
    install_replay(monkeypatch, report(False, tokens, [1, 2], at))
    assert main(["replay", "t.json"]) == 1
    assert said in capsys.readouterr().out


def test_replay_says_what_differs(monkeypatch, capsys):
    other = [Difference("kv_dtype", "int8", "float32")]
    install_replay(monkeypatch, report(True, [1], [1], None, differences=other))
    assert main(["replay", "t.json", "--anyway"]) == 0
    assert "kv_dtype: trace: int8, here: float32" in capsys.readouterr().err
    install_replay(monkeypatch, ReplayReport(False, differences=other))
    assert main(["replay", "t.json"]) == 3
    assert "cannot be rebuilt here" in capsys.readouterr().out


def test_replay_says_where_a_difference_may_be_a_tie(monkeypatch, capsys):
    install_replay(monkeypatch, report(False, [1, 5], [1, 2], 1, deterministic=False))
    assert main(["replay", "t.json"]) == 1
    assert "up to numerical ties" in capsys.readouterr().out.replace("\n", " ")


def test_replay_says_how_far_it_could_compare(monkeypatch, capsys):
    install_replay(monkeypatch, ReplayReport(True, True, [1], [1], 5))
    assert main(["replay", "t.json"]) == 0
    assert "4 further tokens cannot be compared" in capsys.readouterr().out


def test_replay_as_json(monkeypatch, capsys):
    install_replay(monkeypatch, report(False, [1, 5], [1, 2], 1))
    assert main(["replay", "t.json", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["first_difference"] == 1


def test_plain_values():
    @dataclass
    class Inner:
        path: Path
        items: tuple[int, ...]

    class WithDict:
        def as_dict(self):
            return {1: float("-inf"), "b": Inner(Path("x"), (1, 2))}

    assert plain(WithDict()) == {"1": None, "b": {"path": "x", "items": [1, 2]}}
    assert json.loads(json.dumps(plain({"t": __import__("torch").tensor(2.5)}))) == {"t": 2.5}


def test_loading_bars_count_bytes_and_things():
    out = Console(file=io.StringIO(), force_terminal=True, width=120)
    with Progress(TextColumn("{task.description} {task.fields[amount]}"), console=out) as progress:
        bars = terminal.LoadingBars(progress)
        bars("download", 10, 0)
        bars("download", 46_000_000, 93_000_000)
        bars("tensors", 3, 7)
        amounts = [(task.description, task.fields["amount"]) for task in progress.tasks]
    assert amounts == [("fetching the model", "46.0/93.0 MB"), ("tensors", "3/7")]


def test_without_a_terminal_each_stage_is_one_line(capsys):
    with terminal.loading_bars() as progress:
        for done in range(3):
            progress("download", done, 3)
        progress("tensors", 1, None)
    assert capsys.readouterr().err.splitlines() == ["fetching the model ...", "tensors ..."]


def test_on_a_terminal_there_are_bars(monkeypatch):
    screen = io.StringIO()
    monkeypatch.setattr(terminal, "console", lambda stderr=False: Console(file=screen, force_terminal=True, width=120))
    with terminal.loading_bars() as progress:
        progress("download", 46_000_000, 93_000_000)
    assert "fetching the model" in screen.getvalue()


@pytest.fixture
def benches(monkeypatch):
    """The three benchmarks replaced by ones that note their arguments."""
    calls = {}
    for name in ("latency", "throughput", "overhead"):
        def run(*args, _name=name, **kwargs):
            calls[_name] = (args, kwargs)
            return RESULT

        module = ModuleType(f"paceline.bench.{name}")
        module.run = run
        monkeypatch.setitem(sys.modules, f"paceline.bench.{name}", module)
    resolve = import_module("paceline.models.load.resolve")
    monkeypatch.setattr(resolve, "resolve", lambda model, progress: calls.setdefault("fetched", model))
    return calls


def test_bench_prints_a_table(benches, capsys):
    assert main(["bench", "latency", "--no-peers", "--repeats", "1"]) == 0
    assert benches["latency"] == ((None, 1, 128, False, "auto"), {})
    out = capsys.readouterr().out
    assert "transformers" in out and "2.00x" in out


def test_bench_writes_json(benches, capsys, tmp_path):
    assert main(["bench", "overhead", "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out) == RESULT
    target = tmp_path / "figures.json"
    assert main(["bench", "throughput", "--concurrency", "1, 4", "--json", str(target)]) == 0
    assert benches["throughput"][0][1] == (1, 4)
    assert json.loads(target.read_text()) == RESULT
    assert "decode" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["latency", "throughput"])
def test_bench_draws_its_rows(name, benches, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    assert main(["bench", name, "--chart", str(tmp_path / "x.png")]) == 0
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
    benches.clear()
    assert main(["bench", name, "--chart", str(tmp_path / "none" / "x.png")]) == 2
    assert name not in benches, "it was measured all the same"


@pytest.mark.parametrize("arguments", [
    ["throughput", "--concurrency", "1,x"], ["throughput", "--concurrency", "0"],
    ["overhead", "--json", "/no/such/folder/x.json"]])
def test_bench_mistakes_are_explained(arguments, benches, capsys):
    assert main(["bench", *arguments]) == 2
    assert capsys.readouterr().err.startswith("error: ")


def test_the_names_the_bench_commands_rely_on_exist():
    """The other tests replace the benchmarks; this one notices when a real one changes its parameters."""
    from paceline.bench import latency, overhead, throughput

    assert list(inspect.signature(latency.run).parameters)[:5] == [
        "model", "repeats", "new_tokens", "peers", "kernels"]
    assert {"steps"} <= set(inspect.signature(overhead.run).parameters)
    assert list(inspect.signature(throughput.run).parameters)[:3] == ["model", "concurrency", "new_tokens"]
