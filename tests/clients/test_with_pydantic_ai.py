"""Pydantic AI, by chats and by responses."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from pydantic import BaseModel

pydantic_ai = pytest.importorskip("pydantic_ai", reason="`make clients` installs it")
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>'


class Person(BaseModel):
    name: str
    age: int


@pytest.fixture(params=["OpenAIChatModel", "OpenAIResponsesModel"])
def model(server: str, request: pytest.FixtureRequest) -> Any:
    from pydantic_ai.models import openai
    from pydantic_ai.providers.openai import OpenAIProvider
    return getattr(openai, request.param)("tiny", provider=OpenAIProvider(base_url=f"{server}/v1", api_key="unused"))


def test_answers_and_tools(model: Any) -> None:
    agent = pydantic_ai.Agent(model)
    cities = []

    @agent.tool_plain
    def get_weather(city: str) -> str:
        """The weather somewhere."""
        cities.append(city)
        return "sunny"

    assert agent.run_sync("Say: Hello, Zoë.").output == "Hello, Zoë."
    assert agent.run_sync(f"Say: {CALL}").output == "It is sunny." and cities == ["Oslo"]

    async def streamed(asked: str) -> str:
        async with agent.run_stream(asked) as result:
            return "".join([piece async for piece in result.stream_text(delta=True)])

    async def both() -> list[str]:
        return [await streamed("Say: Grüße 🙂"), await streamed(f"Say: {CALL}")]

    assert asyncio.run(both()) == ["Grüße 🙂", "It is sunny."] and cities == ["Oslo", "Oslo"]


def test_structure(model: Any) -> None:
    agent = pydantic_ai.Agent(model, output_type=pydantic_ai.NativeOutput(Person))
    asked = 'Say: {"name":"Ann","age":7}'
    assert agent.run_sync(asked).output == Person(name="Ann", age=7)

    async def streamed() -> list[Any]:
        async with agent.run_stream(asked) as result:
            return [made async for made in result.stream_output(debounce_by=None)]

    assert asyncio.run(streamed())[-1] == Person(name="Ann", age=7)
