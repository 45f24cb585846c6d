"""Requests that do not run to their end: clients that leave, queues that are full, deadlines, a server that drains."""

from __future__ import annotations

import json
import signal
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
from serving import WAIT, ServerProcess, ServerThread, events, held, metrics_of, served, slowed, until

from paceline import LLM

CHAT = "/v1/chat/completions"
LONG: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4000, "ignore_eos": True}


def idle(server: ServerThread) -> bool:
    found = server.metrics()
    return found["vllm:num_requests_running"] == found["vllm:num_requests_waiting"] == 0


def used_blocks(server: ServerThread) -> float:
    return server.metrics()['paceline_cache_blocks{state="used"}']


def test_a_client_that_leaves_a_stream_frees_its_blocks(server: ServerThread) -> None:
    before = server.metrics().get('paceline_sequences_finished_total{reason="cancelled"}', 0.0)
    with httpx.stream("POST", server.url + CHAT, json=LONG | {"stream": True, "n": 2}, timeout=WAIT) as answer:
        chunks = events(answer)
        next(chunks), next(chunks)
        assert used_blocks(server) > 0
    until(lambda: used_blocks(server) == 0)
    until(lambda: server.metrics()['paceline_sequences_finished_total{reason="cancelled"}'] == before + 2)
    assert idle(server)


def test_a_client_that_leaves_is_counted_as_far_as_it_got(tiny_folder: Path) -> None:
    with served(LLM(str(tiny_folder), max_num_seqs=2).engine) as url:
        with httpx.stream("POST", url + CHAT, json=LONG | {"stream": True, "n": 2}, timeout=WAIT) as answer:
            chunks = events(answer)
            next(chunks), next(chunks)
            # This one never gets as far as a first step.
            with httpx.stream("POST", url + CHAT, json=LONG | {"stream": True}, timeout=WAIT) as waiting:
                assert waiting.status_code == 200
        found = until(lambda: (told := metrics_of(url)).get('vllm:request_success_total{finished_reason="abort"}') == 3
                      and told)
        assert found["vllm:request_prompt_tokens_count"] == 2
        for name in ("time_to_first_token", "request_queue_time", "request_prefill_time"):
            assert found[f"vllm:{name}_seconds_count"] == 1, name
        assert found["vllm:inter_token_latency_seconds_count"] > 0
        for name in ("e2e_request_latency", "request_decode_time", "request_inference_time"):
            assert found[f"vllm:{name}_seconds_count"] == 0, "it did not come to its end"
        assert found["vllm:request_generation_tokens_count"] == 0


def test_a_client_that_leaves_without_streaming_frees_its_blocks(server: ServerThread) -> None:
    before = server.metrics().get('paceline_sequences_finished_total{reason="cancelled"}', 0.0)
    host, port = server.url.removeprefix("http://").split(":")
    body = json.dumps(LONG).encode()
    with socket.create_connection((host, int(port)), WAIT) as client:
        client.sendall(f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
                       f"content-length: {len(body)}\r\n\r\n".encode() + body)
        until(lambda: used_blocks(server) > 0)
    until(lambda: used_blocks(server) == 0)
    until(lambda: server.metrics()['paceline_sequences_finished_total{reason="cancelled"}'] == before + 1)


def test_a_deadline_ends_a_request_and_keeps_its_text(server: ServerThread) -> None:
    answer = httpx.post(server.url + CHAT, json=LONG | {"timeout_s": 0.5}, timeout=WAIT).json()
    assert answer["choices"][0]["paceline"]["finish_reason"] == "timeout"
    assert answer["choices"][0]["finish_reason"] == "length", "OpenAI has no other word"
    assert 0 < answer["usage"]["completion_tokens"] < 4000


def test_the_servers_deadline_is_the_longest(tiny_folder: Path) -> None:
    with served(LLM(str(tiny_folder)).engine, timeout_s=0.5) as url:
        for wish in ({}, {"timeout_s": 500.0}):
            answer = httpx.post(url + CHAT, json=LONG | wish, timeout=WAIT).json()
            assert answer["choices"][0]["paceline"]["finish_reason"] == "timeout"


