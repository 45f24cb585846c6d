"""Llama 3's format."""

from __future__ import annotations

from collections.abc import Container, Iterator

from paceline.serve.tool_formats.events import AnswerParser, Event, content
from paceline.serve.tool_formats.format import ToolFormat, Tools
from paceline.serve.tool_formats.json_calls import JsonCalls
from paceline.serve.tool_formats.lark import Lark


class Llama3(ToolFormat):
    name = "llama3-json"
    tags = ("<|python_tag|>",)

    def recognises(self, template: str) -> bool:
        return "<|python_tag|>" in template or "ipython" in template

    def parser(self, tools: Tools, most: int | None) -> AnswerParser:
        return LlamaJsonParser(tools, most)

    def grammar(self, tools: Tools, most: int | None, lark: Lark) -> str:
        return lark.several(lark.json_calls(tools, "parameters"), '"; "', most)


class LlamaJsonParser(AnswerParser):
    """A text that begins with {"name": ..., "parameters": {...}}, as Llama 3 writes calls (several: with ; or in a
    list)."""

    TAG = "<|python_tag|>"

    def __init__(self, names: Container[str], most: int | None = None) -> None:
        self._calls = JsonCalls(names, most)
        self._calling = True
        """Until something comes that is no list of calls: the rest is an ordinary text."""
        self._unread = ""

    @property
    def over(self) -> bool:
        return self._calls.full

    def push(self, text: str) -> Iterator[Event]:
        text, self._unread = self._unread + text, ""
        place = 0
        while self._calling and place < len(text):
            if self._calls.takes(text[place]):
                yield from self._calls.push(text[place])
                place += 1
                continue
            yield from self._calls.break_off()
            if text.startswith(self.TAG, place):
                self._calls.hold(self.TAG)
                place += len(self.TAG)
            elif self.TAG.startswith(text[place:]):
                self._unread = text[place:]
                return
            else:
                self._calling = False
                yield from self._calls.show("")
        yield from content(text[place:])

    def end(self) -> Iterator[Event]:
        self._calls.hold(self._unread)
        self._unread = ""
        yield from self._calls.end()
