"""`paceline serve` with several models: what the command line and a file say, and what is refused."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from serving import WAIT, ServerCommand

import paceline
from paceline.cli.main import main
from paceline.cli.serve_models import cache_shares, leave
from paceline.config import GIB
from paceline.serve import server
from paceline.serve.pool import ModelPool

CHAT = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 3, "temperature": 0}


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """The sentence with which a command line is refused; no model is loaded for it."""
    def never(*_: Any, **given: Any) -> Any:
        raise AssertionError("it was not refused")

    monkeypatch.setitem(vars(paceline), "AsyncLLM", never)
    monkeypatch.setattr(server, "listen", lambda options: type("Socket", (), {"getsockname": lambda self: ("", 1)})())

    def run(*arguments: str) -> str:
        assert main(["serve", *arguments]) == 2
        return " ".join(capsys.readouterr().err.split())

    return run


def write(tmp_path: Path, text: str) -> str:
    file = tmp_path / "serve.toml"
    file.write_text(text)
    return str(file)


@pytest.mark.parametrize(("arguments", "says"), [
    (("--draft", "small"), "--draft belongs to one model"), (("--lora", "x=y"), "table [[models]]"),
    (("--chat-template", "f"), "--chat-template belongs"), (("--model-name", "x"), "--model-name belongs"),
    (("--head", "none"), "--head belongs"), (("--replicas", "2"), "--replicas is for a server with one model"),
    (("--kv-events", "5557"), "--kv-events is for"), (("--models-memory", "-1"), "above 0"),
    (("--models-memory", "0.00001"), "raise --models-memory")])
def test_what_several_models_cannot_have_is_refused(arguments: tuple[str, ...], says: str, tiny_folder: Path,
                                                    refused: Callable[..., str]) -> None:
    assert says in refused("--model", str(tiny_folder), "--model", str(tiny_folder), *arguments)


def test_names_are_told_apart_and_missing_models_are_told_of_at_once(tiny_folder: Path, tmp_path: Path,
                                                                     refused: Callable[..., str]) -> None:
    tiny = str(tiny_folder)
    assert "Two models or adapters are called" in refused("--model", tiny, "--model", tiny)
    assert "no-such" in refused("--model", tiny, "--model", "no-such")
    assert "named twice" in refused(tiny, "--model", tiny)
    assert "for several models" in refused("--model", tiny, "--model-idle", "3")
    file = write(tmp_path, f'[[models]]\nmodel = "{tiny}"\n[[models]]\nmodel = "{tiny}"\nmodel-name = "other"\n')
    assert "is named beside them" in refused(tiny, "--config", file)
    both = write(tmp_path, f'[[models]]\nmodel = "{tiny}"\nlora = ["x=f"]\n[[models]]\nmodel = "{tiny}"\n'
                           'model-name = "x"\n')
    assert "called 'x'" in refused("--config", both)


@pytest.mark.parametrize(("text", "says"), [
    ("[[models]]\nport = 1\nmodel = 'x'", "one for the whole server"), ("[[models]]\ndraft = 'x'", "each with a model"),
    ("[[models]]\nmodel = 'x'\nmax-model-lne = 1", "did you mean max-model-len?"), ("models = 3", "each with a model"),
    ("[[models]]\nmodel = 'x'\npreload = 1", "true or false")])
def test_mistakes_in_tables_are_explained(text: str, says: str, tmp_path: Path, refused: Callable[..., str]) -> None:
    assert says in refused("--config", write(tmp_path, text))


def test_one_table_is_one_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: dict[str, Any] = {}
    monkeypatch.setitem(vars(paceline), "AsyncLLM", lambda **given: seen.update(given))
    monkeypatch.setattr(server, "listen", lambda options: type("Socket", (), {"getsockname": lambda self: ("", 1)})())
    monkeypatch.setattr(server, "run", lambda llm, options, *rest: seen.update(name=options.model_name))
    file = write(tmp_path, 'max-queue = 7\n[[models]]\nmodel = "some/model"\nmodel-name = "some"\ndraft = "small"\n'
                           'chat-template = "own.jinja"\n')
    assert main(["serve", "--config", file]) == 0
    assert (seen["model"], seen["name"], seen["max_queue"]) == ("some/model", "some", 7)
    assert seen["speculation"] == {"method": "draft", "model": "small"} and seen["chat_template"] == "own.jinja"


def test_a_process_ends_though_a_model_is_being_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[int] = []
    monkeypatch.setattr(os, "_exit", ended.append)
    pool: ModelPool[Any] = ModelPool([], 1, None)  # type: ignore[arg-type]
    leave(pool)
    assert not ended
    monkeypatch.setattr(ModelPool, "busy", True)
    leave(pool)
    assert ended == [0]


def test_caches_share_what_the_weights_leave() -> None:
    assert cache_shares(10 * GIB, [GIB, 3 * GIB]) == [3 * GIB, 3 * GIB]
    assert cache_shares(8 * GIB, [6 * GIB, 7 * GIB]) == [GIB, GIB], "they take turns"
    assert cache_shares(8 * GIB, [9 * GIB, GIB])[0] < 0


def test_a_file_with_two_models_is_served_each_with_its_own_options(
        monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tiny_folder: Path) -> None:
    template = tmp_path / "own.jinja"
    template.write_text("{% for message in messages %}[{{ message.content }}]{% endfor %}")
    file = write(tmp_path, f"""
        model-idle = 3600
        models-memory = 1
        max-model-len = 1024
        [[models]]
        model = "{tiny_folder}"
        model-name = "first"
        draft = "{tiny_folder}"
        [[models]]
        model = "{tiny_folder}"
        model-name = "second"
        chat-template = "{template}"
        max-model-len = 512
    """)
    with ServerCommand(monkeypatch, None, "--config", file) as served:
        http = httpx.Client(base_url=served.url, timeout=WAIT)
        states = {one["id"]: one["state"] for one in http.get("/v1/models").json()["data"]}
        assert states == {"first": "loaded", "second": "unloaded"}
        drafted = http.post("/v1/chat/completions", json=CHAT).json()
        assert drafted["model"] == "first" and drafted["paceline"]["speculation"]["method"] == "draft"
        shown = http.post("/apply-template", json={"model": "second", "messages": CHAT["messages"]}).json()
        assert shown == {"prompt": "[hello]"}
        cards = {one["id"]: one for one in http.get("/v1/models").json()["data"]}
        assert cards["second"]["max_model_len"] == 512 and cards["first"]["max_model_len"] == 1024
        http.close()


def test_a_model_with_a_draft_and_a_template_of_its_own_is_served(monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
                                                                 tiny_folder: Path) -> None:
    template = tmp_path / "own.jinja"
    template.write_text("{% for message in messages %}[{{ message.content }}]{% endfor %}")
    with ServerCommand(monkeypatch, None, "--model", str(tiny_folder), "--draft", str(tiny_folder), "--chat-template",
                       str(template), "--max-model-len", "512") as served:
        answer = httpx.post(f"{served.url}/v1/chat/completions", json=CHAT, timeout=WAIT).json()
        assert answer["paceline"]["speculation"]["method"] == "draft" and answer["usage"]["prompt_tokens"] < 9