def test_a_full_queue_says_when_to_come_back(tiny_folder: Path) -> None:
    engine = LLM(str(tiny_folder), max_num_seqs=1, max_queue=1).engine
    with served(engine) as url, httpx.Client(base_url=url, timeout=WAIT) as client:
        fill_queue(client)
        until(lambda: metrics_of(url)['paceline_cache_blocks{state="used"}'] == 0)
        assert client.post(CHAT, json=LONG | {"max_tokens": 2}).status_code == 200


def fill_queue(client: httpx.Client) -> None:
    """One runs, one waits, and there is room for no more."""
    with client.stream("POST", CHAT, json=LONG | {"stream": True}) as first:
        chunks = events(first)
        next(chunks)
        with client.stream("POST", CHAT, json=LONG | {"stream": True}) as second:
            assert second.status_code == 200
            for more in ({}, {"stream": True}):
                refused = client.post(CHAT, json=LONG | more)
                assert refused.status_code == 429
                assert int(refused.headers["retry-after"]) >= 1
                assert refused.json()["error"]["code"] == "queue_full"
                assert refused.json()["error"]["type"] == "rate_limit_error"
            # Of several prompts one may find the queue full: then none is served.
            many = client.post("/v1/completions", json={"prompt": ["a", "b"], "max_tokens": 2})
            assert many.status_code == 429


def test_draining_lets_requests_finish_and_refuses_new_ones(tiny_folder: Path) -> None:
    with ServerThread(tiny_folder, settings={"drain_s": WAIT}) as server:
        go = held(server.engine, 4)
        body = LONG | {"max_tokens": 40, "stream": True, "speculation": "none"}
        with (httpx.Client(base_url=server.url, timeout=WAIT) as client,
              client.stream("POST", CHAT, json=body) as running):
            chunks = events(running)
            next(chunks)
            server.signal(signal.SIGTERM)
            until(lambda: client.get("/ready").status_code == 503)
            refused = client.post(CHAT, json=LONG)
            assert refused.status_code == 503 and refused.json()["error"]["code"] == "draining"
            assert "retry-after" in refused.headers
            assert client.get("/health").status_code == 200
            go.set()
            last = list(chunks)[-1]
            assert last["choices"][0]["finish_reason"] == "length"
            assert last["paceline"]["metrics"]["output_tokens"] == 40
        server.wait()


def test_what_does_not_finish_in_time_is_ended_and_told(tiny_folder: Path) -> None:
    with ServerThread(tiny_folder, settings={"drain_s": 0.2}) as server:
        slowed(server.engine)
        streamed: list[Any] = []
        whole: list[httpx.Response] = []

        def stream() -> None:
            with httpx.stream("POST", server.url + CHAT, json=LONG | {"stream": True}, timeout=WAIT) as answer:
                streamed.extend(events(answer))

        def ask() -> None:
            whole.append(httpx.post(server.url + CHAT, json=LONG, timeout=WAIT))

        asking = [threading.Thread(target=one) for one in (stream, ask)]
        for one in asking:
            one.start()
        until(lambda: server.metrics()["vllm:num_requests_running"] == 2)
        server.signal(signal.SIGTERM)
        for one in asking:
            one.join(WAIT)
        server.wait()
    assert streamed[-1]["error"]["code"] == "draining"
    assert whole[0].status_code == 503 and whole[0].json()["error"]["code"] == "draining"


def test_a_signal_drains_and_a_second_one_leaves_at_once(start: Callable[..., ServerProcess]) -> None:
    """The whole process, whose signals are real ones."""
    server = start("--drain", "600")
    with (httpx.stream("POST", server.url + CHAT, json=LONG | {"stream": True}, timeout=WAIT) as answer,
          httpx.Client(timeout=WAIT) as client):
        chunks = events(answer)
        next(chunks)
        server.signal(signal.SIGTERM)
        until(lambda: client.get(server.url + "/ready").status_code == 503)
        server.signal(signal.SIGINT)
        assert server.process.wait(WAIT) == 0
