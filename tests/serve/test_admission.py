"""Nobody waits for somebody else's request before it is even admitted: what cannot fit is refused unread, and texts are
read neither on the event loop nor in the engine's thread."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

import httpx
import pytest
from serving import TEMPLATE, WAIT, served

from engine.tiny import BASE, tiny_engine, tiny_model
from paceline import AsyncLLM, SamplingParams
from paceline.bench.null_model import byte_tokenizer
from paceline.engine.core import Engine
from paceline.errors import RequestError
from paceline.fair_workers import THREADS
from paceline.models.chat import ChatTemplate
from paceline.sampling import stop
from paceline.sampling.state import SampleState
from paceline.serve import completions
from paceline.serve.containers import MOST_CONTAINERS, check_containers
from paceline.serve.options import ServeOptions
from paceline.serve.responses import JSONResponse
from paceline.text_threads import SHORT, TextThreads

CONTEXT = BASE["max_position_embeddings"]
TOO_LONG = "x" * (CONTEXT * 40)
"""No token of these tokenizers has 40 characters."""
TOOL = {"type": "function", "function": {"name": "f", "description": TOO_LONG}}


def build() -> Engine:
    engine = tiny_engine(tiny_model(vocab_size=256), byte_tokenizer())
    engine.chat = ChatTemplate(TEMPLATE)
    return engine


class Reads:
    """Who tokenised how many texts."""

    def __init__(self, engine: Engine) -> None:
        self.threads: list[str] = []
        tokenizer: Any = engine.tokenizer
        for name in ("encode", "encode_inside"):
            setattr(tokenizer, name, self._noting(getattr(tokenizer, name)))
        control = tokenizer.control
        control.encode_guarded = self._noting(control.encode_guarded)

    def _noting(self, method: Any) -> Any:
        def noted(*args: Any, **more: Any) -> Any:
            self.threads.append(threading.current_thread().name)
            return method(*args, **more)

        return noted


@pytest.mark.parametrize("path, body, param", [
    ("/v1/completions", {"prompt": TOO_LONG}, "prompt"), ("/v1/completions", {"prompt": [TOO_LONG, "x"]}, "prompt"),
    ("/v1/completions", {"prompt": TOO_LONG, "parse_special": True}, "prompt"),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": TOO_LONG}]}, "messages"),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": TOO_LONG}], "parse_special": True}, "messages"),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "tools": [TOOL]}, "messages"),
    ("/tokenize", {"prompt": TOO_LONG}, "prompt"),
    ("/tokenize", {"messages": [{"role": "user", "content": TOO_LONG}]}, "messages"),
    ("/v1/completions", {"prompt": ["x"] * 65, "n": 2}, "n"),
    ("/v1/completions", {"prompt": "x", "bad_words": ["x" * 70_000]}, "bad_words"),
])
def test_what_cannot_fit_is_refused_before_it_is_tokenised(path: str, body: dict[str, Any], param: str) -> None:
    engine = build()
    reads = Reads(engine)
    with served(engine) as url:
        answer = httpx.post(f"{url}{path}", json=body, timeout=WAIT)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == param
    assert reads.threads == []


def test_texts_are_read_beside_the_loop_and_the_engine() -> None:
    engine = build()
    reads = Reads(engine)

    async def ask() -> None:
        llm = AsyncLLM(engine=engine)
        params = SamplingParams(max_tokens=1, bad_words=("never",))
        await llm.complete("a prompt", params)
        async for _ in llm.generate("another", params):
            pass
        async for _ in llm.chat([{"role": "user", "content": "hello"}], params):
            pass
        llm.close()
        with pytest.raises(RequestError, match="closed"):
            await llm.complete("too late", params)

    asyncio.run(ask())
    with served(engine) as url, httpx.Client(base_url=url, timeout=WAIT) as http:
        chat = {"messages": [{"role": "user", "content": "x"}]}
        for path, body in (("/v1/completions", {"prompt": "x", "max_tokens": 1, "bad_words": ["y"]}),
                           ("/v1/chat/completions", chat | {"max_tokens": 1}), ("/tokenize", {"prompt": "x"}),
                           ("/tokenize", chat)):
            assert http.post(path, json=body).status_code == 200
    assert len(reads.threads) >= 10
    assert all(name.startswith("paceline-text") for name in reads.threads), reads.threads


def test_answers_are_written_beside_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[str] = []
    whole = completions._whole

    def noted(*args: Any) -> Any:
        threads.append(threading.current_thread().name)
        return whole(*args)

    monkeypatch.setattr(completions, "_whole", noted)
    with served(build()) as url:
        body = {"prompt": "x", "max_tokens": 40, "logprobs": 20, "n": 8, "ignore_eos": True}
        assert httpx.post(f"{url}/v1/completions", json=body, timeout=WAIT).status_code == 200
    assert threads and threads[0].startswith("paceline-")


def test_short_texts_do_not_wait_for_long_ones() -> None:
    async def ask() -> str:
        texts, go = TextThreads(), threading.Event()
        long = [asyncio.ensure_future(texts.run(SHORT + 1, go.wait)) for _ in range(3 * THREADS)]
        try:
            return await asyncio.wait_for(texts.run(SHORT, lambda: "done"), WAIT)
        finally:
            go.set()
            await asyncio.gather(*long)
            texts.close()

    assert asyncio.run(ask()) == "done"


def test_tenants_take_turns_at_the_threads() -> None:
    async def ask() -> list[str]:
        texts, go = TextThreads(), threading.Event()
        busy = [asyncio.ensure_future(texts.run(1, go.wait, "many")) for _ in range(THREADS)]
        order: list[str] = []
        waiting = [asyncio.ensure_future(texts.run(1, lambda who=who: order.append(who), who))
                   for who in (*["many"] * 20, "first")]
        await asyncio.sleep(0)
        go.set()
        await asyncio.gather(*busy, *waiting)
        texts.close()
        return order

    assert asyncio.run(ask()).index("first") <= THREADS


def test_parameters_are_read_once_for_all_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine's thread made the automaton of stop strings, checked all ids and read the prompt for each of them."""
    made: list[str] = []
    automaton, state = stop._automaton, SampleState.__init__

    def noted_automaton(*args: Any) -> Any:
        made.append("automaton")
        return automaton(*args)

    def noted_state(self: SampleState, *args: Any) -> None:
        made.append("state")
        state(self, *args)

    monkeypatch.setattr(stop, "_automaton", noted_automaton)
    monkeypatch.setattr(SampleState, "__init__", noted_state)
    engine = build()
    params = SamplingParams(n=8, max_tokens=1, stop=("never",), no_repeat_ngram_size=3, stop_token_ids=(5,) * 1000)
    engine.add("a prompt", params)
    assert made == ["state", "automaton"]
    assert params.stop_token_ids == (5,)


