"""Hermes' format, which Qwen and SmolLM write as well."""

from __future__ import annotations

from collections.abc import Container, Iterator

from paceline.serve.tool_formats.events import AnswerParser, Event, content, overlap
from paceline.serve.tool_formats.format import ToolFormat, Tools
from paceline.serve.tool_formats.json_calls import SPACE, JsonCalls
from paceline.serve.tool_formats.lark import Lark


class Hermes(ToolFormat):
    """Also what models are taught whose template says nothing of tools: the server tells them of this format."""

    name = "hermes"

    def recognises(self, template: str) -> bool:
        return "<tool_call>" in template

    def parser(self, tools: Tools, most: int | None) -> AnswerParser:
        return HermesParser(tools, most)

    def grammar(self, tools: Tools, most: int | None, lark: Lark) -> str:
        opened, closed = lark.tag(HermesParser.OPEN), lark.tag(HermesParser.CLOSE)
        calls = lark.json_calls(tools, "arguments")
        return lark.several(f'{opened} "\\n" ({calls}) "\\n" {closed}', '"\\n"', most)


class HermesParser(AnswerParser):
    """<tool_call>{"name": ..., "arguments": {...}}</tool_call>, as Hermes, Qwen and SmolLM write it (also a list)."""

    OPEN, CLOSE = "<tool_call>", "</tool_call>"

    def __init__(self, names: Container[str], most: int | None = None) -> None:
        self._calls = JsonCalls(names, most)
        self._inside = self._called = False
        self._unread = ""

    @property
    def over(self) -> bool:
        return self._calls.full

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
        end = at if self._inside else len(self._unread) - overlap(self._unread, self.OPEN)
        shown = self._unread[:end].rstrip(SPACE)
        self._called = self._called and not shown
        yield from content(shown)
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
            yield from self._calls.break_off()
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
            yield from content(self._unread)
        self._unread = ""
