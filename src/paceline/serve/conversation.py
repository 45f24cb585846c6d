"""Messages and tools as a chat template takes them, whatever the template knows of tools."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from paceline.errors import RequestError
from paceline.models.chat import ChatEncoder, ChatTemplate
from paceline.serve.containers import read_json
from paceline.serve.llm import ServedModel
from paceline.serve.schema import ChatBody, Message
from paceline.serve.tool_schema import (
    AllowedTools,
    CustomTool,
    Function,
    NamedCustomTool,
    NamedFunction,
    NamedTool,
    Tool,
    name_of,
)

TOOL_PROMPT = """You may call functions to help with the user's request. Their signatures are inside <tools></tools>:
<tools>
{tools}
</tools>
For each call write a JSON object with the function's name and arguments inside <tool_call></tool_call>:
<tool_call>
{{"name": <function's name>, "arguments": <object of arguments>}}
</tool_call>"""
INPUT = "input"
"""The one argument of the function that stands for a custom tool: its text."""
NO_EFFORT, SOME_EFFORT = "none", "medium"
"""Of reasoning: what other protocols call off, and on."""
_INPUT_SCHEMA = {"type": "object", "properties": {INPUT: {"type": "string"}}, "required": [INPUT],
                 "additionalProperties": False}
_NOT_VARIABLES = ("messages", "tools", "add_generation_prompt", "continue_final_message", "parse_special",
                  "max_prompt_len", "self")


def prepare(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """As templates expect them: content a text, arguments of calls as objects, developers as system."""
    return [_message(message, place) for place, message in enumerate(messages)]


def _message(message: Message, place: int) -> dict[str, Any]:
    fields: dict[str, Any] = {name: value for name, value in message.model_dump().items() if value is not None}
    fields["role"] = {"developer": "system", "function": "tool"}.get(message.role, message.role)
    if isinstance(message.content, list):
        fields["content"] = _text(message.content, place)
    elif message.content is None:
        if message.role != "assistant":
            raise RequestError(f"messages[{place}] has no 'content': give it a text.", "messages")
        fields["content"] = ""
    calls = list(message.tool_calls or ())
    if (old := fields.pop("function_call", None)) is not None:
        calls.append({"type": "function", "function": old})
    if calls:
        fields["tool_calls"] = [_call(call, place) for call in calls]
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
    if isinstance(custom := call.get("custom"), dict):  # a custom tool's text, as the argument that it was asked for as
        call = {name: value for name, value in call.items() if name != "custom"} | {
            "type": "function", "function": {"name": custom.get("name"), "arguments": {INPUT: custom.get(INPUT, "")}}}
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


def template_of(model: ServedModel, body: ChatBody, trusted: bool = False) -> ChatTemplate | None:
    """What a conversation is written with. `trusted`: requests may bring templates of their own."""
    if body.chat_template is None:
        return model.chat
    if not trusted:
        raise RequestError("chat_template is the operator's to choose here: leave it out, or have the server "
                           "started with --trust-request-chat-template.", "chat_template")
    if model.tokenizer is None:
        raise RequestError("This model came without a tokenizer: give a prompt of token ids instead.", "messages")
    return ChatTemplate(body.chat_template, model.tokenizer.special_tokens)


def rendered(model: ServedModel, body: ChatBody, template: ChatTemplate | None) -> list[int]:
    """The prompt of a conversation, by this template (template_of)."""
    render = model.render
    if template is not None and template is not model.chat and model.tokenizer is not None:
        render = ChatEncoder(template, model.tokenizer).encode
    return render(max_prompt_len=model.config.max_model_len, **render_arguments(body, template))


def render_arguments(body: ChatBody, template: ChatTemplate | None) -> dict[str, Any]:
    """What Engine.render takes for this body. Tools a template has no place for go into a system message."""
    if body.continue_final_message and body.add_generation_prompt:
        raise RequestError("continue_final_message goes on with the last message, add_generation_prompt begins "
                           "another: set one of them.", "continue_final_message")
    messages = prepare(body.messages)
    tools = [tool.model_dump(exclude_none=True) for tool in used_tools(body)]
    extra = _thinking(body, template) | dict(body.chat_template_kwargs or {})
    for name in _NOT_VARIABLES:
        if name in extra:
            raise RequestError(f"chat_template_kwargs may not set {name!r}: it means something else already.",
                               "chat_template_kwargs")
    if template is not None and not _knows_tools(template):
        messages = spell_out(messages, tools)
        tools = []
    return {"messages": messages, "tools": tools or None,
            "add_generation_prompt": body.add_generation_prompt is not False and not body.continue_final_message,
            "continue_final_message": bool(body.continue_final_message),
            "parse_special": bool(body.parse_special), **extra}


def _thinking(body: ChatBody, template: ChatTemplate | None) -> dict[str, Any]:
    """How much to think, in the variables that the template reads; most read none, and their models cannot be told."""
    effort = body.reasoning_effort
    if effort is None or template is None:
        return {}
    source = f"{template.source} {template.tool_source}"
    return {name: value for name, value in {"reasoning_effort": effort, "enable_thinking": effort != NO_EFFORT}.items()
            if name in source}


def named_tool(body: ChatBody) -> str | None:
    """The one that the answer has to call, where tool_choice names it."""
    return name_of(body.tool_choice) if isinstance(body.tool_choice, NamedTool | NamedCustomTool) else None


def must_call(body: ChatBody) -> bool:
    """Whether the answer has to call tools, whatever the model would like."""
    choice = body.tool_choice
    if isinstance(choice, AllowedTools):
        return choice.allowed_tools.mode == "required"
    return choice == "required" or named_tool(body) is not None


def used_tools(body: ChatBody) -> list[Tool]:
    """Those the model may call in this answer, each as a function."""
    _check_functions(body)
    _check_names(body)
    if body.tool_choice == "none":
        return []
    tools = [_as_function(tool, place) for place, tool in enumerate(body.tools or ())]
    allowed = {named} if (named := named_tool(body)) is not None else None
    if isinstance(body.tool_choice, AllowedTools):
        allowed = {name_of(tool) for tool in body.tool_choice.allowed_tools.tools}
    if allowed is not None:
        for name in allowed - {tool.function.name for tool in tools}:
            raise RequestError(f"tool_choice names the function {name!r}, which is not among the tools.", "tool_choice")
        tools = [tool for tool in tools if tool.function.name in allowed]
    if must_call(body) and not tools:
        raise RequestError("tool_choice is 'required' and there are no tools: give some.", "tool_choice")
    return tools


def _check_names(body: ChatBody) -> None:
    """A call names its tool, so every tool has a name of its own."""
    given = "tools" if body.functions is None else "functions"
    known: dict[str, int] = {}
    for place, tool in enumerate(body.tools or ()):
        name = tool.function.name if isinstance(tool, Tool) else tool.custom.name
        if (first := known.setdefault(name, place)) != place:
            raise RequestError(f"{given}[{place}] has the name {name!r}, which {given}[{first}] has already: names "
                               "must be unique.", given)


def _check_functions(body: ChatBody) -> None:
    if body.functions is None:
        if isinstance(body.function_call, NamedFunction):
            raise RequestError("function_call names a function and there are no functions: give some, or tools and "
                               "tool_choice.", "function_call")
    elif body.functions != [getattr(tool, "function", None) for tool in body.tools or ()]:
        raise RequestError("functions and tools are two names for the same: give tools alone.", "functions")


def _as_function(tool: Tool | CustomTool, place: int) -> Tool:
    """Models know functions. A tool that takes a text is one with that text as its argument."""
    if isinstance(tool, Tool):
        return tool
    custom = tool.custom
    if custom.format is not None and custom.format.type != "text":
        raise RequestError(f"tools[{place}].custom.format asks for a grammar, which is not supported: use the format "
                           "text, or a function whose parameters say what is allowed.", "tools")
    return Tool(type="function", function=Function(name=custom.name, description=custom.description,
                                                   parameters=_INPUT_SCHEMA))


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
