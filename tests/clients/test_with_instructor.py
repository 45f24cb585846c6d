"""Instructor: objects by calls of tools, and by a schema; whole, bit by bit, and several of them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import BaseModel

instructor = pytest.importorskip("instructor", reason="`make clients` installs it")
openai = pytest.importorskip("openai", reason="`make clients` installs it")
ANN, BOB = {"name": "Ann", "age": 7}, {"name": "Bob", "age": 8}


class Person(BaseModel):
    """Somebody."""

    name: str
    age: int


@pytest.fixture(params=["TOOLS", "JSON_SCHEMA", "JSON"])
def mode(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def client(server: str, mode: str) -> Any:
    return instructor.from_openai(openai.OpenAI(base_url=f"{server}/v1", api_key="unused", max_retries=0),
                                  mode=getattr(instructor.Mode, mode))


def asked(mode: str, name: str, said: Any) -> Any:
    """`name`: of the function that a model calls with what it says where the mode is TOOLS."""
    text = json.dumps(said)
    if mode == "TOOLS":
        text = f'<tool_call>\n{{"name": "{name}", "arguments": {text}}}\n</tool_call>'
    return {"model": "tiny", "max_retries": 1, "messages": [{"role": "user", "content": f"Say: {text}"}]}


def test_objects(client: Any, mode: str) -> None:
    assert client.chat.completions.create(response_model=Person, **asked(mode, "Person", ANN)).model_dump() == ANN


def test_objects_bit_by_bit(client: Any, mode: str) -> None:
    made = list(client.chat.completions.create_partial(response_model=Person, **asked(mode, "PartialPerson", ANN)))
    assert made[-1].model_dump() == ANN and made[0].age is None and len(made) > 2


def test_several_objects(client: Any, mode: str) -> None:
    said = asked(mode, "IterablePerson", {"tasks": [ANN, BOB]})
    assert [made.model_dump() for made in client.chat.completions.create_iterable(response_model=Person, **said)] == [
        ANN, BOB]
