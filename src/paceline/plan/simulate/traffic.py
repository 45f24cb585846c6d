"""What is asked of a fleet: a trace, or traffic made up by seed; and the tokens of its texts, which are made up too."""

from __future__ import annotations

import json
import math
import random
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

from paceline.bench.serving.datasets import Lengths
from paceline.errors import ConfigError
from paceline.models.fields import finite, shown

Tokenize = Callable[[str], Sequence[int]]
HASHED = (512, 16)
"""Tokens that one of a trace's `hash_ids` may stand for: whichever makes as many as there are."""
_MOST = 1 << 24
_WORDS, _HASHES = 1 << 60, 1 << 62
"""Where the numbers of those begin: no made-up token has one as high."""
_KEYS = {"at", "timestamp", "prompt_tokens", "input_length", "output_tokens", "output_length", "prompt", "prefix",
         "prefix_tokens", "session", "priority", "tenant", "hash_ids", "type", "chat_id", "parent_chat_id", "turn"}


@dataclass(frozen=True, slots=True)
class Asked:
    """One request of a trace."""

    at: float
    """Seconds after the first; below 0: it comes before everything and does not count, as to warm up."""
    prompt_tokens: int
    """All of it: a shared beginning and a conversation's earlier text included."""
    output_tokens: int
    prefix: str | None = None
    """Name of the beginning that it shares with others."""
    prefix_tokens: int = 0
    session: str | None = None
    """The conversation that it goes on with."""
    priority: int = 0
    tenant: str = ""
    given: tuple[int, ...] = ()
    """Its tokens, where the trace has them."""
    line: int = 0
    """Of the trace."""


class Texts:
    """The tokens of every request, made when they are needed: a day of prompts does not fit into memory. Two texts
    begin alike where they share a prefix, a conversation or given tokens, and nowhere else: what is a text's own is one
    token again and again, which is its own too and takes as little room as can be."""

    def __init__(self, asked: Iterable[Asked]) -> None:
        self._turns = Counter(one.session for one in asked if one.session is not None)
        """Those that are still to come."""
        self._spoken: dict[str, list[int]] = {}
        self._prefixes: dict[str, int] = {}

    def tokens(self, asked: Asked, number: int) -> list[int]:
        """Prompt and output of request `number`; of a conversation turn by turn."""
        total = asked.prompt_tokens + asked.output_tokens
        text = self._beginning(asked)[:asked.prompt_tokens]
        text += [2 * number + 1] * (total - len(text))
        if asked.session is not None:
            self._turns[asked.session] -= 1
            if self._turns[asked.session]:
                self._spoken[asked.session] = text
            else:
                self._spoken.pop(asked.session, None)
        return text

    def _beginning(self, asked: Asked) -> list[int]:
        if asked.given:
            return list(asked.given)
        if asked.session in self._spoken:
            return self._spoken[asked.session]
        if asked.prefix is None:
            return []
        return [self._prefixes.setdefault(asked.prefix, 2 * (len(self._prefixes) + 1))] * asked.prefix_tokens


def words(text: str) -> list[int]:
    """Without a tokenizer a word counts as a token: texts that begin alike do so as tokens as well."""
    return [_WORDS + int.from_bytes(blake2b(word.encode(), digest_size=6).digest()) for word in text.split()]


def traffic(source: str, prompt_tokens: int, output_tokens: int, scale: float = 1.0,
            tokenize: Tokenize = words) -> list[Asked]:
    """Of a file, or of `poisson:rate=50,seconds=3600,...`. The lengths are for requests that do not say theirs."""
    kind, colon, options = source.partition(":")
    if colon and kind == "poisson" and not Path(source).exists():
        if scale != 1.0:
            raise ConfigError("--time-scale is for traces: give poisson: another rate.")
        return made_up(options, prompt_tokens, output_tokens)
    return read(source, prompt_tokens, output_tokens, scale, tokenize)


def read(path: str | Path, prompt_tokens: int, output_tokens: int, scale: float = 1.0,
         tokenize: Tokenize = words) -> list[Asked]:
    """A JSON object a line, or a number of seconds. Lines may come in any order; the first arrival is at 0."""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"Cannot read {path} ({error}): --simulate takes a file with a JSON object a line, or "
                          "traffic such as poisson:rate=50,prompt=512,output=128,seconds=3600.") from None
    found = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                found.append(_parse(json.loads(line), prompt_tokens, output_tokens, number, tokenize))
            except (ValueError, RecursionError) as error:
                raise ConfigError(f"Line {number} of {path} is not a request ({error}): it needs a JSON object such "
                                  'as {"at": 1.5, "prompt_tokens": 512, "output_tokens": 128}.') from None
    if not found:
        raise ConfigError(f"{path} has no requests.")
    return _from_zero(found, scale)


def _from_zero(found: list[Asked], scale: float) -> list[Asked]:
    found.sort(key=lambda one: one.at)
    first, last = found[0].at, found[-1].at
    if not math.isfinite((last - first) * scale):
        raise ConfigError(f"The trace goes from {first:g} to {last:g} s, which is too long: correct its times or "
                          "--time-scale.")
    return [replace(one, at=(one.at - first) * scale) for one in found]


