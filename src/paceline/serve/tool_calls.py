"""Tool calls in a model's text: found as they are written, told as OpenAI's deltas."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

ARGUMENTS = ("arguments", "parameters")
SPACE = " \t\r\n"


@dataclass(frozen=True, slots=True)
class Content:
    """Text for the reader."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegun:
    """The model calls a function."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of a call's arguments, as JSON text."""

    index: int
    text: str


Event = Content | CallBegun | CallArguments


class ToolParser(Protocol):
    """Fed with text as it grows; everything that is not a call comes out again as Content."""

    def push(self, text: str) -> Iterator[Event]: ...

    def end(self) -> Iterator[Event]: ...


class CallScanner:
    """One JSON object {"name": ..., "arguments": ...}, a character at a time."""

    def __init__(self) -> None:
        self.name: str | None = None
        self.done = False
        self.raw: list[str] = []
        """All of it, in case it is no call after all."""
        self._depth = 0
        self._in_string = self._escaped = False
        self._key: str | None = None
        self._value_of: str | None = None
        self._text: list[str] = []
        self._quoted = False
        self._ready: list[str] = []

    def push(self, char: str) -> None:
        self.raw.append(char)
        if self._in_string:
            self._inside_string(char)
        elif char == '"':
            self._in_string = True
            if self._depth == 1 and self._value_of is None:
                self._text = []
            self._keep(char)
        elif char in "{[":
            self._depth += 1
            if self._depth > 1:
                self._keep(char)
        elif char in "}]":
            self._depth -= 1
            if self._depth:
                self._keep(char)
            else:
                self._end_value()
                self.done = True
        elif char == ":" and self._depth == 1 and self._value_of is None:
            self._value_of, self._text, self._quoted = self._key or "", [], False
        elif char == "," and self._depth == 1:
            self._end_value()
        elif self._depth > 1 or char not in SPACE:
            self._keep(char)

    def arguments(self) -> str:
        """What can be told now; nothing before the name is known."""
        if self.name is None or not self._ready:
            return ""
        told, self._ready = "".join(self._ready), []
        return told

    def _inside_string(self, char: str) -> None:
        self._keep(char)
        if self._escaped:
            self._escaped = False
        elif char == "\\":
            self._escaped = True
        elif char == '"':
            self._in_string = False
            if self._depth == 1 and self._value_of is None:
                self._key = _decoded("".join(self._text))

    def _keep(self, char: str) -> None:
        if self._value_of in ARGUMENTS:
            if self._quoted or (not self._text and char == '"'):
                self._quoted = True  # arguments as a string that holds JSON: told when it is whole
            else:
                self._ready.append(char)
        self._text.append(char)

    def _end_value(self) -> None:
        if self._value_of == "name":
            self.name = _decoded("".join(self._text))
        elif self._value_of in ARGUMENTS and self._quoted:
            self._ready.append(_decoded("".join(self._text)) or "")
        self._value_of = self._key = None
        self._text = []


def _decoded(text: str) -> str | None:
    try:
        found = json.loads(text)
    except ValueError:
        return None
    return found if isinstance(found, str) else None


class _Calls:
    """Objects one after another, bare or in a list; numbers those that turn out to be calls."""

    def __init__(self, most: int | None = None) -> None:
        self.count = 0
        self.most = most
        self.scanner: CallScanner | None = None
        self._begun = False
        self._arguments = False

    def push(self, char: str) -> Iterator[Event]:
        """`char` belongs to an object, or begins one."""
        scanner = self.scanner
        if scanner is None:
            scanner = self.scanner = CallScanner()
            self._begun = self._arguments = False
        scanner.push(char)
        if scanner.name is not None and not self._begun:
            self._begun = True
            if not self.full:
                yield CallBegun(self.count, scanner.name)
        text = scanner.arguments()
        if text and not self.full:
            self._arguments = True
            yield CallArguments(self.count, text)
        if scanner.done:
            yield from self._close(scanner)

    @property
    def full(self) -> bool:
        """Further calls are dropped: the client asked for one at a time."""
        return self.most is not None and self.count >= self.most

    def _close(self, scanner: CallScanner) -> Iterator[Event]:
        self.scanner = None
        if not self._begun:
            yield Content("".join(scanner.raw))
        elif not self.full:
            if not self._arguments:
                yield CallArguments(self.count, "{}")
            self.count += 1

    def end(self) -> Iterator[Event]:
        """The text ends inside an object: without a name it was no call."""
        if self.scanner is not None and not self._begun:
            yield Content("".join(self.scanner.raw))
        self.scanner = None


