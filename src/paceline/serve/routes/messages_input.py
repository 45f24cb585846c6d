"""/v1/messages: what is asked, as the body of a chat."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from paceline.errors import RequestError
from paceline.serve.body import Body, ListOf, Text, number
from paceline.serve.conversation import NO_EFFORT, SOME_EFFORT
from paceline.serve.routes.translate import (
    chat_body,
    check_one_answer,
    compact,
    joined_text,
    passed_on,
    unasked_result,
)
from paceline.serve.schema import ChatBody, Sampling

OWN = ("metadata", "stream_options", "response_format", "n", "stop")
"""Fields of a chat's that mean something else here, or nothing."""
WORDS = {"stop": "stop_sequences", "response_format": "output_format"}
"""What chats call them -> what they are called here."""
FORGOTTEN = ("thinking", "redacted_thinking")
"""Blocks that clients send back as they got them, from whomever."""


class Turn(Body):
    role: Literal["user", "assistant", "system"]
    content: str | ListOf[dict[str, Any]]


class ToolChoice(Body):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class OutputFormat(Body):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Body):
    format: OutputFormat | None = None
    effort: str | None = None


class CountBody(Sampling):
    messages: ListOf[Turn] = Field(min_length=1)
    system: str | ListOf[dict[str, Any]] | None = None
    tools: ListOf[dict[str, Any]] | None = None
    tool_choice: ToolChoice | None = None
    thinking: dict[str, Any] | None = None
    output_config: OutputConfig | None = None
    # Accepted because clients send them; the cache needs no word.
    cache_control: dict[str, Any] | None = None
    context_management: dict[str, Any] | None = None


class MessagesBody(CountBody):
    max_tokens: int = Field(json_schema_extra={"minimum": 1})
    stop_sequences: ListOf[Text] | None = None
    top_k: int | None = number(minimum=-1)
    output_format: OutputFormat | None = None


def translated(body: CountBody) -> ChatBody:
    check_one_answer(body)
    messages: list[dict[str, Any]] = []
    if body.system:
        messages.append({"role": "system", "content": joined_text(body.system, "system")})
    turns, last = body.messages, body.messages[-1]
    if last.role == "assistant" and not last.content:  # an answer that begins with nothing is one like others
        turns = turns[:-1]
    for place, turn in enumerate(turns):
        _add(messages, turn, f"messages[{place}].content")
    if (call := unasked_result(messages)) is not None:
        raise RequestError(f"messages: unexpected `tool_use_id` found in `tool_result` blocks: {call}. Each "
                           "`tool_result` block must have a corresponding `tool_use` block in a message before it.",
                           "messages")
    fields = passed_on(body, without=OWN) | {
        "messages": messages, "tools": _tools(body.tools), "reasoning_effort": _effort(body),
        "continue_final_message": _begun(messages)}
    if body.tool_choice is not None:
        fields |= _tool_choice(body.tool_choice)
    if isinstance(body, MessagesBody):
        fields |= {"max_tokens": body.max_tokens, "stop": body.stop_sequences or body.stop}
        form = body.output_format or (body.output_config.format if body.output_config is not None else None)
        if form is not None:
            fields["response_format"] = {"type": "json_schema", "json_schema": {"schema": form.schema_}}
    return chat_body(fields, WORDS)


def _begun(messages: list[dict[str, Any]]) -> bool:
    """Whether the last message is the beginning of the answer."""
    if not messages or messages[-1]["role"] != "assistant":
        return False
    if "tool_calls" in messages[-1]:
        raise RequestError("The last message calls tools and has no results: send a tool_result for each call.",
                           "messages")
    if messages[-1]["content"] != messages[-1]["content"].rstrip():
        raise RequestError("The last message is the assistant's and ends in whitespace: the answer goes on from there, "
                           "and begins with the space itself; leave it out.", "messages")
    return True


def _effort(body: CountBody) -> str | None:
    """What chats call it: thinking is on or off, and output_config may say how much of it."""
    effort = None if body.output_config is None else body.output_config.effort
    if body.thinking is None:
        return effort
    return NO_EFFORT if body.thinking.get("type") == "disabled" else effort or SOME_EFFORT


def _add(messages: list[dict[str, Any]], turn: Turn, where: str) -> None:
    """What one turn consists of, in its order: results of tools are messages of their own."""
    if isinstance(turn.content, str):
        messages.append({"role": turn.role, "content": turn.content})
        return
    texts: list[str] = []
    calls: list[dict[str, Any]] = []
    found = len(messages)

    def flush() -> None:
        if texts or calls:
            messages.append({"role": turn.role, "content": "\n".join(texts)} | ({"tool_calls": calls.copy()} if calls
                                                                              else {}))
        texts.clear()
        calls.clear()

    for place, block in enumerate(turn.content):
        kind = block.get("type")
        if kind == "tool_use" and turn.role == "assistant":
            calls.append(_call(block, f"{where}[{place}]"))
        elif kind == "tool_result" and turn.role == "user":
            flush()
            messages.append(_result(block, f"{where}[{place}]"))
        elif kind not in FORGOTTEN:
            texts.append(joined_text([block], where))
    flush()
    if len(messages) == found and not any(block.get("type") in FORGOTTEN for block in turn.content):
        raise RequestError(f"{where} is empty: give it a text.", "messages")


def _call(block: dict[str, Any], where: str) -> dict[str, Any]:
    name, given = block.get("name"), block.get("input")
    if not isinstance(name, str) or not isinstance(given, dict) or not isinstance(block.get("id"), str):
        raise RequestError(f"{where} needs an id and a name, both texts, and an input, which is an object.", "messages")
    return {"id": block["id"], "type": "function", "function": {"name": name, "arguments": compact(given)}}


def _result(block: dict[str, Any], where: str) -> dict[str, Any]:
    if not isinstance(block.get("tool_use_id"), str):
        raise RequestError(f"{where}.tool_use_id is missing: say which call this is the result of.", "messages")
    content = block.get("content")
    return {"role": "tool", "tool_call_id": block["tool_use_id"],
            "content": "" if content is None else joined_text(content, f"{where}.content")}


def _tools(tools: list[dict[str, Any]] | None) -> list[dict[str, Any]] | None:
    if tools is None:
        return None
    found = []
    for place, tool in enumerate(tools):
        if tool.get("type") not in (None, "custom"):
            raise RequestError(f"tools[{place}] is of type {tool['type']!r}: this server runs no tools itself, give "
                               "some with a name and an input_schema.", "tools")
        if not isinstance(tool.get("name"), str) or not isinstance(tool.get("input_schema"), dict):
            raise RequestError(f"tools[{place}] needs a name, which is a text, and an input_schema, which is an "
                               "object.", "tools")
        found.append({"type": "function", "function": {
            "name": tool.get("name"), "description": tool.get("description"), "parameters": tool["input_schema"]}})
    return found


def _tool_choice(choice: ToolChoice) -> dict[str, Any]:
    if choice.type == "tool" and choice.name is None:
        raise RequestError("tool_choice.name is missing: name the tool.", "tool_choice")
    named = {"type": "function", "function": {"name": choice.name}}
    return {"tool_choice": {"auto": "auto", "any": "required", "none": "none", "tool": named}[choice.type],
            "parallel_tool_calls": not choice.disable_parallel_tool_use}
