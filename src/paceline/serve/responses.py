"""What endpoints share."""

from __future__ import annotations

import json
from typing import Any, cast

from starlette.requests import Request
from starlette.responses import Response

from paceline.serve.calls import Service


class JSONResponse(Response):
    """ASCII, so that a text with half a character in it can still be sent; no NaN, which is not JSON."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return json.dumps(content, allow_nan=False, separators=(",", ":")).encode()


def service_of(request: Request) -> Service:
    return cast(Service, request.app.state.service)
