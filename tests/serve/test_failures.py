"""An engine that fails: a step that breaks is the server's fault, and the next request is served."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from serving import WAIT, events, served, until

from engine.tiny import tiny_engine, tiny_model
from paceline.async_llm import AsyncLLM
from paceline.bench.null_model import byte_tokenizer
from paceline.engine.core import Engine
from paceline.serve import errors
from paceline.serve.app import create_app
from paceline.serve.calls import FAILED
from paceline.serve.logs import TextLines
from paceline.serve.options import ServeOptions

BODY: dict[str, Any] = {"prompt": [5, 6, 7], "max_tokens": 4}


def broken_once(engine: Engine, steps: int = 0) -> None:
    """The next step to be planned, or the one after so many, finds no memory."""
    healthy: Callable[..., Any] = engine.scheduler.schedule
    planned = 0

    def broken(*args: Any, **more: Any) -> Any:
        nonlocal planned
        planned += 1
        if planned <= steps:
            return healthy(*args, **more)
        engine.scheduler.schedule = healthy  # type: ignore[method-assign]
        raise MemoryError("no room")

    engine.scheduler.schedule = broken  # type: ignore[method-assign]


def test_a_broken_step_is_a_500_and_the_server_goes_on() -> None:
    engine = tiny_engine()
    with served(engine) as url, httpx.Client(base_url=url, timeout=WAIT) as http:
        broken_once(engine)
        answer = http.post("/v1/completions", json=BODY)
        assert answer.status_code == 500
        assert answer.json()["error"]["code"] == "engine_error" and answer.json()["error"]["type"] == "server_error"
        assert "Traceback" not in answer.text and "no room" not in answer.text and "MemoryError" not in answer.text
        broken_once(engine)
        with http.stream("POST", "/v1/completions", json=BODY | {"stream": True}) as stream:
            chunk, error = events(stream)
            assert chunk["choices"][0]["paceline"]["finish_reason"] == "error" and chunk["choices"][0]["text"] == ""
            assert error["error"]["code"] == "engine_error"
        assert http.post("/v1/completions", json=BODY).status_code == 200


def test_what_was_held_back_comes_before_the_error() -> None:
    """A text that may yet become a stop string is held back; when its request fails it is told with the end."""
    tokenizer = byte_tokenizer()
    engine = tiny_engine(tiny_model(vocab_size=256), tokenizer, enable_prefix_caching=False)
    letters = [token for token in range(256) if (text := tokenizer.decode([token])).isascii() and text.isalpha()]
    prompts = [tokenizer.encode(text) for text in ("one", "two")]
    body = {"prompt": prompts, "max_tokens": 40, "temperature": 0, "allowed_token_ids": letters, "speculation": "none"}
    with served(engine) as url, httpx.Client(base_url=url, timeout=WAIT) as http:
        whole = [choice["text"] for choice in http.post("/v1/completions", json=body).json()["choices"]]
        broken_once(engine, 12)
        stops = [text + "!" for text in whole]
        with http.stream("POST", "/v1/completions", json=body | {"stream": True, "stop": stops}) as stream:
            *chunks, last = events(stream)
    assert last["error"]["code"] == "engine_error"
    texts = ["".join(choice["text"] for chunk in chunks for choice in chunk["choices"] if choice["index"] == index)
             for index in range(2)]
    assert all(text and wanted.startswith(text) for text, wanted in zip(texts, whole))
    assert [len(text) for text in texts] in ([12, 12], [12, 11], [11, 12]), "one may have come a step later"
    ends = [choice for chunk in chunks for choice in chunk["choices"]][-2:]
    assert {(end["finish_reason"], end["paceline"]["finish_reason"]) for end in ends} == {("length", "error")}


def test_an_engine_that_died_is_told_by_health_and_refusals() -> None:
    engine = tiny_engine()
    with served(engine) as url, httpx.Client(base_url=url, timeout=WAIT) as http:
        assert http.get("/health").status_code == 200
        engine.step = lambda: 1 / 0  # type: ignore[method-assign,return-value]
        answer = http.post("/v1/completions", json=BODY)
        assert answer.status_code == 503 and answer.json()["error"]["code"] == "unavailable"
        assert "ZeroDivision" not in answer.text
        until(lambda: http.get("/health").status_code == 503)
        assert http.get("/ready").status_code == 503
        assert http.head("/health").status_code == http.head("/ready").status_code == 503
        assert http.post("/v1/completions", json=BODY).status_code == 503
        assert http.get("/v1/models").status_code == 200


def test_a_mistake_of_the_servers_own_says_nothing_of_its_insides() -> None:
    app = FastAPI()
    errors.install(app)

    @app.get("/broken")
    async def broken() -> None:
        raise ValueError("secret")

    async def scene() -> httpx.Response:
        transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
            return await http.get("/broken")

    answer = asyncio.run(scene())
    assert answer.status_code == 500 and "secret" not in answer.text
    assert answer.json()["error"]["code"] == "internal_error"


def test_a_mistake_of_the_servers_own_passes_through_the_middleware(caplog: pytest.LogCaptureFixture) -> None:
    llm = AsyncLLM(engine=tiny_engine())
    app = create_app(llm, ServeOptions(model_name="tiny", page=False, cors_origins=("https://app.example",)))

    @app.get("/broken")
    async def broken() -> None:
        raise ValueError("secret")

    with caplog.at_level(logging.INFO):
        answer = asked(app, "/broken", {"origin": "https://app.example", "x-request-id": "mine"})
    llm.close()
    assert answer.status_code == 500 and answer.json()["error"]["code"] == "internal_error"
    assert answer.headers["x-request-id"] == "mine"
    assert answer.headers["access-control-allow-origin"] == "https://app.example"
    failed, access = [record for record in caplog.records if getattr(record, "request_id", None) == "mine"]
    assert failed.exc_info and "ValueError" in TextLines().format(failed)
    assert access.getMessage() == "GET /broken 500"


def test_a_path_cannot_forge_lines_of_the_log(caplog: pytest.LogCaptureFixture) -> None:
    llm = AsyncLLM(engine=tiny_engine())
    with caplog.at_level(logging.INFO):
        asked(create_app(llm, ServeOptions(model_name="tiny", page=False)), "/a%0A12:00:00 error", {})
    llm.close()
    [access] = [record for record in caplog.records if record.name == "paceline.access"]
    assert access.getMessage() == "GET /a%0A12:00:00%20error 404"


def asked(app: FastAPI, path: str, headers: dict[str, str]) -> httpx.Response:
    async def scene() -> httpx.Response:
        transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
            return await http.get(path, headers=headers)

    return asyncio.run(scene())


def test_what_a_drafter_raised_is_for_the_log() -> None:
    engine = tiny_engine()
    with served(engine) as url, httpx.Client(base_url=url, timeout=WAIT) as http:
        engine._drafting._checked = lambda *_: 1 / 0  # type: ignore[method-assign,return-value]
        body = {"prompt": [5, 6, 7] * 8, "max_tokens": 8, "ignore_eos": True, "temperature": 0,
                "speculation": {"method": "ngram", "adaptive": False}}
        told = http.post("/v1/completions", json=body).json()["paceline"]["speculation"]
    assert told["failure"] == FAILED and "division" not in str(told)
