"""Short paths, HEAD, the page of routes; and that whatever makes the engine work is metered."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import openai
import pytest
from fastapi.routing import APIRoute
from serving import NAME, WAIT, ServerThread, served

from engine.tiny import tiny_engine
from paceline.serve.app import ROUTERS
from paceline.serve.page import HEADERS
from paceline.serve.quotas import METERED, Quota
from paceline.serve.spellings import Spellings

FREE = {"/tokenize", "/detokenize", "/v1/messages/count_tokens", "/api/show", "/apply-template"}
"""Posted to, and answered without the engine."""


def test_the_official_client_does_without_v1(server: ServerThread) -> None:
    client = openai.OpenAI(base_url=server.url, api_key="unused", timeout=WAIT, max_retries=0)
    messages: Any = [{"role": "user", "content": "x"}]
    assert client.chat.completions.create(model=NAME, messages=messages, max_tokens=2).object == "chat.completion"
    assert client.completions.create(model=NAME, prompt="x", max_tokens=2).object == "text_completion"
    assert [model.id for model in client.models.list()] == [NAME] and client.models.retrieve(NAME).id == NAME
    assert len(client.embeddings.create(model=NAME, input="x").data) == 1
    kept = client.responses.create(model=NAME, input="x", max_output_tokens=2)
    assert client.responses.retrieve(kept.id).id == kept.id


def test_every_route_that_makes_the_engine_work_is_metered() -> None:
    posted = {route.path for router in ROUTERS for route in router.routes
              if isinstance(route, APIRoute) and "POST" in route.methods}
    assert posted == METERED | FREE and not METERED & FREE


@pytest.mark.parametrize("path", ["/chat/completions", "/v1/messages", "/api/chat", "/completion", "/v1/responses",
                                  "/embeddings", "/api/embed", "/api/generate"])
def test_quotas_hold_by_every_path(path: str) -> None:
    with served(tiny_engine(), quota=Quota(requests_per_minute=1)) as url:
        assert httpx.post(f"{url}{path}", json={}).status_code == 400
        refused = httpx.post(f"{url}{path}", json={})
        assert refused.status_code == 429 and int(refused.headers["retry-after"]) > 0


def test_keys_are_asked_for_by_every_path() -> None:
    with served(tiny_engine(), api_keys=("one",)) as url:
        for path in ("/models", "/v1/models", "/props", "/slots", "/api/tags", "/responses/x"):
            assert httpx.get(f"{url}{path}").status_code == httpx.head(f"{url}{path}").status_code == 401
        for path in ("/chat/completions", "/v1/messages", "/api/chat", "/completion"):
            assert httpx.post(f"{url}{path}", json={}).status_code == 401
        for path in ("/docs", "/api/version", "/health"):
            assert httpx.get(f"{url}{path}").status_code == 200


@pytest.mark.parametrize("path", ["/", "/health", "/v1/models", "/models", "/version", "/docs", "/props", "/api/tags",
                                  "/page/app.js", "/nowhere", "/v1/completions"])
def test_head_is_the_head_of_get(server: ServerThread, path: str) -> None:
    with httpx.Client(base_url=server.url, timeout=WAIT) as http:
        head, get = http.head(path), http.get(path)
        assert head.status_code == get.status_code and head.content == b""
        for name in ("content-type", "content-length"):
            assert head.headers.get(name) == get.headers.get(name)


def test_head_of_a_stream_without_an_end_ends(server: ServerThread) -> None:
    with httpx.Client(base_url=server.url, timeout=WAIT) as http:
        head = http.head("/paceline/live")
        assert head.status_code == 200 and head.headers["content-type"].startswith("text/event-stream")
        assert http.get("/health").status_code == 200, "on the same connection"


def test_what_breaks_before_it_begins_is_told() -> None:
    async def broken(scope: Any, receive: Any, send: Any) -> None:
        raise ValueError("broken")

    scope = {"type": "http", "method": "HEAD", "path": "/x"}
    with pytest.raises(ValueError, match="broken"):
        asyncio.run(Spellings(broken)(scope, None, None))  # type: ignore[arg-type]


def test_the_page_of_routes(server: ServerThread) -> None:
    page = httpx.get(f"{server.url}/docs")
    assert page.headers["content-security-policy"] == HEADERS["content-security-policy"]
    assert "<script" not in page.text and "style=" not in page.text
    for route in ("POST /v1/chat/completions", "GET /v1/responses/{response_id}", "POST /api/chat", "POST /completion"):
        assert f"<code>{route}</code>" in page.text
    assert "<code>previous_response_id</code>" in page.text
    with served(tiny_engine(), page=False) as url:
        assert "stylesheet" not in httpx.get(f"{url}/docs").text
