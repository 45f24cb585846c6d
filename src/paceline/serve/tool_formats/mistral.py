"""Mistral's formats: a list of calls, and since 2025 a tag, a name and arguments for each call."""

from __future__ import annotations

from collections.abc import Iterator

from paceline.serve.tool_formats.events import (
    AnswerParser,
    CallArguments,
    CallBegun,
    Event,
    StatefulParser,
    content,
    overlap,
)
from paceline.serve.tool_formats.format import ToolFormat, Tools
from paceline.serve.tool_formats.json_calls import SPACE, JsonCalls, ObjectEnd
from paceline.serve.tool_formats.lark import Lark

TAG, ARGS = "[TOOL_CALLS]", "[ARGS]"


class Mistral(ToolFormat):
    """[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]"""

    name = "mistral"
    tags = (TAG, ARGS)

    def recognises(self, template: str) -> bool:
        return TAG in template

    def parser(self, tools: Tools, most: int | None) -> AnswerParser:
        return MistralParser(tools, most)

    def grammar(self, tools: Tools, most: int | None, lark: Lark) -> str:
        call = lark.rule(lark.json_calls(tools, "arguments"))
        more = "" if most == 1 else f' (", " {call})*'
        return lark.whole(f'{lark.tag(TAG)} "[" {call}{more} "]"')


class MistralArgs(Mistral):
    """[TOOL_CALLS]name[ARGS]{...}, again for each call."""

    name = "mistral-args"

    def recognises(self, template: str) -> bool:
        return TAG in template and ARGS in template

    def grammar(self, tools: Tools, most: int | None, lark: Lark) -> str:
        calls = [f"{lark.text(name)} {lark.tag(ARGS)} {lark.json(schema)}" for name, schema in tools.items()]
        one = lark.rule(f"{lark.tag(TAG)} ({' | '.join(calls)})")
        return lark.whole(one if most == 1 else f"{one}+")


class MistralParser(StatefulParser):
    """Both formats: what follows the tag says which."""

    def __init__(self, tools: Tools, most: int | None = None) -> None:
        super().__init__()
        self._tools = tools
        self._calls = JsonCalls(tools, most)
        self._object: ObjectEnd | None = None

    @property
    def over(self) -> bool:
        return self._calls.full

    def _text(self) -> Iterator[Event]:
        """Up to a tag. Space before it is the format's."""
        at = self._unread.find(TAG)
        end = at if at >= 0 else len(self._unread) - overlap(self._unread, TAG)
        shown = self._unread[:end].rstrip(SPACE)
        yield from content(shown)
        self._unread = self._unread[len(shown):]
        if at >= 0:
            self._calls.open(self._unread[:end - len(shown) + len(TAG)])
            self._unread = self._unread[end - len(shown) + len(TAG):]
            self._read = self._begin

    def _begin(self) -> Iterator[Event]:
        """A list, or a name; space before either."""
        bare = self._unread.lstrip(SPACE)
        if not bare:
            return
        self._read = self._list if bare[0] in "[{" else self._name
        yield from ()

    def _list(self) -> Iterator[Event]:
        for place, char in enumerate(self._unread):
            taken = self._calls.takes(char)
            if not taken:
                yield from self._calls.break_off()
            if not taken or (char == "[" and self._calls.idle):
                rest = self._unread[place:]
                if not taken or rest.startswith(TAG):
                    self._unread = rest
                    yield from self._leave()
                    return
                if TAG.startswith(rest):
                    self._unread = rest
                    return
            yield from self._calls.push(char)
        self._unread = ""

    def _leave(self) -> Iterator[Event]:
        """What is no call ends the list."""
        self._read = self._text
        yield from self._calls.show("")

    def _name(self) -> Iterator[Event]:
        at = self._unread.find(ARGS)
        name = self._unread[:max(at, 0)].strip(SPACE)
        if at >= 0 and name in self._tools:
            self._calls.open("")
            if not self._calls.full:
                yield CallBegun(self._calls.count, name)
            self._unread = self._unread[at + len(ARGS):]
            self._object, self._read = ObjectEnd(), self._arguments
        elif at >= 0 or not any(known.startswith(self._named) for known in self._tools):
            yield from self._leave()

    @property
    def _named(self) -> str:
        """As much of a name as there is."""
        text = self._unread.lstrip(SPACE)
        return text[:len(text) - overlap(text, ARGS)].rstrip(SPACE)

    def _arguments(self) -> Iterator[Event]:
        assert self._object is not None
        size = self._object.push(self._unread)
        if not self._calls.full:
            yield CallArguments(self._calls.count, self._unread[:size])
        self._unread = self._unread[size:]
        if self._object.done:
            if not self._calls.full:
                self._calls.count += 1
            self._calls.after_call, self._read = True, self._next

    def _next(self) -> Iterator[Event]:
        """Behind a call: space, and another tag perhaps."""
        self._unread = self._unread.lstrip(SPACE)
        if self._unread:
            self._read = self._text
        yield from ()

    def end(self) -> Iterator[Event]:
        if self._read == self._list or self._read == self._begin or self._read == self._name:
            self._calls.hold(self._unread)
            yield from self._calls.end()
        elif self._read == self._text:
            yield from content(self._unread)
        self._unread = ""
