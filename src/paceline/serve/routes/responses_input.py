"""/v1/responses: what is asked, as the body of a chat."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import Field

from paceline.errors import RequestError
from paceline.serve.body import Body, ListOf, number
from paceline.serve.routes.translate import chat_body, check_one_answer, joined_text, passed_on, unasked_result
from paceline.serve.schema import ChatBody, Sampling

TEXTS = ("input_text", "output_text", "text", "refusal")
OWN = ("store", "metadata", "stream_options", "response_format", "n")
"""Fields of a chat's that mean something else here, or nothing."""

WORDS = {"response_format": "text.format", "max_completion_tokens": "max_output_tokens", "messages": "input"}
"""What chats call them -> what they are called here."""


class TextFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class TextOptions(Body):
    format: TextFormat | None = None
    verbosity: str | None = None


class ResponsesBody(Sampling):
    input: str | ListOf[dict[str, Any]]
    instructions: str | None = None
    previous_response_id: str | None = None
    max_output_tokens: int | None = number(minimum=1)
    text: TextOptions | None = None
    tools: ListOf[dict[str, Any]] | None = None
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    top_logprobs: int | None = number(minimum=0, maximum=0)
    background: bool | None = None
    truncation: str | None = Field(default=None, description="auto cuts nothing: a text that does not fit is refused.")
    max_tool_calls: int | None = Field(default=None, json_schema_extra={"minimum": 1},
                                       description="Of tools that a server runs: there are none here.")
    include: ListOf[str] | None = None
    reasoning: dict[str, Any] | None = None


def check(body: ResponsesBody) -> None:
    """Refuse what would have to be dropped in silence."""
    if body.background:
        raise RequestError("background is not supported: wait for the answer, or stream it.", "background")
    if body.truncation not in (None, "disabled", "auto"):
        raise RequestError(f"truncation must be auto or disabled, got {body.truncation!r}.", "truncation")
    if body.max_tool_calls is not None and body.max_tool_calls < 1:
        raise RequestError(f"max_tool_calls must be at least 1, got {body.max_tool_calls}.", "max_tool_calls")
    if body.top_logprobs:
        raise RequestError("top_logprobs is not supported here: ask /v1/chat/completions.", "top_logprobs")
    check_one_answer(body)
    for wanted in body.include or ():
        if wanted != "reasoning.encrypted_content":  # of which there is none
            raise RequestError(f"include names {wanted!r}, which this server does not have: leave it out.", "include")


def translated(body: ResponsesBody, messages: Sequence[Mapping[str, Any]]) -> ChatBody:
    """`messages`: the conversation, without instructions."""
    if not messages:
        raise RequestError("input is an empty list: give it a message.", "input")
    if (call := unasked_result(messages)) is not None:
        raise RequestError(f"No tool call found for function call output with call_id {call}: send the function_call "
                           "before it, or the previous_response_id of the response that made it.", "input")
    first = [] if not body.instructions else [{"role": "system", "content": body.instructions}]
    fields = passed_on(body, without=OWN) | {
        "messages": [*first, *messages], "max_completion_tokens": body.max_output_tokens, "tools": _tools(body.tools),
        "tool_choice": _tool_choice(body.tool_choice), "parallel_tool_calls": body.parallel_tool_calls,
        "reasoning_effort": _effort(body)}
    if body.text is not None and body.text.format is not None:
        fields["response_format"] = _format(body.text.format)
    return chat_body(fields, WORDS)


def _effort(body: ResponsesBody) -> str | None:
    effort = (body.reasoning or {}).get("effort")
    if effort is not None and not isinstance(effort, str):
        raise RequestError(f"reasoning.effort must be a text, got {effort!r}.", "reasoning")
    return effort


def messages_of(asked: str | list[dict[str, Any]]) -> list[dict[str, Any]]:
    if isinstance(asked, str):
        return [{"role": "user", "content": asked}]
    messages: list[dict[str, Any]] = []
    for place, item in enumerate(asked):
        _add(messages, item, f"input[{place}]")
    return messages


