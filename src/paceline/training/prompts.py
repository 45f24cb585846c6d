"""Prompts to train on: read from files, or made by the target itself."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from paceline.errors import ConfigError

ROLES = ("system", "user", "assistant")


class Message(NamedTuple):
    role: str
    content: str


Prompt = str | tuple[Message, ...]
"""What a user says, or a conversation that ends with what a user says."""


def messages_of(prompt: Prompt) -> list[Mapping[str, Any]]:
    """As chat templates take them."""
    turns = (Message("user", prompt),) if isinstance(prompt, str) else prompt
    return [turn._asdict() for turn in turns]


def plain_text(prompt: Prompt) -> str:
    """For who has no chat template."""
    return prompt if isinstance(prompt, str) else "\n\n".join(turn.content for turn in prompt)


def read_prompts(paths: Sequence[Path]) -> list[Prompt]:
    """All prompts of all files, in their order, each once."""
    prompts: dict[Prompt, None] = {}
    for path in paths:
        found: Sequence[Prompt] = _lines(path) if {".jsonl", ".json"} & {*path.suffixes} else _paragraphs(path)
        if not found:
            raise ConfigError(f"{path} holds no prompts: give a file with at least one, or leave it out.")
        prompts.update(dict.fromkeys(found))
    return list(prompts)


def _lines(path: Path) -> list[Prompt]:
    prompts: list[Prompt] = []
    for number, line in enumerate(_text(path).split("\n"), 1):  # no other line ends: JSON texts hold them
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
        except json.JSONDecodeError as error:
            raise ConfigError(f"{path}, line {number}: not JSON ({error.msg}): one object a line, with a \"prompt\"."
                              ) from None
        if not isinstance(entry, dict):
            entry = {}
        where = f"{path}, line {number}"
        if "messages" in entry:
            prompts.append(_conversation(entry["messages"], where))
        elif _is_text(entry.get("prompt")):
            prompts.append(entry["prompt"])
        else:
            raise ConfigError(f"{where}: there is no \"prompt\" with a text in it, and no \"messages\": give one, or "
                              "leave the line out.")
    return prompts


def _conversation(turns: Any, where: str) -> Prompt:
    if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
        raise ConfigError(f"{where}: \"messages\" is a list of objects, each with a \"role\" and a \"content\".")
    for place, turn in enumerate(turns, 1):
        if turn.get("role") not in ROLES or not _is_text(turn.get("content")):
            raise ConfigError(f"{where}: message {place} needs a \"role\" ({', '.join(ROLES)}) and a \"content\" with "
                              "a text in it.")
    messages = tuple(Message(turn["role"], turn["content"]) for turn in turns)
    if not messages or messages[-1].role != "user":
        raise ConfigError(f"{where}: \"messages\" must end with a user's: the target answers that one.")
    return messages[0].content if len(messages) == 1 else messages


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())


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
