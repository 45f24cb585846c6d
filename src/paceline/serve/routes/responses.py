"""/v1/responses: OpenAI's Responses API, as a chat that may go on from what is kept of an earlier one."""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from paceline.request import RequestOutput
from paceline.serve.calls import Call, Service, unless_gone
from paceline.serve.chat import begin
from paceline.serve.choosing import for_model
from paceline.serve.errors import ApiError
from paceline.serve.keys import caller_of
from paceline.serve.responses import BoundedRoute, JSONResponse, answer, beside, service_of
from paceline.serve.routes.responses_input import WORDS, ResponsesBody, add_call, check, messages_of, translated
from paceline.serve.routes.stored import Stored
from paceline.serve.routes.translate import PartsWriter, sse
from paceline.serve.schema import ChatBody
from paceline.serve.streaming import EventStream
from paceline.serve.told_calls import call_id, text_of
from paceline.serve.tool_formats.events import CallArguments, CallBegun, Content, Event, Reasoning
from paceline.serve.tool_schema import CustomTool

router = APIRouter(route_class=BoundedRoute)
Message = dict[str, Any]
MOST_ITEMS = 100
"""Of an answer to who asks for a response's input."""


@router.post("/v1/responses")
@for_model
async def responses(request: Request, body: ResponsesBody) -> Response:
    """Answer an input, or go on with an earlier response."""
    service, tenant = service_of(request), caller_of(request).tenant.name
    check(body)
    before: tuple[Message, ...] = ()
    before_size = 0
    if body.previous_response_id is not None:
        stored = _kept(service, tenant, body.previous_response_id, "previous_response_id")
        before, before_size = stored.messages, stored.size

    def read() -> tuple[tuple[Message, ...], ChatBody]:
        asked = (*before, *messages_of(body.input))
        return asked, translated(body, asked)

    asked, chat = await beside(request, read)
    call = await begin(request, chat, f"resp_{secrets.token_hex(24)}", WORDS)
    told = _Telling(call, body, chat, asked, before_size + len(await request.body()))
    if body.stream:
        return EventStream(call, await call.open(), _ResponseWriter(call, told))
    output = (await unless_gone(request, call))[0]

    def make() -> dict[str, Any]:
        told.hear(call.parts(output.outputs[0].text))
        told.end(output)
        return told.response | {"paceline": call.explanation([output])}

    whole = await answer(request, [output], make)
    told.keep()
    return whole


@router.get("/v1/responses/{response_id}")
async def retrieve(request: Request, response_id: str) -> Response:
    """A response that was stored."""
    if request.query_params.get("stream", "false").lower() == "true":
        raise ApiError(400, "A response that has ended is not streamed again: leave stream out.", param="stream")
    return JSONResponse(_kept(service_of(request), caller_of(request).tenant.name, response_id).response)


@router.get("/v1/responses/{response_id}/input_items")
async def input_items(request: Request, response_id: str) -> Response:
    """What a stored response was asked, the latest first."""
    asked = request.query_params
    order, after, limit = asked.get("order", "desc"), asked.get("after"), asked.get("limit", "20")
    if order not in ("asc", "desc"):
        raise ApiError(400, f"order must be asc or desc, got {order!r}.", param="order")
    if not (limit.isascii() and limit.isdigit() and len(limit) < 4 and 1 <= int(limit) <= MOST_ITEMS):
        raise ApiError(400, f"limit must be a number from 1 to {MOST_ITEMS}, got {limit!r}.", param="limit")
    items = [*_kept(service_of(request), caller_of(request).tenant.name, response_id).items]
    if order == "desc":
        items.reverse()
    if after is not None:
        place = next((place for place, item in enumerate(items) if item["id"] == after), None)
        if place is None:
            raise ApiError(400, f"after names {after!r}, which is no item of this response.", param="after")
        items = items[place + 1:]
    page = items[:int(limit)]
    return JSONResponse({"object": "list", "data": page, "first_id": page[0]["id"] if page else None,
                         "last_id": page[-1]["id"] if page else None, "has_more": len(items) > len(page)})


@router.delete("/v1/responses/{response_id}")
async def delete(request: Request, response_id: str) -> Response:
    """Forget a response."""
    if not service_of(request).responses.delete(caller_of(request).tenant.name, response_id):
        raise _unknown(response_id)
    return JSONResponse({"id": response_id, "object": "response", "deleted": True})


def _kept(service: Service, tenant: str, response_id: str, param: str | None = None) -> Stored:
    stored = service.responses.get(tenant, response_id)
    if stored is None:
        raise _unknown(response_id, param)
    return stored


