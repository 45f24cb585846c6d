"""/api/...: Ollama's protocol, by hand."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from calling import ARGUMENTS, WEATHER, calling_engine
from serving import NAME, WAIT, ServerThread, served

from engine.tiny import tiny_engine
from paceline import LLM, SamplingParams, __version__
from paceline.bench.null_model import byte_tokenizer

ASKED: Any = [{"role": "user", "content": "Who are you?"}]
FIGURES = {"total_duration", "load_duration", "prompt_eval_count", "prompt_eval_duration", "eval_count",
           "eval_duration"}


@pytest.fixture(scope="module")
def caller() -> Iterator[str]:
    """Of a model that calls tools."""
    with served(calling_engine()) as url:
        yield url


def ask(url: str, path: str = "/api/chat", **more: Any) -> httpx.Response:
    options = {"seed": 7, "num_predict": 12, "num_ctx": 2048} | more.pop("options", {})
    body: dict[str, Any] = {"model": NAME, "options": options} | ({"messages": ASKED} if path == "/api/chat" else {})
    return httpx.post(f"{url}{path}", json=body | more, timeout=WAIT)


def lines(response: httpx.Response) -> list[dict[str, Any]]:
    assert response.headers["content-type"].startswith("application/x-ndjson")
    return [json.loads(line) for line in response.text.splitlines()]


def test_a_chat_is_streamed_unless_it_is_not_to_be(server: ServerThread, offline: LLM) -> None:
    want = offline.chat(ASKED, SamplingParams(max_tokens=12, seed=7))[0]
    found = lines(ask(server.url))
    assert len(found) > 2 and [line["done"] for line in found] == [False] * (len(found) - 1) + [True]
    assert "".join(line["message"]["content"] for line in found) == want.outputs[0].text
    last = found[-1]
    assert last["done_reason"] == want.outputs[0].finish_reason and last["model"] == NAME
    whole = ask(server.url, stream=False, model=f"{NAME}:latest", keep_alive="5m", think=False).json()
    assert whole["message"] == {"role": "assistant", "content": want.outputs[0].text} and whole["done"] is True
    for told in (last, whole):
        assert set(told) >= FIGURES and all(isinstance(told[name], int) for name in FIGURES)
        assert told["eval_count"] == len(want.outputs[0].token_ids) and told["total_duration"] > 0
        assert told["prompt_eval_count"] == len(want.prompt_token_ids)
        assert told["prompt_eval_duration"] + told["eval_duration"] <= told["total_duration"] + 1


def test_options_are_those_of_the_engine(server: ServerThread, offline: LLM) -> None:
    params = SamplingParams(max_tokens=9, seed=3, temperature=0.7, top_k=5, top_p=0.9, repetition_penalty=1.2)
    want = offline.chat(ASKED, params)[0].outputs[0].text
    answer = ask(server.url, stream=False, options={
        "num_predict": 9, "seed": 3, "temperature": 0.7, "top_k": 5, "top_p": 0.9, "repeat_penalty": 1.2,
        "num_gpu": 1, "mirostat": 0}).json()
    assert answer["message"]["content"] == want
    stop = want[2:4]
    stopped = ask(server.url, stream=False, options={
        "num_predict": 9, "seed": 3, "temperature": 0.7, "top_k": 5, "top_p": 0.9, "repeat_penalty": 1.2,
        "stop": [stop]}).json()
    assert stopped["message"]["content"] == want[:want.index(stop)] and stopped["done_reason"] == "stop"


@pytest.mark.parametrize(("options", "word"), [
    ({"num_predict": 0}, "num_predict"), ({"repeat_penalty": -1}, "repeat_penalty"),
    ({"num_predict": "x"}, "num_predict")])
@pytest.mark.parametrize("path", ["/api/chat", "/api/generate"])
def test_faults_are_told_by_the_names_that_were_sent(server: ServerThread, path: str, options: dict[str, Any],
                                                     word: str) -> None:
    more = {} if path == "/api/chat" else {"prompt": "x"}
    for raw in ({}, {"raw": True}) if more else ({},):
        refused = ask(server.url, path, options=options, **more, **raw)
        assert refused.status_code == 400 and word in refused.json()["error"], refused.text
        assert "max_tokens" not in refused.text and "repetition" not in refused.text


def test_a_prompt_that_is_too_long_is_one_here(server: ServerThread) -> None:
    refused = ask(server.url, "/api/generate", prompt="word " * 9000)
    assert refused.status_code == 400 and "your prompt resulted in" in refused.json()["error"]


def test_log_probabilities_may_be_declined(server: ServerThread) -> None:
    assert ask(server.url, stream=False, logprobs=False).status_code == 200
    assert "logprobs" in ask(server.url, logprobs=True).json()["error"]


def test_prompts_are_answered_or_continued(server: ServerThread, offline: LLM) -> None:
    params = SamplingParams(max_tokens=12, seed=7)
    messages = [{"role": "system", "content": "Be brief."}, *ASKED]
    answered = offline.chat(messages, params)[0].outputs[0].text
    found = lines(ask(server.url, "/api/generate", prompt="Who are you?", system="Be brief."))
    assert "".join(line["response"] for line in found) == answered and set(found[-1]) >= FIGURES
    continued = offline.generate(["Who are you?"], params)[0].outputs[0].text
    assert ask(server.url, "/api/generate", prompt="Who are you?", raw=True, stream=False).json()[
        "response"] == continued


def test_without_a_number_it_goes_on_to_the_end_of_the_context() -> None:
    with served(tiny_engine(tokenizer=byte_tokenizer(), max_model_len=64)) as url:
        for options in ({"seed": 1}, {"seed": 1, "num_predict": -1}):
            answer = httpx.post(f"{url}/api/generate", timeout=WAIT, json={
                "model": NAME, "prompt": "abc", "stream": False, "options": options}).json()
            assert answer["eval_count"] > 16 and answer["prompt_eval_count"] == 3


@pytest.mark.parametrize("headers", [{}, {"content-type": "application/x-www-form-urlencoded"}])
def test_bodies_are_json_whatever_they_are_called(server: ServerThread, headers: dict[str, str]) -> None:
    """As `curl -d` and several clients send them; but a page in a browser cannot ask a server that is not its own."""
    body = json.dumps({"model": NAME, "messages": ASKED, "stream": False, "options": {"num_predict": 1}}).encode()
    assert httpx.post(f"{server.url}/api/chat", content=body, headers=headers).json()["eval_count"] == 1
    page = {"origin": "http://elsewhere.example", "content-type": "text/plain"}
    assert httpx.post(f"{server.url}/api/chat", content=body, headers=page).status_code == 400


def test_formats(server: ServerThread) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
    answer = ask(server.url, stream=False, format=schema, options={"num_predict": 60}).json()
    assert json.loads(answer["message"]["content"])["a"] in (1, 2)
    begun = ask(server.url, "/api/generate", prompt="x", stream=False, format="json").json()["response"]
    assert begun.lstrip().startswith("{")


def test_calls_of_tools_are_told_whole(caller: str) -> None:
    given: Any = {"tools": [WEATHER], "options": {"temperature": 0, "num_predict": 1000, "stop": ["\x00"]},
                  "messages": [{"role": "user", "content": "weather?"}]}
    whole = ask(caller, stream=False, **given).json()["message"]
    assert whole["content"] == "Let me look."
    calls = [{"function": {"name": "get_weather", "arguments": ARGUMENTS}}] * 2
    assert whole["tool_calls"] == calls
    found = lines(ask(caller, **given))
    assert "".join(line["message"]["content"] for line in found) == "Let me look."
    assert [call for line in found for call in line["message"].get("tool_calls", ())] == calls
    further = [*given["messages"], whole, {"role": "tool", "tool_name": "get_weather", "content": "rain"}]
    assert ask(caller, stream=False, **given | {"messages": further}).status_code == 200


def test_embeddings(server: ServerThread, offline: LLM) -> None:
    want = offline.generate(["One", "Two more"], SamplingParams(max_tokens=0, pooling="mean"))
    answer = httpx.post(f"{server.url}/api/embed", json={"model": NAME, "input": ["One", "Two more"]}).json()
    assert answer["embeddings"] == [out.embedding for out in want]
    assert answer["prompt_eval_count"] == sum(len(out.prompt_token_ids) for out in want)
    assert httpx.post(f"{server.url}/api/embed", json={"model": NAME, "input": "One"}).json()[
        "embeddings"] == [want[0].embedding]
    old = httpx.post(f"{server.url}/api/embeddings", json={"model": NAME, "prompt": "One"}).json()
    assert old == {"embedding": want[0].embedding}


def test_what_there_is(server: ServerThread) -> None:
    def get(path: str) -> Any:
        return httpx.get(f"{server.url}{path}").json()

    assert get("/api/version") == {"version": __version__}
    assert [(model["name"], model["details"]["family"]) for model in get("/api/tags")["models"]] == [(NAME, "paceline")]
    shown = httpx.post(f"{server.url}/api/show", json={"model": f"{NAME}:latest"}).json()
    architecture = shown["model_info"]["general.architecture"]
    assert shown["model_info"][f"{architecture}.context_length"] == 4096
    assert shown["capabilities"] == ["completion", "embedding", "tools"] and "im_start" in shown["template"]
    loaded = ask(server.url, messages=[]).json()
    assert loaded["done"] is True and loaded["done_reason"] == "load"
    assert ask(server.url, "/api/generate", prompt="", keep_alive=0).json()["done_reason"] == "unload"
    assert [model["name"] for model in get("/api/ps")["models"]] == [NAME]


@pytest.mark.parametrize(("path", "more", "status", "word"), [
    ("/api/chat", {"options": {"mirostat": 2}}, 400, "mirostat"),
    ("/api/chat", {"options": {"num_predcit": 2}}, 400, "num_predcit"),
    ("/api/chat", {"options": {"temperature": "hot"}}, 400, "temperature"),
    ("/api/chat", {"format": "xml"}, 400, "format"),
    ("/api/chat", {"messages": [{"role": "user", "content": "x", "images": ["abc"]}]}, 400, "images"),
    ("/api/chat", {"model": "llama3"}, 404, "llama3"),
    ("/api/chat", {"model": "llama3", "messages": []}, 404, "llama3"),
    ("/api/generate", {"model": "llama3", "prompt": ""}, 404, "llama3"), ("/api/show", {"options": {}}, 400, "options"),
    ("/api/generate", {"prompt": "x", "context": [1]}, 400, "context"), ("/api/nothing", {}, 404, "Not Found")])
def test_errors_have_ollamas_shape(server: ServerThread, path: str, more: Any, status: int, word: str) -> None:
    refused = ask(server.url, path, **more)
    assert refused.status_code == status and set(refused.json()) == {"error"} and word in refused.json()["error"]
