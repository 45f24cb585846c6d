"""One server, several models: two tiny ones, loaded when they are asked for."""

from __future__ import annotations

import gc
import re
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from serving import WAIT, events, held, until
from two_models import SeveralThread

from paceline import LLM
from paceline.errors import EngineError
from paceline.serve import live
from paceline.serve.app import ROUTERS
from paceline.serve.quotas import LOADING, METERED, Quota

CHAT = "/v1/chat/completions"
ASK = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 6, "temperature": 0}


@pytest.fixture
def start(tiny_folder: Path) -> Iterator[Callable[..., SeveralThread]]:
    made: list[SeveralThread] = []

    def begin(**options: Any) -> SeveralThread:
        made.append(SeveralThread(tiny_folder, **options))
        return made[-1]

    yield begin
    for one in made:
        one.stop()


@pytest.fixture(scope="module")
def both(tiny_folder: Path) -> Iterator[SeveralThread]:
    made = SeveralThread(tiny_folder)
    yield made
    made.stop()


def said(answer: httpx.Response) -> str:
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["message"]["content"])


def test_the_model_field_chooses_and_the_first_is_meant_without(both: SeveralThread, offline: LLM) -> None:
    http = both.http
    assert both.states()["a"] == "loaded"
    texts = {said(http.post(CHAT, json=ASK | more)) for more in ({}, {"model": ""}, {"model": "a"}, {"model": "b"})}
    assert len(texts) == 1 and both.states() == {"a": "loaded", "b": "loaded"} and both.loads == ["a", "b"]
    named = http.post(CHAT, json=ASK | {"model": "b"}).json()
    assert named["model"] == "b"
    error = http.post(CHAT, json=ASK | {"model": "c"})
    assert error.status_code == 404 and error.json()["error"]["code"] == "model_not_found"
    assert "'a', 'b'" in error.json()["error"]["message"]
    assert http.get("/v1/models/b").json()["max_model_len"] == 512 and http.get("/v1/models/c").status_code == 404
    assert both.loads == ["a", "b"]


@pytest.mark.parametrize(("path", "body"), [
    ("/v1/completions", {"prompt": "x", "max_tokens": 1}), ("/v1/embeddings", {"input": "x"}),
    ("/v1/responses", {"input": "x", "max_output_tokens": 1}), ("/tokenize", {"prompt": "x"}),
    ("/detokenize", {"tokens": [5]}), ("/v1/messages", {"max_tokens": 1, "messages": ASK["messages"]}),
    ("/v1/messages/count_tokens", {"messages": ASK["messages"]}), ("/completion", {"prompt": "x", "n_predict": 1}),
    ("/apply-template", {"messages": ASK["messages"]}),
    ("/api/chat", {"messages": ASK["messages"], "options": {"num_predict": 1}, "stream": False}),
    ("/api/generate", {"prompt": "x", "options": {"num_predict": 1}, "stream": False}), ("/api/embed", {"input": "x"}),
    ("/api/show", {})])
def test_every_protocol_names_models(both: SeveralThread, path: str, body: dict[str, Any]) -> None:
    for name in ("a", "b", "b:latest" if path.startswith("/api/") else "b"):
        answer = both.http.post(path, json=body | {"model": name})
        assert answer.status_code == 200, answer.text
        assert answer.json().get("model", name) == name
    assert both.http.post(path, json=body | {"model": "c"}).status_code == 404


def test_a_response_goes_on_with_another_model(both: SeveralThread) -> None:
    first = both.http.post("/v1/responses", json={"model": "a", "input": "one", "max_output_tokens": 2}).json()
    second = both.http.post("/v1/responses", json={
        "model": "b", "input": "two", "max_output_tokens": 2, "previous_response_id": first["id"]})
    assert second.status_code == 200 and second.json()["model"] == "b"
    assert both.http.get(f"/v1/responses/{first['id']}").json()["model"] == "a"


