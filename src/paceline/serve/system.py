"""Everything but completions: models, tokens, health, version, metrics."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from paceline import __version__
from paceline.errors import RequestError
from paceline.models.tokenizer import Tokenizer
from paceline.serve.calls import Service
from paceline.serve.choosing import for_model
from paceline.serve.conversation import prepare
from paceline.serve.errors import ApiError
from paceline.serve.house import ModelCard
from paceline.serve.keys import check_operator
from paceline.serve.responses import BoundedRoute, JSONResponse, beside, house_of, service_of
from paceline.serve.schema import DetokenizeBody, TokenizeBody

router = APIRouter(route_class=BoundedRoute)


@router.get("/health")
async def health(request: Request) -> Response:
    """200 as long as an engine can serve, or be loaded."""
    llm = house_of(request).llm
    if not llm.alive:
        raise ApiError(503, llm.outage or "Nothing can be served.", code="unavailable")
    return JSONResponse({"status": "ok"})


@router.get("/ready")
async def ready(request: Request) -> Response:
    """200 when new requests are welcome."""
    house_of(request).check_open()
    return JSONResponse({"status": "ready"})


@router.get("/version")
async def version(request: Request) -> Response:
    card = house_of(request).cards[0]
    return JSONResponse({"version": __version__, "model": card.name, "system_fingerprint": card.fingerprint})


@router.get("/v1/models")
async def models(request: Request) -> Response:
    return JSONResponse({"object": "list", "data": [_card(request, card) for card in house_of(request).cards]})


@router.get("/v1/models/{name:path}")
async def model(request: Request, name: str) -> Response:
    return JSONResponse(_card(request, house_of(request).card(name)))


def _card(request: Request, card: ModelCard) -> dict[str, Any]:
    """An adapter's has the model it belongs to as its parent."""
    return {"id": card.name, "parent": card.parent, "object": "model", "created": request.app.state.started,
            "owned_by": "paceline", "max_model_len": card.max_model_len, "state": card.state}


@router.post("/tokenize")
@for_model
async def tokenize(request: Request, body: TokenizeBody) -> Response:
    """The ids of a text, or of a conversation as the model will see it."""
    service = service_of(request)
    service.adapter(body.model)
    return await beside(request, lambda: _tokenized(service, body))


def _tokenized(service: Service, body: TokenizeBody) -> Response:
    tokens = _tokens(service, body)
    answer: dict[str, Any] = {"count": len(tokens), "max_model_len": service.llm.engine.config.max_model_len,
                              "tokens": tokens}
    if body.with_pieces:
        answer["tokens"] = [{"id": token, "piece": service.names.text(token)} for token in tokens]
    if body.return_token_strs:
        answer["token_strs"] = [service.names.text(token) for token in tokens]
    return JSONResponse(answer)


def _tokens(service: Service, body: TokenizeBody) -> list[int]:
    if sum(one is not None for one in (body.prompt, body.content, body.messages)) != 1:
        raise RequestError("Give either a prompt or messages.", "prompt")
    most = service.llm.engine.config.max_model_len
    if body.messages is not None:
        return service.llm.engine.render(prepare(body.messages), max_prompt_len=most,
                                         add_generation_prompt=body.add_generation_prompt is not False,
                                         parse_special=bool(body.parse_special))
    tokenizer = _tokenizer(service)
    text, special = body.prompt, body.add_special_tokens is not False
    if body.content is not None:  # llama.cpp's way, where the beginning of a text is not marked unless asked for
        text, special = body.content, bool(body.add_special)
    tokenizer.check_length(text or "", most, "prompt" if body.content is None else "content")
    return tokenizer.encode(text or "", add_special=special, parse_special=bool(body.parse_special))


@router.post("/detokenize")
@for_model
async def detokenize(request: Request, body: DetokenizeBody) -> Response:
    service = service_of(request)
    service.adapter(body.model)
    return await beside(request, lambda: _detokenized(_tokenizer(service), body.tokens))


def _detokenized(tokenizer: Tokenizer, tokens: list[int]) -> Response:
    for token in tokens:
        if not 0 <= token < tokenizer.vocab_size:
            raise RequestError(f"Token id {token} is out of range: the vocabulary has ids 0 to "
                               f"{tokenizer.vocab_size - 1}.", "tokens")
    text = tokenizer.decode(tokens, False)
    return JSONResponse({"prompt": text, "content": text})  # as vLLM calls it, and as llama.cpp does


def _tokenizer(service: Service) -> Tokenizer:
    tokenizer = service.llm.engine.tokenizer
    if tokenizer is None:
        raise RequestError("This model came without a tokenizer: it takes and gives token ids.")
    return tokenizer


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    """For Prometheus."""
    check_operator(request)
    house = house_of(request)
    reports = await house.views.reports()
    return Response(house.metrics.expositions(reports), media_type="text/plain; version=0.0.4; charset=utf-8")