def _add(messages: list[dict[str, Any]], item: Mapping[str, Any], where: str) -> None:
    kind = item.get("type", "message")
    if kind == "message":
        role = item.get("role")
        if role not in ("system", "developer", "user", "assistant"):
            raise RequestError(f"{where}.role must be system, developer, user or assistant, got {role!r}.", "input")
        messages.append({"role": role, "content": joined_text(item.get("content"), f"{where}.content", TEXTS)})
    elif kind == "function_call":
        call = {"id": _named(item, "call_id", where), "type": "function", "function": {
            "name": _named(item, "name", where), "arguments": _named(item, "arguments", where)}}
        add_call(messages, call)
    elif kind == "custom_tool_call":
        add_call(messages, {"id": _named(item, "call_id", where), "type": "custom", "custom": {
            "name": _named(item, "name", where), "input": _named(item, "input", where)}})
    elif kind in ("function_call_output", "custom_tool_call_output"):
        messages.append({"role": "tool", "tool_call_id": _named(item, "call_id", where),
                         "content": joined_text(item.get("output"), f"{where}.output", TEXTS)})
    elif kind != "reasoning":  # which clients send back as they got it, from whomever
        raise RequestError(f"{where} is of type {kind!r}, which this server does not know: it takes message, "
                           "function_call, function_call_output, custom_tool_call and custom_tool_call_output.",
                           "input")


def add_call(messages: list[dict[str, Any]], call: dict[str, Any]) -> None:
    """Calls one after another are one turn of the assistant's, with what it said before them."""
    if messages and messages[-1]["role"] == "assistant":
        last = messages[-1]
        messages[-1] = last | {"tool_calls": [*last.get("tool_calls", ()), call]}
    else:
        messages.append({"role": "assistant", "content": "", "tool_calls": [call]})


def _named(item: Mapping[str, Any], name: str, where: str, param: str = "input") -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise RequestError(f"{where}.{name} is missing: a {item.get('type')} needs it, as a text.", param)
    return value


def _tools(tools: list[dict[str, Any]] | None) -> list[dict[str, Any]] | None:
    if tools is None:
        return None
    found = []
    for place, tool in enumerate(tools):
        kind = tool.get("type")
        if kind not in ("function", "custom"):
            raise RequestError(f"tools[{place}] is of type {kind!r}: this server runs no tools itself, give functions "
                               "and custom tools.", "tools")
        _named(tool, "name", f"tools[{place}]", "tools")
        own = {name: value for name, value in tool.items() if name != "type"}
        if kind == "custom" and isinstance(form := own.get("format"), dict) and form.get("type") == "grammar":
            own["format"] = {"type": "grammar", "grammar": {name: value for name, value in form.items()
                                                            if name != "type"}}
        found.append({"type": kind, kind: own})
    return found


def _tool_choice(choice: str | dict[str, Any] | None) -> Any:
    if not isinstance(choice, dict):
        return choice
    kind = choice.get("type")
    if kind == "allowed_tools" and isinstance(tools := choice.get("tools"), list):
        return {"type": kind, "allowed_tools": {"mode": choice.get("mode", "auto"), "tools": [_named_tool(
            tool if isinstance(tool, dict) else {}) for tool in tools]}}
    return _named_tool(choice)


def _named_tool(choice: Mapping[str, Any]) -> dict[str, Any]:
    kind = choice.get("type")
    if kind not in ("function", "custom") or not isinstance(choice.get("name"), str):
        raise RequestError("tool_choice must be none, auto, required or an object: of the type function or custom with "
                           "a name, or allowed_tools with a list of such.", "tool_choice")
    return {"type": kind, kind: {"name": choice["name"]}}


def _format(wanted: TextFormat) -> dict[str, Any]:
    if wanted.type != "json_schema":
        return {"type": wanted.type}
    if wanted.schema_ is None:
        raise RequestError("text.format.schema is missing: give the schema.", "text")
    return {"type": "json_schema", "json_schema": {
        "name": wanted.name or "", "description": wanted.description, "schema": wanted.schema_,
        "strict": wanted.strict}}
