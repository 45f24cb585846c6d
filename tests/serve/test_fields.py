"""Clients written for OpenAI and vLLM work unchanged: fields, their nulls, what is ignored and what is refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx
import pytest
from calling import ANSWER, TOKENIZER, calling_engine
from serving import CONTEXT, NAME, TEMPLATE, WAIT, ServerThread, events, served

from engine.tiny import tiny_engine
from paceline import LLM, SamplingParams
from paceline.engine.core import Engine
from paceline.models.chat import ChatTemplate
from paceline.serve.options import ServeOptions
from paceline.serve.params import speculation
from paceline.serve.schema import ChatBody, CompletionBody

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HELLO: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 6, "seed": 1}
ONCE: dict[str, Any] = {"prompt": "Once", "max_tokens": 6, "seed": 1}


@pytest.fixture(scope="module")
def http(server: ServerThread) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=WAIT) as made:
        yield made


@pytest.fixture(scope="module")
def calling() -> Iterator[tuple[httpx.Client, Engine]]:
    """A model that says what is written here."""
    engine = calling_engine()
    with served(engine, lenient=True, trust_request_chat_template=True) as url, \
            httpx.Client(base_url=url, timeout=WAIT) as made:
        yield made, engine


def told(answer: httpx.Response) -> dict[str, Any]:
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def refused(http: httpx.Client, path: str, body: dict[str, Any]) -> dict[str, Any]:
    answer = http.post(path, json=body)
    assert answer.status_code == 400, answer.text
    return dict(answer.json()["error"])


def text_of(answer: httpx.Response) -> str:
    choice = told(answer)["choices"][0]
    return str(choice["text"] if "text" in choice else choice["message"]["content"])


# -- nulls and what does not apply -----------------------------------------------------------------------------------


@pytest.mark.parametrize("path, body, kind", [(CHAT, HELLO, ChatBody), (TEXT, ONCE, CompletionBody)])
def test_a_null_is_the_default(http: httpx.Client, path: str, body: dict[str, Any], kind: Any) -> None:
    names = {field.alias or name for name, field in kind.model_fields.items()} | {"of_another_server"}
    answer = http.post(path, json=dict.fromkeys(names) | body)
    assert text_of(answer) == text_of(http.post(path, json=body))
    assert answer.json()["paceline"]["speculation"]["method"] == "auto", "the server's default, as for all others"
    assert http.post(path, json=body | {"stream_options": {"include_usage": None}}).status_code == 200
    shape = {"type": "json_schema", "json_schema": {"name": None, "strict": None, "schema": {"enum": [1]}}}
    assert text_of(http.post(path, json=body | {"response_format": shape})) == "1"


def test_what_does_not_apply_is_accepted(http: httpx.Client) -> None:
    more = {"store": True, "metadata": {"a": "b"}, "service_tier": "auto", "safety_identifier": "x", "user": "me",
            "prompt_cache_key": "k", "reasoning_effort": "low", "verbosity": "low", "modalities": ["text"],
            "parallel_tool_calls": True}
    assert text_of(http.post(CHAT, json=HELLO | more)) == text_of(http.post(CHAT, json=HELLO))


def test_an_assistant_may_have_said_nothing(http: httpx.Client) -> None:
    def ask(**turn: Any) -> httpx.Response:
        turns = [*HELLO["messages"], {"role": "assistant", **turn}, {"role": "user", "content": "And?"}]
        return http.post(CHAT, json=HELLO | {"messages": turns})

    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    assert text_of(ask(content=None)) == text_of(ask(content="")) == text_of(ask(content=None, tool_calls=None))
    assert text_of(ask(content=None, tool_calls=[call])) == text_of(ask(content=None, function_call=call["function"]))
    assert refused(http, CHAT, {"messages": [{"role": "user", "content": None}]})["param"] == "messages"


# -- unknown fields --------------------------------------------------------------------------------------------------


def test_unknown_fields_are_refused_by_their_whole_name(http: httpx.Client) -> None:
    for name in ("temprature", "Temperature", "str", "body"):
        told = refused(http, TEXT, ONCE | {name: 1})
        assert told["param"] == name and told["message"] == f"Unrecognized request argument: {name}."


def test_a_lenient_server_drops_them_and_says_so(calling: tuple[httpx.Client, Engine],
                                                 caplog: pytest.LogCaptureFixture) -> None:
    http, _ = calling
    tool = {"type": "function", "function": {"name": "f", "colour": "red"}}
    body = HELLO | {"temprature": 1, "Ünknown": [2], "tools": [tool]}
    for _ in range(2):
        answer = http.post(CHAT, json=body)
        assert text_of(answer) == text_of(http.post(CHAT, json=HELLO))
        assert sorted(answer.headers["x-paceline-ignored"].split(", ")) == ["%C3%9Cnknown", "colour", "temprature"]
    assert caplog.text.count("temprature") == caplog.text.count("colour") == 1
    assert "x-paceline-ignored" not in http.post(CHAT, json=HELLO).headers
    with http.stream("POST", CHAT, json=body | {"stream": True}) as stream:
        assert "temprature" in stream.headers["x-paceline-ignored"]
        assert list(events(stream))
    assert refused(http, CHAT, HELLO | {"temprature": 1, "temperature": "warm"})["param"] == "temperature"
    assert refused(http, CHAT, HELLO | {f"field{i}": i for i in range(20)})["code"] == "unknown_argument"


# -- prompts ---------------------------------------------------------------------------------------------------------


def test_the_last_message_goes_on(http: httpx.Client) -> None:
    turns = [*HELLO["messages"], {"role": "assistant", "content": "Once upon <|im_start|> "}]
    body = HELLO | {"messages": turns, "continue_final_message": True}
    chat = http.post(CHAT, json=body | {"add_generation_prompt": False})
    begun = "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\nOnce upon "
    again = http.post(TEXT, json=ONCE | {"prompt": begun, "parse_special": True})
    whole = http.post(CHAT, json=body | {"messages": [turns[0], turns[1] | {"content": "Once upon "}]})
    sizes = [answer.json()["usage"]["prompt_tokens"] for answer in (chat, whole, again)]
    assert text_of(whole) == text_of(again) and sizes[1] == sizes[2]
    assert sizes[0] > sizes[1] + 1, "what is written in a message is text"
    assert refused(http, CHAT, body | {"add_generation_prompt": True})["param"] == "continue_final_message"


def test_a_message_that_the_template_leaves_out_cannot_go_on() -> None:
    engine = calling_engine()
    engine.chat = ChatTemplate("{{ messages[0]['content'] }}")
    with served(engine) as url, httpx.Client(base_url=url, timeout=WAIT) as http:
        turns = [*HELLO["messages"], {"role": "assistant", "content": "x"}]
        problem = refused(http, CHAT, {"messages": turns, "continue_final_message": True})
        assert problem["param"] == "continue_final_message" and "leave" in problem["message"]


def test_templates_come_from_clients_that_are_trusted(http: httpx.Client,
                                                      calling: tuple[httpx.Client, Engine]) -> None:
    problem = refused(http, CHAT, HELLO | {"chat_template": TEMPLATE})
    assert problem["param"] == "chat_template" and "--trust-request-chat-template" in problem["message"]
    trusting, _ = calling
    answer = told(trusting.post(CHAT, json=HELLO | {"chat_template": "{{ messages[0]['content'] }}{{ more }}|>",
                                                    "chat_template_kwargs": {"more": "abc"}}))
    assert answer["usage"]["prompt_tokens"] == len(TOKENIZER.encode("Helloabc|>"))
    assert refused(trusting, CHAT, HELLO | {"chat_template": "{% if %}"})["message"]


def test_a_prompt_that_is_too_long_is_refused_in_openais_words(http: httpx.Client) -> None:
    for path, body, param in ((CHAT, {"messages": [{"role": "user", "content": "x y " * 4000}]}, "messages"),
                              (TEXT, {"prompt": [5] * (CONTEXT + 3)}, "prompt"),
                              (TEXT, {"prompt": "x" * 10**6}, "prompt")):
        problem = refused(http, path, body)
        assert problem["code"] == "context_length_exceeded" and problem["param"] == param
        assert problem["message"].startswith(
            f"This model's maximum context length is {CONTEXT} tokens. However, your {param} resulted in ")
    assert "4099 tokens, 4 too many" in refused(http, TEXT, {"prompt": [5] * (CONTEXT + 3)})["message"]


def test_scores_of_the_prompt(http: httpx.Client, offline: LLM) -> None:
    ids = [5, 6, 7, 8]
    scores = offline.generate([ids], SamplingParams(max_tokens=1, prompt_logprobs=2))[0].prompt_logprobs
    assert scores is not None and scores[1] is not None
    choice = told(http.post(TEXT, json={"prompt": ids, "max_tokens": 1, "prompt_logprobs": 2}))["choices"][0]
    first, second, *_ = choice["prompt_logprobs"]
    assert first is None and len(choice["prompt_logprobs"]) == 4
    assert second["6"]["logprob"] == pytest.approx(scores[1].raw) and second["6"]["rank"] == scores[1].rank
    assert {int(token) for token in second} == {6, *scores[1].top}
    chat = told(http.post(CHAT, json=HELLO | {"prompt_logprobs": 0}))
    assert len(chat["prompt_logprobs"]) == chat["usage"]["prompt_tokens"]
    assert [len(one) for one in chat["prompt_logprobs"][1:]] == [1] * (len(chat["prompt_logprobs"]) - 1)
    assert refused(http, TEXT, ONCE | {"prompt_logprobs": 1, "stream": True})["param"] == "stream"
    assert refused(http, TEXT, ONCE | {"prompt_logprobs": 21})["param"] == "prompt_logprobs"


# -- texts -----------------------------------------------------------------------------------------------------------


def test_special_tokens_and_stop_strings_can_be_part_of_the_text(
        http: httpx.Client, calling: tuple[httpx.Client, Engine], offline: LLM) -> None:
    assert offline.engine.tokenizer is not None
    start, end = (offline.engine.tokenizer.backend.token_to_id(name) for name in ("<|im_start|>", "<|im_end|>"))
    body = ONCE | {"max_tokens": 2}
    assert text_of(http.post(TEXT, json=body | {"allowed_token_ids": [start]})) == ""
    shown = {"skip_special_tokens": False}
    assert text_of(http.post(TEXT, json=body | shown | {"allowed_token_ids": [start]})) == "<|im_start|><|im_start|>"
    assert text_of(http.post(TEXT, json=body | shown | {"allowed_token_ids": [end]})) == ""
    assert text_of(http.post(TEXT, json=body | shown | {"allowed_token_ids": [end],
                                                        "include_stop_str_in_output": True})) == "<|im_end|>"
    said, _ = calling
    body = HELLO | {"temperature": 0, "max_tokens": 40, "stop": ["look"]}
    assert text_of(said.post(CHAT, json=body)) == "Let me "
    body["include_stop_str_in_output"] = True
    assert text_of(said.post(CHAT, json=body)) == "Let me look"
    with said.stream("POST", CHAT, json=body | {"stream": True}) as stream:
        deltas = [choice["delta"] for chunk in events(stream) for choice in chunk["choices"]]
    assert "".join(delta.get("content", "") for delta in deltas) == "Let me look"


@pytest.mark.parametrize("expected", [ANSWER[:-1], "Well. Let me look." + ANSWER[12:-1], "nothing of it"])
def test_a_prediction_is_a_draft(calling: tuple[httpx.Client, Engine], expected: str) -> None:
    http, _ = calling
    body = HELLO | {"temperature": 0, "max_tokens": 120}
    plain = told(http.post(CHAT, json=body | {"speculation": "none"}))
    for content in (expected, [{"type": "text", "text": expected[:3]}, {"type": "text", "text": expected[3:]}]):
        drafted = told(http.post(CHAT, json=body | {"prediction": {"type": "content", "content": content}}))
        assert drafted["choices"][0]["message"] == plain["choices"][0]["message"]
        assert drafted["paceline"]["speculation"]["method"] == "prediction"
        counts = drafted["usage"]["completion_tokens_details"]
        stats = drafted["paceline"]["speculation"]
        assert counts["accepted_prediction_tokens"] == stats["accepted"]
        assert counts["rejected_prediction_tokens"] == stats["drafted"] - stats["accepted"]
    problem = refused(http, CHAT, body | {"prediction": {"type": "content", "content": "x"}, "speculation": "ngram"})
    assert problem["param"] == "prediction"


def test_what_is_predicted_rightly_is_accepted() -> None:
    """Whether it pays to draft is the engine's to say, so here it is made to."""
    engine = calling_engine()
    body = ChatBody.model_validate(HELLO | {"prediction": {"type": "content", "content": f"Well. {ANSWER[:-1]}"}})
    wish = speculation(body, ServeOptions(), engine)
    assert (wish.method, wish.k, wish.adaptive) == ("prediction", 32, True)
    name = engine.add("Hello|>", SamplingParams(temperature=0.0, max_tokens=100), speculation=replace(
        wish, adaptive=False))
    while engine.has_work:
        engine.step()
    record = engine.take(name)
    assert record.snapshot().outputs[0].token_ids == TOKENIZER.encode(ANSWER)[:100]
    assert record.speculation.accepted > 80, "it begins wrongly, and is found again"


