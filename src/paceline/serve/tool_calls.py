"""Tool calls in a model's text: found as they are written, sent as OpenAI's deltas."""

from __future__ import annotations

import json
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

ARGUMENTS = ("arguments", "parameters")
SPACE = " \t\r\n"
SEPARATORS = "[],;" + SPACE


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
        """What can be sent now; nothing before the name is known."""
        if self.name is None or not self._ready:
            return ""
        ready, self._ready = "".join(self._ready), []
        return ready

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
                self._quoted = True  # arguments as a string that holds JSON: sent when it is whole
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
    if not text.startswith('"'):
        return None
    try:
        found = json.loads(text)
    except ValueError:
        return None
    return found if isinstance(found, str) else None


class _Calls:
    """Objects one after another, bare or in a list; those that name a known tool are calls, and are numbered.

    What stands beside a call (commas, brackets, space, tags) is the format's; all else is the reader's, to the letter.
    So it is held until the object after it shows which it is.
    """

    def __init__(self, names: Container[str], most: int | None = None) -> None:
        self.count = 0
        self.names = names
        self.most = most
        self.after_call = False
        self._scanner: CallScanner | None = None
        self._held = ""
        self._begun = False
        self._arguments = False

    def takes(self, char: str) -> bool:
        """Whether `char` can be part of a list of calls here."""
        return self._scanner is not None or char == "{" or char in SEPARATORS

    def push(self, char: str) -> Iterator[Event]:
        """`char` is one that this `takes`."""
        scanner = self._scanner
        if scanner is None:
            if char in SEPARATORS:
                self.hold(char)
                return
            scanner = self._scanner = CallScanner()
            self._begun = self._arguments = False
        scanner.push(char)
        if not self._begun and scanner.name is not None and scanner.name in self.names:
            self._begun, self._held = True, ""
            if not self.full:
                yield CallBegun(self.count, scanner.name)
        text = scanner.arguments() if self._begun else ""
        if text and not self.full:
            self._arguments = True
            yield CallArguments(self.count, text)
        if scanner.done:
            yield from self._close(scanner)

    @property
    def full(self) -> bool:
        """Further calls are dropped: the client asked for one at a time."""
        return self.most is not None and self.count >= self.most

    def open(self, tag: str) -> None:
        """Calls may begin here, with `tag`."""
        self._held, self.after_call = tag, False

    def hold(self, text: str) -> None:
        """`text` is the format's, if a call is beside it."""
        if not self.after_call:
            self._held += text

    def show(self, text: str) -> Iterator[Event]:
        """`text` is no call, and what was held before it is the reader's too."""
        shown, self._held, self.after_call = self._held + text, "", False
        yield from _content(shown)

    def _close(self, scanner: CallScanner) -> Iterator[Event]:
        self._scanner = None
        if not self._begun:
            yield from self.show("".join(scanner.raw))
            return
        self.after_call = True
        if not self.full:
            if not self._arguments:
                yield CallArguments(self.count, "{}")
            self.count += 1

    def end(self) -> Iterator[Event]:
        """The text ends, perhaps inside an object: without a known name it was no call."""
        scanner, self._scanner = self._scanner, None
        yield from self.show("".join(scanner.raw) if scanner is not None and not self._begun else "")


class HermesParser:
    """<tool_call>{"name": ..., "arguments": {...}}</tool_call>, as Hermes, Qwen and SmolLM write it (also a list)."""

    OPEN, CLOSE = "<tool_call>", "</tool_call>"

    def __init__(self, names: Container[str], most: int | None = None) -> None:
        self._calls = _Calls(names, most)
        self._inside = self._called = False
        self._unread = ""

    def push(self, text: str) -> Iterator[Event]:
        self._unread += text
        while self._unread:
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
            self._unread = self._unread.lstrip(SPACE)
        at = self._unread.find(self.OPEN)
        self._inside = at >= 0
        end = at if self._inside else len(self._unread) - _overlap(self._unread, self.OPEN)
        shown = self._unread[:end].rstrip(SPACE)
        self._called = self._called and not shown
        yield from _content(shown)
        read = at + len(self.OPEN) if self._inside else len(shown)
        if self._inside:
            self._calls.open(self._unread[len(shown):read])
        self._unread = self._unread[read:]

    def _read_calls(self) -> Iterator[Event]:
        """Until the closing tag, or something that is no call, or until more is needed."""
        for place, char in enumerate(self._unread):
            if self._calls.takes(char):
                yield from self._calls.push(char)
                continue
            self._unread = self._unread[place:]
            if self._unread.startswith(self.CLOSE):
                self._unread = self._unread[len(self.CLOSE):]
                self._inside, self._called = False, self._calls.after_call
                yield from self._calls.show("" if self._called else self.CLOSE)
            elif not self.CLOSE.startswith(self._unread):
                self._inside = self._called = False
                yield from self._calls.show("")  # not what the model was told to write: the rest is text
            return
        self._unread = ""

    def end(self) -> Iterator[Event]:
        if self._inside:
            self._calls.hold(self._unread)
            yield from self._calls.end()
        else:
            yield from _content(self._unread)
        self._unread = ""


class LlamaJsonParser:
    """A text that begins with {"name": ..., "parameters": {...}}, as Llama 3 writes calls (several: with ; or in a
    list)."""

    TAG = "<|python_tag|>"

    def __init__(self, names: Container[str], most: int | None = None) -> None:
        self._calls = _Calls(names, most)
        self._calling = True
        """Until something comes that is no list of calls: the rest is an ordinary text."""
        self._unread = ""

    def push(self, text: str) -> Iterator[Event]:
        text, self._unread = self._unread + text, ""
        place = 0
        while self._calling and place < len(text):
            if self._calls.takes(text[place]):
                yield from self._calls.push(text[place])
                place += 1
            elif text.startswith(self.TAG, place):
                self._calls.hold(self.TAG)
                place += len(self.TAG)
            elif self.TAG.startswith(text[place:]):
                self._unread = text[place:]
                return
            else:
                self._calling = False
                yield from self._calls.show("")
        yield from _content(text[place:])

    def end(self) -> Iterator[Event]:
        self._calls.hold(self._unread)
        self._unread = ""
        yield from self._calls.end()


class ForcedParser:
    """The text is a list of calls and nothing else, because a grammar saw to it (tool_choice: required)."""

    def __init__(self, names: Container[str], most: int | None = None) -> None:
        self._calls = _Calls(names, most)

    def push(self, text: str) -> Iterator[Event]:
        for char in text:
            if self._calls.takes(char):
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


PARSERS: Mapping[str, Callable[[Container[str], int | None], ToolParser]] = {
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
