"""/v1/completions: texts that go on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from paceline.engine.admission import Prepared
from paceline.engine.records.deltas import SampleDelta
from paceline.errors import RequestError
from paceline.request import Completion, RequestOutput, SamplingParams
from paceline.serve.calls import Call, Service, unless_gone
from paceline.serve.choosing import for_model
from paceline.serve.endings import ended
from paceline.serve.errors import NO_WORDS, asked_in
from paceline.serve.keys import caller_of
from paceline.serve.params import check_streamed, completion_names, completion_params, speculation
from paceline.serve.responses import BoundedRoute, answer, beside, service_of
from paceline.serve.schema import CompletionBody
from paceline.serve.streaming import ChunkWriter, EventStream
from paceline.serve.tokens import CompletionLogprobs, Provenances, prompt_logprobs

router = APIRouter(route_class=BoundedRoute)


@router.post("/v1/completions")
@for_model
async def completions(request: Request, body: CompletionBody) -> Response:
    """Continue a text, a list of texts, or token ids."""
    call, texts = await begin(request, body, f"cmpl-{request.state.name}")
    if body.stream:
        if body.echo and body.logprobs is not None:
            raise RequestError("echo with logprobs cannot be streamed: the prompt's scores come with the end; leave "
                               "stream out.", "stream")
        return EventStream(call, await call.open(), ChunkWriter(call, _CompletionStream(call, body, texts)))
    outputs = await unless_gone(request, call)
    return await answer(request, outputs, lambda: _whole(call, body, texts, outputs))


async def begin(request: Request, body: CompletionBody, name: str,
                words: Mapping[str, str] = NO_WORDS) -> tuple[Call, list[str]]:
    """Texts as a call of the engine's, with those that will be echoed: the one way for every protocol that continues
    texts. `name`: what the call is known by, nobody else's. `words`: what the protocol calls fields that completions
    have another name for."""
    service = service_of(request)
    adapter = service.adapter(body.model)

    def ask() -> tuple[Call, list[str]]:
        check_streamed(body)
        names = {**words, **{own: words.get(told, told) for own, told in completion_names(body).items()}}
        with asked_in(names):
            params = completion_params(body, service.options)
            wish = speculation(body, service.options, service.llm.engine)
            prompts, texts = _encode(service, body, params)
        return Call(service, name, "text_completion", prompts, params, wish, caller_of(request).tenant, adapter,
                    include_usage=body.stream_options is not None and body.stream_options.include_usage,
                    provenance=bool(body.provenance), request_id=request.state.request_id,
                    headers=request.headers, names=names), texts

    return await beside(request, ask)


def _encode(service: Service, body: CompletionBody, params: SamplingParams) -> tuple[list[Prepared], list[str]]:
    """The prompts as the engine takes them, and their texts where they will be echoed."""
    asked: list[Any] = [body.prompt] if isinstance(body.prompt, str) else list(body.prompt)
    if asked and isinstance(asked[0], int):
        asked = [asked]
    if not asked:
        raise RequestError("prompt is an empty list: give a text or token ids.", "prompt")
    service.options.check(params, len(asked))
    engine = service.llm.engine
    tokenizer = engine.tokenizer
    prompts: list[Prepared] = []
    texts: list[str] = []
    for prompt in asked:
        ids = prompt
        if isinstance(prompt, str):
            if tokenizer is None:
                raise RequestError("This model came without a tokenizer: give prompts as token ids.", "prompt")
            if not prompt:
                raise RequestError("The prompt is empty: give at least one character or token.", "prompt")
            tokenizer.check_length(prompt, engine.config.max_model_len)
            ids = tokenizer.encode(prompt, add_special=body.add_special_tokens is not False,
                                   parse_special=bool(body.parse_special))
        prompts.append(engine.prepare(ids, params, prompts[0] if prompts else None))
        if isinstance(prompt, str):
            texts.append(prompt)
        else:
            texts.append(tokenizer.decode(prompt, skip_special=False) if body.echo and tokenizer is not None else "")
    return prompts, texts


def _whole(call: Call, body: CompletionBody, texts: list[str], outputs: list[RequestOutput]) -> dict[str, Any]:
    choices = []
    for place, output in enumerate(outputs):
        for completion in output.outputs:
            choice = _choice(call, place, completion.index)
            choice["text"] = (texts[place] if body.echo else "") + completion.text
            choice["logprobs"] = _logprobs(call, body, output, completion)
            choice |= ended(completion.finish_reason, completion.stop_reason)
            choice |= prompt_logprobs(output, body.prompt_logprobs, call.service.names)
            if completion.score is not None:
                choice["score"] = completion.score
            if call.provenance:
                stats = output.speculation if completion.index == 0 else None
                teller = Provenances(call.service.llm.engine.tokenizer, call.service.names, call.prompts[place].ids)
                choice["tokens"] = teller.of_completion(completion, None if stats is None else stats.provenance,
                                                        call.drafted)
            choices.append(choice)
    return call.envelope() | {"choices": choices, "usage": call.usage(outputs),
                              "paceline": call.explanation(outputs)}


def _choice(call: Call, place: int, sample: int) -> dict[str, Any]:
    return {"index": place * call.params.n + sample, "text": "", "logprobs": None, "finish_reason": None}


def _logprobs(call: Call, body: CompletionBody, output: RequestOutput, completion: Completion) -> dict[str, Any] | None:
    if body.logprobs is None:
        return None
    scores: list[Any] = list(completion.logprobs or [])
    tokens = completion.token_ids
    if body.echo:
        scores = [*(output.prompt_logprobs or []), *scores]
        tokens = [*output.prompt_token_ids, *tokens]
    return CompletionLogprobs(call.service.names).format(scores, tokens)


class _CompletionStream:
    """Chunks of one call: remembers, of each sample, what goes on from chunk to chunk."""

    def __init__(self, call: Call, body: CompletionBody, texts: list[str]) -> None:
        self._call = call
        self._body = body
        self._texts = texts
        self._scores: dict[int, CompletionLogprobs] = {}
        self._tellers: dict[int, Provenances] = {}

    def __call__(self, place: int, delta: SampleDelta) -> list[dict[str, Any]]:
        call, names = self._call, self._call.service.names
        choice = _choice(call, place, delta.index)
        index = choice["index"]
        scores = self._scores.get(index)
        if scores is None:
            scores = self._scores[index] = CompletionLogprobs(names)
            choice["text"] = self._texts[place] if self._body.echo else ""
        choice["text"] += delta.text
        if delta.logprobs:
            choice["logprobs"] = scores.format(delta.logprobs, delta.token_ids)
        if call.provenance:
            teller = self._tellers.get(index)
            if teller is None:
                teller = self._tellers[index] = Provenances(call.service.llm.engine.tokenizer, names,
                                                             call.prompts[place].ids)
            choice["tokens"] = teller.of_delta(delta, call.drafted)
        if delta.finish_reason is not None:
            choice |= ended(delta.finish_reason, delta.stop_reason)
        elif not choice["text"] and not delta.logprobs and not call.provenance:
            return []  # half a character, or what may become a stop string
        return [choice]
