"""Requests that nobody should send, a thousand of them, to every route that takes a body: each is refused with an error
in the shape of its protocol, or is fine after all; nothing breaks the server, and nothing keeps it waiting."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from serving import NAME, ServerThread

SOON = 20.0
"""Seconds: none of these is work."""
MESSAGES = [{"role": "user", "content": "Hi"}]
FUNCTION = {"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 1, "temperature": 0.5, "stop": ["x"], "stream": False,
                             "logit_bias": {"3": 1}, "seed": 1, "tools": [{"type": "function", "function": FUNCTION}],
                             "tool_choice": "none", "response_format": {"type": "text"}},
    "/v1/completions": {"prompt": "Hi", "max_tokens": 1, "logprobs": 1, "echo": False, "stop": "x"},
    "/v1/responses": {"input": MESSAGES, "max_output_tokens": 1, "tools": [{"type": "function"} | FUNCTION],
                      "tool_choice": "none", "text": {"format": {"type": "text"}}},
    "/v1/embeddings": {"input": ["Hi"], "encoding_format": "float"},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 1, "system": "x", "stop_sequences": ["x"],
                     "tools": [{"name": "f", "input_schema": FUNCTION["parameters"]}], "tool_choice": {"type": "none"}},
    "/v1/messages/count_tokens": {"messages": MESSAGES, "system": "x"},
    "/api/chat": {"model": NAME, "messages": MESSAGES, "stream": False, "options": {"num_predict": 1, "top_k": 3}},
    "/api/generate": {"model": NAME, "prompt": "Hi", "stream": False, "options": {"num_predict": 1}, "format": "json"},
    "/api/embed": {"model": NAME, "input": "Hi"},
    "/api/embeddings": {"model": NAME, "prompt": "Hi"},
    "/api/show": {"model": NAME},
    "/completion": {"prompt": "Hi", "n_predict": 1, "n_probs": 1, "logit_bias": [[3, 1.0]], "stop": ["x"],
                    "response_fields": ["content"]},
    "/tokenize": {"content": "Hi", "with_pieces": True},
    "/detokenize": {"tokens": [65, 66]},
    "/apply-template": {"messages": MESSAGES},
}
WRONG: list[Any] = [
    None, True, 0, -1, 1 << 80, -(1 << 63), 1e308, 0.5, "", "x", "\ud800", "\x00", [], [None], [[]], [0, "x", {}], {},
    {"x": None}, {"type": "x"}, {"type": None}, [{"type": []}], [{"role": "user"}], [{"role": 1, "content": 2}]]
"""In place of whatever stood there."""


@pytest.fixture(scope="module")
def url(tiny_folder: Path) -> Iterator[str]:
    """Of a server whose answers are short whatever is asked: a null stands for the longest."""
    with ServerThread(tiny_folder, settings={"max_output_tokens": 2}) as server:
        yield server.url
        assert "Traceback" not in server.log()


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Of everything inside."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, one in inner:
        yield (*path, key)
        yield from places(one, (*path, key))


def with_(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    if not path:
        return new
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[path[0]] = with_(value[path[0]], path[1:], new)
    return copy


def bodies(route: str) -> Iterator[tuple[bytes, str | None]]:
    """(what is sent, what it is called)."""
    body, luck = BODIES[route], random.Random(route)
    for path in places(body):
        for wrong in luck.sample(WRONG, 5):
            yield json.dumps(with_(body, path, wrong)).encode(), "application/json"
    for wrong in WRONG:
        yield json.dumps(wrong).encode(), "application/json"
    text = json.dumps(body).encode()
    for end in sorted(luck.sample(range(len(text)), min(8, len(text)))):
        yield text[:end], "application/json"
    deep = b"[" * 5000 + b"]" * 5000
    yield deep, "application/json"
    for name in list(body)[:2]:
        yield json.dumps(body | {name: 0}).encode().replace(b": 0", b": " + deep, 1), "application/json"
        yield json.dumps(body | {name: 0}).encode().replace(b": 0", b": " + b'{"a":' * 900 + b"1" + b"}" * 900, 1), None
        yield json.dumps(body | {name: 0}).encode().replace(b": 0", b": " + b"9" * 6000, 1), None
    yield text[:-1] + b', "nobody_knows": 1}', "application/json"
    yield from ((junk, "application/json") for junk in (b"", b"\xff\xfe{}", text.replace(b"Hi", b"\xc3\x28"), b"NaN",
                                                        b"\xef\xbb\xbf" + text + b"}", b'{"a":1,}', text + text))
    yield b"messages=Hi&prompt=Hi", "application/x-www-form-urlencoded"
    yield b'--x\r\nContent-Disposition: form-data; name="prompt"\r\n\r\nHi\r\n--x--', "multipart/form-data; boundary=x"


def error_of(route: str, answer: httpx.Response) -> Any:
    """The sentence, where the protocol has it."""
    told = answer.json()
    if route.startswith("/api/"):
        return told["error"]
    if route.startswith("/v1/messages"):
        assert told["type"] == "error" and told["error"]["type"]
    else:
        assert told["error"].keys() == {"message", "type", "param", "code"}
    return told["error"]["message"]


@pytest.mark.parametrize("route", BODIES)
def test_what_is_malformed_is_refused_in_a_sentence(url: str, route: str) -> None:
    refused = 0
    with httpx.Client(base_url=url, timeout=SOON) as client:
        for content, kind in bodies(route):
            answer = client.post(route, content=content, headers={} if kind is None else {"content-type": kind})
            assert answer.status_code == 200 or 400 <= answer.status_code < 500, (content[:300], answer.text[:300])
            if answer.status_code != 200:
                refused += 1
                message = error_of(route, answer)
                assert isinstance(message, str) and message and "Traceback" not in message, content[:300]
    assert refused >= 25
    assert httpx.get(f"{url}/health", timeout=SOON).status_code == 200


TOOL = {"type": "function", "function": FUNCTION}
NOT = {"type": "object", "properties": {"a": {"not": {"format": "date"}}}}


@pytest.mark.parametrize(("route", "wrong", "words"), [
    ("/v1/chat/completions", {"messages": []}, "messages: List should have at least 1 item, not 0."),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": ["x"]}]},
     "messages.0.content.0: Input should be a valid dictionary."),
    ("/v1/chat/completions", {"stop": 5}, "stop: Input should be a valid string, or: Input should be a valid list."),
    ("/v1/chat/completions", {"tool_choice": {"type": "function"}}, "tool_choice.function: Field required."),
    ("/v1/chat/completions", {"tools": [TOOL, TOOL]}, "tools[1] has the name 'f', which tools[0] has already"),
    ("/v1/chat/completions", {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": NOT}}},
     "response_format cannot be used: not cannot be enforced of format"),
    ("/v1/responses", {"input": ["x"]}, "input.0: Input should be a valid dictionary."),
    ("/v1/responses", {"tools": [{"type": "function"}]}, "tools[0].name is missing"),
    ("/v1/responses", {"text": {"format": {"type": "json_schema", "name": "x", "schema": NOT}}},
     "text.format cannot be used: not cannot be enforced of format"),
    ("/v1/messages", {"max_tokens": "1"}, "max_tokens: Input should be a valid integer."),
    ("/v1/messages", {"tools": [{"name": "f"}]}, "tools[0] needs a name, which is a text, and an input_schema"),
    ("/v1/messages", {"output_format": {"type": "json_schema", "schema": NOT}}, "output_format cannot be used: not"),
    ("/api/chat", {"options": {"num_predict": "x"}}, "num_predict: Input should be a valid integer."),
    ("/api/chat", {"format": "xml"}, "format must be json or a schema."),
])
def test_a_refusal_names_the_field_and_what_it_takes(url: str, route: str, wrong: dict[str, Any], words: str) -> None:
    answer = httpx.post(url + route, json=BODIES[route] | wrong, timeout=SOON)
    assert answer.status_code == 400
    assert words in error_of(route, answer)


def test_there_are_many() -> None:
    assert sum(1 for route in BODIES for _ in bodies(route)) >= 1000
