"""The page at `/`: static files, written by hand, that need nothing but this server."""

from __future__ import annotations

from pathlib import Path

from fastapi import FastAPI
from starlette.responses import FileResponse, Response
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

STATIC = Path(__file__).parent / "static"

HEADERS = {
    # All that the page needs comes from this server; what models and clients write is text, never code.
    "content-security-policy": "default-src 'self'; img-src 'self' data:; frame-ancestors 'none'; base-uri 'none'; "
                               "form-action 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    # Asked again each time, answered with "not modified": an upgraded server is never shown by an older page.
    "cache-control": "no-cache",
}


class PageFiles(StaticFiles):
    async def get_response(self, path: str, scope: Scope) -> Response:
        response = await super().get_response(path, scope)
        response.headers.update(HEADERS)
        if path.endswith(".js"):  # not what this machine's registry of types may say: browsers insist
            response.headers["content-type"] = "text/javascript; charset=utf-8"
        return response


def mount_page(app: FastAPI) -> None:
    """The page at / and its files under /page; what it asks for is in paceline.serve.live."""

    async def index() -> Response:
        return FileResponse(STATIC / "index.html", headers=HEADERS)

    app.add_api_route("/", index, include_in_schema=False)
    app.mount("/page", PageFiles(directory=STATIC), name="page")
