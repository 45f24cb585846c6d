"""/v1/embeddings by the official client: what the engine gives, in every form in which texts come and vectors go."""

from __future__ import annotations

import asyncio
import base64
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from calling import CallingModel
from serving import NAME, WAIT, ServerThread, held, served, until

from engine.tiny import tiny_engine
from paceline import LLM, SamplingParams

TEXTS = ["The sea is wide.", "A short one", "The sea is wide, and the sky above it is wider still."]


@pytest.fixture(scope="module")
def client(server: ServerThread) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", timeout=WAIT, max_retries=0)


@pytest.fixture(scope="module")
def vectors(offline: LLM) -> list[list[float]]:
    return [out.embedding or [] for out in offline.generate(TEXTS, SamplingParams(max_tokens=0, pooling="mean"))]


def test_texts_and_tokens_become_the_engines_vectors(client: openai.OpenAI, offline: LLM,
                                                     vectors: list[list[float]]) -> None:
    answer = client.embeddings.create(model=NAME, input=TEXTS)  # the client asks for base64
    assert [entry.index for entry in answer.data] == [0, 1, 2] and answer.model == NAME
    assert [entry.embedding for entry in answer.data] == vectors
    ids = [offline.engine.tokenizer.encode(text) for text in TEXTS]
    assert answer.usage.prompt_tokens == answer.usage.total_tokens == sum(map(len, ids))
    assert client.embeddings.create(model=NAME, input=TEXTS[0]).data[0].embedding == vectors[0]
    assert client.embeddings.create(model=NAME, input=ids[1]).data[0].embedding == vectors[1]
    assert [one.embedding for one in client.embeddings.create(model=NAME, input=ids).data] == vectors


def test_both_formats(server: ServerThread, vectors: list[list[float]]) -> None:
    found: list[Any] = []
    for form in ("float", "base64"):
        answer = httpx.post(f"{server.url}/v1/embeddings", json={"input": TEXTS[0], "encoding_format": form,
                                                                 "dimensions": len(vectors[0])}, timeout=WAIT).json()
        found.append(answer["data"][0]["embedding"])
    assert found[0] == vectors[0]
    assert np.frombuffer(base64.b64decode(found[1]), dtype="<f4").tolist() == vectors[0]


@pytest.mark.parametrize(("more", "word"), [
    ({"dimensions": 8}, "dimensions"), ({"input": []}, "empty"), ({"input": ""}, "empty"), ({"input": [[]]}, "empty"),
    ({"input": [1 << 40]}, "out of range"), ({"input": "word " * 9000}, "your input resulted in"),
    ({"input": ["x"] * 2049}, "2049 entries"),
    ({"pooling": "last"}, "pooling")])
def test_what_cannot_be_done_is_refused(server: ServerThread, more: dict[str, Any], word: str) -> None:
    refused = httpx.post(f"{server.url}/v1/embeddings", json={"input": "x"} | more, timeout=WAIT)
    assert refused.status_code == 400 and word in refused.json()["error"]["message"]
    assert refused.json()["error"]["param"] == next(iter(more))


def test_a_model_without_hidden_states_is_the_wrong_one() -> None:
    engine = tiny_engine(CallingModel())
    with served(engine) as url:
        refused = httpx.post(f"{url}/v1/embeddings", json={"input": [1, 2]}, timeout=WAIT)
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "model"
    assert "pooling" not in refused.json()["error"]["message"]


def test_a_long_list_takes_its_turns_and_leaves_the_queue_to_others() -> None:
    engine = tiny_engine(max_queue=40)
    admit, most = engine.admit, 0

    def noted(*given: Any, **more: Any) -> str:
        nonlocal most
        name = admit(*given, **more)
        most = max(most, len(engine._records))
        return name

    engine.admit = noted  # type: ignore[method-assign]
    with served(engine, pooling="last") as url:
        answer = httpx.post(f"{url}/v1/embeddings", json={"input": [[1, 2, 3]] * 100}, timeout=WAIT)
    data = answer.json()["data"]
    assert len(data) == 100 and all(entry["embedding"] == data[0]["embedding"] for entry in data)
    assert most <= 32 < engine.metrics.requests == 100


def test_a_client_that_leaves_ends_its_requests() -> None:
    engine = tiny_engine()
    go = held(engine, 0)
    with served(engine) as url:
        async def leave() -> None:
            async with httpx.AsyncClient(timeout=WAIT) as http:
                task = asyncio.ensure_future(http.post(f"{url}/v1/embeddings", json={"input": [[1, 2]] * 64}))
                await asyncio.to_thread(until, lambda: engine._records)
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

        asyncio.run(leave())
        for _ in range(3):  # by then the server has noticed
            httpx.get(f"{url}/health", timeout=WAIT)
        go.set()
        until(lambda: not engine._records)
        assert engine.metrics.requests <= 32, "the rest was never begun"
