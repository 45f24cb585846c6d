"""/v1/chat/completions: conversations, with tools."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from paceline.engine.records.deltas import SampleDelta
from paceline.request import Completion, RequestOutput
from paceline.serve.answers import Answers
from paceline.serve.calls import Call, unless_gone
from paceline.serve.choosing import for_model
from paceline.serve.conversation import rendered, template_of
from paceline.serve.endings import ended
from paceline.serve.errors import NO_WORDS, asked_in
from paceline.serve.keys import caller_of
from paceline.serve.params import chat_names, chat_params, check_streamed, speculation
from paceline.serve.responses import BoundedRoute, answer, beside, service_of
from paceline.serve.schema import ChatBody
from paceline.serve.streaming import ChunkWriter, EventStream
from paceline.serve.tokens import Provenances, chat_logprobs, prompt_logprobs
from paceline.serve.told_calls import ToldCalls, call_id
from paceline.serve.tool_formats.events import AnswerParser, CallBegun, Content, Event, Reasoning

router = APIRouter(route_class=BoundedRoute)


@router.post("/v1/chat/completions")
@for_model
async def chat_completions(request: Request, body: ChatBody) -> Response:
    """Answer a conversation."""
    call = await begin(request, body, f"chatcmpl-{request.state.name}")
    if body.stream:
        call.kind = "chat.completion.chunk"
        return EventStream(call, await call.open(), ChunkWriter(call, _ChatStream(call, body)))
    output = (await unless_gone(request, call))[0]
    return await answer(request, [output], lambda: call.envelope() | {
        "choices": [_choice(call, body, output, completion) for completion in output.outputs],
        "usage": call.usage([output]), "paceline": call.explanation([output])}
        | prompt_logprobs(output, body.prompt_logprobs, call.service.names))


async def begin(request: Request, body: ChatBody, name: str, words: Mapping[str, str] = NO_WORDS) -> Call:
    """A conversation as a call of the engine's: the one way for every protocol that has conversations. `name`: what
    the call is known by, nobody else's. `words`: what the protocol calls fields that chats have another name for."""
    service = service_of(request)
    adapter = service.adapter(body.model)
    engine = service.llm.engine

    def ask() -> Call:
        check_streamed(body)
        names = {**words, **{own: words.get(told, told) for own, told in chat_names(body).items()}}
        template = template_of(engine, body, service.options.trust_request_chat_template)
        with asked_in(names):
            answers = Answers.of(body, template, engine.tokenizer, service.options.tool_parser)
            params = chat_params(body, service.options, answers.structure)
            wish = speculation(body, service.options, engine)
            service.options.check(params, 1)
            ids = rendered(engine, body, template)
            answers = answers.behind(ids, engine.tokenizer)
            params = answers.params(params)
            prompt = engine.prepare(ids, params)
        return Call(service, name, "chat.completion", [prompt], params, wish, caller_of(request).tenant, adapter,
                    include_usage=body.stream_options is not None and body.stream_options.include_usage,
                    provenance=bool(body.provenance), answers=answers, request_id=request.state.request_id,
                    headers=request.headers, names=names)

    return await beside(request, ask)


def _choice(call: Call, body: ChatBody, output: RequestOutput, completion: Completion) -> dict[str, Any]:
    content, thoughts, calls = gather(call.parts(completion.text))
    told = ToldCalls(body)
    message: dict[str, Any] = {"role": "assistant", "content": content if content or not calls else None,
                               "refusal": None}
    if thoughts:
        message["reasoning_content"] = thoughts
    message |= told.message(calls)
    choice: dict[str, Any] = {
        "index": completion.index, "message": message,
        "logprobs": None if completion.logprobs is None else chat_logprobs(completion.logprobs, call.service.names)}
    choice |= ended(completion.finish_reason, completion.stop_reason, told.ending)
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


class _ChatStream:
    """Chunks of one call: remembers, of each sample, what goes on from chunk to chunk."""

    def __init__(self, call: Call, body: ChatBody) -> None:
        self._call = call
        self._body = body
        self._parsers: dict[int, AnswerParser] = {}
        self._tellers: dict[int, Provenances] = {}
        self._told: dict[int, ToldCalls] = {}

    def __call__(self, place: int, delta: SampleDelta) -> list[dict[str, Any]]:
        index, call = delta.index, self._call
        deltas: list[dict[str, Any]] = []
        parser = self._parsers.get(index)
        if parser is None:
            parser = self._parsers[index] = call.new_parser()
            self._told[index] = ToldCalls(self._body)
            deltas.append({"role": "assistant", "content": "", "refusal": None})
        events, told = list(parser.push(delta.text)), self._told[index]
        if delta.finish_reason is not None:
            events += parser.end()
        said = [one for event in events for one in told.deltas(event)]
        if delta.finish_reason is not None:
            said += told.end()
        deltas += said
        extra: dict[str, Any] = {}
        if delta.logprobs:
            extra["logprobs"] = chat_logprobs(delta.logprobs, call.service.names)
        if call.provenance:
            teller = self._tellers.get(index)
            if teller is None:
                teller = self._tellers[index] = Provenances(call.service.llm.engine.tokenizer, call.service.names,
                                                             call.prompts[place].ids)
            extra["tokens"] = teller.of_delta(delta, call.drafted)
        if extra and not said:
            deltas.append({})
        choices: list[dict[str, Any]] = [
            {"index": index, "delta": one, "logprobs": None, "finish_reason": None} for one in deltas]
        if choices:
            choices[-1] |= extra
        if delta.finish_reason is not None:
            choices.append({"index": index, "delta": {}, "logprobs": None,
                            **ended(delta.finish_reason, delta.stop_reason, told.ending)})
        return choices