def _parse(raw: Any, prompt_tokens: int, output_tokens: int, line: int, tokenize: Tokenize) -> Asked:
    raw = raw if isinstance(raw, dict) else {"at": raw}
    if unknown := sorted(set(raw) - _KEYS):
        raise ValueError(f"unknown key {unknown[0]!r}")
    at = finite(raw.get("at", raw.get("timestamp")))
    if at is None:
        raise ValueError(f"at must be a number of seconds, got {shown(raw.get('at', raw.get('timestamp')))}")
    prompt, hashed = raw.get("prompt"), raw.get("hash_ids")
    given: list[int] = []
    if isinstance(prompt, str):
        given = list(tokenize(prompt))
    elif prompt is not None:
        given = _ids(prompt, "prompt")
    if prompt is not None and not given:
        raise ValueError("prompt is empty")
    length = _count(raw, ("prompt_tokens", "input_length"), prompt_tokens if prompt is None else len(given), 1)
    if prompt is None and hashed is not None:
        blocks = _ids(hashed, "hash_ids")
        size = next((size for size in HASHED if -(-length // size) == len(blocks)), HASHED[0])
        given = [token for block in blocks for token in [_HASHES + block] * size]
    prefix, shared = raw.get("prefix"), _count(raw, ("prefix_tokens",), 0, 0)
    if (prefix is None) != (shared == 0):
        raise ValueError("prefix and prefix_tokens go together")
    if shared > length:
        raise ValueError(f"prefix_tokens is {shared}, and the whole prompt has {length}")
    priority = raw.get("priority", 0)
    if isinstance(priority, bool) or not isinstance(priority, int):
        raise ValueError(f"priority must be a whole number, got {shown(priority)}")
    session = raw.get("session")
    return Asked(at, length, _count(raw, ("output_tokens", "output_length"), output_tokens, 1),
                 None if prefix is None else str(prefix), shared, None if session is None else str(session), priority,
                 str(raw.get("tenant") or ""), tuple(given[:length]), line)


def _ids(value: Any, name: str) -> list[int]:
    if not isinstance(value, list) or not all(type(one) is int and one >= 0 for one in value):
        raise ValueError(f"{name} must be a text or a list of whole numbers" if name == "prompt" else
                         f"{name} must be a list of whole numbers")
    return value


def _count(raw: Mapping[str, Any], names: tuple[str, ...], default: int, least: int) -> int:
    name = next((one for one in names if raw.get(one) is not None), None)
    if name is None:
        return default
    value = raw[name]
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value < _MOST:
        raise ValueError(f"{name} must be a whole number from {least} to {_MOST - 1}, got {shown(value)}")
    return value


def made_up(options: str, prompt_tokens: int, output_tokens: int) -> list[Asked]:
    """Requests come by chance, `rate` a second. Prompts of `prompt` tokens begin with one of `prefixes` texts of
    `prefix` tokens; each conversation has `turns`, `think` seconds apart on average. Lengths may be ranges."""
    given = {"rate": "1", "seconds": "60", "prompt": str(prompt_tokens), "output": str(output_tokens),
             "prefixes": "0", "prefix": "", "turns": "1", "think": "30", "seed": "0"}
    for part in options.split(","):
        name, equals, value = part.partition("=")
        if name.strip() not in given or not equals:
            raise ConfigError(f"--simulate poisson: {part!r} is not NAME=VALUE with a name of {', '.join(given)}.")
        given[name.strip()] = value.strip()
    rate, seconds, think = (_positive(given, name) for name in ("rate", "seconds", "think"))
    prompt, output = (Lengths.parse(given[name], f"--simulate {name}") for name in ("prompt", "output"))
    prefixes, turns, seed = (_whole(given, name) for name in ("prefixes", "turns", "seed"))
    shared = _whole(given, "prefix") if given["prefix"] else prompt.least // 2
    if shared > prompt.least or (prefixes and not shared):
        raise ConfigError(f"--simulate: a beginning of {shared} tokens is none of a prompt of {prompt.least}: give "
                          "prefix=TOKENS, at most the prompt's.")
    luck, found, at = random.Random(seed), [], 0.0
    while (at := at + luck.expovariate(rate / max(1, turns))) <= seconds:
        prefix = f"prefix {luck.randrange(prefixes)}" if prefixes else None
        when, length = at, 0
        for _ in range(max(1, turns)):
            length, answer = length + prompt.draw(luck), output.draw(luck)
            found.append(Asked(when, length, answer, prefix, shared if prefixes else 0,
                               None if turns < 2 else f"talk {at}"))
            length += answer
            when += luck.expovariate(1.0 / think)
    if not found:
        raise ConfigError(f"--simulate: {rate:g} requests a second for {seconds:g} s came to none: ask for more.")
    return _from_zero(found, 1.0)


def _positive(given: Mapping[str, str], name: str) -> float:
    try:
        value = float(given[name])
    except ValueError:
        value = math.nan
    if not 0.0 < value < math.inf:
        raise ConfigError(f"--simulate: {name} must be a number above 0, got {given[name]!r}.")
    return value


def _whole(given: Mapping[str, str], name: str) -> int:
    if not given[name].isdigit():
        raise ConfigError(f"--simulate: {name} must be a whole number, got {given[name]!r}.")
    return int(given[name])
