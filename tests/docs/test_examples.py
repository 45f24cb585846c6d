"""What README.md and docs/ show works: Python blocks are run, commands are parsed, links and pictures exist."""

from __future__ import annotations

import re
import runpy
import shlex
import sys
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass
from pathlib import Path

import pytest
import typer.main

from paceline.cli.main import app

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])
FENCE = re.compile(r"^```(\w+)[^\n]*\n(.*?)^```\s*$", re.MULTILINE | re.DOTALL)
SERVER = "http://127.0.0.1:8000"
"""Where the documents say a server is."""


@dataclass(frozen=True)
class Block:
    page: Path
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks(language: str) -> list[Block]:
    return [
        Block(page, page.read_text().count("\n", 0, found.start(2)) + 1, found[1], found[2])
        for page in PAGES
        for found in FENCE.finditer(page.read_text())
        if found[1] == language
    ]


def python_cases() -> list:
    """A block that builds an LLM needs the default model; one that asks a server is run in test_serving.py."""
    return [
        pytest.param(block, id=str(block), marks=[pytest.mark.real_model] if "LLM(" in block.text else [])
        for block in blocks("python")
        if SERVER not in block.text
    ]


def commands() -> list:
    return [
        pytest.param(line, id=f"{block}:{line}")
        for block in blocks("bash")
        for line in block.text.splitlines()
        if line.strip() and not line.startswith("#")
    ]


@pytest.mark.parametrize("block", python_cases())
def test_python_blocks_run(block, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    # Line numbers in a traceback are those of the page.
    code = compile("\n" * (block.line - 1) + block.text, str(block.page), "exec")
    exec(code, {"__name__": "__main__"})


@pytest.mark.parametrize("line", commands())
def test_commands_exist(line, monkeypatch, capsys, tmp_path):
    words = shlex.split(line)
    if words[0] == "make":
        targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert set(words[1:]) <= set(targets)
    elif words[0] == "source":
        assert words[1:] == [".venv/bin/activate"], "which make has built"
    elif words[0] == "python":
        monkeypatch.syspath_prepend((ROOT / words[1]).parent)
        monkeypatch.setattr(sys, "argv", [words[1], "--help"])
        with pytest.raises(SystemExit) as end:
            runpy.run_path(str(ROOT / words[1]), run_name="__main__")
        assert not end.value.code
        known = capsys.readouterr().out
        assert [word for word in words[2:] if word.startswith("--") and f"{word} " not in known] == []
    else:
        assert words[0] == "paceline", f"cannot check {line!r}"
        monkeypatch.chdir(tmp_path)
        (tmp_path / "serve.toml").touch()  # read while options are; tests/serve reads the one that is shown
        parse(typer.main.get_command(app), words[1:])


def parse(command, words):
    """Parse as the command line would, without running anything; a wrong name or option raises."""
    name, rest = "paceline", words
    while hasattr(command, "commands"):
        name, *rest = rest
        assert name in command.commands, f"no command {name}"
        command = command.commands[name]
    context = command.make_context(name, list(rest))
    context.close()


def test_wrong_examples_would_be_noticed():
    root = typer.main.get_command(app)
    with pytest.raises(AssertionError):
        parse(root, ["generat", "x"])
    with pytest.raises(Exception, match="no-such"):
        parse(root, ["generate", "x", "--no-such"])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    text = FENCE.sub("", page.read_text())
    targets = [target.split("#")[0] for target in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in target]
    missing = [target for target in targets if target and not (page.parent / target).exists()]
    assert missing == []


def anchors(page):
    """What links may name in a page: its headings, as hosts of repositories spell them."""
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading)).strip().lower().replace(" ", "-")
            for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_into_pages_name_a_heading(page):
    text = FENCE.sub("", page.read_text())
    targets = [target.split("#") for target in re.findall(r"\]\(([^)\s]+)\)", text)
               if "#" in target and "://" not in target]
    missing = [f"{name}#{anchor}" for name, anchor in targets
               if anchor not in anchors(page.parent / name if name else page)]
    assert missing == []


def test_pictures_are_readable_in_light_and_dark():
    for picture in (ROOT / "docs" / "images").glob("*.svg"):
        text = picture.read_text()
        ElementTree.fromstring(text)
        assert "prefers-color-scheme: dark" in text, picture
        assert "<title" in text and "<desc" in text, picture


def test_there_is_something_to_check():
    assert len(blocks("python")) >= 5
    assert len(blocks("bash")) >= 3
