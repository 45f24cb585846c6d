"""The /commands of a chat: what each does, and what Tab completes it with."""

from __future__ import annotations

import base64
import glob
import json
import os
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from paceline.cli.conversation import Conversation
from paceline.cli.files import named
from paceline.cli.options import DEFAULT_MODEL
from paceline.cli.terminal import print_error
from paceline.errors import PacelineError, RequestError
from paceline.request import SamplingParams

SETTINGS = ("temperature", "max_tokens", "min_tokens", "top_k", "top_p", "min_p", "repetition_penalty",
            "presence_penalty", "frequency_penalty", "no_repeat_ngram_size", "seed", "stop")
"""Fields of SamplingParams that /set sets."""


def _help(chat: Conversation, rest: str) -> str:
    return help_text()


def _system(chat: Conversation, rest: str) -> str:
    chat.system = rest or None
    chat.reset()
    return "system prompt set, conversation forgotten"


def _reset(chat: Conversation, rest: str) -> str:
    chat.reset()
    return "forgotten"


def _save(chat: Conversation, rest: str) -> str:
    chat.save(_path(rest, "/save"))
    return f"{len(chat.messages)} messages saved"


def _load(chat: Conversation, rest: str) -> str:
    chat.load(_path(rest, "/load"))
    return f"{len(chat.messages)} messages loaded"


def _model(chat: Conversation, rest: str) -> str:
    if not rest or chat.switch is None:
        raise RequestError("/model needs a model's name: `paceline list` shows those that are here.")
    chat.switch(rest, chat)
    return f"{rest} answers from now on; the conversation goes on"


def _set(chat: Conversation, rest: str) -> str:
    """Without a key: all of them as they are."""
    key, _, text = rest.partition(" ")
    if not key:
        return "\n".join(f"{name} {json.dumps(getattr(chat.params, name))}" for name in SETTINGS)
    name = key.replace("-", "_")
    if name not in SETTINGS or not text.strip():
        raise RequestError(f"/set takes a key and a value, and knows {', '.join(SETTINGS)}.")
    chat.params = replace(chat.params, **{name: _value(name, text.strip())})
    return f"{name} {json.dumps(getattr(chat.params, name))}"


def _value(name: str, text: str) -> Any:
    if text in ("none", "default"):
        return next(one.default for one in fields(SamplingParams) if one.name == name)
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _retry(chat: Conversation, rest: str) -> str:
    if not any(message["role"] == "user" for message in chat.messages):
        raise RequestError("Nothing was asked yet.")
    chat.retry()
    return ""


def _copy(chat: Conversation, rest: str) -> str:
    """By the terminal's own means (OSC 52), which work over a network too; there are terminals that do not have it."""
    if (answer := chat.last_answer) is None:
        raise RequestError("There is no answer to copy yet.")
    if not chat.out.is_terminal:
        raise RequestError("Only a terminal has a clipboard: /save FILE writes the conversation.")
    chat.out.file.write(f"\x1b]52;c;{base64.b64encode(answer.encode()).decode()}\a")
    return f"{len(answer)} characters copied"


def _path(text: str, command: str) -> Path:
    if not text:
        raise RequestError(f"{command} needs a file.")
    return named(text)


def _files(start: str) -> list[str]:
    found = glob.glob(glob.escape(os.path.expanduser(start)) + "*")
    return [f"{one}/" if Path(one).is_dir() else one for one in sorted(found)]


def _models(start: str) -> list[str]:
    from paceline.hub.catalogue import CATALOGUE

    return sorted(name for name in (DEFAULT_MODEL, *CATALOGUE) if name.startswith(start))


def _settings(start: str) -> list[str]:
    return [name for name in SETTINGS if name.startswith(start)]


@dataclass(frozen=True)
class Command:
    usage: str
    words: str
    do: Callable[[Conversation, str], str]
    """What to say then; a PacelineError: what went wrong, and nothing has changed."""
    complete: Callable[[str], list[str]] = lambda start: []


COMMANDS = {one.usage.split()[0]: one for one in (
    Command("/help", "this list", _help),
    Command("/system TEXT", "start over with this system prompt (without TEXT: none)", _system),
    Command("/reset", "forget the conversation", _reset),
    Command("/retry", "ask the last question again", _retry),
    Command("/set KEY VALUE", "temperature, max_tokens, seed and so on (without KEY: what is set)", _set, _settings),
    Command("/model NAME", "go on with another model", _model, _models),
    Command("/save FILE", "write the conversation", _save, _files),
    Command("/load FILE", "go on with one that was written", _load, _files),
    Command("/copy", "the last answer to the clipboard", _copy),
)}
LEAVE = ("/exit", "/quit")


def help_text() -> str:
    rows = [*((one.usage, one.words) for one in COMMANDS.values()),
            ("/exit", "leave (Ctrl-D too); Ctrl-C stops an answer"),
            ('"""', 'begins and ends a message of several lines; pasted lines are one message anyway')]
    return "\n".join(f"{usage:16} {words}" for usage, words in rows)


def is_command(message: str) -> bool:
    return message.startswith("/") and "\n" not in message


def obey(chat: Conversation, line: str) -> bool:
    """Carry out a /command; False: leave."""
    name, _, rest = line.strip().partition(" ")
    if name in LEAVE:
        return False
    command = COMMANDS.get(name)
    if command is None:
        chat.out.print(f"unknown command {name}; /help lists them", style="dim", markup=False)
        return True
    try:
        said = command.do(chat, rest.strip())
    except PacelineError as problem:
        print_error(problem)
        return True
    if said:
        chat.out.print(said, style=None if command.do is _help else "dim", markup=False)
    return True


def completions(line: str) -> list[str]:
    """Of the last word of what is typed."""
    if not line.startswith("/"):
        return []
    name, space, rest = line.partition(" ")
    if not space:
        return [f"{one} " if len(COMMANDS[one].usage.split()) > 1 else one
                for one in COMMANDS if one.startswith(name)] + [one for one in LEAVE if one.startswith(name)]
    command = COMMANDS.get(name)
    return [] if command is None or " " in rest else command.complete(rest)
