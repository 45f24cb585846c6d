"""LangChain, by chats, by responses and by embeddings."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import BaseModel

langchain = pytest.importorskip("langchain_openai", reason="`make clients` installs it")
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>'


class Person(BaseModel):
    """Somebody."""

    name: str
    age: int


def get_weather(city: str) -> str:
    """The weather somewhere."""
    return "sunny"


@pytest.fixture(params=[False, True], ids=["chats", "responses"])
def model(server: str, request: pytest.FixtureRequest) -> Any:
    return langchain.ChatOpenAI(base_url=f"{server}/v1", api_key="unused", model="tiny", max_retries=0,
                                use_responses_api=request.param)


def test_answers(model: Any) -> None:
    assert model.invoke("Say: Hello, Zoë.").text == "Hello, Zoë."
    assert "".join(chunk.text for chunk in model.stream("Say: Grüße 🙂")) == "Grüße 🙂"


def test_tools(model: Any) -> None:
    able = model.bind_tools([get_weather])
    message = able.invoke(f"Say: {CALL}")
    assert [(call["name"], call["args"]) for call in message.tool_calls] == [("get_weather", {"city": "Oslo"})]
    result = {"role": "tool", "tool_call_id": message.tool_calls[0]["id"], "content": "sunny"}
    assert able.invoke([{"role": "user", "content": f"Say: {CALL}"}, message, result]).text == "It is sunny."
    whole = None
    for chunk in able.stream(f"Say: {CALL}"):
        whole = chunk if whole is None else whole + chunk
    assert whole is not None and [call["args"] for call in whole.tool_calls] == [{"city": "Oslo"}]


def test_structure(model: Any) -> None:
    asked = 'Say: {"name":"Ann","age":7}'
    able = model.with_structured_output(Person)
    assert able.invoke(asked) == Person(name="Ann", age=7)
    assert list(able.stream(asked))[-1] == Person(name="Ann", age=7)


def test_embeddings(server: str) -> None:
    model = langchain.OpenAIEmbeddings(base_url=f"{server}/v1", api_key="unused", model="tiny", max_retries=0,
                                       check_embedding_ctx_length=False)  # else it sends tokens of another model
    sea, sky = model.embed_documents(["The sea", "The sky"])
    assert model.embed_query("The sky") == sky != sea and abs(sum(value * value for value in sky) - 1) < 1e-5