EFFORTS = "{% for m in messages %}{{ m['content'] }}{% endfor %}{{ reasoning_effort }} {{ enable_thinking }}|>"


@pytest.mark.parametrize(("path", "given", "said"), [
    (CHAT, {"reasoning_effort": "low"}, "low True"), (CHAT, {"reasoning_effort": "none"}, "none False"),
    (CHAT, {"reasoning_effort": "low", "chat_template_kwargs": {"enable_thinking": False}}, "low False"),
    (CHAT, {}, " "),
    ("/v1/responses", {"reasoning": {"effort": "high", "summary": "auto"}}, "high True"),
    ("/v1/messages", {"thinking": {"type": "disabled"}}, "none False"),
    ("/v1/messages", {"thinking": {"type": "enabled", "budget_tokens": 1024}}, "medium True"),
    ("/v1/messages", {"thinking": {"type": "adaptive"}, "output_config": {"effort": "low"}}, "low True"),
    ("/api/chat", {"think": True}, "medium True"), ("/api/chat", {"think": False}, "none False"),
    ("/api/generate", {"think": "high", "prompt": "Hello"}, "high True")])
def test_the_template_hears_how_much_to_think(thinking: tuple[httpx.Client, list[str]], path: str,
                                              given: dict[str, Any], said: str) -> None:
    http, prompts = thinking
    own = {CHAT: HELLO | {"max_tokens": 1}, "/v1/responses": {"input": "Hello", "max_output_tokens": 1},
           "/v1/messages": HELLO | {"max_tokens": 1}}.get(path, {"model": NAME, "options": {"num_predict": 1}})
    if path == "/api/chat":
        own |= {"messages": HELLO["messages"]}
    assert http.post(path, json=own | given).status_code == 200
    assert prompts[-1] == f"Hello{said}|>"


