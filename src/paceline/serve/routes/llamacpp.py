"""/completion, /props, /slots, /apply-template: llama.cpp's own protocol."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import Response

from paceline import __version__
from paceline.engine.records.deltas import SampleDelta
from paceline.request import RequestOutput, TokenLogprob
from paceline.serve.body import Body, ListOf
from paceline.serve.calls import Call, unless_gone
from paceline.serve.choosing import for_model
from paceline.serve.completions import begin
from paceline.serve.conversation import rendered
from paceline.serve.errors import ApiError
from paceline.serve.keys import check_operator
from paceline.serve.responses import BoundedRoute, JSONResponse, answer, beside, house_of, service_of
from paceline.serve.routes.llama_input import WORDS, LlamaCompletion, only, translated
from paceline.serve.routes.translate import chat_body
from paceline.serve.schema import Message
from paceline.serve.streaming import EVENTS, EventStream, encode
from paceline.serve.tokens import llama_logprobs
from paceline.serve.tool_schema import AnyTool

router = APIRouter(route_class=BoundedRoute)


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
    asked = await beside(request, lambda: translated(service, body))
    call, texts = await begin(request, asked, f"cmpl-{request.state.name}", WORDS)
    telling = _Telling(call, texts, body)
    if body.stream:
        return EventStream(call, await call.open(), telling)
    outputs = await unless_gone(request, call)

    def make() -> Any:
        told = [telling.whole(place, output, True) for place, output in enumerate(outputs)]
        return told[0] if len(told) == 1 else told

    return await answer(request, outputs, make)


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


class _Telling:
    """Texts, told as llama.cpp tells them; a Writer."""

    media_type = EVENTS

    def __init__(self, call: Call, prompts: list[str], body: LlamaCompletion) -> None:
        """`prompts`: their texts, where they were texts."""
        self._call = call
        self._prompts = prompts
        self._body = body
        self._predicted = [0] * len(prompts)

    def begin(self) -> str:
        return ""

    async def write(self, place: int, samples: list[SampleDelta], ended: list[RequestOutput] | None) -> str:
        told: list[dict[str, Any]] = []
        for sample in samples:
            self._predicted[place] += len(sample.token_ids)
            if sample.text or sample.logprobs or (self._body.return_tokens and sample.token_ids):
                told.append({"index": place, "content": sample.text, "tokens": self._ids(sample.token_ids),
                             "stop": False, "id_slot": -1, "tokens_predicted": self._predicted[place],
                             "tokens_evaluated": len(self._call.prompts[place].ids)} | self._scores(sample.logprobs))
        told += [self.whole(which, output) for which, output in enumerate(ended or ())]
        return "".join(f"data: {encode(one)}\n\n" for one in told)

    def end(self) -> str:
        return ""

    def fail(self, problem: ApiError) -> str:
        return f"data: {encode(problem.body())}\n\n"

    def whole(self, place: int, output: RequestOutput, alone: bool = False) -> dict[str, Any]:
        """The last of a stream, which has no text of its own; `alone`: of no stream, with all of it."""
        sample, params = output.outputs[0], self._call.params
        word = sample.stop_reason if isinstance(sample.stop_reason, str) else ""
        kinds = {"stop": "word" if word else "eos", "length": "limit"}
        return only({
            "index": place, "content": sample.text if alone else "",
            "tokens": self._ids(sample.token_ids) if alone else [], "id_slot": -1, "stop": True,
            "model": self._call.envelope()["model"], "prompt": self._prompts[place], "truncated": False,
            "tokens_predicted": len(sample.token_ids), "tokens_evaluated": len(output.prompt_token_ids),
            "tokens_cached": output.metrics.cached_tokens, "has_new_line": "\n" in sample.text,
            "stop_type": kinds.get(str(sample.finish_reason), "none"), "stopping_word": word,
            "generation_settings": {
                "n_predict": params.max_tokens, "seed": output.seed, "temperature": params.temperature,
                "top_k": params.top_k, "top_p": params.top_p, "min_p": params.min_p,
                "repeat_penalty": params.repetition_penalty, "presence_penalty": params.presence_penalty,
                "frequency_penalty": params.frequency_penalty, "stop": list(params.stop)},
            "timings": _timings(output)} | (self._scores(sample.logprobs) if alone else {}), self._body.response_fields)

    def _ids(self, tokens: list[int]) -> list[int]:
        return tokens if self._body.return_tokens else []

    def _scores(self, scores: Sequence[TokenLogprob] | None) -> dict[str, Any]:
        return {} if not self._body.n_probs else {
            "completion_probabilities": llama_logprobs(scores or (), self._call.service.names)}


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
