"""Prompts to train on: read from files, or made by the target itself."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Sequence
from pathlib import Path

from paceline.errors import ConfigError


def read_prompts(paths: Sequence[Path]) -> list[str]:
    """All prompts of all files, in their order, each once."""
    prompts: dict[str, None] = {}
    for path in paths:
        found = _lines(path) if ".jsonl" in path.suffixes or ".json" in path.suffixes else _paragraphs(path)
        if not found:
            raise ConfigError(f"{path} holds no prompts: give a file with at least one, or leave it out.")
        prompts.update(dict.fromkeys(found))
    return list(prompts)


def _lines(path: Path) -> list[str]:
    prompts = []
    for number, line in enumerate(_text(path).split("\n"), 1):  # no other line ends: JSON texts hold them
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
        except json.JSONDecodeError as error:
            raise ConfigError(f"{path}, line {number}: not JSON ({error.msg}): one object a line, with a \"prompt\"."
                              ) from None
        prompt = entry.get("prompt") if isinstance(entry, dict) else None
        if not isinstance(prompt, str) or not prompt.strip():
            raise ConfigError(f"{path}, line {number}: there is no \"prompt\" with a text in it: give one, or leave "
                              "the line out.")
        prompts.append(prompt)
    return prompts


def _paragraphs(path: Path) -> list[str]:
    paragraphs, lines = [], list[str]()
    for line in [*_text(path).split("\n"), ""]:
        if line.strip():
            lines.append(line.rstrip())
        elif lines:
            paragraphs.append("\n".join(lines))
            lines = []
    return paragraphs


def _text(path: Path) -> str:
    try:
        raw = path.read_bytes()
        if path.suffix == ".gz":
            raw = gzip.decompress(raw)
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{path}, line {line}: not UTF-8 text (byte {error.start}): convert it or leave it out."
                          ) from None
    except (gzip.BadGzipFile, zlib.error, EOFError):
        raise ConfigError(f"{path} is no whole .gz file: fetch it again, or leave it out.") from None
    except OSError as error:
        raise ConfigError(f"Cannot read {path}: {error.strerror}.") from None
