"""Calls of tools as chats tell them: as tool calls, as the text of a custom tool, or as the function_call of old."""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from typing import Any

from paceline.serve.conversation import INPUT
from paceline.serve.schema import ChatBody
from paceline.serve.tool_formats.events import CallArguments, CallBegun, Content, Event, Reasoning
from paceline.serve.tool_schema import CustomTool


def call_id() -> str:
    return f"call_{secrets.token_hex(12)}"


class ToldCalls:
    """Of one answer. Its texts are told beside them, as they are."""

    def __init__(self, body: ChatBody) -> None:
        self._old = body.functions is not None
        self._custom = {tool.custom.name for tool in body.tools or () if isinstance(tool, CustomTool)}
        self._texts: dict[int, str] = {}
        """Arguments of custom tools' calls, by index: their text is known when they are whole."""
        self._called = False

    @property
    def ending(self) -> str | None:
        """What the answer's end is called; None: nothing was called."""
        return ("function_call" if self._old else "tool_calls") if self._called else None

    def message(self, calls: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """What a whole message has of `calls`, which are of functions."""
        self._called = bool(calls)
        if not calls:
            return {}
        if self._old:
            return {"function_call": calls[0]["function"]}
        return {"tool_calls": [self._told(call) for call in calls]}

    def deltas(self, event: Event) -> list[dict[str, Any]]:
        """What a stream tells of an event."""
        if isinstance(event, Content):
            return [{"content": event.text}]
        if isinstance(event, Reasoning):
            return [{"reasoning_content": event.text}]
        if isinstance(event, CallBegun):
            self._called = True
            if event.name in self._custom:
                self._texts[event.index] = ""
                return [{"tool_calls": [{"index": event.index, "id": call_id(), "type": "custom",
                                         "custom": {"name": event.name, INPUT: ""}}]}]
            function = {"name": event.name, "arguments": ""}
            return [{"function_call": function} if self._old else {"tool_calls": [
                {"index": event.index, "id": call_id(), "type": "function", "function": function}]}]
        if event.index in self._texts:
            self._texts[event.index] += event.text
            return []
        return [_more(event, self._old)]

    def end(self) -> list[dict[str, Any]]:
        """What is left to tell when the text has ended."""
        return [{"tool_calls": [{"index": index, "custom": {INPUT: text_of(arguments)}}]}
                for index, arguments in self._texts.items()]

    def _told(self, call: dict[str, Any]) -> dict[str, Any]:
        function = call["function"]
        if function["name"] not in self._custom:
            return call
        return {"id": call["id"], "type": "custom",
                "custom": {"name": function["name"], INPUT: text_of(function["arguments"])}}


def _more(event: CallArguments, old: bool) -> dict[str, Any]:
    function = {"arguments": event.text}
    return {"function_call": function} if old else {"tool_calls": [{"index": event.index, "function": function}]}


def text_of(arguments: str) -> str:
    """The text that a custom tool is called with; where the model wrote something else, that."""
    try:
        found = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    text = found.get(INPUT) if isinstance(found, dict) else None
    return text if isinstance(text, str) else arguments
