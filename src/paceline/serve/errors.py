"""Errors as clients expect them, never a stack trace: OpenAI's get {"error": {"message", "type", "param", "code"}},
those of other protocols what is theirs, by the path that they asked."""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Callable, Mapping, Sequence
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from paceline.errors import (
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

_UNION = re.compile(r"(str|int|float|bool|(list|dict|literal|function-\w+)\[.*|[A-Z]\w*)")
"""How pydantic names the member of a union in a path."""


class ApiError(HTTPException):
    """A refusal with its HTTP status. (A plain exception that comes out of reading a body, FastAPI would replace.)"""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None,
                 headers: Mapping[str, str] | None = None) -> None:
        super().__init__(status, message, dict(headers or {}))
        self.param = param
        self.code = code

    def body(self) -> dict[str, Any]:
        kind = TYPES.get(self.status_code, "invalid_request_error" if self.status_code < 500 else "server_error")
        return {"error": {"message": self.detail, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        return _Refusal(self)


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
    return {"type": "error", "error": {"type": kind, "message": error.detail}}


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


def retry_after(problem: QueueFullError) -> str:
    """Whole seconds, as the header has them."""
    return str(min(max(math.ceil(problem.retry_after_s or 0.0), 1), LONGEST_WAIT_S))


def validation_error(errors: Sequence[Any]) -> ApiError:
    """The first of a body's faults, with the path of the field."""
    first: Any = errors[0] if errors else {"loc": (), "msg": "invalid", "type": ""}
    path = ".".join(str(part) for part in first["loc"] if part != "body" and not _UNION.fullmatch(str(part)))
    if first["type"] == "json_invalid":
        return ApiError(400, f"The body is not valid JSON: {first.get('ctx', {}).get('error', first['msg'])}.")
    if first["type"] == "extra_forbidden":
        return ApiError(400, f"Unrecognized request argument: {path}.", param=path, code="unknown_argument")
    return ApiError(400, f"{path or 'body'}: {first['msg']}.", param=path or None)


def _sentence(problem: HTTPException) -> str:
    phrase = HTTPStatus(problem.status_code).phrase
    return f"{phrase}." if problem.detail in (None, "", phrase) else str(problem.detail)


def install(app: FastAPI) -> None:
    """Every way out of the app that is not an answer."""

    async def on_problem(request: Request, problem: Exception) -> Response:
        return api_error(problem, getattr(request.state, "request_id", None)).response()

    async def on_validation(request: Request, problem: Exception) -> Response:
        errors = problem.errors() if isinstance(problem, RequestValidationError) else ()
        return validation_error(errors).response()

    for kind in (PacelineError, HTTPException, Exception):
        app.add_exception_handler(kind, on_problem)
    app.add_exception_handler(RequestValidationError, on_validation)
