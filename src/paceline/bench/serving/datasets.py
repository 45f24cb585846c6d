"""What is asked: prompts made up by seed, prompts with shared beginnings, or those of a file. Nothing is tokenised:
lengths that are made up are words, about a token each, and the server's own count is what reports state."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.bench.questions import read_questions
from paceline.errors import ConfigError

SYNTHETIC, SHARED_PREFIX = "synthetic", "shared-prefix"
COMMON = (
    "the of and to in is was for on that with as his they at be this from have or by one had not but what all were "
    "when we there can an your which their said if do will each about how up out them then she many some so these "
    "would other into has more her two like him see time could no make than first been its who now people my made "
    "over did down only way find use may water long little very after words called just where most know get through "
    "back much before go good new write our used me man too any day same right look think also around another came "
    "come work three word must because does part even place well such here take why things help put years different "
    "away again off went old number great tell men say small every found still between name should home big give air "
    "line set own under read last never us left end along while might next sound below saw something thought both few "
    "those always looked show large often together asked house world going want school important until form food keep "
    "children feet land side without boy once animals life enough took sometimes four head above kind began almost "
    "live page got earth need far hand high year mother light parts country father let night following picture being"
)
WORDS = COMMON.split()


@dataclass(frozen=True)
class Lengths:
    """A range, both ends counted."""

    least: int
    most: int

    @staticmethod
    def parse(text: str, option: str) -> Lengths:
        ends = text.split("-")
        if not (len(ends) <= 2 and all(end.strip().isdigit() for end in ends)):
            raise ConfigError(f"{option} must be a whole number or a range such as 64-512, got {text!r}.")
        least, most = int(ends[0]), int(ends[-1])
        if not 1 <= least <= most:
            raise ConfigError(f"{option} must be at least 1, and a range must rise, got {text!r}.")
        return Lengths(least, most)

    def draw(self, luck: random.Random) -> int:
        return luck.randint(self.least, self.most)


@dataclass(frozen=True)
class Ask:
    """`content`: what the body says, a prompt or messages."""

    content: dict[str, Any]
    max_tokens: int


class Asks:
    """Goes through a dataset, never back: no later level meets prompts that a cache has seen, as long as a file lasts.
    The same seed asks the same. `name`: synthetic, shared-prefix, or a file's path; `prefixes` texts of `prefix_len`
    words are shared."""

    def __init__(self, name: str, input_len: Lengths, output_len: Lengths, prefixes: int = 4, prefix_len: int = 512,
                 seed: int = 0) -> None:
        made_up = name in (SYNTHETIC, SHARED_PREFIX)
        self._luck = random.Random(f"{seed} asks")
        self._input_len, self._output_len = input_len, output_len
        self._prefixes = [_prose(self._luck, prefix_len) for _ in range(prefixes)] if name == SHARED_PREFIX else []
        self._file = None if made_up else read_contents(name)
        self._contents = None if self._file is None else self._shuffled(self._file)

    @property
    def size(self) -> int | None:
        """Of a file; None: there is no end."""
        return None if self._file is None else len(self._file)

    @property
    def has_messages(self) -> bool:
        return self._file is not None and any("messages" in one for one in self._file)

    def next(self, input_len: int | None = None, output_len: int | None = None) -> Ask:
        """Lengths are those of the dataset where a trace has none; a file's prompts are as long as they are."""
        luck = self._luck
        length, most = input_len or self._input_len.draw(luck), output_len or self._output_len.draw(luck)
        if self._contents is not None:
            content = dict(next(self._contents))
            own = content.pop("max_tokens", None)
            return Ask(content, output_len or own or most)
        text = _prose(luck, length)
        if self._prefixes:
            text = f"{luck.choice(self._prefixes)} {text}"
        return Ask({"prompt": text}, most)

    def _shuffled(self, contents: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        while True:
            order = list(contents)
            self._luck.shuffle(order)
            yield from order


def read_contents(path: str | Path) -> list[dict[str, Any]]:
    """A JSON object a line: `prompt`, `messages`, or `turns` as in Spec-Bench, whose first turns are asked; and
    `max_tokens`, if it is to be another than everybody's."""
    try:
        lines = [line for line in Path(path).read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"Cannot read {path} ({error}): --dataset is {SYNTHETIC}, {SHARED_PREFIX} or a file with a "
                          "JSON object a line.") from None
    found = []
    for number, line in enumerate(lines, 1):
        try:
            raw = json.loads(line)
            most = raw.get("max_tokens")
            if most is not None and not (isinstance(most, int) and most >= 1):
                raise ValueError("max_tokens must be a whole number from 1")
            if "turns" in raw:
                return [{"messages": [{"role": "user", "content": one.turns[0]}]} for one in read_questions(path)]
            key = "messages" if "messages" in raw else "prompt"
            if not isinstance(raw[key], list if key == "messages" else str) or not raw[key]:
                raise ValueError("a prompt is a text, messages are a list")
        except (ValueError, KeyError, AttributeError) as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(f"Line {number} of {path} asks nothing ({type(error).__name__}: {error}): it needs "
                              "prompt, messages or turns, as JSON.") from None
        found.append({key: raw[key]} | ({} if most is None else {"max_tokens": most}))
    if not found:
        raise ConfigError(f"{path} has no prompts.")
    return found


def body(ask: Ask, chat: bool) -> dict[str, Any]:
    """As the endpoint wants it: a prompt is a user's message to a chat, and messages are no prompt."""
    content = ask.content
    if chat and "prompt" in content:
        content = {"messages": [{"role": "user", "content": content["prompt"]}]}
    elif not chat and "messages" in content:
        raise ConfigError("The dataset has messages, which completions do not take: use --endpoint chat.")
    return content | {"max_tokens": ask.max_tokens}


def _prose(luck: random.Random, words: int) -> str:
    return " ".join(luck.choice(WORDS) for _ in range(words))