class HermesParser:
    """<tool_call>{"name": ..., "arguments": {...}}</tool_call>, as Hermes, Qwen and SmolLM write it (also a list)."""

    OPEN, CLOSE = "<tool_call>", "</tool_call>"

    def __init__(self, most: int | None = None) -> None:
        self._calls = _Calls(most)
        self._inside = self._called = False
        self._held = ""

    def push(self, text: str) -> Iterator[Event]:
        self._held += text
        while self._held:
            if self._inside:
                yield from self._read_calls()
                if self._inside:
                    return
            else:
                yield from self._read_text()
                if not self._inside:
                    return

    def _read_text(self) -> Iterator[Event]:
        """Up to an opening tag. Space around calls is the format's, not the reader's."""
        if self._called:
            self._held = self._held.lstrip(SPACE)
        at = self._held.find(self.OPEN)
        self._inside = at >= 0
        end = at if self._inside else len(self._held) - _overlap(self._held, self.OPEN)
        told = self._held[:end].rstrip(SPACE)
        self._called = self._called and not told
        yield from _content(told)
        self._held = self._held[at + len(self.OPEN) if self._inside else len(told):]

    def _read_calls(self) -> Iterator[Event]:
        """Until the closing tag, or until more is needed."""
        for place, char in enumerate(self._held):
            if self._calls.scanner is None and char == "<":
                rest = self._held[place:]
                if rest.startswith(self.CLOSE):
                    self._held = rest[len(self.CLOSE):]
                    self._inside, self._called = False, True
                    return
                if self.CLOSE.startswith(rest):
                    self._held = rest
                    return
            if self._calls.scanner is not None or char == "{":
                yield from self._calls.push(char)
            elif char not in "[],;" + SPACE:
                yield Content(char)  # not what the model was told to write: show it
        self._held = ""

    def end(self) -> Iterator[Event]:
        if self._inside:
            yield from self._calls.end()
        else:
            yield from _content(self._held)
        self._held = ""


class LlamaJsonParser:
    """A text that is nothing but {"name": ..., "parameters": {...}}, as Llama 3 writes calls (several: with ; or in a
    list)."""

    TAG = "<|python_tag|>"

    def __init__(self, most: int | None = None) -> None:
        self._calls = _Calls(most)
        self._mode: bool | None = None
        """True: calls, False: an ordinary text, None: not known yet."""
        self._held = ""

    def push(self, text: str) -> Iterator[Event]:
        if self._mode is None:
            self._held = (self._held + text).lstrip(SPACE)
            text = self._held
            if self.TAG.startswith(text):
                return  # empty, or the beginning of the tag
            text = text.removeprefix(self.TAG).lstrip(SPACE)
            if not text:
                return
            self._mode = text[0] in "{["
        if not self._mode:
            yield from _content(text)
            return
        for char in text:
            if self._calls.scanner is not None or char == "{":
                yield from self._calls.push(char)
            elif char not in "[],;" + SPACE:
                yield Content(char)

    def end(self) -> Iterator[Event]:
        if self._mode is None:
            yield from _content(self._held)
        yield from self._calls.end()


class ForcedParser:
    """The text is a list of calls and nothing else, because a grammar saw to it (tool_choice: required)."""

    def __init__(self, most: int | None = None) -> None:
        self._calls = _Calls(most)

    def push(self, text: str) -> Iterator[Event]:
        for char in text:
            if self._calls.scanner is not None or char == "{":
                yield from self._calls.push(char)

    def end(self) -> Iterator[Event]:
        yield from self._calls.end()


class NamedParser:
    """The text is one function's arguments, because a grammar saw to it (tool_choice names the function)."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._begun = False

    def push(self, text: str) -> Iterator[Event]:
        if not self._begun:
            self._begun = True
            yield CallBegun(0, self._name)
        if text:
            yield CallArguments(0, text)

    def end(self) -> Iterator[Event]:
        return iter(())


class PlainText:
    """No tools: all of it is for the reader."""

    def push(self, text: str) -> Iterator[Event]:
        return _content(text)

    def end(self) -> Iterator[Event]:
        return iter(())


PARSERS: Mapping[str, Callable[[int | None], ToolParser]] = {
    "hermes": HermesParser, "llama3-json": LlamaJsonParser}


def parser_name(template: str | None) -> str:
    """Which format a model was taught, by what its chat template says."""
    return "llama3-json" if template and ("<|python_tag|>" in template or "ipython" in template) else "hermes"


def _content(text: str) -> Iterator[Event]:
    if text:
        yield Content(text)


def _overlap(text: str, tag: str) -> int:
    """How many of the last characters might be the beginning of `tag`."""
    for size in range(min(len(text), len(tag) - 1), 0, -1):
        if tag.startswith(text[-size:]):
            return size
    return 0
