"""/api/...: Ollama's protocol: chats, texts, embeddings, and what models there are."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterable
from datetime import UTC, datetime
from functools import wraps
from typing import Any

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import Response

from paceline import __version__
from paceline.errors import RequestError
from paceline.request import RequestOutput
from paceline.serve import chat as chats
from paceline.serve import completions
from paceline.serve.body import Body, ListOf, Text
from paceline.serve.calls import Call, Service, unless_gone
from paceline.serve.choosing import for_model
from paceline.serve.conversation import NO_EFFORT, SOME_EFFORT
from paceline.serve.errors import ApiError, ollama_body
from paceline.serve.house import House, ModelCard
from paceline.serve.keys import caller_of
from paceline.serve.pool import LOADED
from paceline.serve.responses import BoundedRoute, JSONResponse, answer, beside, house_of, service_of
from paceline.serve.routes.embeddings import embed, vectors_of, written
from paceline.serve.routes.llama_options import sampling
from paceline.serve.routes.translate import PartsWriter, chat_body, completion_body
from paceline.serve.several import Several
from paceline.serve.streaming import EventStream, encode
from paceline.serve.tool_formats.events import CallArguments, CallBegun, Content, Event, Reasoning

router = APIRouter(route_class=BoundedRoute)

NEVER = "9999-12-31T00:00:00Z"
"""When a model is unloaded, as clients read it: nobody knows, for it depends on what else is asked for."""


WORDS = {"max_tokens": "num_predict", "repetition_penalty": "repeat_penalty", "response_format": "format"}
"""What chats call them -> what they are called here."""
FROM_PROMPT = WORDS | {"messages": "prompt"}


class OllamaBody(Body):
    model: str
    stream: bool | None = None
    format: str | dict[str, Any] | None = None
    options: dict[str, Any] | None = None
    think: bool | str | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    # Accepted because clients send it: only 0 means something, and where nothing is asked (or_unload).
    keep_alive: str | int | float | None = None


class OllamaChat(OllamaBody):
    messages: ListOf[dict[str, Any]] = Field(default_factory=list)
    tools: ListOf[dict[str, Any]] | None = None

    @property
    def asked(self) -> bool:
        """Whether there is anything to answer."""
        return bool(self.messages)

    def nothing(self) -> dict[str, Any]:
        """The answer where there is not."""
        return {"message": _message("")}


class OllamaGenerate(OllamaBody):
    prompt: str = ""
    system: str | None = None
    raw: bool | None = None
    suffix: str | None = None
    template: str | None = None
    context: ListOf[int] | None = None
    images: ListOf[str] | None = None

    @property
    def asked(self) -> bool:
        return bool(self.prompt)

    def nothing(self) -> dict[str, Any]:
        return {"response": ""}


class OllamaEmbed(Body):
    model: str
    input: str | ListOf[Text]
    truncate: bool | None = None
    dimensions: int | None = None
    options: dict[str, Any] | None = None
    keep_alive: str | int | float | None = None


class OllamaOldEmbed(Body):
    model: str
    prompt: Text
    options: dict[str, Any] | None = None
    keep_alive: str | int | float | None = None


class OllamaShow(Body):
    model: str | None = None
    name: str | None = None
    verbose: bool | None = None


def or_unload(endpoint: Any) -> Any:
    """Without anything to answer and with keep_alive 0 (`ollama stop`) a model is not loaded: of several, it is
    unloaded unless somebody uses it."""

    @wraps(endpoint)
    async def unless_stopped(request: Request, body: Any) -> Response:
        several: Several | None = request.app.state.several
        if several is None or body.asked or not _zero(body.keep_alive):
            return await endpoint(request=request, body=body)  # type: ignore[no-any-return]
        if not caller_of(request).operator:
            raise ApiError(403, "A model that is unloaded is unloaded for everybody, which needs an operator's key: "
                           "leave keep_alive out, or start the server with --operator-key KEY and send that one.",
                           param="keep_alive", code="operator_key_needed")
        gone = several.pool.dismiss(several.owner(_named(several, body.model)))
        return JSONResponse(_line(body.model, body.nothing() | {
            "done": True, "done_reason": "unload" if gone else "load"}))

    return unless_stopped


@router.post("/api/chat")
@or_unload
@for_model
async def chat(request: Request, body: OllamaChat) -> Response:
    """Answer a conversation, by Ollama's protocol."""
    service = service_of(request)
    if not body.asked:
        return _loaded(service, body)
    asked = await beside(request, lambda: chat_body(_fields(service, body) | _effort(body.think) | {
        "messages": [_read(message, place) for place, message in enumerate(body.messages)], "tools": body.tools},
        WORDS))
    call = await chats.begin(request, asked, f"ollama-{request.state.name}", WORDS)
    return await _told(request, body, _ChatLines(call, body.model))


