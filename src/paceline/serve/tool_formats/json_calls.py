"""Calls as JSON objects {"name": ..., "arguments": ...}, which most formats are made of."""

from __future__ import annotations

import json
from collections.abc import Container, Iterator

from paceline.serve.tool_formats.events import CallArguments, CallBegun, Event, content

ARGUMENTS = ("arguments", "parameters")
SPACE = " \t\r\n"
SEPARATORS = "[],;" + SPACE
BEHIND = "}]," + SPACE
"""What can follow a value in an object."""


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
        self._whole = False
        """Of the value that is being read: nothing can be added to it."""
        self._ready: list[str] = []

    def takes(self, char: str) -> bool:
        """Whether `char` can be part of it. Models forget the last brace at times: what follows is not the object's."""
        return not self._whole or self._value_of not in ARGUMENTS or self._depth > 1 or char in BEHIND

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
                self._whole = self._whole or self._depth == 1
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
            elif self._depth == 1:
                self._whole = True

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
        self._text, self._whole = [], False


def _decoded(text: str) -> str | None:
    if not text.startswith('"'):
        return None
    try:
        found = json.loads(text)
    except ValueError:
        return None
    return found if isinstance(found, str) else None


class JsonCalls:
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
        """Whether `char` can be part of a list of calls here. A brace too many behind one is nothing for the reader."""
        if self._scanner is not None:
            return self._scanner.takes(char)
        return char == "{" or char in SEPARATORS or (char == "}" and self.after_call)

    def push(self, char: str) -> Iterator[Event]:
        """`char` is one that this `takes`."""
        scanner = self._scanner
        if scanner is None:
            if char != "{":
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
    def idle(self) -> bool:
        """Whether no object is open."""
        return self._scanner is None

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
        yield from content(shown)

    def break_off(self) -> Iterator[Event]:
        """What comes next is none of the calls': an object that was not closed ends here."""
        if self._scanner is not None:
            yield from self.push("}") if self._begun else self._close(self._scanner)

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


class ObjectEnd:
    """Finds where a JSON object ends."""

    def __init__(self) -> None:
        self.done = False
        self._depth = 0
        self._in_string = self._escaped = False

    def push(self, text: str) -> int:
        """How many of these characters belong to it."""
        for place, char in enumerate(text):
            if self._in_string:
                if self._escaped or char == "\\":
                    self._escaped = not self._escaped
                elif char == '"':
                    self._in_string = False
            elif char == '"':
                self._in_string = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                if self._depth <= 0:
                    self.done = True
                    return place + 1
        return len(text)
