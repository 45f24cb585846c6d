"""`paceline serve --config FILE`, the environment, --model, --draft and --chat-template: what reaches the engine."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
import typer.main

import paceline
from paceline import LLM
from paceline.cli.main import app, main
from paceline.cli.serve import settings
from paceline.errors import ConfigError
from paceline.serve import server


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the engine and the server would have been made with."""
    seen: dict[str, Any] = {}

    class Engine:
        def __init__(self, **given: Any) -> None:
            seen.update(given)

    def listen(options: Any) -> Any:
        seen["server"] = options
        return type("Socket", (), {"getsockname": lambda self: ("127.0.0.1", 1)})()

    monkeypatch.setitem(vars(paceline), "AsyncLLM", Engine)
    monkeypatch.setattr(server, "listen", listen)
    monkeypatch.setattr(server, "run", lambda *given: None)
    return seen


def write(tmp_path: Path, text: str) -> str:
    file = tmp_path / "serve.toml"
    file.write_text(text)
    return str(file)


def test_every_option_can_be_said_in_a_file() -> None:
    command = typer.main.get_command(app).commands["serve"]  # type: ignore[attr-defined]
    known = {setting.key for setting in settings()}
    flags = {flag[2:] for parameter in command.params for flag in parameter.opts if flag.startswith("--")}
    assert flags - known - {"help"} == {"config"} and known <= flags


def test_a_file_says_what_the_command_line_would(served: dict[str, Any], tmp_path: Path) -> None:
    file = write(tmp_path, """
        model = "some/model"
        port = 9000
        api-key = ["one", "two"]
        max_queue = 7
        prefix-caching = false
        max-step-ms = 50
        cors-origin = "http://a"
        lora = ["pirate=folder"]
        speculation = {method = "ngram", k = 3}
    """)
    assert main(["serve", "--config", file]) == 0
    options = served["server"]
    assert (options.port, options.api_keys, options.cors_origins) == (9000, ("one", "two"), ("http://a",))
    assert options.model_name == served["model"] == "some/model"
    assert (served["max_queue"], served["enable_prefix_caching"], served["max_step_ms"]) == (7, False, 50)
    assert served["speculation"] == {"method": "ngram", "k": 3} and served["adapters"] == {"pirate": "folder"}