@router.post("/api/generate")
@or_unload
@for_model
async def generate(request: Request, body: OllamaGenerate) -> Response:
    """Answer a prompt, or with raw continue it, by Ollama's protocol."""
    service = service_of(request)
    for name in ("suffix", "template", "context", "images"):
        if getattr(body, name):
            raise RequestError(f"{name} is not supported: leave it out, and send conversations to /api/chat.", name)
    if not body.asked:
        return _loaded(service, body)
    name = f"ollama-{request.state.name}"
    if body.raw or service.llm.engine.chat is None:
        text = f"{body.system}\n\n{body.prompt}" if body.system and not body.raw else body.prompt
        plain = completion_body(_fields(service, body) | {"prompt": text}, WORDS)
        call = (await completions.begin(request, plain, name, WORDS))[0]
    else:
        first = [{"role": "system", "content": body.system}] if body.system else []
        call = await chats.begin(request, chat_body(_fields(service, body) | _effort(body.think) | {
            "messages": [*first, {"role": "user", "content": body.prompt}]}, FROM_PROMPT), name, FROM_PROMPT)
    return await _told(request, body, _TextLines(call, body.model))


@router.post("/api/embed")
@for_model
async def embeddings(request: Request, body: OllamaEmbed) -> Response:
    """A vector of length 1 for each text, by Ollama's protocol."""
    began = time.monotonic()
    if body.dimensions is not None:
        raise RequestError("dimensions is not supported: leave it out.", "dimensions")
    model = _named(service_of(request), body.model)
    call, outputs = await embed(request, body.input, model, f"ollama-{request.state.name}")
    return await written(call, vectors_of(outputs), lambda vectors: {
        "model": body.model, "embeddings": vectors, "total_duration": _ns(time.monotonic() - began), "load_duration": 0,
        "prompt_eval_count": call.usage(outputs)["prompt_tokens"]})


@router.post("/api/embeddings")
@for_model
async def old_embeddings(request: Request, body: OllamaOldEmbed) -> Response:
    """The same of one text, as it was asked for before /api/embed."""
    model = _named(service_of(request), body.model)
    call, outputs = await embed(request, body.prompt, model, f"ollama-{request.state.name}", "prompt")
    return await written(call, vectors_of(outputs), lambda vectors: {"embedding": vectors[0]})


@router.get("/api/tags")
async def tags(request: Request) -> Response:
    """The models, by Ollama's protocol."""
    return JSONResponse({"models": [_tag(request, card) for card in house_of(request).cards]})


@router.get("/api/ps")
async def running(request: Request) -> Response:
    """The models that are loaded, by Ollama's protocol."""
    return JSONResponse({"models": [
        _tag(request, card) | {"size_vram": card.size, "context_length": card.max_model_len, "expires_at": NEVER}
        for card in house_of(request).cards if card.state == LOADED]})


def _tag(request: Request, card: ModelCard) -> dict[str, Any]:
    began = datetime.fromtimestamp(request.app.state.started, UTC).isoformat()
    return {"name": card.name, "model": card.name, "modified_at": began, "size": card.size,
            "digest": card.fingerprint or "", "details": _details(), "state": card.state}


@router.post("/api/show")
async def show(request: Request, body: OllamaShow) -> Response:
    """What is known of a model, by Ollama's protocol."""
    house = house_of(request)
    name = body.model or body.name
    if name is None:
        raise RequestError("model is missing: name one of /api/tags.", "model")
    card = house.card(_named(house, name))
    service = house.peek(card.name)  # who looks at all models has none of them loaded
    template = None if service is None else service.llm.engine.chat
    able = ["completion", "embedding", *(["tools"] if service is None or template is not None else [])]
    return JSONResponse({
        "modelfile": "", "parameters": "", "template": (template.source if template is not None else None) or "",
        "details": _details(), "capabilities": able, "model_info": {
            "general.architecture": "paceline", "paceline.context_length": card.max_model_len}})


@router.get("/api/version")
async def version() -> Response:
    """The version, by Ollama's protocol."""
    return JSONResponse({"version": __version__})


def _loaded(service: Service, body: OllamaChat | OllamaGenerate) -> Response:
    """How clients have a model loaded, or forgotten (keep_alive: 0): where it is the only one it stays."""
    service.adapter(_named(service, body.model))
    return JSONResponse(_line(body.model, body.nothing() | {
        "done": True, "done_reason": "unload" if _zero(body.keep_alive) else "load"}))


def _zero(keep_alive: str | int | float | None) -> bool:
    """As a number, or as a duration in the manner of Go."""
    return re.fullmatch(r"0+(\.0+)?(ms|s|m|h)?", str(keep_alive)) is not None


def _details() -> dict[str, Any]:
    return {"parent_model": "", "format": "", "family": "paceline", "families": ["paceline"], "parameter_size": "",
            "quantization_level": ""}


def _named(service: House, name: str) -> str:
    """Ollama's clients may add a tag."""
    return name if name in service.models else name.removesuffix(":latest")


