"""schemathesis over the OpenAPI document: whatever fits it, or does not, the server never fails."""

from __future__ import annotations

from contextlib import suppress
from unittest import SkipTest

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import Unsatisfiable
from schemathesis.checks import not_a_server_error
from serving import NAME, served

from engine.tiny import tiny_engine, tiny_model
from paceline.bench.null_model import byte_tokenizer
from paceline.models.chat import ChatTemplate

EVERY = {("POST", "/v1/completions"), ("POST", "/v1/chat/completions"), ("GET", "/v1/models"),
         ("GET", "/v1/models/{name}"), ("POST", "/tokenize"), ("POST", "/detokenize"), ("GET", "/health"),
         ("GET", "/ready"), ("GET", "/version"), ("GET", "/metrics"), ("POST", "/v1/responses"),
         ("GET", "/v1/responses/{response_id}"), ("DELETE", "/v1/responses/{response_id}"),
         ("GET", "/v1/responses/{response_id}/input_items"), ("POST", "/v1/embeddings"),
         ("POST", "/v1/messages"), ("POST", "/v1/messages/count_tokens"), ("POST", "/api/chat"),
         ("POST", "/api/generate"), ("POST", "/api/embed"), ("POST", "/api/embeddings"),
         ("POST", "/api/show"), ("GET", "/api/tags"),
         ("GET", "/api/ps"), ("GET", "/api/version"), ("POST", "/completion"), ("GET", "/props"), ("GET", "/slots"),
         ("POST", "/apply-template")}

ERRORS = {"/v1/messages": {"message", "type"}, "/v1/messages/count_tokens": {"message", "type"}}
"""What errors consist of, where that is not OpenAI's."""


@pytest.fixture(scope="module")
def schema():
    engine = tiny_engine(tiny_model(vocab_size=256), byte_tokenizer(), kv_blocks=64, max_num_seqs=4)
    engine.chat = ChatTemplate("{% for m in messages %}{{ m['content'] }}{% endfor %}")
    with served(engine, max_output_tokens=8, max_samples=4, timeout_s=5.0) as url:
        yield schemathesis.openapi.from_url(f"{url}/openapi.json")


SHAPES = {"tools", "tool_choice", "response_format", "structured_outputs", "guided_json", "guided_regex",
          "guided_choice", "guided_grammar", "speculation"}
"""Fields of which random values are nearly always refused, together always."""
BOUNDS = {"n": 4, "max_tokens": 8, "max_completion_tokens": 8, "min_tokens": 1, "best_of": None, "suffix": None,
          "model": None, "top_logprobs": None, "allowed_token_ids": None, "logit_bias": None, "echo": None,
          "use_beam_search": None, "length_penalty": None, "early_stopping": None, "max_output_tokens": 8,
          "dimensions": None, "background": None, "truncation": None, "include": None, "text": None,
          "previous_response_id": None, "output_config": None, "output_format": None}

OLLAMAS = {"options", "format", "suffix", "template", "context", "images", "dimensions"}
"""Fields of Ollama's that are mostly refused."""


def explore(schema, examples: int) -> dict[tuple[str, str], set[int]]:
    """Requests that fit the document, tamer ones that the engine will mostly run, and ones that do not fit; which
    statuses each operation answered with."""
    seen = {}
    for found in schema.get_all_operations():
        operation = found.ok()
        statuses = seen.setdefault((operation.method.upper(), operation.path), set())
        valid = operation.as_strategy(generation_mode=schemathesis.GenerationMode.POSITIVE)
        try_all(valid, examples, statuses)
        if operation.method == "post":
            try_all(valid.map(tamed), examples, statuses)
            # What is asked for by its address alone has nothing to get wrong, and looking for it takes seconds.
            try_all(operation.as_strategy(generation_mode=schemathesis.GenerationMode.NEGATIVE), examples, statuses)
    return seen


def tamed(case):
    body = {name: value for name, value in case.body.items() if name not in SHAPES}
    for name, most in BOUNDS.items():
        if body.get(name) is not None:
            body[name] = None if most is None else min(body[name], most)
    if case.operation.path == "/tokenize":  # it takes one of both
        body = {name: value for name, value in body.items() if name != "messages"} | {"prompt": "hello"}
    if "prompt" in body:
        body["prompt"] = "hello"
    if "max_output_tokens" in body or "stop_sequences" in body:
        body |= {"trace": None, "provenance": None}
    if "input" in body:
        body["input"] = "hello"
        body.pop("n", None)
    if case.operation.path.startswith("/api/"):
        body = {name: value for name, value in body.items() if name not in OLLAMAS} | {"model": NAME}
    if "stop_sequences" in body:
        body.pop("n", None)
    if "messages" in body:
        body["messages"] = [{"role": "user", "content": "hello"}]
    case.body = body
    return case


def try_all(cases, examples: int, statuses: set[int]) -> None:
    @settings(max_examples=examples, deadline=None, database=None, phases=[Phase.generate],
              suppress_health_check=list(HealthCheck), derandomize=True)
    @given(case=cases)
    def check(case):
        response = case.call(timeout=60)
        statuses.add(response.status_code)
        case.validate_response(response, checks=[not_a_server_error])
        if response.status_code >= 400:
            told = response.json()["error"]
            path = case.operation.path
            assert isinstance(told, str) if path.startswith("/api/") else set(told) == ERRORS.get(
                path, {"message", "type", "param", "code"})

    with suppress(SkipTest, Unsatisfiable):  # an operation without input: there is nothing to get wrong
        check()


def check_all(schema, examples: int) -> None:
    seen = explore(schema, examples)
    assert set(seen) == EVERY
    for (method, path), statuses in seen.items():
        assert statuses, "nothing was tried"
        assert method != "POST" or 400 in statuses, "nothing wrong was tried"
        assert 200 in statuses or "{" in path, "nothing right was tried"


def test_no_request_breaks_the_server(schema):
    check_all(schema, 2)


@pytest.mark.full
def test_no_request_breaks_the_server_in_many_tries(schema):
    check_all(schema, 150)
