"""What endpoints share: how bodies are read and answers written, off the event loop as far as that can take long."""

from __future__ import annotations

import json
import operator
from collections.abc import Callable, Iterator, Sequence
from functools import reduce
from typing import Any, TypeVar, cast
from urllib.parse import quote

from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope

from paceline.request import RequestOutput
from paceline.serve.calls import Service
from paceline.serve.containers import check_containers
from paceline.serve.errors import path_in
from paceline.serve.house import House
from paceline.serve.keys import caller_of

Done = TypeVar("Done")

IGNORED = "x-paceline-ignored"
"""The header that names what a lenient server has dropped."""
MOST_DROPPED = 16
"""Unknown fields of a body beyond which it is refused all the same."""
_NAME = 64
"""Characters of a field's name that are told."""
_LEVELS = 5
"""As deep as the tokens of a choice's log-probabilities lie in an answer."""
_A_TOKEN = 64
"""Characters that a token, or a log-probability, is in an answer, roughly."""

_encode = json.JSONEncoder(allow_nan=False, separators=(",", ":")).encode


class BoundedRequest(Request):
    """Its body is counted before it is parsed."""

    async def json(self) -> Any:
        check_containers(await self.body())
        return await super().json()


class BoundedRoute(APIRoute):
    """An endpoint that takes a body."""

    def get_route_handler(self) -> Callable[[Request], Any]:
        handle = super().get_route_handler()

        async def bounded(request: Request) -> Response:
            asked = BoundedRequest(_as_json(request), request.receive)
            if not house_of(request).options.lenient:
                return await handle(asked)
            return await _leniently(asked, handle)

        return bounded


def _as_json(request: Request) -> Scope:
    """Bodies are JSON here, whatever their header says: many a client of Ollama's sends none. Not those of pages in a
    browser, which name their origin: a page may send any server a body, unless that is called JSON."""
    if "origin" in request.headers:
        return request.scope
    headers = [pair for pair in request.scope["headers"] if pair[0] != b"content-type"]
    return {**request.scope, "headers": [*headers, (b"content-type", b"application/json")]}


async def _leniently(request: Request, handle: Callable[[Request], Any]) -> Response:
    """Without the fields that nobody knows here. They are read again for each of them, so there may not be many."""
    dropped: list[str] = []
    while True:
        try:
            response: Response = await handle(request)
        except RequestValidationError as problem:
            unknown = next((fault for fault in problem.errors() if fault["type"] == "extra_forbidden"), None)
            if unknown is None or len(dropped) == MOST_DROPPED:
                raise
            *path, name = path_in(problem.body, unknown)
            # The body that was parsed is kept by the request, and read again from there.
            del reduce(operator.getitem, path, await request.json())[name]
            dropped.append(quote(str(name)[:_NAME]))
        else:
            if dropped:
                house_of(request).unknown_fields.note(dropped)
                response.headers[IGNORED] = ", ".join(dropped)
            return response


class JSONResponse(Response):
    """ASCII, so that a text with half a character in it can still be sent; no NaN, which is not JSON."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return "".join(_pieces(content, _LEVELS)).encode()


def _pieces(value: Any, levels: int) -> Iterator[str]:
    """JSON, piece by piece: one call for a long answer would let no other thread run before its end."""
    if levels and isinstance(value, dict):
        mark = "{"
        for name, inner in value.items():
            yield f"{mark}{_encode(str(name))}:"
            yield from _pieces(inner, levels - 1)
            mark = ","
        yield "}" if value else "{}"
    elif levels and isinstance(value, list) and value and isinstance(value[0], dict | list):
        mark = "["
        for inner in value:
            yield mark
            yield from _pieces(inner, levels - 1)
            mark = ","
        yield "]"
    else:
        yield _encode(value)


def house_of(request: Request) -> House:
    """Whichever model is meant."""
    return cast(House, request.app.state.service)


def service_of(request: Request) -> Service:
    """The model that is meant. Where there may be several, of endpoints that are for_model() alone."""
    return cast(Service, getattr(request.state, "service", None) or request.app.state.service)


async def beside(request: Request, work: Callable[[], Done]) -> Done:
    """work(), which reads what came in the request's body: in a thread for texts."""
    return await service_of(request).llm.texts.run(len(await request.body()), work, caller_of(request).tenant.name)


async def answer(request: Request, outputs: Sequence[RequestOutput], make: Callable[[], dict[str, Any]]) -> Response:
    """What `make` tells of finished requests: likewise, by how many tokens, log-probabilities and drafts there are."""
    numbers = sum(len(sample.token_ids) * (1 + len(sample.logprobs[0].top) if sample.logprobs else 1)
                  for output in outputs for sample in output.outputs)
    numbers += sum(len(output.prompt_token_ids) for output in outputs if output.prompt_logprobs)
    numbers += sum(output.trace.numbers for output in outputs if output.trace is not None)
    return await service_of(request).llm.texts.run(_A_TOKEN * numbers, lambda: JSONResponse(make()),
                                                   caller_of(request).tenant.name)
