"""Messages and tools as a chat template takes them, whatever the template knows of tools."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from paceline.errors import RequestError
from paceline.models.chat import ChatTemplate
from paceline.serve.containers import read_json
from paceline.serve.schema import ChatBody, Message, NamedTool, Tool

TOOL_PROMPT = """You may call functions to help with the user's request. Their signatures are inside <tools></tools>:
<tools>
{tools}
</tools>
For each call write a JSON object with the function's name and arguments inside <tool_call></tool_call>:
<tool_call>
{{"name": <function's name>, "arguments": <object of arguments>}}
</tool_call>"""


def prepare(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """As templates expect them: content a text, arguments of calls as objects, developers as system."""
    return [_message(message, place) for place, message in enumerate(messages)]


def _message(message: Message, place: int) -> dict[str, Any]:
    fields: dict[str, Any] = {name: value for name, value in message.model_dump().items() if value is not None}
    fields["role"] = {"developer": "system", "function": "tool"}.get(message.role, message.role)
    if isinstance(message.content, list):
        fields["content"] = _text(message.content, place)
    elif message.content is None:
        if message.role != "assistant" or not message.tool_calls:
            raise RequestError(f"messages[{place}] has no 'content': give it a text.", "messages")
        fields["content"] = ""
    if message.tool_calls:
        fields["tool_calls"] = [_call(call, place) for call in message.tool_calls]
    return fields


def _text(parts: list[dict[str, Any]], place: int) -> str:
    texts = []
    for part in parts:
        text = part.get("text", part.get("refusal"))
        if part.get("type") not in ("text", "refusal") or not isinstance(text, str):
            raise RequestError(f"messages[{place}].content holds a part of type {part.get('type')!r}: this model reads "
                               "text only.", "messages")
        texts.append(text)
    return "\n".join(texts)


def _call(call: dict[str, Any], place: int) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RequestError(f"messages[{place}].tool_calls must hold objects with a function and its name.", "messages")
    arguments = function.get("arguments", "{}")
    if isinstance(arguments, str):
        try:
            arguments = read_json(arguments or "{}", f"messages[{place}].tool_calls")
        except (ValueError, RecursionError):
            raise RequestError(f"messages[{place}].tool_calls: the arguments are not valid JSON.", "messages") from None
    return call | {"function": function | {"arguments": arguments}}


def render_arguments(body: ChatBody, template: ChatTemplate | None) -> dict[str, Any]:
    """What Engine.render takes for this body. Tools a template has no place for go into a system message."""
    messages = prepare(body.messages)
    tools = [tool.model_dump(exclude_none=True) for tool in used_tools(body)]
    extra = dict(body.chat_template_kwargs or {})
    for name in ("messages", "tools", "add_generation_prompt", "parse_special", "max_prompt_len", "self"):
        if name in extra:
            raise RequestError(f"chat_template_kwargs may not set {name!r}: it means something else already.",
                               "chat_template_kwargs")
    if template is not None and not _knows_tools(template):
        messages = spell_out(messages, tools)
        tools = []
    return {"messages": messages, "tools": tools or None,
            "add_generation_prompt": body.add_generation_prompt is not False,
            "parse_special": bool(body.parse_special), **extra}


def used_tools(body: ChatBody) -> list[Tool]:
    """Those the model may call in this answer."""
    if body.tool_choice == "none":
        return []
    tools = body.tools or []
    if isinstance(body.tool_choice, NamedTool):
        name = body.tool_choice.function.name
        named = [tool for tool in tools if tool.function.name == name]
        if not named:
            raise RequestError(f"tool_choice names the function {name!r}, which is not among the tools.", "tool_choice")
        return named
    if body.tool_choice == "required" and not tools:
        raise RequestError("tool_choice is 'required' and there are no tools: give some.", "tool_choice")
    return tools


def _knows_tools(template: ChatTemplate) -> bool:
    return template.tool_source is not None or "tools" in (template.source or "")


def spell_out(messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Tools, calls and their results as plain messages, in the manner of Hermes."""
    spelled = [_spelled(message) for message in messages]
    if not tools:
        return spelled
    prompt = TOOL_PROMPT.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
    if spelled[0]["role"] == "system":
        return [spelled[0] | {"content": f"{spelled[0]['content']}\n\n{prompt}"}, *spelled[1:]]
    return [{"role": "system", "content": prompt}, *spelled]


def _spelled(message: dict[str, Any]) -> dict[str, Any]:
    content = message["content"]
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{content}\n</tool_response>"}
    calls = [json.dumps({"name": call["function"]["name"], "arguments": call["function"]["arguments"]},
                        ensure_ascii=False) for call in message.get("tool_calls", ())]
    if calls:
        written = [f"<tool_call>\n{call}\n</tool_call>" for call in calls]
        content = "\n".join([content, *written] if content else written)
    return {"role": message["role"], "content": content}