def test_the_command_line_wins_over_the_file_and_that_over_the_environment(
        served: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write(tmp_path, 'model = "of-file"\nport = 9000\nmax-queue = 7\ncors-origin = ["http://f"]\npage = false\n')
    for name, value in {"PORT": "8500", "MAX_QUEUE": "8", "MAX_N": "3", "SHARE_CACHE": "yes", "HOST": "",
                        "ALLOWED_HOST": "a, b", "STALL_TIMEOUT": "2.5", "MODEL": "of-environment"}.items():
        monkeypatch.setenv(f"PACELINE_SERVE_{name}", value)
    assert main(["serve", "of-line", "--config", file, "--port", "9100", "--page", "--cors-origin", "http://line"]) == 0
    options = served["server"]
    assert (options.port, served["max_queue"], options.max_n, options.page) == (9100, 7, 3, True)
    assert (options.share_cache, options.allowed_hosts, options.stall_s) == (True, ("a", "b"), 2.5)
    assert options.host == "127.0.0.1" and options.cors_origins == ("http://line",)
    assert served["model"] == "of-line"
    assert main(["serve", "--config", file, "--model", "of-option"]) == 0 and served["model"] == "of-option"
    assert main(["serve", "--config", file]) == 0 and served["model"] == "of-file"
    assert main(["serve"]) == 0 and served["model"] == "of-environment"
    monkeypatch.setenv("PACELINE_SERVE_CONFIG", file)
    assert main(["serve"]) == 0 and served["model"] == "of-file"


@pytest.mark.parametrize(("text", "says"), [
    ("prot = 1", "did you mean port?"), ("max_queu = 1", "did you mean max-queue?"), ("zzzzzz = 1", "no option"),
    ("[serve]\nport = 1", "no option"), ("config = 'x'", "no option"), ("port = '9000'", "port must be a whole number"),
    ("port = true", "a whole number"), ("page = 1", "true or false"), ("host = 5", "a text"),
    ("host = ['a']", "a text"), ("api-key = [1]", "a text, or a list of such"), ("port =", "is not TOML"),
    ("max-queue = 1\nmax_queue = 2", "twice"), ("timeout = 'x'", "a number"), ("port = 70000", "--port"),
    ("speculation = {method = 'ngram', k = 2020-01-01}", "holds a date")])
def test_mistakes_in_a_file_are_explained(text: str, says: str, tmp_path: Path,
                                          capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--config", write(tmp_path, text)]) == 2
    assert says in capsys.readouterr().err.replace("\n", " ")


def test_a_file_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--config", str(tmp_path / "none.toml")]) == 2
    assert "cannot be read" in capsys.readouterr().err


def test_a_file_that_never_ends_is_not_read_to_its_end(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--config", "/dev/zero"]) == 2
    assert "more than 1 MB" in capsys.readouterr().err


def test_a_mark_at_the_beginning_of_a_file_is_no_mistake(served: dict[str, Any], tmp_path: Path) -> None:
    """Some editors write one (BOM), and ends of lines of two characters."""
    assert main(["serve", "--config", write(tmp_path, "\ufeffport = 9000\r\nmax-n = 3\r\n")]) == 0
    assert (served["server"].port, served["server"].max_n) == (9000, 3)


def test_mistakes_in_the_environment_are_explained(monkeypatch: pytest.MonkeyPatch,
                                                   capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("PACELINE_SERVE_PORT", "tcp://10.0.0.1:80")
    assert main(["serve"]) == 2
    assert "PACELINE_SERVE_PORT must be a whole number" in capsys.readouterr().err.replace("\n", " ")


def test_the_document_shows_a_file_that_is_right(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "serving.md").read_text()
    shown = page.partition("```toml\n# serve.toml")[2].partition("```")[0]
    assert len(tomllib.loads(shown)) > 4
    assert len(settings().of_file(Path(write(tmp_path, shown)))) == len(tomllib.loads(shown))


# -- models and templates --------------------------------------------------------------------------------------------

def test_a_model_is_named_once(served: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--model", "a"]) == 0 and served["model"] == "a"
    assert main(["serve", "a", "--model", "b"]) == 2
    assert "named twice" in capsys.readouterr().err


def test_draft_is_short_for_a_speculation(served: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--draft", "small"]) == 0
    assert served["speculation"] == {"method": "draft", "model": "small"}
    assert main(["serve", "--draft", "small", "--speculation", "ngram"]) == 2
    assert "both say how to draft" in capsys.readouterr().err


def test_a_chat_template_of_ones_own(served: dict[str, Any], tmp_path: Path, tiny_folder: Path) -> None:
    file = tmp_path / "own.jinja"
    file.write_text("{% for message in messages %}[{{ message.content }}]{% endfor %}")
    assert main(["serve", "--chat-template", str(file)]) == 0 and served["chat_template"] == str(file)
    engine = LLM(str(tiny_folder), chat_template=str(file)).engine
    assert engine.tokenizer is not None
    ids = engine.render([{"role": "user", "content": "one"}, {"role": "user", "content": "two"}])
    assert engine.tokenizer.decode(ids) == "[one][two]"


@pytest.mark.parametrize("content", [None, "{% for %}"])
def test_a_chat_template_that_is_broken_is_refused_at_once(content: str | None, tmp_path: Path,
                                                           tiny_folder: Path) -> None:
    file = tmp_path / "own.jinja"
    if content is not None:
        file.write_text(content)
    with pytest.raises(ConfigError, match=r"own\.jinja cannot be used"):
        LLM(str(tiny_folder), chat_template=str(file))


def test_only_the_model_that_is_served_is_pulled(served: dict[str, Any], tmp_path: Path,
                                                 monkeypatch: pytest.MonkeyPatch) -> None:
    pulled: list[str] = []
    monkeypatch.setattr("paceline.hub.pull.pull", lambda name, progress: pulled.append(name))
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path))
    file = write(tmp_path, 'model = "owner/of-file"\ndraft = "owner/small"\npull = true\n')
    assert main(["serve", "owner/of-line", "--config", file]) == 0
    assert pulled == ["owner/of-line", "owner/small"]