def test_lists_probes_and_the_page(both: SeveralThread) -> None:
    http = both.http
    said(http.post(CHAT, json=ASK | {"model": "b"}))
    assert [model["name"] for model in http.get("/api/tags").json()["models"]] == ["a", "b"]
    assert [model["name"] for model in http.get("/api/ps").json()["models"]] == ["a", "b"]
    assert http.get("/health").status_code == http.get("/ready").status_code == 200
    about = http.get("/paceline/about?model=b").json()
    assert (about["model"], about["models"], about["max_model_len"]) == ("b", ["a", "b"], 512)
    assert http.get("/props?model=b").json()["model_alias"] == "b" and http.get("/version").json()["model"] == "a"
    assert len({one["n_ctx"] for one in http.get("/slots").json()}) == 2
    assert len(http.get("/paceline/requests").json()["requests"]) > 1
    with http.stream("GET", "/paceline/live") as live:
        assert next(events(live))["totals"]["requests"] > 1


def test_metrics_have_each_models_series_and_each_family_once(both: SeveralThread) -> None:
    said(both.http.post(CHAT, json=ASK | {"model": "b"}))
    text = both.http.get("/metrics").text
    families = re.findall(r"^# TYPE (\S+)", text, re.M)
    assert len(families) == len(set(families))
    assert len(re.findall(r"^# HELP (\S+)", text, re.M)) == len(families)
    for name in "ab":
        assert re.search(rf'^vllm:generation_tokens_total{{model_name="{name}"}} [1-9]', text, re.M)
        assert f'paceline_model_loads_total{{model_name="{name}"}} 1.0' in text
    assert re.search(r'^paceline_http_responses_total{model_name="",status="200"} [1-9]', text, re.M)
    series = [line.rpartition(" ")[0] for line in text.splitlines() if not line.startswith("#")]
    assert len(series) == len(set(series))


def test_a_model_that_is_loading_holds_up_nobody_and_who_gives_up_is_forgotten(
        start: Callable[..., SeveralThread]) -> None:
    server = start()
    server.gates["b"].clear()
    with pytest.raises(httpx.ReadTimeout):
        server.http.post(CHAT, json=ASK | {"model": "b"}, timeout=0.3)
    until(lambda: not server.several.pool["b"].waiters)
    late = server.http.post(CHAT, json=ASK | {"model": "b", "timeout_s": 0.05})
    assert late.status_code == 503 and late.json()["error"]["code"] == "timeout"
    assert server.states()["b"] == "loading"
    said(server.http.post(CHAT, json=ASK | {"model": "a"}))
    server.gates["b"].set()
    said(server.http.post(CHAT, json=ASK | {"model": "b"}))
    assert server.loads == ["a", "b"]
    until(lambda: not any(place.users for place in server.several.pool))


def test_models_that_do_not_fit_take_turns_and_a_running_stream_is_not_broken(
        start: Callable[..., SeveralThread], tiny_folder: Path) -> None:
    server = start(limit=1 << 20)
    gone = weakref.ref(server.several.pool["a"].loaded.llm.engine)  # type: ignore[union-attr]
    go = held(gone(), 2)
    answers: list[str] = []
    with server.http.stream("POST", CHAT, json=ASK | {"stream": True}) as stream:
        chunks = events(stream)
        next(chunks)
        other = threading.Thread(target=lambda: answers.append(said(server.http.post(CHAT, json=ASK | {"model": "b"}))))
        other.start()
        until(lambda: server.several.pool["b"].waiters)
        assert server.states() == {"a": "loaded", "b": "unloaded"}
        go.set()
        told = list(chunks)
    other.join(WAIT)
    assert told[-1]["choices"][0]["finish_reason"] and answers
    assert server.states() == {"a": "unloaded", "b": "loaded"}
    del go
    until(lambda: gc.collect() >= 0 and gone() is None)
    said(server.http.post(CHAT, json=ASK))
    assert server.loads == ["a", "b", "a"]


def test_a_load_that_fails_answers_for_itself_alone(start: Callable[..., SeveralThread]) -> None:
    server = start()
    server.broken.add("b")
    refused = server.http.post(CHAT, json=ASK | {"model": "b"})
    assert refused.status_code == 503 and refused.json()["error"]["code"] == "model_not_loaded"
    assert "secret" not in refused.text and int(refused.headers["retry-after"]) > 1
    assert server.states() == {"a": "loaded", "b": "failed"} and server.http.get("/health").status_code == 200
    said(server.http.post(CHAT, json=ASK))
    server.broken.clear()
    server.several.pool["b"].failed = -1e9  # long ago
    said(server.http.post(CHAT, json=ASK | {"model": "b"}))


