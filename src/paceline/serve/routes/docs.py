"""/docs: what can be asked here, as a page without scripts, written from the application's own description."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from html import escape
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import HTMLResponse, Response

from paceline.serve.page import HEADERS

router = APIRouter()


@router.get("/docs", include_in_schema=False)
async def docs(request: Request) -> Response:
    """The routes there are, with the fields that each takes."""
    style = '<link rel="stylesheet" href="/page/base.css">' if request.app.state.options.page else ""
    body = "\n".join(_routes(request.app.openapi()))
    return HTMLResponse(f'<!doctype html>\n<html lang="en">\n<head><meta charset="utf-8"><title>Paceline</title>'
                        f'{style}</head>\n<body>\n<main>\n<h1>Routes</h1>\n<p>Machines read <a href="/openapi.json">'
                        f'/openapi.json</a>.</p>\n{body}\n</main>\n</body>\n</html>\n', headers=HEADERS)


def _routes(description: Mapping[str, Any]) -> Iterator[str]:
    for path, methods in description["paths"].items():
        for method, operation in methods.items():
            yield f"<h2><code>{method.upper()} {escape(path)}</code></h2>"
            if told := operation.get("description"):
                yield f"<p>{escape(told)}</p>"
            if fields := _fields(description, operation):
                yield "<p>Fields: " + ", ".join(f"<code>{escape(name)}</code>" for name in fields) + ".</p>"


def _fields(description: Mapping[str, Any], operation: Mapping[str, Any]) -> list[str]:
    """Of its body, where it takes one."""
    content = operation.get("requestBody", {}).get("content", {}).get("application/json", {})
    name = content.get("schema", {}).get("$ref", "").rpartition("/")[2]
    return list(description.get("components", {}).get("schemas", {}).get(name, {}).get("properties", ()))
