"""The default model behind the server, as a user gets it, against the same model offline."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from serving import NAME, WAIT, ServerThread

from paceline import LLM, SamplingParams

pytestmark = pytest.mark.real_model
MESSAGES: Any = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]


@pytest.fixture(scope="module")
def real_server(default_model_path: Path) -> Iterator[ServerThread]:
    made = ServerThread(default_model_path, max_model_len=1024)
    yield made
    made.stop()


def test_many_streams_at_once_say_what_one_says_alone(real_server: ServerThread, default_model_path: Path) -> None:
    seeds = range(3)

    async def scene() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{real_server.url}/v1", api_key="unused", timeout=WAIT) as client:

            async def ask(seed: int) -> str:
                stream = await client.chat.completions.create(model=NAME, messages=MESSAGES, max_tokens=10, seed=seed,
                                                              temperature=0.8, stream=True)
                return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

            return await asyncio.gather(*map(ask, seeds))

    offline = LLM(str(default_model_path), max_model_len=1024)
    for seed, text in zip(seeds, asyncio.run(scene())):
        want = offline.chat(MESSAGES, SamplingParams(max_tokens=10, seed=seed, temperature=0.8))[0].outputs[0].text
        assert text == want


def test_it_knows_the_capital_of_france(real_server: ServerThread) -> None:
    client = openai.OpenAI(base_url=f"{real_server.url}/v1", api_key="unused", timeout=WAIT)
    answer = client.chat.completions.create(model=NAME, messages=MESSAGES, max_tokens=24, temperature=0)
    assert "Paris" in (answer.choices[0].message.content or "")
    assert answer.choices[0].finish_reason == "stop"
