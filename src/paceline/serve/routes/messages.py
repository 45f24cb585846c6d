"""/v1/messages: Anthropic's Messages API."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from paceline.request import Completion, RequestOutput
from paceline.serve.calls import Call, unless_gone
from paceline.serve.chat import begin
from paceline.serve.choosing import for_model
from paceline.serve.conversation import rendered
from paceline.serve.errors import ApiError, anthropic_body
from paceline.serve.responses import BoundedRoute, JSONResponse, answer, beside, service_of
from paceline.serve.routes.messages_input import WORDS, CountBody, MessagesBody, translated
from paceline.serve.routes.translate import PartsWriter, sse
from paceline.serve.schema import ChatBody
from paceline.serve.streaming import EventStream
from paceline.serve.tool_formats.events import CallArguments, CallBegun, Content, Event, Reasoning

router = APIRouter(route_class=BoundedRoute)


@router.post("/v1/messages")
@for_model
async def messages(request: Request, body: MessagesBody) -> Response:
    """Answer a conversation, by Anthropic's protocol."""
    chat = await beside(request, lambda: translated(body))
    call = await begin(request, chat, f"msg_{secrets.token_hex(12)}", WORDS)
    if body.stream:
        return EventStream(call, await call.open(), _MessageWriter(call, chat))
    output = (await unless_gone(request, call))[0]

    def make() -> dict[str, Any]:
        blocks = _blocks(call.parts(output.outputs[0].text))
        called = any(block["type"] == "tool_use" for block in blocks)
        return _envelope(call) | {"content": blocks} | _stop(chat, output.outputs[0], called) | {
            "usage": _usage(call, output), "paceline": call.explanation([output])}

    return await answer(request, [output], make)


@router.post("/v1/messages/count_tokens")
@for_model
async def count_tokens(request: Request, body: CountBody) -> Response:
    """How many tokens a conversation is, as the model would see it."""
    service = service_of(request)
    service.adapter(body.model)
    engine = service.llm.engine
    counted = await beside(request, lambda: len(rendered(engine, translated(body), engine.chat)))
    return JSONResponse({"input_tokens": counted})


def _envelope(call: Call) -> dict[str, Any]:
    return {"id": call.id, "type": "message", "role": "assistant", "model": call.envelope()["model"], "content": [],
            "stop_reason": None, "stop_sequence": None}


def _blocks(events: Iterable[Event]) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = []
    for event in events:
        if isinstance(event, CallArguments):
            blocks[-1]["input"] += event.text
        elif not isinstance(event, CallBegun) and blocks and blocks[-1]["type"] == _kind(event):
            blocks[-1][_kind(event)] += event.text
        else:
            blocks.append(_block(event))
    return [block | {"input": _object(block["input"])} if block["type"] == "tool_use" else block for block in blocks]


def _kind(event: Content | Reasoning) -> str:
    return "text" if isinstance(event, Content) else "thinking"


def _block(event: Content | Reasoning | CallBegun) -> dict[str, Any]:
    """As it begins."""
    if isinstance(event, Content):
        return {"type": "text", "text": event.text}
    if isinstance(event, Reasoning):
        return {"type": "thinking", "thinking": event.text, "signature": ""}
    return {"type": "tool_use", "id": f"toolu_{secrets.token_hex(12)}", "name": event.name, "input": ""}


def _object(text: str) -> dict[str, Any]:
    """A call's arguments; of one that was cut short, as stop_reason says, there is nothing to read."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _usage(call: Call, output: RequestOutput) -> dict[str, int]:
    usage = call.usage([output])
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return {"input_tokens": usage["prompt_tokens"] - cached, "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached, "output_tokens": usage["completion_tokens"]}


def _stop(chat: ChatBody, completion: Completion, called: bool) -> dict[str, Any]:
    """Why the text ended."""
    reason, found = "end_turn", None
    if completion.finish_reason != "stop":
        full = chat.max_tokens is not None and len(completion.token_ids) >= chat.max_tokens
        cut = completion.finish_reason == "length" and not full
        reason = "model_context_window_exceeded" if cut else "max_tokens"
    elif isinstance(completion.stop_reason, str):
        reason, found = "stop_sequence", completion.stop_reason
    elif called:
        reason = "tool_use"
    return {"stop_reason": reason, "stop_sequence": found}


class _MessageWriter(PartsWriter):
    """Blocks one after another, each begun, told and stopped."""

    def __init__(self, call: Call, body: ChatBody) -> None:
        super().__init__(call)
        self._chat = body
        self._index = -1
        self._called = False
        self._kind = ""
        """Of the block that is open."""

    def begin(self) -> str:
        usage = {"input_tokens": len(self.call.prompts[0].ids), "cache_creation_input_tokens": 0,
                 "cache_read_input_tokens": 0, "output_tokens": 0}
        return _event("message_start", message=_envelope(self.call) | {"usage": usage})

    def part(self, event: Event) -> str:
        if isinstance(event, Content | Reasoning):
            kind = _kind(event)
            told = "" if self._kind == kind else self._open(_block(type(event)("")))
            return told + self._delta({"type": f"{kind}_delta", kind: event.text})
        if isinstance(event, CallBegun):
            self._called = True
            return self._open(_block(event) | {"input": {}})
        return self._delta({"type": "input_json_delta", "partial_json": event.text})

    def ended(self, output: RequestOutput) -> str:
        why = _stop(self._chat, output.outputs[0], self._called)
        return self._close() + _event("message_delta", delta=why, usage=_usage(self.call, output)) + _event(
            "message_stop")

    def fail(self, problem: ApiError) -> str:
        return sse("error", anthropic_body(problem))

    def _open(self, block: dict[str, Any]) -> str:
        told = self._close()
        self._index += 1
        self._kind = block["type"]
        return told + _event("content_block_start", index=self._index, content_block=block)

    def _delta(self, delta: dict[str, Any]) -> str:
        return _event("content_block_delta", index=self._index, delta=delta)

    def _close(self) -> str:
        if not self._kind:
            return ""
        self._kind = ""
        return _event("content_block_stop", index=self._index)


def _event(kind: str, **fields: Any) -> str:
    return sse(kind, {"type": kind, **fields})
