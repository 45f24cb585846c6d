"""Prompts to train on: read from files, or made by the target itself."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from paceline.errors import ConfigError
from paceline.measure.text_files import read_text

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
    for number, line in enumerate(read_text(path).split("\n"), 1):  # no other line ends: JSON texts hold them
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError) as error:  # a number too long, or nesting too deep
            said = error.msg if isinstance(error, json.JSONDecodeError) else error
            raise ConfigError(f"{path}, line {number}: not JSON ({said}): one object a line, with a \"prompt\"."
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
    for line in [*read_text(path).split("\n"), ""]:
        if line.strip():
            lines.append(line.rstrip())
        elif lines:
            paragraphs.append("\n".join(lines))
            lines = []
    return paragraphs