def test_parameters_are_read_once_for_all_prompts_of_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """A short body could have a thousand bad words tokenised, and a long stop string taken apart, for each prompt."""
    spelled: list[str] = []
    automata: list[Any] = []
    engine = build()
    spell, automaton = engine._spell, stop._automaton
    monkeypatch.setattr(engine, "_spell", lambda text: (spelled.append(text), spell(text))[1])
    monkeypatch.setattr(stop, "_automaton", lambda *args: (automata.append(args), automaton(*args))[1])
    with served(engine) as url:
        body = {"max_tokens": 2, "bad_words": ["never"], "stop": ["nor this"], "temperature": 0}
        alone = httpx.post(f"{url}/v1/completions", json=body | {"prompt": "b"}, timeout=WAIT).json()["choices"][0]
        spelled.clear()
        automata.clear()
        answer = httpx.post(f"{url}/v1/completions", json=body | {"prompt": ["a", "b", "c"]}, timeout=WAIT)
    assert answer.status_code == 200 and answer.json()["choices"][1]["text"] == alone["text"]
    assert spelled == ["never", " never"] and len(automata) == 1


def test_bodies_are_as_large_as_a_context_needs() -> None:
    options = ServeOptions()
    assert options.body_limit(4096) < options.body_limit(32_768) < options.body_limit(1 << 20) == 8_000_000
    assert ServeOptions(max_body_bytes=10).body_limit(1 << 20) == 10
    with served(build()) as url:
        answer = httpx.post(f"{url}/v1/completions", json={"prompt": "x" * 2_000_000}, timeout=WAIT)
        assert answer.status_code == 413


def test_a_body_of_a_million_lists_is_not_even_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parsing holds everybody up: a microsecond for each list and object."""
    with served(build()) as url:
        body = b'{"prompt": [' + b"[]," * (MOST_CONTAINERS + 1) + b"[]]}"
        parsed: list[int] = []
        loads = json.loads
        monkeypatch.setattr(json, "loads", lambda text, **more: (parsed.append(len(text)), loads(text, **more))[1])
        answer = httpx.post(f"{url}/v1/completions", content=body, timeout=WAIT,
                            headers={"content-type": "application/json"})
        assert answer.status_code == 400 and not any(size >= len(body) for size in parsed)
        assert "lists and objects" in answer.json()["error"]["message"]


@pytest.mark.parametrize("text", ["[{" * MOST_CONTAINERS, '\\"[{' * MOST_CONTAINERS, '"[' * MOST_CONTAINERS + "\\"])
def test_texts_may_hold_brackets(text: str) -> None:
    check_containers(json.dumps({"prompt": text}).encode())


@pytest.mark.parametrize("content", [
    {}, {"a": {}, "b": [], "c": [[]], "d": [{}], "é": "\ud800"},
    {"a": [{"b": {"c": [{"d": [{"e": [1, {"f": None}]}]}]}}]},
    {"choices": [{"logprobs": {"content": [{"token": "x", "bytes": [1, 2]}, {"token": "y", "bytes": []}]}}], "n": 1.5}])
def test_answers_are_the_same_json_piece_by_piece(content: Any) -> None:
    assert JSONResponse(content).body == json.dumps(content, separators=(",", ":")).encode()
