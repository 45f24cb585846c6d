"""Lark: the grammar that has a model write calls, in the notation that grammars are compiled from."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from paceline.grammar.schemas import prepared, whitespace
from paceline.serve.tool_formats.format import Tools


class Lark:
    """Collects rules; a format says what `start` is made of."""

    def __init__(self, special: Mapping[str, int]) -> None:
        """`special`: the ids of tags that are special tokens, which no spelling stands for."""
        self._special = special
        self._rules: list[str] = []

    def tag(self, text: str) -> str:
        return f"<[{self._special[text]}]>" if text in self._special else self.text(text)

    @staticmethod
    def text(text: str) -> str:
        return json.dumps(text, ensure_ascii=False)

    def rule(self, body: str, options: str = "") -> str:
        """The name of a new rule."""
        name = f"r{len(self._rules)}"
        self._rules.append(f"{name}{options}: {body}")
        return name

    def json(self, schema: Mapping[str, Any]) -> str:
        """JSON by a schema of its own: "#/$defs/..." in it is its own. The text of the schema is on one line."""
        own = {"x-guidance": {"whitespace_pattern": whitespace(schema)}} | prepared(schema)
        return self.rule(f"%json {json.dumps(own, ensure_ascii=False)}")

    def until(self, tag: str) -> str:
        """Any text, up to `tag` and with it."""
        if tag in self._special:
            return f"{self.rule('/(?s:.*)/')} {self.tag(tag)}"
        return self.rule("/(?s:.*)/", f"[suffix={self.text(tag)}]")

    def json_calls(self, tools: Tools, arguments: str) -> str:
        """One of {"name": ..., "arguments": {...}}, spaced as models are taught it."""
        return " | ".join(self.rule(" ".join((
            self.text(f'{{"name": {json.dumps(name, ensure_ascii=False)}, "{arguments}": '), self.json(schema), '"}"')))
            for name, schema in tools.items())

    def several(self, call: str, between: str, most: int | None) -> str:
        """The whole grammar: one call, or one after another."""
        one = self.rule(call)
        return self.whole(one if most == 1 else f"{one} ({between} {one})*")

    def whole(self, start: str) -> str:
        return "\n".join([f"start: {start}", *self._rules, ""])
