"""The command line as a whole: what exists, how errors look, how quickly it starts."""

from __future__ import annotations

import errno
import io
import json
import os
import subprocess
import sys

import pytest

from paceline import __version__
from paceline.cli.main import main
from paceline.errors import PacelineError


def test_help_lists_every_command(capsys):
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    for command in ("chat", "generate", "doctor", "replay", "bench", "serve", "plan", "train", "verify"):
        assert command in text


def test_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.strip() == f"paceline {__version__}"


def test_unknown_command_and_option_are_explained(capsys):
    assert main(["chatt"]) == 2
    assert "chatt" in capsys.readouterr().err
    assert main(["generate", "x", "--no-such-option"]) == 2
    assert "--no-such-option" in capsys.readouterr().err


def test_an_error_is_one_sentence_on_stderr(fake_llm, capsys):
    assert main(["generate", "hello", "--model", "missing"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    lines = [line for line in captured.err.splitlines() if line.startswith("error")]
    assert lines == ["error: No model 'missing': give a folder, a .gguf file or a known short name."]
    assert "Traceback" not in captured.err


def test_debug_shows_the_traceback(fake_llm, monkeypatch):
    monkeypatch.setenv("PACELINE_DEBUG", "1")
    with pytest.raises(PacelineError):
        main(["generate", "hello", "--model", "missing"])


@pytest.mark.parametrize("arguments", [
    ["--top-p", "0"], ["--n", "0"], ["--temperature", "-1"], ["--max-tokens", "-1"], ["--stop", ""],
    ["--speculation", "{not json"],
])
def test_impossible_parameters_are_refused_before_a_model_is_loaded(arguments, fake_llm, capsys, monkeypatch):
    monkeypatch.setattr(fake_llm, "__init__", lambda *a, **k: pytest.fail("loaded a model"))
    assert main(["generate", "hello", *arguments]) == 2
    assert capsys.readouterr().err.startswith("error: ")


def test_starting_imports_no_heavy_package():
    """Speed of `--help`, as a fact that cannot flake: neither torch nor the tokenizer is touched."""
    code = (
        "import sys, json\n"
        "from paceline.cli.main import main\n"
        "main(['--help'])\n"
        "print(json.dumps([m for m in ('torch', 'numpy', 'tokenizers', 'safetensors', 'jinja2') if m in sys.modules]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert json.loads(done.stdout.splitlines()[-1]) == []


def test_python_dash_m_is_the_command():
    done = subprocess.run([sys.executable, "-m", "paceline", "--version"], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.strip()) == (0, f"paceline {__version__}")


def test_without_typer_the_command_says_what_to_install():
    code = "import sys, runpy; sys.modules['typer'] = None; runpy.run_module('paceline', run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ") and "pip install typer" in done.stderr


def test_an_output_that_cannot_be_written_is_one_sentence(capsys, monkeypatch):
    def full(text):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("sys.stdout.write", full)
    assert main(["list"]) == 2
    said = capsys.readouterr().err
    assert "No space left" in said and "Traceback" not in said


def test_what_an_old_terminal_cannot_show_is_a_question_mark(fake_llm, monkeypatch):
    monkeypatch.setattr(fake_llm, "answer", "caf\u00e9 \u2013 \u20ac")
    for arguments, shown in (["generate", "x"], b"caf? ? ?"), (["chat"], b"caf? ? ?"), (
            ["generate", "x", "--json"], rb"caf\u00e9 \u2013 \u20ac"):
        screen = io.BytesIO()
        monkeypatch.setattr("sys.stdin", io.StringIO())
        monkeypatch.setattr("sys.stdout", io.TextIOWrapper(screen, encoding="ascii", write_through=True))
        assert main(arguments) == 0
        assert shown in screen.getvalue()


def test_ctrl_c_leaves_quietly(capsys, monkeypatch):
    def interrupted():
        raise KeyboardInterrupt

    monkeypatch.setattr("paceline.cli.doctor.examine", interrupted)
    assert main(["doctor"]) != 0
    assert "Traceback" not in capsys.readouterr().err


def test_a_shell_completes_commands_and_options():
    def completed(words):
        environment = {**os.environ, "_PACELINE_COMPLETE": "complete_bash", "COMP_WORDS": words,
                       "COMP_CWORD": str(len(words.split()) - 1)}
        done = subprocess.run([sys.executable, "-m", "paceline"], env=environment, capture_output=True, text=True,
                              timeout=60, check=True)
        return done.stdout.split()

    assert completed("paceline gen") == ["generate"]
    assert {"--speculation", "--system"} <= set(completed("paceline chat --s"))


def test_completion_can_be_installed(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr("shellingham.detect_shell", lambda: ("bash", "/bin/bash"))
    monkeypatch.setenv("HOME", str(tmp_path))
    assert main(["--show-completion"]) == 0
    script = capsys.readouterr().out
    assert "_PACELINE_COMPLETE=complete_bash" in script
    assert main(["--install-completion"]) == 0
    assert any(script.strip() in file.read_text() for file in tmp_path.rglob("paceline*"))