@pytest.fixture(scope="module")
def thinking() -> Iterator[tuple[httpx.Client, list[str]]]:
    """A model whose template reads both variables, and the prompts that it got."""
    engine = calling_engine()
    engine.chat = ChatTemplate(EFFORTS)
    prompts: list[str] = []
    prepare = engine.prepare

    def noted(ids: Any, *rest: Any) -> Any:
        prompts.append(TOKENIZER.decode(ids))
        return prepare(ids, *rest)

    engine.prepare = noted  # type: ignore[method-assign]
    with served(engine) as url, httpx.Client(base_url=url, timeout=WAIT) as http:
        yield http, prompts


def test_half_a_character_is_no_salt(http: httpx.Client) -> None:
    body = json.dumps(HELLO | {"max_tokens": 1, "cache_salt": "\ud800"}).encode()
    answer = http.post(CHAT, content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "cache_salt"


def test_where_no_method_may_be_named_a_prediction_is_ignored() -> None:
    with served(tiny_engine(tokenizer=TOKENIZER), allow_speculation=("none",)) as url:
        answer = httpx.post(url + TEXT, json={"prompt": "a", "prediction": {"type": "content", "content": "b"}})
        assert told(answer)["paceline"]["speculation"] is None


# -- structure -------------------------------------------------------------------------------------------------------


def test_a_json_object_may_have_a_schema(http: httpx.Client) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a"], "additionalProperties": False}
    body = HELLO | {"response_format": {"type": "json_object", "schema": schema}, "max_tokens": 30}
    assert json.loads(text_of(http.post(CHAT, json=body))) == {"a": 1}


def test_faults_of_a_structure_are_told_of_the_clients_field(http: httpx.Client) -> None:
    bad = {"type": "object", "properties": {"a": {"type": "nonsense"}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": bad}}
    shape = {"type": "json_schema", "json_schema": {"name": "x", "schema": bad}}
    for more, param in (({"response_format": shape}, "response_format"), ({"guided_json": bad}, "guided_json"),
                        ({"guided_regex": "("}, "guided_regex"), ({"guided_grammar": "?"}, "guided_grammar"),
                        ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex"),
                        ({"response_format": {"type": "json_object", "schema": False}}, "response_format"),
                        ({"tools": [tool], "tool_choice": "required"}, "tools")):
        problem = refused(http, CHAT, HELLO | more)
        assert problem["param"] == param and param in problem["message"], more
    problem = refused(http, CHAT, HELLO | {"max_tokens": None, "max_completion_tokens": 1, "min_tokens": 2})
    assert problem["param"] == "min_tokens"


def test_a_field_of_several_kinds_says_all_that_it_is_not(http: httpx.Client) -> None:
    problem = refused(http, TEXT, ONCE | {"stop": 5})
    assert problem["param"] == "stop" and "string" in problem["message"] and "list" in problem["message"]
    problem = refused(http, CHAT, HELLO | {"tools": [{"type": "function", "function": {}}]})
    assert problem["param"] == "tools.0.function.name"
    problem = refused(http, CHAT, HELLO | {"tools": [{"type": "hammer"}]})
    assert problem["param"] == "tools.0" and "'function', 'custom'" in problem["message"]
