"""`paceline train KIND`: the same options as the plain command, and its words for a terminal."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from paceline.cli import train_heads
from paceline.cli.main import main
from paceline.training.__main__ import parser
from paceline.training.news import News
from paceline.training.options import KINDS, TrainOptions, option_names


def arguments(options: Any, **changes: Any) -> list[str]:
    chosen = options(steps=2, answers=12, **changes)
    words = ["train", "dspark"]
    for name in option_names():
        value = getattr(chosen, name)
        if isinstance(value, tuple):
            value = ",".join(map(str, value))
        if value not in (None, ""):
            words += ["--" + name.replace("_", "-"), str(value)]
    return words


def test_a_run_from_the_command_line(options: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*arguments(options), "--json"]) == 0
    told = capsys.readouterr()
    assert json.loads(told.out)["steps"] == 2 and "% training" not in told.out
    assert "answers" in told.err
    assert main(arguments(options)) == 0  # goes on from its checkpoint, which is at the end
    assert "Tokens a cycle on held-out prompts" in capsys.readouterr().out


def test_mistakes_are_sentences(options: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "eagle3", "--out", str(tmp_path / "x"), "--steps", "1"]) == 2
    assert "nothing to train on" in capsys.readouterr().err
    assert main([*arguments(options), "--taps", "one"]) == 2
    assert "--taps are numbers" in capsys.readouterr().err
    (tmp_path / "bad.jsonl").write_text("{}\n")
    bad, out = str(tmp_path / "bad.jsonl"), str(tmp_path / "x")
    assert main(["train", "mtp", "--data", bad, "--out", out, "--steps", "1"]) == 2
    assert "line 1" in " ".join(capsys.readouterr().err.split())


def test_an_interrupt_says_how_to_go_on(options: Any, capsys: pytest.CaptureFixture[str],
                                        monkeypatch: pytest.MonkeyPatch) -> None:
    def show(news: News) -> None:
        signal.raise_signal(signal.SIGINT)

    from contextlib import nullcontext
    monkeypatch.setattr(train_heads, "progress", lambda: nullcontext(show))
    assert main(arguments(options)) == train_heads.INTERRUPTED
    assert "the same command goes on from there" in capsys.readouterr().err


def test_a_terminal_gets_a_bar(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from rich.console import Console

    wide = Console(force_terminal=True, width=100, no_color=True, highlight=False)
    monkeypatch.setattr(train_heads, "console", lambda stderr: wide)
    with train_heads.progress() as show:
        show(News("training", 0.5, "step 3"))
        show(News("measured", 0.6, "K 3: 2.1"))
    assert "% K 3: 2.1" in capsys.readouterr().out


def test_both_commands_know_the_same_options() -> None:
    plain = {action.dest for action in parser()._actions} - {"help", "kind"}
    assert plain == set(option_names())
    given = parser().parse_args(["dspark", "--out", "x", "--data", "a", "b", "--data", "c", "--temperatures", "0,0.5",
                                 "--taps", "1,2", "--minutes", "2.5"])
    assert given.data == [Path("a"), Path("b"), Path("c")] and given.temperatures == (0.0, 0.5) and given.taps == (1, 2)
    defaults = TrainOptions(kind="dspark", out=Path("x"))
    assert vars(parser().parse_args(["dspark", "--out", "x"])) | {"data": ()} == vars(defaults)
    assert set(train_heads._ABOUT) == set(KINDS)
