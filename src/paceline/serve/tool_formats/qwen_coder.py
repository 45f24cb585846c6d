"""Qwen3-Coder's format: <function=name> and a <parameter=name> for each argument, inside <tool_call>."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

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
from paceline.serve.tool_formats.json_calls import SPACE
from paceline.serve.tool_formats.lark import Lark

OPEN, CLOSE = "<tool_call>", "</tool_call>"
FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"
LONGEST_NAME = 256
"""Characters: what goes on for longer is no name."""


class QwenCoder(ToolFormat):
    """Strings are written as they are, all else as JSON."""

    name = "qwen-coder"

    def recognises(self, template: str) -> bool:
        return FUNCTION in template and PARAMETER in template

    def parser(self, tools: Tools, most: int | None) -> AnswerParser:
        return QwenCoderParser(tools, most)

    def grammar(self, tools: Tools, most: int | None, lark: Lark) -> str:
        text = lark.until(f"\n{PARAMETER_END}\n")
        functions = " | ".join(lark.rule(" ".join((
            lark.text(f"{FUNCTION}{name}>\n"), *_parameters(schema, text, lark), lark.text(FUNCTION_END))))
            for name, schema in tools.items())
        return lark.several(f'{lark.tag(OPEN)} "\\n" ({functions}) "\\n" {lark.tag(CLOSE)}', '"\\n"', most)


def _parameters(schema: Mapping[str, Any], text: str, lark: Lark) -> Iterator[str]:
    """A rule for each argument, in the schema's order. A function that names none takes any."""
    properties = schema.get("properties")
    if not isinstance(properties, Mapping) or not properties:
        if schema.get("additionalProperties") is not False:
            yield f"({lark.text(PARAMETER)} /[A-Za-z_][A-Za-z0-9_.-]*/ {lark.text('>' + chr(10))} {text})*"
        return
    shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    for name, own in properties.items():
        if own is True or own == {} or _is_text(own):
            value = text
        else:
            value = f"{lark.json({**shared, **own})} {lark.text(f'{chr(10)}{PARAMETER_END}{chr(10)}')}"
        if _is_text(own) and isinstance(texts := [own["const"]] if "const" in own else own.get("enum"), list):
            value = "(" + " | ".join(lark.text(f"{one}\n{PARAMETER_END}\n") for one in texts) + ")"
        rule = lark.rule(f"{lark.text(f'{PARAMETER}{name}>{chr(10)}')} {value}")
        yield rule if name in schema.get("required", ()) else f"{rule}?"


def _is_text(schema: Any) -> bool:
    return isinstance(schema, Mapping) and schema.get("type") == "string"


class QwenCoderParser(StatefulParser):
    def __init__(self, tools: Tools, most: int | None = None) -> None:
        super().__init__()
        self._tools = tools
        self._most = most
        self._count = 0
        self._schema: Mapping[str, Any] = {}
        self._separator = "{"
        self._is_text = self._begun = False
        """Of the argument that is being read: whether it is a string, and whether any of it was told."""

    @property
    def over(self) -> bool:
        return self._most is not None and self._count >= self._most

    def _text(self) -> Iterator[Event]:
        """Up to a function; the tag before it, and space around that, are the format's."""
        at = self._unread.find(FUNCTION)
        if at < 0:
            partial = max(overlap(self._unread, FUNCTION), overlap(self._unread, OPEN))
            yield from self._show(len(_without_tag(self._unread[:len(self._unread) - partial])))
            return
        end = self._unread.find(">", at)
        name = self._unread[at + len(FUNCTION):end if end >= 0 else None]
        if end < 0 and len(name) <= LONGEST_NAME and "\n" not in name:
            yield from self._show(len(_without_tag(self._unread[:at])))
        elif name not in self._tools:
            yield from self._show(at + len(FUNCTION))
        else:
            yield from self._show(len(_without_tag(self._unread[:at])))
            self._unread = self._unread.partition(FUNCTION)[2].partition(">")[2]
            self._schema, self._separator, self._read = self._tools[name].get("properties") or {}, "{", self._inside
            if not self.over:
                yield CallBegun(self._count, name)

    def _show(self, size: int) -> Iterator[Event]:
        shown, self._unread = self._unread[:size], self._unread[size:]
        return content(shown)

    def _inside(self) -> Iterator[Event]:
        """Between arguments."""
        text = self._unread = self._unread.lstrip(SPACE)
        end = text.find(">")
        if text.startswith(PARAMETER) and end >= 0:
            name = text[len(PARAMETER):end]
            yield from self._tell(f"{self._separator}{json.dumps(name, ensure_ascii=False)}: ")
            self._separator = ", "
            self._unread = text[end + 1:]
            self._is_text, self._begun, self._read = _is_text(self._schema.get(name)), False, self._value
        elif text.startswith(FUNCTION_END) or not (PARAMETER.startswith(text[:len(PARAMETER)])
                                                   or FUNCTION_END.startswith(text)):
            self._unread = text.removeprefix(FUNCTION_END)
            yield from self._tell("{}" if self._separator == "{" else "}")
            self._count, self._read = self._count + (not self.over), self._behind

    def _value(self) -> Iterator[Event]:
        """Up to its tag; a new line at either end is the format's. Strings are told as they come."""
        at = self._unread.find(PARAMETER_END)
        if at < 0:
            if self._is_text:
                held = overlap(self._unread, f"\n{PARAMETER_END}") or overlap(self._unread, PARAMETER_END)
                yield from self._string(self._unread[:len(self._unread) - held])
                self._unread = self._unread[len(self._unread) - held:]
            return
        value, self._unread, self._read = self._unread[:at], self._unread[at + len(PARAMETER_END):], self._inside
        if self._is_text:
            yield from self._string(value.removesuffix("\n"))
            yield from self._tell('"' if self._begun else '""')
            return
        value = value.strip(SPACE)
        try:
            json.loads(value)
        except (ValueError, RecursionError):
            value = json.dumps(value, ensure_ascii=False)
        yield from self._tell(value)

    def _string(self, text: str) -> Iterator[Event]:
        """More of a string, without the new line it begins with."""
        if text and not self._begun:
            self._begun = True
            yield from self._tell('"')
            text = text.removeprefix("\n")
        yield from self._tell(json.dumps(text, ensure_ascii=False)[1:-1])

    def _tell(self, text: str) -> Iterator[Event]:
        if text and not self.over:
            yield CallArguments(self._count, text)

    def _behind(self) -> Iterator[Event]:
        """Behind a call: space, and the tag that closes it."""
        text = self._unread = self._unread.lstrip(SPACE)
        if text.startswith(CLOSE):
            self._unread = text[len(CLOSE):]
        elif text and not CLOSE.startswith(text):
            self._read = self._text
        yield from ()

    def end(self) -> Iterator[Event]:
        if self._read == self._text:
            yield from content(self._unread)
        elif self._read == self._value and not self._is_text:  # of strings all was told that is not the tag's
            whole = self._unread[:len(self._unread) - overlap(self._unread, PARAMETER_END)]
            yield from self._tell(whole.strip(SPACE))
        self._unread = ""


def _without_tag(text: str) -> str:
    """What is left for the reader of a text before a call."""
    return text.rstrip(SPACE).removesuffix(OPEN).rstrip(SPACE)
