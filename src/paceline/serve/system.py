"""Everything but completions: models, tokens, health, version, metrics."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from paceline import __version__
from paceline.errors import RequestError
from paceline.models.tokenizer import Tokenizer
from paceline.serve.calls import Service, fingerprint
from paceline.serve.conversation import prepare
from paceline.serve.errors import ApiError
from paceline.serve.keys import check_operator
from paceline.serve.responses import BoundedRoute, JSONResponse, beside, service_of
from paceline.serve.schema import DetokenizeBody, TokenizeBody

router = APIRouter(route_class=BoundedRoute)


@router.get("/health")
async def health(request: Request) -> Response:
    """200 as long as the engine can serve."""
    if not service_of(request).llm.alive:
        raise ApiError(503, "The engine has stopped; the server must be started again.", code="unavailable")
    return JSONResponse({"status": "ok"})


@router.get("/ready")
async def ready(request: Request) -> Response:
    """200 when new requests are welcome."""
    service_of(request).check_open()
    return JSONResponse({"status": "ready"})


@router.get("/version")
async def version(request: Request) -> Response:
    service = service_of(request)
    return JSONResponse({"version": __version__, "model": service.options.model_name,
                         "system_fingerprint": fingerprint(service)})


@router.get("/v1/models")
async def models(request: Request) -> Response:
    return JSONResponse({"object": "list", "data": [_card(request, name) for name in service_of(request).models]})


@router.get("/v1/models/{name:path}")
async def model(request: Request, name: str) -> Response:
    service_of(request).adapter(name)
    return JSONResponse(_card(request, name))


def _card(request: Request, name: str) -> dict[str, Any]:
    """An adapter's has the model it belongs to as its parent."""
    service = service_of(request)
    parent = None if service.adapter(name) is None else service.options.model_name
    return {"id": name, "parent": parent, "object": "model", "created": request.app.state.started,
            "owned_by": "paceline", "max_model_len": service.llm.engine.config.max_model_len}


@router.post("/tokenize")
async def tokenize(request: Request, body: TokenizeBody) -> Response:
    """The ids of a text, or of a conversation as the model will see it."""
    service = service_of(request)
    service.adapter(body.model)
    return await beside(request, lambda: _tokenized(service, body))


def _tokenized(service: Service, body: TokenizeBody) -> Response:
    tokens = _tokens(service, body)
    answer: dict[str, Any] = {"count": len(tokens), "max_model_len": service.llm.engine.config.max_model_len,
                              "tokens": tokens}
    if body.return_token_strs:
        answer["token_strs"] = [service.names.text(token) for token in tokens]
    return JSONResponse(answer)


def _tokens(service: Service, body: TokenizeBody) -> list[int]:
    if (body.prompt is None) == (body.messages is None):
        raise RequestError("Give either a prompt or messages.", "prompt")
    most = service.llm.engine.config.max_model_len
    if body.messages is not None:
        return service.llm.engine.render(prepare(body.messages), max_prompt_len=most,
                                         add_generation_prompt=body.add_generation_prompt is not False,
                                         parse_special=bool(body.parse_special))
    tokenizer = _tokenizer(service)
    tokenizer.check_length(body.prompt or "", most)
    return tokenizer.encode(body.prompt or "", add_special=body.add_special_tokens is not False,
                            parse_special=bool(body.parse_special))


@router.post("/detokenize")
async def detokenize(request: Request, body: DetokenizeBody) -> Response:
    service = service_of(request)
    service.adapter(body.model)
    return await beside(request, lambda: _detokenized(_tokenizer(service), body.tokens))


def _detokenized(tokenizer: Tokenizer, tokens: list[int]) -> Response:
    for token in tokens:
        if not 0 <= token < tokenizer.vocab_size:
            raise RequestError(f"Token id {token} is out of range: the vocabulary has ids 0 to "
                               f"{tokenizer.vocab_size - 1}.", "tokens")
    return JSONResponse({"prompt": tokenizer.decode(tokens, False)})


def _tokenizer(service: Service) -> Tokenizer:
    tokenizer = service.llm.engine.tokenizer
    if tokenizer is None:
        raise RequestError("This model came without a tokenizer: it takes and gives token ids.")
    return tokenizer


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    """For Prometheus."""
    check_operator(request)
    service = service_of(request)
    reports = await service.views.reports()
    return Response(service.metrics.expositions(reports), media_type="text/plain; version=0.0.4; charset=utf-8")