def _unknown(response_id: str, param: str | None = None) -> ApiError:
    return ApiError(404, f"There is no response {response_id!r} of this key's: it was never stored, was deleted, "
                    "or has made way for newer ones; send the conversation itself.", param=param,
                    code="response_not_found")


def _whole(tool: dict[str, Any]) -> dict[str, Any]:
    """As it is told again: of a function these two are always said."""
    said = {name: tool.get(name) for name in ("parameters", "strict")} if tool["type"] == "function" else {}
    return tool | said


class _Telling:
    """One response as it grows: its items, and of each step the events that tell of it."""

    def __init__(self, call: Call, body: ResponsesBody, chat: ChatBody, asked: tuple[Message, ...], size: int) -> None:
        """`asked`: the conversation, which takes so many bytes."""
        self._call = call
        self._input = body.input
        self._custom = {tool.custom.name for tool in chat.tools or () if isinstance(tool, CustomTool)}
        self._asked = asked
        self._size = size
        self._sequence = 0
        self._arguments = ""
        """Of the custom tool's call that is being written."""
        self._open: dict[str, Any] | None = None
        """The item that is being written, the last of the output."""
        self._keeps = body.store is not False
        text = {} if body.text is None else body.text.model_dump(exclude_none=True, by_alias=True)
        self.response: dict[str, Any] = {
            "id": call.id, "object": "response", "created_at": call.created, "status": "in_progress",
            "background": False, "error": None, "incomplete_details": None, "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens, "model": call.envelope()["model"], "output": [],
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id, "reasoning": {"effort": None, "summary": None} | (
                body.reasoning or {}),
            "service_tier": "default", "store": self._keeps, "temperature": call.params.temperature,
            "text": {"format": {"type": "text"}} | text, "tool_choice": body.tool_choice or "auto",
            "tools": [_whole(tool) for tool in body.tools or ()], "top_logprobs": 0, "top_p": call.params.top_p,
            "truncation": body.truncation or "disabled", "max_tool_calls": body.max_tool_calls,
            "usage": None, "user": body.user, "metadata": body.metadata or {}}

    def begin(self) -> str:
        return self._event("response.created", response=self.response) + self._event(
            "response.in_progress", response=self.response)

    def hear(self, events: Iterable[Event]) -> str:
        return "".join(self._part(event) for event in events)

    def end(self, output: RequestOutput) -> str:
        """It has ended: the rest of the events."""
        told = "" if self.response["output"] else self._message()
        reason = output.outputs[0].finish_reason
        status = "completed" if reason == "stop" else "incomplete"
        told += self._close(status)
        usage = self._call.usage([output])
        self.response |= {"status": status, "usage": {
            "input_tokens": usage["prompt_tokens"], "input_tokens_details": usage["prompt_tokens_details"],
            "output_tokens": usage["completion_tokens"], "output_tokens_details": {
                "reasoning_tokens": usage["completion_tokens_details"]["reasoning_tokens"]},
            "total_tokens": usage["total_tokens"]}}
        if status == "incomplete":
            self.response["incomplete_details"] = {"reason": "max_output_tokens" if reason == "length" else reason}
        self._size += 2 * len(output.outputs[0].text)
        return told + self._event(f"response.{status}", response=self.response)

    def fail(self, problem: ApiError) -> str:
        told = "" if self._open is None else self._close("incomplete")
        self.response |= {"status": "failed", "error": {"code": problem.code or "server_error",
                                                        "message": problem.detail}}
        return told + self._event("response.failed", response=self.response)

    def _part(self, event: Event) -> str:
        if isinstance(event, Content):
            told = self._message() if self._open is None or self._open["type"] != "message" else ""
            assert self._open is not None
            self._open["content"][0]["text"] += event.text
            return told + self._of_text("response.output_text.delta", delta=event.text, logprobs=[])
        if isinstance(event, Reasoning):
            told = "" if self._open is not None and self._open["type"] == "reasoning" else self._begin_item({
                "id": f"rs_{secrets.token_hex(24)}", "type": "reasoning", "status": "in_progress", "summary": [],
                "content": [{"type": "reasoning_text", "text": ""}]})
            assert self._open is not None
            self._open["content"][0]["text"] += event.text
            return told + self._of_text("response.reasoning_text.delta", delta=event.text)
        if isinstance(event, CallBegun) and event.name in self._custom:
            self._arguments = ""
            return self._begin_item({"id": f"ctc_{secrets.token_hex(24)}", "type": "custom_tool_call",
                                     "status": "in_progress", "call_id": call_id(), "name": event.name, "input": ""})
        if isinstance(event, CallBegun):
            return self._begin_item({"id": f"fc_{secrets.token_hex(24)}", "type": "function_call",
                                     "status": "in_progress", "call_id": call_id(), "name": event.name,
                                     "arguments": ""})
        assert isinstance(event, CallArguments) and self._open is not None
        if self._open["type"] == "custom_tool_call":  # its text is known when the arguments are whole
            self._arguments += event.text
            return ""
        self._open["arguments"] += event.text
        return self._of_item("response.function_call_arguments.delta", delta=event.text)

    def _message(self) -> str:
        """An item for text."""
        told = self._begin_item({"id": f"msg_{secrets.token_hex(24)}", "type": "message", "status": "in_progress",
                                 "role": "assistant", "content": []})
        assert self._open is not None
        self._open["content"].append({"type": "output_text", "text": "", "annotations": [], "logprobs": []})
        return told + self._of_text("response.content_part.added", part=self._open["content"][0])

    def _begin_item(self, item: dict[str, Any]) -> str:
        told = "" if self._open is None else self._close("completed")
        self._open = item
        self.response["output"].append(item)
        return told + self._event("response.output_item.added", output_index=self._place, item=item)

    def _close(self, status: str) -> str:
        item = self._open
        assert item is not None
        item["status"] = status
        if item["type"] == "custom_tool_call":
            item["input"] = text_of(self._arguments)
            told = self._of_item("response.custom_tool_call_input.delta", delta=item["input"])
            told += self._of_item("response.custom_tool_call_input.done", input=item["input"])
        elif item["type"] == "message":
            part = item["content"][0]
            told = self._of_text("response.output_text.done", text=part["text"], logprobs=[])
            told += self._of_text("response.content_part.done", part=part)
        elif item["type"] == "reasoning":
            told = self._of_text("response.reasoning_text.done", text=item["content"][0]["text"])
        else:
            told = self._of_item("response.function_call_arguments.done", name=item["name"],
                                 arguments=item["arguments"])
        told += self._event("response.output_item.done", output_index=self._place, item=item)
        self._open = None
        return told

    @property
    def _place(self) -> int:
        return len(self.response["output"]) - 1

    def _of_item(self, kind: str, **fields: Any) -> str:
        assert self._open is not None
        return self._event(kind, item_id=self._open["id"], output_index=self._place, **fields)

    def _of_text(self, kind: str, **fields: Any) -> str:
        return self._of_item(kind, content_index=0, **fields)

    def _event(self, kind: str, **fields: Any) -> str:
        self._sequence += 1
        return sse(kind, {"type": kind, "sequence_number": self._sequence - 1, **fields})

    def keep(self) -> None:
        """For who comes back to it; once it has ended, in the event loop."""
        if not self._keeps:
            return
        messages = list(self._asked)
        for item in self.response["output"]:
            if item["type"] == "message":
                messages.append({"role": "assistant", "content": item["content"][0]["text"]})
            elif item["type"] == "function_call":
                add_call(messages, {"id": item["call_id"], "type": "function", "function": {
                    "name": item["name"], "arguments": item["arguments"]}})
            elif item["type"] == "custom_tool_call":
                add_call(messages, {"id": item["call_id"], "type": "custom", "custom": {
                    "name": item["name"], "input": item["input"]}})
        self._call.service.responses.put(self._call.tenant.name, self._call.id,
                                         Stored(self.response, tuple(messages), self._size, _items(self._input)))


def _items(asked: str | list[dict[str, Any]]) -> tuple[dict[str, Any], ...]:
    """What was asked, as items with ids; texts are parts of messages."""
    given = [{"role": "user", "content": asked}] if isinstance(asked, str) else asked
    found = []
    for item in given:
        kind = item.get("type", "message")
        own = {"type": kind, "id": f"{'msg' if kind == 'message' else 'item'}_{secrets.token_hex(24)}",
               "status": "completed", **item}
        if kind == "message" and isinstance(own.get("content"), str):
            part = "output_text" if own.get("role") == "assistant" else "input_text"
            own["content"] = [{"type": part, "text": own["content"]}]
        found.append(own)
    return tuple(found)


class _ResponseWriter(PartsWriter):
    def __init__(self, call: Call, told: _Telling) -> None:
        super().__init__(call)
        self._told = told

    def begin(self) -> str:
        return self._told.begin()

    def part(self, event: Event) -> str:
        return self._told.hear([event])

    def ended(self, output: RequestOutput) -> str:
        told = self._told.end(output)
        self._told.keep()
        return told

    def fail(self, problem: ApiError) -> str:
        return self._told.fail(problem)
