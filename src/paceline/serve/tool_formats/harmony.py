"""Harmony, the format of gpt-oss: messages in channels, of which one is for thoughts, and calls are messages to
functions."""

from __future__ import annotations

import re
from collections.abc import Iterator

from paceline.serve.tool_formats.events import (
    AnswerParser,
    CallArguments,
    CallBegun,
    Content,
    Event,
    Reasoning,
    overlap,
)
from paceline.serve.tool_formats.format import ToolFormat, Tools
from paceline.serve.tool_formats.lark import Lark

START, END, MESSAGE, CHANNEL = "<|start|>", "<|end|>", "<|message|>", "<|channel|>"
CONSTRAIN, CALL, RETURN = "<|constrain|>", "<|call|>", "<|return|>"
_ENDS = re.compile("|".join(map(re.escape, (END, CALL, RETURN, START))))
_RECIPIENT = re.compile(r"to=functions\.([^\s<]+)")
_CHANNEL = re.compile(re.escape(CHANNEL) + r"\s*(\w+)")
_HEADS = (CHANNEL, START, MESSAGE, " to=")
"""What an answer begins with: the prompt has said whose it is."""


class Harmony(ToolFormat):
    name = "harmony"
    tags = (START, END, MESSAGE, CHANNEL, CONSTRAIN, CALL, RETURN)
    channels = True

    def recognises(self, template: str) -> bool:
        return CHANNEL in template and MESSAGE in template

    def parser(self, tools: Tools, most: int | None) -> AnswerParser:
        return HarmonyParser(tools, most)

    def grammar(self, tools: Tools, most: int | None, lark: Lark) -> str:
        """One call: its end is the answer's."""
        calls = " | ".join(f"{lark.text(f'{name} ')} {lark.tag(CONSTRAIN)} \"json\" {lark.tag(MESSAGE)} "
                           f"{lark.json(schema)}" for name, schema in tools.items())
        return lark.whole(f'{lark.tag(CHANNEL)} "commentary to=functions." ({calls})')


class HarmonyParser(AnswerParser):
    def __init__(self, tools: Tools, most: int | None = None) -> None:
        self._tools = tools
        self._most = most
        self._count = 0
        self._unread = ""
        self._first = self._in_header = True
        self._calling = self._told = self._called = False

    @property
    def over(self) -> bool:
        """A call ends the answer, also where the model does not."""
        return self._called

    def push(self, text: str) -> Iterator[Event]:
        self._unread += text
        while self._unread:
            before = self._in_header, len(self._unread)
            yield from self._header() if self._in_header else self._body()
            if before == (self._in_header, len(self._unread)):
                return

    def _header(self) -> Iterator[Event]:
        """Up to where a message begins. What begins like none is the answer as it is."""
        text = self._unread
        if self._first and not any(text.startswith(head) or head.startswith(text) for head in _HEADS):
            self._first = self._in_header = False
            return
        head, found, rest = text.partition(MESSAGE)
        if not found:
            return
        self._unread, self._first, self._in_header = rest, False, False
        recipient, channel = _RECIPIENT.search(head), _CHANNEL.search(head)
        self._calling = recipient is not None and recipient[1] in self._tools and not self._full
        self.thinking = recipient is None and channel is not None and channel[1] == "analysis"
        self._told = False
        if self._calling and recipient is not None:
            yield CallBegun(self._count, recipient[1])

    def _body(self) -> Iterator[Event]:
        found = _ENDS.search(self._unread)
        if found is None:
            held = max(overlap(self._unread, tag) for tag in (END, CALL, RETURN, START))
            yield from self._tell(self._unread[:len(self._unread) - held])
            self._unread = self._unread[len(self._unread) - held:]
            return
        yield from self._tell(self._unread[:found.start()])
        self._unread, self._in_header = self._unread[found.end():], True
        yield from self._close()
        self._called = self._called or found[0] == CALL

    def _tell(self, text: str) -> Iterator[Event]:
        if not text:
            return
        self._told = True
        if self._calling:
            yield CallArguments(self._count, text)
        else:
            yield Reasoning(text) if self.thinking else Content(text)

    def _close(self) -> Iterator[Event]:
        self.thinking = False
        if self._calling:
            if not self._told:
                yield CallArguments(self._count, "{}")
            self._calling = False
            self._count += 1
            self._called = self._full

    @property
    def _full(self) -> bool:
        return self._most is not None and self._count >= self._most

    def end(self) -> Iterator[Event]:
        """What might be a tag's beginning is the reader's; of arguments it is no part."""
        if not (self._in_header or self._calling) or (self._first and not self._unread.startswith("<|")):
            yield from self._tell(self._unread)
        self._unread = ""