def _fields(service: Service, body: OllamaBody) -> dict[str, Any]:
    if body.logprobs or body.top_logprobs:
        raise RequestError("logprobs is not supported here: ask /v1/chat/completions.", "logprobs")
    fields = sampling(body.options or {}, service) | {"model": _named(service, body.model)}
    if isinstance(body.format, dict):
        fields["response_format"] = {"type": "json_schema", "json_schema": {"schema": body.format}}
    elif body.format == "json":
        fields["response_format"] = {"type": "json_object"}
    elif body.format:
        raise RequestError("format must be json or a schema.", "format")
    return fields


def _effort(think: bool | str | None) -> dict[str, Any]:
    """What chats call it."""
    if isinstance(think, bool):
        think = SOME_EFFORT if think else NO_EFFORT
    return {"reasoning_effort": think or None}


def _read(message: dict[str, Any], place: int) -> dict[str, Any]:
    if message.get("images"):
        raise RequestError(f"messages[{place}] has images: this model reads text only.", "messages")
    return {name: value for name, value in message.items() if name not in ("images", "thinking")}


def _line(model: str, fields: dict[str, Any]) -> dict[str, Any]:
    now = datetime.now(UTC).isoformat().replace("+00:00", "Z")
    return {"model": model, "created_at": now, "done": False, **fields}


def _message(content: str, calls: Iterable[dict[str, Any]] = (), thoughts: str = "") -> dict[str, Any]:
    made: dict[str, Any] = {"role": "assistant", "content": content} | ({"thinking": thoughts} if thoughts else {})
    return made | {"tool_calls": list(calls)} if calls else made


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)


def _figures(output: RequestOutput) -> dict[str, Any]:
    metrics = output.metrics
    end = metrics.arrival if metrics.finished is None else metrics.finished
    first = end if metrics.first_token is None else metrics.first_token
    return {"done": True, "done_reason": output.outputs[0].finish_reason,
            "total_duration": _ns(end - metrics.arrival), "load_duration": 0,
            "prompt_eval_count": len(output.prompt_token_ids),
            "prompt_eval_duration": _ns(first - (metrics.first_scheduled or metrics.arrival)),
            "eval_count": len(output.outputs[0].token_ids), "eval_duration": _ns(end - first)}


async def _told(request: Request, body: OllamaBody, lines: _TextLines) -> Response:
    if body.stream is not False:
        return EventStream(lines.call, await lines.call.open(), lines)
    output = (await unless_gone(request, lines.call))[0]
    return await answer(request, [output], lambda: lines.whole(output))


class _TextLines(PartsWriter):
    """A line of JSON for whatever is new."""

    media_type = "application/x-ndjson"

    def __init__(self, call: Call, model: str) -> None:
        super().__init__(call)
        self._model = model

    def part(self, event: Event) -> str:
        if isinstance(event, Reasoning):
            return self._write(self.text("", event.text))
        return self._write(self.text(event.text)) if isinstance(event, Content) else ""

    def ended(self, output: RequestOutput) -> str:
        return self._write(self.text("") | _figures(output))

    def whole(self, output: RequestOutput) -> dict[str, Any]:
        return _line(self._model, self.gathered(self.call.parts(output.outputs[0].text)) | _figures(output))

    def gathered(self, events: list[Event]) -> dict[str, Any]:
        content, thoughts, _ = chats.gather(events)
        return self.text(content, thoughts)

    def text(self, text: str, thoughts: str = "") -> dict[str, Any]:
        return {"response": text} | ({"thinking": thoughts} if thoughts else {})

    def fail(self, problem: ApiError) -> str:
        return f"{encode(ollama_body(problem))}\n"

    def _write(self, fields: dict[str, Any]) -> str:
        return f"{encode(_line(self._model, fields))}\n"


class _ChatLines(_TextLines):
    """A call of a tool is told when it is whole."""

    def __init__(self, call: Call, model: str) -> None:
        super().__init__(call, model)
        self._name: str | None = None
        self._arguments = ""

    def part(self, event: Event) -> str:
        if isinstance(event, CallArguments):
            self._arguments += event.text
            return ""
        told = self._close()
        if isinstance(event, CallBegun):
            self._name, self._arguments = event.name, ""
            return told
        return told + super().part(event)

    def ended(self, output: RequestOutput) -> str:
        return self._close() + super().ended(output)

    def gathered(self, events: list[Event]) -> dict[str, Any]:
        content, thoughts, calls = chats.gather(events)
        return {"message": _message(content, [_call(call["function"]["name"], call["function"]["arguments"])
                                              for call in calls], thoughts)}

    def text(self, text: str, thoughts: str = "") -> dict[str, Any]:
        return {"message": _message(text, thoughts=thoughts)}

    def _close(self) -> str:
        if self._name is None:
            return ""
        call, self._name = _call(self._name, self._arguments), None
        return self._write({"message": _message("", [call])})


def _call(name: str, arguments: str) -> dict[str, Any]:
    """Arguments that were cut short are an empty object: done_reason says it."""
    try:
        found = json.loads(arguments)
    except (ValueError, RecursionError):
        found = None
    return {"function": {"name": name, "arguments": found if isinstance(found, dict) else {}}}
