"""Errors as clients expect them, never a stack trace: OpenAI's get {"error": {"message", "type", "param", "code"}},
those of other protocols what is theirs, by the path that they asked."""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from http import HTTPStatus
from types import MappingProxyType
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from paceline.errors import (
    ContextLengthError,
    EngineError,
    NotYetError,
    NoWorkerError,
    PacelineError,
    QueueFullError,
    RequestError,
    StepError,
)

log = logging.getLogger("paceline.serve")

TYPES = {400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error",
         405: "invalid_request_error", 413: "invalid_request_error", 429: "rate_limit_error", 500: "server_error",
         503: "server_error"}

LONGEST_WAIT_S = 300
"""No refused client is told to stay away for longer: a queue that stands still may move again at once."""
RETRY_S = "5"
"""When to try again where nobody knows better."""
NO_WORDS: Mapping[str, str] = MappingProxyType({})
"""Of a protocol that calls everything as the engine does."""


class ApiError(HTTPException):
    """A refusal with its HTTP status. (A plain exception that comes out of reading a body, FastAPI would replace.)"""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None,
                 headers: Mapping[str, str] | None = None, cause: Exception | None = None) -> None:
        super().__init__(status, message, dict(headers or {}))
        self.param = param
        self.code = code
        self.cause = cause
        """What was refused, where a protocol has words of its own for it."""

    def body(self) -> dict[str, Any]:
        kind = TYPES.get(self.status_code, "invalid_request_error" if self.status_code < 500 else "server_error")
        return {"error": {"message": self.detail, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        return _Refusal(self)

    def told_in(self, names: Mapping[str, str]) -> ApiError:
        """In a client's words: `names` says what it calls parameters that the engine has another name for."""
        own = self.param
        if own is None or own not in names:
            return self
        message = re.sub(rf"\b{own}\b", names[own], str(self.detail))
        return ApiError(self.status_code, message, param=names[own], code=self.code, headers=self.headers,
                        cause=self.cause)


class _Refusal(Response):
    """Written when it is known who asked, and how."""

    def __init__(self, error: ApiError) -> None:
        super().__init__(status_code=error.status_code)
        self._error = error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "")
        shape = next((own for prefix, own in SHAPES.items() if path.startswith(prefix)), ApiError.body)
        # ASCII: a message may quote a text that has half a character in it.
        told = Response(json.dumps(shape(self._error)), self.status_code, self._error.headers, "application/json")
        await told(scope, receive, send)


def anthropic_body(error: ApiError) -> dict[str, Any]:
    kinds = TYPES | {413: "request_too_large", 500: "api_error", 503: "overloaded_error"}
    kind = kinds.get(error.status_code, "invalid_request_error" if error.status_code < 500 else "api_error")
    message, cause = error.detail, error.cause
    if isinstance(cause, ContextLengthError):  # clients that shorten a conversation go by these words
        message = f"prompt is too long: {cause.tokens} tokens > {cause.context} maximum. {message}"
    return {"type": "error", "error": {"type": kind, "message": message}}


def ollama_body(error: ApiError) -> dict[str, Any]:
    return {"error": error.detail}


SHAPES: Mapping[str, Callable[[ApiError], dict[str, Any]]] = {
    "/v1/messages": anthropic_body, "/api/": ollama_body}
"""By what paths begin with; all else is OpenAI's."""


def api_error(problem: Exception, request_id: str | None = None) -> ApiError:
    """Whatever went wrong, as what the client hears; the log hears of the server's own mistakes."""
    if isinstance(problem, ApiError):
        return problem
    if isinstance(problem, QueueFullError):
        return ApiError(429, str(problem), code="queue_full", headers={"retry-after": retry_after(problem)})
    if isinstance(problem, StepError):
        return ApiError(500, problem.told, code="engine_error")
    if isinstance(problem, ContextLengthError):
        return ApiError(400, str(problem), param=problem.param, code="context_length_exceeded", cause=problem)
    if isinstance(problem, RequestError):
        return ApiError(400, str(problem), param=problem.param)
    if isinstance(problem, NotYetError):
        return ApiError(400, str(problem), code="not_supported")
    if isinstance(problem, PacelineError):
        told = problem.told if isinstance(problem, EngineError) else str(problem)
        later = {"retry-after": RETRY_S} if isinstance(problem, NoWorkerError) else None
        return ApiError(503, told, code="unavailable", headers=later)
    if isinstance(problem, HTTPException):
        return ApiError(problem.status_code, _sentence(problem), headers=problem.headers)
    log.error("a request failed inside the server", exc_info=problem,
              extra={} if request_id is None else {"request_id": request_id})
    return ApiError(500, "The server failed on this request; its log says why.", code="internal_error")


@contextmanager
def asked_in(names: Mapping[str, str]) -> Iterator[None]:
    """What is refused inside is told in the client's words (ApiError.told_in)."""
    try:
        yield
    except (RequestError, ApiError) as problem:
        if problem.param not in names:
            raise
        told = api_error(problem).told_in(names)
    else:
        return
    raise told


def retry_after(problem: QueueFullError) -> str:
    """Whole seconds, as the header has them."""
    return str(min(max(math.ceil(problem.retry_after_s or 0.0), 1), LONGEST_WAIT_S))


def path_in(body: Any, fault: Mapping[str, Any]) -> list[Any]:
    """Where in a body a fault lies: pydantic's paths also name the members of unions that were tried."""
    loc = [*fault["loc"]]
    parts = loc[1:] if loc[:1] == ["body"] else loc
    path, inner = [], body
    for place, part in enumerate(parts):
        if part in inner if isinstance(inner, dict) else isinstance(inner, list) and part in range(len(inner)):
            inner = inner[part]
        elif fault["type"] != "missing" or place < len(parts) - 1:
            continue
        path.append(part)
    return path


def validation_error(errors: Sequence[Any], body: Any) -> ApiError:
    """The first of a body's faults, with the path of the field; of a field that may be of several kinds, all that it
    is not."""
    first: Any = errors[0] if errors else {"loc": (), "msg": "invalid", "type": ""}
    place = path_in(body, first)
    inside = [one for one in errors if path_in(body, one)[:len(place)] == place != path_in(body, one)]
    if len(inside) == 1:  # of several kinds that the field may be of, this is the one that was meant
        first, place = inside[0], path_in(body, inside[0])
    path = ".".join(map(str, place))
    if first["type"] == "json_invalid":
        return ApiError(400, f"The body is not valid JSON: {first.get('ctx', {}).get('error', first['msg'])}.")
    if first["type"] == "extra_forbidden":
        return ApiError(400, f"Unrecognized request argument: {path}.", param=path, code="unknown_argument")
    told = dict.fromkeys(one["msg"] for one in errors if path_in(body, one) == place) or {first["msg"]: None}
    said = ", or: ".join(told).replace(" after validation", "")
    return ApiError(400, f"{path or 'body'}: {said}.", param=path or None)


def _sentence(problem: HTTPException) -> str:
    phrase = HTTPStatus(problem.status_code).phrase
    return f"{phrase}." if problem.detail in (None, "", phrase) else str(problem.detail)


def install(app: FastAPI) -> None:
    """Every way out of the app that is not an answer."""

    async def on_problem(request: Request, problem: Exception) -> Response:
        return api_error(problem, getattr(request.state, "request_id", None)).response()

    async def on_validation(request: Request, problem: Exception) -> Response:
        if not isinstance(problem, RequestValidationError):
            return api_error(problem).response()
        return validation_error(problem.errors(), problem.body).response()

    for kind in (PacelineError, HTTPException, Exception):
        app.add_exception_handler(kind, on_problem)
    app.add_exception_handler(RequestValidationError, on_validation)
