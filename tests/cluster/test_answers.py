"""What HTTP clients get of streams that moved: the same text, calls, scores and usage, and a word about it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from serving import NAME, write_model

from cluster.mortal import Crew, Mortal, mortal
from paceline.async_llm import AsyncLLM
from paceline.cluster.moving import MovingStream
from paceline.cluster.order import Order
from paceline.engine.admission import Prepared
from paceline.llm import LLM
from paceline.request import RequestOutput
from paceline.serve.app import create_app
from paceline.serve.options import ServeOptions

TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {
    "type": "object", "properties": {"a": {"enum": [1, 22]}}, "required": ["a"], "additionalProperties": False}}}]
BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "tools": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hello"}], "tools": TOOLS,
                                       "tool_choice": "required", "temperature": 1.0, "max_tokens": 36}),
    "scores and stops": ("/v1/completions", {"prompt": ["one two one two", "abc"], "logprobs": 2, "max_tokens": 20,
                                             "temperature": 0.9, "stop": ["qu", "ab"], "speculation": "ngram"}),
    "a schema": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 60,
                                          "logprobs": True, "top_logprobs": 1, "response_format": {
                                              "type": "json_schema", "json_schema": {"name": "it", "schema": {
                                                  "type": "array", "items": {"type": "integer"}, "maxItems": 3}}}}),
}


class Front:
    """In the place of an AsyncLLM: it reads requests by itself and has workers carry them out."""

    def __init__(self, llm: AsyncLLM, workers: list[Mortal]) -> None:
        self._llm = llm
        self._workers = workers
        self.deaths: list[int] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._llm, name)

    def _open(self, prompt: Prepared, request_id: str, speculation: Any, adapter: Any, tenant: Any) -> MovingStream:
        order = Order.of(request_id, prompt.ids, prompt.params, speculation=speculation, adapter=adapter, tenant=tenant)
        return MovingStream(order, Crew(self._workers, self.deaths).choose)

    async def stream(self, prompt: Prepared, *, request_id: str, speculation: Any, adapter: Any,
                     tenant: Any) -> MovingStream:
        stream = self._open(prompt, request_id, speculation, adapter, tenant)
        await stream.admitted()
        return stream

    async def complete(self, prompt: Prepared, *, request_id: str, speculation: Any, adapter: Any,
                       tenant: Any) -> RequestOutput:
        return await self._open(prompt, request_id, speculation, adapter, tenant).output()


@pytest.fixture(scope="module")
def front(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Front]:
    folder: Path = write_model(tmp_path_factory.mktemp("tiny"))
    workers = [mortal(name, LLM(str(folder), deterministic=True).engine) for name in ("one", "two")]
    made = Front(workers[0].inner._llm, workers)
    yield made
    for worker in workers:
        worker.inner._llm.close()


def ask(front: Front, deaths: list[int], path: str, body: dict[str, Any]) -> httpx.Response:
    async def main() -> httpx.Response:
        app = create_app(front, ServeOptions(model_name=NAME))  # type: ignore[arg-type]
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1") as client:
            return await client.post(path, json=body, timeout=60)

    front.deaths = deaths
    answer = asyncio.run(main())
    assert answer.status_code == 200, answer.text
    return answer


def salted(body: dict[str, Any], salt: str) -> dict[str, Any]:
    """Nothing of it is in anybody's cache."""
    return body | {"model": NAME, "seed": 3, "cache_salt": salt}


@pytest.mark.parametrize("name", ["scores and stops", "a schema"])
def test_whole_answers(name: str, front: Front) -> None:
    path, body = BODIES[name]
    calm = ask(front, [], path, salted(body, "calm")).json()
    wild = ask(front, [3, 0, 4], path, salted(body, "wild")).json()
    assert _told(wild) == _told(calm)
    moved = [one.get("moved") for one in (wild["paceline"], *wild["paceline"].get("others", ()))]
    assert {"times": 3, "exact": True} in moved
    assert "moved" not in calm["paceline"]


@pytest.mark.parametrize("name", BODIES)
def test_streamed_answers(name: str, front: Front) -> None:
    path, body = BODIES[name]
    stream = {"stream": True, "stream_options": {"include_usage": True}}
    calm = _events(ask(front, [], path, salted(body, "calm, streamed") | stream))
    wild = _events(ask(front, [3, 0, 4], path, salted(body, "wild, streamed") | stream))
    assert _put_together(wild) == _put_together(calm)
    assert wild[-1]["usage"]["completion_tokens"] == calm[-1]["usage"]["completion_tokens"] > 4
    assert wild[-1]["paceline"]["moved"]["exact"] is True


def _told(answer: dict[str, Any]) -> tuple[Any, Any]:
    choices = json.loads(json.dumps(answer["choices"]))
    for choice in choices:
        for call in choice.get("message", {}).get("tool_calls") or ():
            call.pop("id")
    usage = {name: value for name, value in answer["usage"].items() if name != "completion_tokens_details"}
    return choices, usage


def _events(answer: httpx.Response) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def _put_together(events: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """By choice: everything that was said, in order."""
    found: dict[int, dict[str, Any]] = {}
    for choice in (choice for event in events for choice in event["choices"]):
        own = found.setdefault(choice["index"], {"text": "", "calls": {}, "scores": [], "end": None})
        delta = choice.get("delta", {})
        own["text"] += choice.get("text") or delta.get("content") or ""
        for call in delta.get("tool_calls") or ():
            name, arguments = own["calls"].setdefault(call["index"], ["", ""])
            function = call["function"]
            own["calls"][call["index"]] = [name + (function.get("name") or ""),
                                           arguments + (function.get("arguments") or "")]
        scores = choice.get("logprobs") or {}
        own["scores"] += scores.get("content") or scores.get("token_logprobs") or []
        own["end"] = choice.get("finish_reason") or own["end"]
    return found
