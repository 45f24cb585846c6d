"""/v1/embeddings: prompts as vectors, by requests of the engine like all others."""

from __future__ import annotations

import base64
import math
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
from fastapi import APIRouter, Request
from starlette.responses import Response

from paceline.errors import RequestError
from paceline.request import RequestOutput, SamplingParams
from paceline.serve.body import Body, ListOf, Text, TokenId, number
from paceline.serve.calls import Call, unless_gone
from paceline.serve.choosing import for_model
from paceline.serve.errors import ApiError, asked_in
from paceline.serve.keys import caller_of
from paceline.serve.responses import BoundedRoute, JSONResponse, beside, service_of

router = APIRouter(route_class=BoundedRoute)

MOST_INPUTS = 2048
AT_ONCE = 32
"""Inputs of one call that are in the engine side by side: a long list leaves the queue to others."""
_A_NUMBER = 24
"""Characters that a number is in an answer, roughly."""


class EmbeddingBody(Body):
    input: str | ListOf[Text] | ListOf[TokenId] | ListOf[ListOf[TokenId]]
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = number(minimum=1)
    user: str | None = None


@router.post("/v1/embeddings")
@for_model
async def embeddings(request: Request, body: EmbeddingBody) -> Response:
    """A vector of length 1 for each text."""
    call, outputs = await embed(request, body.input, body.model, f"embd-{request.state.name}")
    vectors = vectors_of(outputs)
    if body.dimensions not in (None, len(vectors[0])):
        raise RequestError(f"This model's embeddings have {len(vectors[0])} dimensions and were not trained to be cut: "
                           "leave dimensions out.", "dimensions")
    form = _base64 if body.encoding_format == "base64" else list
    tokens = call.usage(outputs)["prompt_tokens"]
    return await written(call, vectors, lambda vectors: {
        "object": "list", "model": call.envelope()["model"],
        "data": [{"object": "embedding", "index": place, "embedding": form(vector)}
                 for place, vector in enumerate(vectors)],
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens}})


async def written(call: Call, vectors: list[list[float]],
                  make: Callable[[list[list[float]]], dict[str, Any]]) -> Response:
    """What `make` tells of vectors: beside the event loop, for they may be many."""
    return await call.service.llm.texts.run(_A_NUMBER * sum(map(len, vectors)), lambda: JSONResponse(make(vectors)),
                                            call.tenant.name)


async def embed(request: Request, given: Any, model: str | None, name: str,
                field: str = "input") -> tuple[Call, list[RequestOutput]]:
    """`given`: a text, token ids, or a list of either, in this field. The call, and an output for each."""
    service = service_of(request)
    adapter = service.adapter(model)
    inputs: list[Any] = [given] if isinstance(given, str) or (given and isinstance(given[0], int)) else list(given)
    names = {"prompt": field, "pooling": "model"}
    if not inputs:
        raise RequestError("input is an empty list: give a text or token ids.", "input")
    if len(inputs) > MOST_INPUTS:
        raise RequestError(f"input has {len(inputs)} entries and this server takes {MOST_INPUTS} at once: split them.",
                           "input")

    def ask() -> Call:
        params = SamplingParams(max_tokens=0, pooling=service.options.pooling, seed=0,
                                timeout_s=service.options.timeout_s)
        with asked_in(names):
            prepared = [service.llm.engine.prepare(one, params) for one in inputs]
        return Call(service, name, "embedding", prepared, params, None, caller_of(request).tenant, adapter,
                    request_id=request.state.request_id, headers=request.headers, at_once=AT_ONCE,
                    names=names)

    call = await beside(request, ask)
    return call, await unless_gone(request, call)


def vectors_of(outputs: list[RequestOutput]) -> list[list[float]]:
    found = [output.embedding for output in outputs]
    if any(vector is None for vector in found):  # a deadline passed
        raise ApiError(503, "The time that a request may take here is over: send less at once, or try again later.",
                       code="timeout")
    vectors = [vector for vector in found if vector is not None]
    if not all(math.isfinite(value) for vector in vectors for value in vector):
        raise ApiError(500, "The model's hidden states are not finite: no embedding can be made of them.",
                       code="not_finite")
    return vectors


def _base64(vector: list[float]) -> str:
    return base64.b64encode(np.array(vector, dtype="<f4").tobytes()).decode()
