"""/completion, /props, /slots, /apply-template: llama.cpp's own protocol."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import Response

from paceline import __version__
from paceline.engine.records.deltas import SampleDelta
from paceline.errors import RequestError
from paceline.request import RequestOutput
from paceline.serve.body import Body, ListOf, TokenId
from paceline.serve.calls import Call, Service, unless_gone
from paceline.serve.choosing import for_model
from paceline.serve.completions import begin
from paceline.serve.conversation import rendered
from paceline.serve.errors import ApiError
from paceline.serve.keys import check_operator
from paceline.serve.responses import BoundedRoute, JSONResponse, answer, beside, house_of, service_of
from paceline.serve.routes.llama_options import sampling
from paceline.serve.routes.translate import chat_body, completion_body
from paceline.serve.schema import CompletionBody, Message
from paceline.serve.streaming import EVENTS, EventStream, encode
from paceline.serve.tool_schema import AnyTool

router = APIRouter(route_class=BoundedRoute)


class LlamaCompletion(BaseModel):
    """Further fields are options of the sampler; those that mean nothing here are refused."""

    model_config = ConfigDict(extra="allow", strict=True)

    prompt: str | ListOf[TokenId]
    model: str | None = None
    stream: bool | None = None
    grammar: str | None = None
    json_schema: dict[str, Any] | None = None
    logit_bias: dict[str, float | bool] | ListOf[ListOf[Any]] | None = None
    ignore_eos: bool | None = None
    n_probs: int | None = Field(default=None, json_schema_extra={"minimum": 0, "maximum": 0})
    return_tokens: bool | None = None
    timings_per_token: bool | None = None


class ApplyTemplate(Body):
    messages: ListOf[Message] = Field(min_length=1)
    model: str | None = None
    tools: ListOf[AnyTool] | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


@router.post("/completion")
@for_model
async def completion(request: Request, body: LlamaCompletion) -> Response:
    """Continue a text, by llama.cpp's protocol."""
    service = service_of(request)
    call, texts = await begin(request, _translated(service, body), f"cmpl-{request.state.name}")
    telling = _Telling(call, texts[0], bool(body.return_tokens))
    if body.stream:
        return EventStream(call, await call.open(), telling)
    output = (await unless_gone(request, call))[0]
    return await answer(request, [output], lambda: telling.whole(output) | {
        "content": output.outputs[0].text, "tokens": output.outputs[0].token_ids if body.return_tokens else []})


@router.get("/props")
@for_model
async def props(request: Request) -> Response:
    """What llama.cpp's clients ask of a server before they begin."""
    service = service_of(request)
    engine = service.llm.engine
    special = {} if engine.tokenizer is None else engine.tokenizer.special_tokens
    return JSONResponse({
        "default_generation_settings": {"n_ctx": engine.config.max_model_len, "params": {
            "n_predict": -1, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}},
        "total_slots": engine.config.max_num_seqs, "model_alias": service.options.model_name,
        "model_path": service.options.model_name,
        "chat_template": (engine.chat.source if engine.chat is not None else None) or "",
        "bos_token": special.get("bos_token", ""), "eos_token": special.get("eos_token", ""),
        "modalities": {"vision": False, "audio": False}, "build_info": f"paceline {__version__}", "is_sleeping": False})


@router.get("/slots")
async def slots(request: Request) -> Response:
    """How many requests run, as llama.cpp's slots; nothing of what is in them. Of every model that is loaded."""
    check_operator(request)
    told: list[dict[str, Any]] = []
    for service in house_of(request).loaded:
        engine, live = service.llm.engine, service.llm.live
        told += [{"id": len(told) + place, "n_ctx": engine.config.max_model_len,
                  "speculative": engine.speculation is not None, "is_processing": place < live}
                 for place in range(engine.config.max_num_seqs)]
    return JSONResponse(told)


@router.post("/apply-template")
@for_model
async def apply_template(request: Request, body: ApplyTemplate) -> Response:
    """The text that a conversation becomes for the model."""
    engine = service_of(request).llm.engine

    def apply() -> str:
        asked = chat_body({name: getattr(body, name) for name in body.model_fields_set - {"model"}})
        ids = rendered(engine, asked, engine.chat)
        return "" if engine.tokenizer is None else engine.tokenizer.decode(ids, False)

    return JSONResponse({"prompt": await beside(request, apply)})


