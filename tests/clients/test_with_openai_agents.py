"""OpenAI's agents, by chats and by responses."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from pydantic import BaseModel

agents = pytest.importorskip("agents", reason="`make clients` installs openai-agents")
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>'


class Person(BaseModel):
    name: str
    age: int


@pytest.fixture(params=["OpenAIChatCompletionsModel", "OpenAIResponsesModel"])
def model(server: str, request: pytest.FixtureRequest) -> Any:
    agents.set_tracing_disabled(True)
    client = agents.AsyncOpenAI(base_url=f"{server}/v1", api_key="unused", max_retries=0)
    return getattr(agents, request.param)(model="tiny", openai_client=client)


async def streamed(agent: Any, asked: str) -> Any:
    run = agents.Runner.run_streamed(agent, asked)
    deltas = [event.data.delta async for event in run.stream_events()
              if getattr(event, "data", None) is not None and event.data.type == "response.output_text.delta"]
    assert len(deltas) > 1
    return run.final_output


def test_answers_and_tools(model: Any) -> None:
    @agents.function_tool
    def get_weather(city: str) -> str:
        """The weather somewhere."""
        return "sunny"

    agent = agents.Agent(name="one", instructions="Be kind.", model=model, tools=[get_weather])

    async def run() -> None:
        assert (await agents.Runner.run(agent, "Say: Hello, Zoë.")).final_output == "Hello, Zoë."
        assert (await agents.Runner.run(agent, f"Say: {CALL}")).final_output == "It is sunny."
        assert await streamed(agent, "Say: Hello, Zoë.") == "Hello, Zoë."
        assert await streamed(agent, f"Say: {CALL}") == "It is sunny."

    asyncio.run(run())


def test_structure(model: Any) -> None:
    agent, asked = agents.Agent(name="one", model=model, output_type=Person), 'Say: {"name":"Ann","age":7}'

    async def run() -> None:
        assert (await agents.Runner.run(agent, asked)).final_output == Person(name="Ann", age=7)
        assert await streamed(agent, asked) == Person(name="Ann", age=7)

    asyncio.run(run())
