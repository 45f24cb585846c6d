"""/v1/chat/completions: conversations, with tools."""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from paceline.engine.records.deltas import SampleDelta
from paceline.request import Completion, RequestOutput
from paceline.serve.answers import Answers
from paceline.serve.calls import Call, unless_gone
from paceline.serve.conversation import render_arguments
from paceline.serve.keys import caller_of
from paceline.serve.params import chat_params, speculation
from paceline.serve.responses import BoundedRoute, answer, beside, service_of
from paceline.serve.schema import ChatBody
from paceline.serve.streaming import ChunkWriter, EventStream
from paceline.serve.tokens import Provenances, chat_logprobs
from paceline.serve.tool_formats.events import AnswerParser, CallArguments, CallBegun, Content, Event, Reasoning

router = APIRouter(route_class=BoundedRoute)


@router.post("/v1/chat/completions")
async def chat_completions(request: Request, body: ChatBody) -> Response:
    """Answer a conversation."""
    call = await begin(request, body, f"chatcmpl-{request.state.name}")
    if body.stream:
        call.kind = "chat.completion.chunk"
        return EventStream(call, await call.open(), ChunkWriter(call, _ChatStream(call)))
    output = (await unless_gone(request, call))[0]
    return await answer(request, [output], lambda: call.envelope() | {
        "choices": [_choice(call, output, completion) for completion in output.outputs],
        "usage": call.usage([output]), "paceline": call.explanation([output])})


async def begin(request: Request, body: ChatBody, name: str) -> Call:
    """A conversation as a call of the engine's: the one way for every protocol that has conversations. `name`: what
    the call is known by, nobody else's."""
    service = service_of(request)
    adapter = service.adapter(body.model)
    engine = service.llm.engine

    def ask() -> Call:
        answers = Answers.of(body, engine.chat, engine.tokenizer, service.options.tool_parser)
        params = chat_params(body, service.options, answers.structure)
        wish = speculation(body, service.options, engine.speculation)
        service.options.check(params, 1)
        prompt = engine.render(max_prompt_len=engine.config.max_model_len, **render_arguments(body, engine.chat))
        answers = answers.behind(prompt, engine.tokenizer)
        params = answers.params(params)
        return Call(service, name, "chat.completion", [engine.prepare(prompt, params)],
                    params, wish, caller_of(request).tenant, adapter,
                    include_usage=body.stream_options is not None and body.stream_options.include_usage,
                    provenance=bool(body.provenance), answers=answers,
                    request_id=request.state.request_id, headers=request.headers)

    return await beside(request, ask)


def call_id() -> str:
    return f"call_{secrets.token_hex(12)}"


def _choice(call: Call, output: RequestOutput, completion: Completion) -> dict[str, Any]:
    content, thoughts, calls = gather(call.parts(completion.text))
    message: dict[str, Any] = {"role": "assistant", "content": content if content or not calls else None,
                               "refusal": None}
    if thoughts:
        message["reasoning_content"] = thoughts
    if calls:
        message["tool_calls"] = calls
    choice: dict[str, Any] = {
        "index": completion.index, "message": message,
        "logprobs": None if completion.logprobs is None else chat_logprobs(completion.logprobs, call.service.names),
        "finish_reason": _reason(completion.finish_reason, bool(calls)), "stop_reason": completion.stop_reason}
    if completion.score is not None:
        choice["score"] = completion.score
    if call.provenance:
        stats = output.speculation if completion.index == 0 else None
        teller = Provenances(call.service.llm.engine.tokenizer, call.service.names, output.prompt_token_ids)
        choice["tokens"] = teller.of_completion(completion, None if stats is None else stats.provenance, call.drafted)
    return choice


def gather(events: Iterable[Event]) -> tuple[str, str, list[dict[str, Any]]]:
    """The text for the reader, the thoughts before it, and the calls."""
    content: list[str] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for event in events:
        if isinstance(event, Content):
            content.append(event.text)
        elif isinstance(event, Reasoning):
            thoughts.append(event.text)
        elif isinstance(event, CallBegun):
            calls.append({"id": call_id(), "type": "function", "function": {"name": event.name, "arguments": ""}})
        else:
            calls[event.index]["function"]["arguments"] += event.text
    return "".join(content), "".join(thoughts), calls


def _reason(reason: str | None, called: bool) -> str | None:
    return "tool_calls" if called and reason == "stop" else reason


class _ChatStream:
    """Chunks of one call: remembers, of each sample, what goes on from chunk to chunk."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self._parsers: dict[int, AnswerParser] = {}
        self._tellers: dict[int, Provenances] = {}
        self._called: set[int] = set()

    def __call__(self, place: int, delta: SampleDelta) -> list[dict[str, Any]]:
        index, call = delta.index, self._call
        deltas: list[dict[str, Any]] = []
        parser = self._parsers.get(index)
        if parser is None:
            parser = self._parsers[index] = call.new_parser()
            deltas.append({"role": "assistant", "content": "", "refusal": None})
        events = list(parser.push(delta.text))
        if delta.finish_reason is not None:
            events += parser.end()
        deltas += [self._delta(index, event) for event in events]
        extra: dict[str, Any] = {}
        if delta.logprobs:
            extra["logprobs"] = chat_logprobs(delta.logprobs, call.service.names)
        if call.provenance:
            teller = self._tellers.get(index)
            if teller is None:
                teller = self._tellers[index] = Provenances(call.service.llm.engine.tokenizer, call.service.names,
                                                             call.prompts[place].ids)
            extra["tokens"] = teller.of_delta(delta, call.drafted)
        if extra and not events:
            deltas.append({})
        choices: list[dict[str, Any]] = [
            {"index": index, "delta": one, "logprobs": None, "finish_reason": None} for one in deltas]
        if choices:
            choices[-1] |= extra
        if delta.finish_reason is not None:
            choices.append({"index": index, "delta": {}, "logprobs": None, "stop_reason": delta.stop_reason,
                            "finish_reason": _reason(delta.finish_reason, index in self._called)})
        return choices

    def _delta(self, index: int, event: Event) -> dict[str, Any]:
        if isinstance(event, Content):
            return {"content": event.text}
        if isinstance(event, Reasoning):
            return {"reasoning_content": event.text}
        if isinstance(event, CallArguments):
            return {"tool_calls": [{"index": event.index, "function": {"arguments": event.text}}]}
        self._called.add(index)
        return {"tool_calls": [{"index": event.index, "id": call_id(), "type": "function",
                                "function": {"name": event.name, "arguments": ""}}]}
