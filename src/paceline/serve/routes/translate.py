"""What protocols share that are translated to chats: the body they become, and an answer's parts as they come back."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from pydantic import ValidationError

from paceline.engine.records.deltas import SampleDelta
from paceline.errors import RequestError
from paceline.request import RequestOutput
from paceline.serve.calls import Call
from paceline.serve.errors import NO_WORDS, ApiError, validation_error
from paceline.serve.schema import ChatBody, CompletionBody, Sampling
from paceline.serve.streaming import EVENTS, encode
from paceline.serve.tool_formats.events import AnswerParser, Event

Made = TypeVar("Made", bound=Sampling)


def passed_on(body: Sampling, *, without: tuple[str, ...] = ()) -> dict[str, Any]:
    """Fields that were given and that chats know by the same name: so whatever chats can be asked for, can be asked for
    by every protocol."""
    return {name: getattr(body, name) for name in Sampling.model_fields
            if name in body.model_fields_set and name not in without}


def check_one_answer(body: Sampling) -> None:
    """Refuse what chats have and an answer of another protocol has no place for."""
    if body.n is not None and body.n != 1:
        raise RequestError("n must be 1: there is one answer here.", "n")
    for name in ("provenance", "trace", "prompt_logprobs"):
        if getattr(body, name) not in (None, False):
            raise RequestError(f"{name} is not told here: ask /v1/chat/completions.", name)


def chat_body(fields: Mapping[str, Any], words: Mapping[str, str] = NO_WORDS) -> ChatBody:
    """`words`: what the protocol calls fields that chats have another name for; faults are told in them."""
    return _body(ChatBody, fields, words)


def completion_body(fields: Mapping[str, Any], words: Mapping[str, str] = NO_WORDS) -> CompletionBody:
    return _body(CompletionBody, fields, words)


def _body(kind: type[Made], fields: Mapping[str, Any], words: Mapping[str, str]) -> Made:
    try:
        return kind.model_validate(dict(fields))
    except ValidationError as problem:
        raise validation_error(problem.errors(), dict(fields)).told_in(words) from None


def joined_text(content: Any, where: str, kinds: tuple[str, ...] = ("text",)) -> str:
    """A text, or a list of parts that are texts, as one."""
    if isinstance(content, str):
        return content
    texts = []
    for part in content if isinstance(content, list) else [content]:
        kind: Any = part.get("type") if isinstance(part, dict) else type(part).__name__
        text = part.get("refusal" if kind == "refusal" else "text") if isinstance(part, dict) else None
        if kind not in kinds or not isinstance(text, str):
            raise ApiError(400, f"{where} holds a part of type {kind!r}: this model reads text only.", param=where)
        texts.append(text)
    return "\n".join(texts)


def unasked_result(messages: Iterable[Mapping[str, Any]]) -> str | None:
    """The id of the first result whose call nobody made before it; None: there is none."""
    called: set[Any] = set()
    for message in messages:
        called.update(call.get("id") for call in message.get("tool_calls", ()))
        if message["role"] == "tool" and message["tool_call_id"] not in called:
            return str(message["tool_call_id"])
    return None


def sse(kind: str, data: Mapping[str, Any]) -> str:
    """A server-sent event that has a name."""
    return f"event: {kind}\ndata: {encode(data)}\n\n"


class PartsWriter:
    """Streams one answer, part by part. A protocol says how parts and the end are told."""

    media_type = EVENTS

    def __init__(self, call: Call) -> None:
        self.call = call
        self._parser: AnswerParser = call.new_parser()

    def begin(self) -> str:
        return ""

    async def write(self, place: int, samples: list[SampleDelta], ended: list[RequestOutput] | None) -> str:
        told: list[str] = []
        for sample in samples:
            found = list(self._parser.push(sample.text))
            if sample.finish_reason is not None:
                found += self._parser.end()
            told += [self.part(event) for event in found]
        if ended is not None:
            told.append(self.ended(ended[0]))
        return "".join(told)

    def part(self, event: Event) -> str:
        raise NotImplementedError

    def ended(self, output: RequestOutput) -> str:
        raise NotImplementedError

    def end(self) -> str:
        return ""

    def fail(self, problem: ApiError) -> str:
        raise NotImplementedError


def compact(value: Any) -> str:
    """JSON for a text within JSON: models read it as it is."""
    return json.dumps(value, ensure_ascii=False)
