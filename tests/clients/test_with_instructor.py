"""Instructor: objects by calls of tools, and by a schema."""

from __future__ import annotations

import pytest
from pydantic import BaseModel

instructor = pytest.importorskip("instructor", reason="`make clients` installs it")
openai = pytest.importorskip("openai", reason="`make clients` installs it")


class Person(BaseModel):
    """Somebody."""

    name: str
    age: int


@pytest.mark.parametrize(("mode", "said"), [
    ("TOOLS", '<tool_call>\n{"name": "Person", "arguments": {"name": "Ann", "age": 7}}\n</tool_call>'),
    ("JSON_SCHEMA", '{"name":"Ann","age":7}'), ("JSON", '{"name":"Ann","age":7}')])
def test_objects(server: str, mode: str, said: str) -> None:
    client = instructor.from_openai(openai.OpenAI(base_url=f"{server}/v1", api_key="unused", max_retries=0),
                                    mode=getattr(instructor.Mode, mode))
    made = client.chat.completions.create(model="tiny", response_model=Person, max_retries=1,
                                          messages=[{"role": "user", "content": f"Say: {said}"}])
    assert (made.name, made.age) == ("Ann", 7)