def _translated(service: Service, body: LlamaCompletion) -> CompletionBody:
    if body.n_probs:
        raise RequestError("n_probs is not supported here: ask /v1/completions for logprobs.", "n_probs")
    fields = sampling(body.model_extra or {}, service) | {"prompt": body.prompt, "model": body.model,
                                                          "ignore_eos": body.ignore_eos}
    if body.grammar:
        fields["guided_grammar"] = body.grammar
    if body.json_schema:
        fields["guided_json"] = body.json_schema
    if body.logit_bias:
        fields["logit_bias"] = _biases(body.logit_bias)
    return completion_body(fields)


def _biases(given: dict[str, Any] | list[list[Any]]) -> dict[str, float]:
    """false: never."""
    pairs: list[Any] = list(given.items()) if isinstance(given, dict) else given
    found: dict[str, float] = {}
    for pair in pairs:
        if len(pair) != 2 or isinstance(pair[0], bool) or not isinstance(pair[0], int | str) or not isinstance(
                pair[1], int | float) or pair[1] is True:
            raise RequestError("logit_bias must hold pairs of a token id and a number, or false for never.",
                               "logit_bias")
        found[str(pair[0])] = float("-inf") if pair[1] is False else float(pair[1])
    return found


class _Telling:
    """One text, told as llama.cpp tells it; a Writer."""

    media_type = EVENTS

    def __init__(self, call: Call, prompt: str, tokens: bool) -> None:
        """`prompt`: its text, where it was one. `tokens`: their ids are asked for."""
        self._call = call
        self._prompt = prompt
        self._ids = tokens
        self._predicted = 0

    def begin(self) -> str:
        return ""

    async def write(self, place: int, samples: list[SampleDelta], ended: list[RequestOutput] | None) -> str:
        told = []
        for sample in samples:
            self._predicted += len(sample.token_ids)
            if sample.text or self._ids:
                told.append({"index": 0, "content": sample.text, "tokens": sample.token_ids if self._ids else [],
                             "stop": False, "id_slot": -1, "tokens_predicted": self._predicted,
                             "tokens_evaluated": len(self._call.prompts[0].ids)})
        if ended is not None:
            told.append(self.whole(ended[0]))
        return "".join(f"data: {encode(one)}\n\n" for one in told)

    def end(self) -> str:
        return ""

    def fail(self, problem: ApiError) -> str:
        return f"data: {encode(problem.body())}\n\n"

    def whole(self, output: RequestOutput) -> dict[str, Any]:
        """The last of a stream, which has no text of its own."""
        sample, params = output.outputs[0], self._call.params
        word = sample.stop_reason if isinstance(sample.stop_reason, str) else ""
        kinds = {"stop": "word" if word else "eos", "length": "limit"}
        return {
            "index": 0, "content": "", "tokens": [], "id_slot": -1, "stop": True,
            "model": self._call.envelope()["model"], "prompt": self._prompt, "truncated": False,
            "tokens_predicted": len(sample.token_ids), "tokens_evaluated": len(output.prompt_token_ids),
            "tokens_cached": output.metrics.cached_tokens, "has_new_line": "\n" in sample.text,
            "stop_type": kinds.get(str(sample.finish_reason), "none"), "stopping_word": word,
            "generation_settings": {
                "n_predict": params.max_tokens, "seed": output.seed, "temperature": params.temperature,
                "top_k": params.top_k, "top_p": params.top_p, "min_p": params.min_p,
                "repeat_penalty": params.repetition_penalty, "presence_penalty": params.presence_penalty,
                "frequency_penalty": params.frequency_penalty, "stop": list(params.stop)},
            "timings": _timings(output)}


def _timings(output: RequestOutput) -> dict[str, Any]:
    metrics = output.metrics
    end = metrics.arrival if metrics.finished is None else metrics.finished
    first = end if metrics.first_token is None else metrics.first_token
    begun = metrics.arrival if metrics.first_scheduled is None else metrics.first_scheduled
    return (_rates("prompt", metrics.prompt_tokens - metrics.cached_tokens, first - begun)
            | _rates("predicted", metrics.output_tokens, end - first) | {"cache_n": metrics.cached_tokens})


def _rates(name: str, tokens: int, seconds: float) -> dict[str, Any]:
    return {f"{name}_n": tokens, f"{name}_ms": 1e3 * seconds,
            f"{name}_per_token_ms": 1e3 * seconds / tokens if tokens else 0.0,
            f"{name}_per_second": tokens / seconds if seconds > 0 else 0.0}
