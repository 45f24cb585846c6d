"""One body cannot keep the server busy: mistakes are told once, lists are bounded."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from paceline.errors import RequestError
from paceline.serve.containers import MOST_CONTAINERS, check_containers
from paceline.serve.conversation import prepare
from paceline.serve.errors import ApiError, validation_error
from paceline.serve.limits import MOST_CHARACTERS
from paceline.serve.options import ServeOptions
from paceline.serve.params import chat_params
from paceline.serve.schema import ChatBody, CompletionBody, DetokenizeBody

HELLO: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}]}
MANY = 5_000


@pytest.mark.parametrize("kind, body, param", [
    (DetokenizeBody, {"tokens": ["x"] * MANY}, "tokens.0"),
    (CompletionBody, {"prompt": [None] * MANY}, "prompt"),
    (CompletionBody, {"prompt": [[1, *[None] * MANY]]}, "prompt"),
    (ChatBody, {"messages": [{}] * MANY}, "messages.0.role"),
    (ChatBody, HELLO | {"stop": [3] * MANY}, "stop.0"),
    (ChatBody, HELLO | {"tools": [{}] * MANY}, "tools.0"),
    (ChatBody, HELLO | {"logit_bias": {"0": 1} | {str(token): "x" for token in range(1, MANY)}}, "logit_bias.1"),
    (ChatBody, HELLO | {f"unknown{place}": 1 for place in range(MANY)}, "unknown0"),
    (ChatBody, HELLO | {"response_format": {f"a{place}": 1 for place in range(MANY)}}, "response_format.type"),
    (ChatBody, HELLO | {"tool_choice": {"type": "function", "function": {"name": 3}}}, "tool_choice.function.name"),
])
def test_a_body_full_of_mistakes_has_few_errors(kind: type[BaseModel], body: dict[str, Any], param: str) -> None:
    with pytest.raises(ValidationError) as caught:
        kind.model_validate(body)
    assert caught.value.error_count() <= 5
    assert validation_error(caught.value.errors(), body).param == param


@pytest.mark.parametrize("asked, says", [
    ({"stop": [str(place) for place in range(65)]}, "65 entries"),
    ({"stop": "x" * (MOST_CHARACTERS + 1)}, "characters"),
    ({"stop": ["x" * MOST_CHARACTERS, "y"]}, "characters"),
    ({"bad_words": [str(place) for place in range(1025)]}, "1025 entries"),
    ({"bad_words": ["x" * MOST_CHARACTERS, "y"]}, "characters"),
    ({"stop_token_ids": [1] * 1025}, "1025 entries"), ({"cache_salt": "x" * 1025}, "characters"),
])
def test_texts_that_the_engine_watches_for_are_bounded(asked: dict[str, Any], says: str) -> None:
    with pytest.raises(RequestError, match=says) as caught:
        chat_params(ChatBody.model_validate(HELLO | asked), ServeOptions(model_name="tiny"), {})
    assert caught.value.param == next(iter(asked))


def test_as_many_as_are_allowed_are_taken() -> None:
    asked = {"stop": [str(place) for place in range(64)], "bad_words": [f"word{place}" for place in range(1024)]}
    params = chat_params(ChatBody.model_validate(HELLO | asked), ServeOptions(model_name="tiny"), {})
    assert len(params.stop) == 64 and len(params.bad_words) == 1024


def test_counting_lists_takes_no_longer_for_texts_that_do_not_end() -> None:
    many = b"[" * (MOST_CONTAINERS + 1)
    started = time.thread_time()
    for odd in (b'"' + b'\\"' * 100_000, b'"' + b"\\", b'"a\\\\' * 100_001, b'"'):
        with pytest.raises(ApiError, match="lists and objects"):
            check_containers(many + odd)
        check_containers(b'"' + many + odd[1:] + b'"')  # brackets of a text count for nothing
    assert time.thread_time() - started < 5, "the time must grow with the text, not with its square"


def test_json_within_texts_is_counted_too() -> None:
    lists = json.dumps([[]] * MOST_CONTAINERS)
    call = {"function": {"name": "f", "arguments": lists}}
    for asked in ({"guided_json": lists}, {"structured_outputs": {"json": lists}}):
        with pytest.raises(ApiError, match="lists and objects"):
            chat_params(ChatBody.model_validate(HELLO | asked), ServeOptions(model_name="tiny"), {})
    body = ChatBody.model_validate({"messages": [{"role": "assistant", "tool_calls": [call]}]})
    with pytest.raises(ApiError, match="lists and objects"):
        prepare(body.messages)