def test_an_unloaded_model_is_gone_when_the_next_is_loaded(
        start: Callable[..., SeveralThread], monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the connection that asked it, which is open yet, nor a thread that read a text keeps it."""
    monkeypatch.setattr("paceline.serve.several.RECLAIM_S", 0.1)  # both end after five seconds without work
    server = start(limit=1 << 20)
    service = server.several.pool["a"].loaded
    assert service is not None
    server.watched.append(weakref.ref(service.llm.engine))
    del service
    with httpx.Client(base_url=server.url, timeout=WAIT) as first:
        said(first.post(CHAT, json=ASK))
        assert first.post("/tokenize", json={"prompt": "x" * 5000}).status_code == 200
        said(server.http.post(CHAT, json=ASK | {"model": "b"}))
    assert server.loads == ["a", "b"] and server.left == [False, False]


def test_a_model_that_something_refers_to_is_told_of(
        start: Callable[..., SeveralThread], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr("paceline.serve.several.RECLAIM_S", 0.001)
    server = start()
    kept = server.several.pool["a"].loaded.llm.engine  # type: ignore[union-attr]
    assert server.http.post("/api/generate", json={"model": "a", "keep_alive": 0}).status_code == 200
    until(lambda: server.several.pool["a"].state == "unloaded")
    assert kept is not None and "the model a is unloaded and something still refers to it" in caplog.text


def test_a_server_whose_models_all_failed_tries_again(start: Callable[..., SeveralThread]) -> None:
    server = start()
    server.broken |= {"a", "b"}
    assert server.http.post("/api/chat", json={"model": "a", "keep_alive": "0s"}).json()["done_reason"] == "unload"
    until(lambda: server.several.pool["a"].state == "unloaded")
    for name in "ab":
        refused = server.http.post(CHAT, json=ASK | {"model": name})
        assert refused.status_code == 503 and refused.json()["error"]["code"] == "model_not_loaded"
    assert server.http.get("/health").status_code == 503
    again = server.http.post(CHAT, json=ASK)
    assert again.json()["error"]["code"] == "model_not_loaded" and int(again.headers["retry-after"]) > 1
    server.broken.clear()
    for name in "ab":
        server.several.pool[name].failed = -1e9  # long ago
    assert server.http.get("/health").status_code == server.http.get("/ready").status_code == 200
    said(server.http.post(CHAT, json=ASK))


@pytest.mark.parametrize(("path", "keep_alive"), [("/api/generate", 0), ("/api/chat", "0"), ("/api/chat", "0s")])
def test_ollamas_stop_unloads_and_loads_nothing(
        start: Callable[..., SeveralThread], path: str, keep_alive: Any) -> None:
    server = start(api_keys=("k",), operator_keys=("o",))
    server.http.headers["authorization"] = "Bearer k"
    body = {"model": "a:latest", "keep_alive": keep_alive}
    refused = server.http.post(path, json=body)
    assert refused.status_code == 403 and server.states()["a"] == "loaded"
    server.http.headers["authorization"] = "Bearer o"
    assert server.http.post(path, json=body | {"model": "c"}).status_code == 404
    assert server.http.post(path, json=body | {"model": "b"}).json()["done_reason"] == "unload"
    server.several.pool["a"].users += 1
    assert server.http.post(path, json=body).json()["done_reason"] == "load" and server.states()["a"] == "loaded"
    server.several.pool["a"].users -= 1
    assert server.http.post(path, json=body).json()["done_reason"] == "unload"
    until(lambda: server.states()["a"] == "unloaded")
    assert server.loads == ["a"]


def test_only_so_many_requests_wait_for_a_model(start: Callable[..., SeveralThread]) -> None:
    server = start(max_queue=1)
    server.gates["b"].clear()
    answers: list[str] = []
    waiting = threading.Thread(target=lambda: answers.append(said(server.http.post(CHAT, json=ASK | {"model": "b"}))))
    waiting.start()
    until(lambda: server.several.pool["b"].waiters)
    refused = server.http.post(CHAT, json=ASK | {"model": "b"})
    assert refused.status_code == 429 and refused.json()["error"]["code"] == "queue_full"
    assert int(refused.headers["retry-after"]) >= 1
    server.gates["b"].set()
    waiting.join(WAIT)
    assert answers


def test_who_names_no_model_and_looks_on_has_none_loaded(start: Callable[..., SeveralThread]) -> None:
    server = start()
    said(server.http.post(CHAT, json=ASK | {"model": "b"}))
    server.http.post("/api/chat", json={"model": "a", "keep_alive": 0})
    assert server.http.get("/paceline/about").json()["model"] == "b"
    assert server.http.get("/props").json()["model_alias"] == "b" and server.loads == ["a", "b"]


def test_views_of_one_model_that_fails_are_left_out_and_memory_is_always_told(
        start: Callable[..., SeveralThread]) -> None:
    server = start()
    said(server.http.post(CHAT, json=ASK | {"model": "b"}))
    service = server.several.pool["a"].loaded
    assert service is not None

    async def broken() -> Any:
        raise EngineError("it broke")

    service.views = SimpleNamespace(reports=broken)  # type: ignore[assignment]
    del service
    text = server.http.get("/metrics").text
    assert 'vllm:num_requests_running{model_name="b"}' in text
    assert 'vllm:num_requests_running{model_name="a"}' not in text
    for name in "ab":
        server.http.post("/api/chat", json={"model": name, "keep_alive": 0})
    until(lambda: not server.several.loaded)
    text = server.http.get("/metrics").text
    assert 'paceline_memory_bytes{model_name="",part="heap"}' in text and "num_requests_running" not in text


def test_the_server_leaves_while_a_model_is_loading(start: Callable[..., SeveralThread]) -> None:
    server = start()
    server.gates["b"].clear()
    answers: list[httpx.Response] = []
    waiting = threading.Thread(target=lambda: answers.append(server.http.post(CHAT, json=ASK | {"model": "b"})))
    waiting.start()
    until(lambda: server.several.pool["b"].waiters)
    server.signal()
    waiting.join(WAIT)
    assert answers[0].status_code == 503 and answers[0].json()["error"]["code"] == "draining"
    server.wait()


def test_an_idle_model_goes_and_keys_and_quotas_are_the_servers(start: Callable[..., SeveralThread]) -> None:
    server = start(idle_s=0.05, api_keys=("k",))
    assert server.http.post(CHAT, json=ASK | {"model": "b"}).status_code == 401 and server.loads == ["a"]
    until(lambda: server.several.pool["a"].state == "unloaded")
    server.http.headers["authorization"] = "Bearer k"
    assert server.http.get("/health").status_code == 200 and server.states() == {"a": "unloaded", "b": "unloaded"}
    said(server.http.post(CHAT, json=ASK))


def test_what_may_have_a_model_loaded_counts_against_a_quota(start: Callable[..., SeveralThread]) -> None:
    server = start(quota=Quota(requests_per_minute=2))
    assert server.http.post("/tokenize", json={"prompt": "x"}).status_code == 200
    assert server.http.get("/paceline/about").status_code == 200
    assert server.http.get("/props?model=b").status_code == 429 and server.loads == ["a"]
    assert server.http.get("/v1/models").status_code == 200


def test_all_that_is_for_a_model_is_metered() -> None:
    routes: list[Any] = [route for router in (*ROUTERS, live.router) for route in router.routes]
    assert {route.path for route in routes if hasattr(route.endpoint, "__wrapped__")} == METERED | LOADING


def test_every_endpoint_with_a_body_says_whether_it_needs_a_model() -> None:
    """A new one that reads service_of() has to be for_model(): with several models there is none else."""
    routes: list[Any] = [route for router in ROUTERS for route in router.routes]
    without = {route.path for route in routes if "POST" in route.methods and not hasattr(route.endpoint, "__wrapped__")}
    assert without == {"/api/show"}
