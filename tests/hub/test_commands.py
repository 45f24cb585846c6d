"""`paceline pull | list | rm | show`, `--pull`, and what a chat suggests."""

from __future__ import annotations

import io
import json
import socket
import threading
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from serving import write_model

from hub.stand_in import StandIn
from paceline.cli import chat, suggestion
from paceline.cli.main import main
from paceline.hub.catalogue import CATALOGUE
from paceline.hub.pull import pull


@pytest.fixture
def tiny(hub: StandIn, tmp_path: Path) -> StandIn:
    """The hub has a model that runs."""
    folder = write_model(tmp_path / "tiny")
    hub.files = {file.name: file.read_bytes() for file in folder.iterdir()}
    return hub


def test_pull_list_show_rm(tiny: StandIn, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pull", "owner/name"]) == 0
    assert "owner/name is at " in capsys.readouterr().out
    assert main(["list", "--json"]) == 0
    listed = {model["name"]: model for model in json.loads(capsys.readouterr().out)["models"]}
    assert listed["owner/name"]["ready"] and not listed["owner/name"]["default"]
    assert listed["owner/name"]["bytes"] > sum(map(len, tiny.files.values()))
    assert listed["smollm2-135m"] | {"bytes": 0} == {
        "name": "smollm2-135m", "bytes": 0, "path": None, "ready": False, "default": True, "here": False, "own": True}
    assert main(["show", "owner/name", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["architecture"], facts["context"], facts["licence"]) == ("llama", 4096, "apache-2.0")
    assert facts["parameters"] > 10_000 and facts["quantisation"].startswith("F32") and "ngram" in facts["drafters"]
    assert main(["show", "owner/name"]) == 0 and "llama" in capsys.readouterr().out
    assert main(["rm", "owner/name"]) == 0
    assert "owner/name is gone" in capsys.readouterr().out
    assert main(["show", "owner/name"]) == 2
    assert "paceline pull owner/name" in capsys.readouterr().err


def test_the_catalogue_is_listed_when_asked(hub: StandIn, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list"]) == 0
    out = capsys.readouterr().out
    assert "smollm2-135m" in out and "the default" in out and "qwen3-8b" not in out and "--all" in out
    assert main(["list", "--all"]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in CATALOGUE)


def test_half_a_model_is_listed_as_such(hub: StandIn, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupt(stage: str, done: int, total: int) -> None:
        if done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pull("owner/name", progress=interrupt)
    main(["list"])
    assert "owner/name:Q4_K_M" in (out := capsys.readouterr().out) and "incomplete" in out
    assert main(["rm", "owner/name"]) == 0
    capsys.readouterr()
    main(["list"])
    assert "owner/name" not in capsys.readouterr().out


def test_a_command_pulls_when_it_is_told_to(tiny: StandIn, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["generate", "one two", "--max-tokens", "2", "--model", "owner/name"]
    assert main(asked) == 2
    assert "paceline pull owner/name" in capsys.readouterr().err and not tiny.asked
    assert main([*asked, "--pull"]) == 0
    assert "fetching the model" in capsys.readouterr().err
    tiny.asked.clear()
    assert main([*asked, "--pull"]) == 0 and not tiny.asked, "what is here is not asked for again"


def test_a_plan_reads_what_was_pulled_or_the_config_alone(tiny: StandIn, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "owner/name", "--json"]) == 0
    first = json.loads(capsys.readouterr().out)
    assert [one.path.rpartition("/")[2] for one in tiny.asked] == ["config.json"]
    pull("owner/name")
    tiny.asked.clear()
    assert main(["plan", "owner/name", "--json"]) == 0 and not tiny.asked
    second = json.loads(capsys.readouterr().out)
    assert first["model"]["parameters"] == second["model"]["parameters"]


# -- a better model -------------------------------------------------------------------------------------------------

@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch, hub: StandIn) -> Any:
    """What a chat with the default model says on a terminal, once the look at the network is over."""
    def look(*arguments: str, terminal: bool = True) -> str:
        screen = io.StringIO()
        monkeypatch.setattr(chat, "console", lambda: Console(file=screen, force_terminal=terminal, color_system=None,
                                                              highlight=False, width=200))
        monkeypatch.setattr(chat, "load_llm", lambda *given, **more: [
            thread.join() for thread in threading.enumerate() if thread.name == "paceline-suggestion"])
        monkeypatch.setattr(chat, "interact", lambda *given: None)
        stdin = io.StringIO("hello\n")
        stdin.isatty = lambda: terminal  # type: ignore[method-assign]
        monkeypatch.setattr("sys.stdin", stdin)
        monkeypatch.setattr(chat, "answer", lambda *given: True)
        assert main(["chat", *arguments]) == 0
        return screen.getvalue()

    monkeypatch.setattr("paceline.config.available_memory", lambda: 1 << 40)
    return look


def test_a_better_model_is_suggested_once(lines: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = lines()
    assert shown.count("a better model") == 1 and "paceline chat qwen3-1.7b --pull" in shown
    assert "a better model" not in lines("some-model"), "who names a model has chosen"
    assert "a better model" not in lines(terminal=False)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert "a better model" not in lines(), "there is no network"


@pytest.mark.parametrize(("name", "value", "seen"), [("HF_HUB_OFFLINE", "1", False), ("HF_HUB_OFFLINE", "0", True),
                                                     ("HF_ENDPOINT", "http://a..b", False)])
def test_a_suggestion_reads_the_environment_as_a_pull_does(name: str, value: str, seen: bool, hub: StandIn,
                                                           monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, value)
    better = suggestion.Suggestion.__new__(suggestion.Suggestion)
    better._online = False
    better._look()
    assert better._online == seen


def test_one_that_is_here_is_named_without_a_network(lines: Any, hub: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.repo = CATALOGUE["qwen3-0.6b"].repo
    pull("qwen3-0.6b")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert "a better model is here: paceline chat qwen3-0.6b" in lines()


def test_nobody_waits_for_the_network(monkeypatch: pytest.MonkeyPatch, hub: StandIn) -> None:
    held = threading.Event()

    def hang(*given: Any) -> None:
        held.wait(10)
        raise OSError

    monkeypatch.setattr(socket, "create_connection", hang)
    better = suggestion.Suggestion()
    assert better.line() is None
    held.set()
