"""A server that has answered keeps nothing of a request but what is bounded: twice as many leave no more behind."""

from __future__ import annotations

import asyncio
import gc
import types
import weakref
from collections import Counter
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
from serving import WAIT, ServerThread, until

from paceline.engine.records.emitter import Emitter
from paceline.engine.records.record import Record
from paceline.engine.schedule.sequence import Sequence
from paceline.grammar.sequence import SequenceGrammar
from paceline.request import Request, SamplingParams
from paceline.sampling.state import SampleState
from paceline.serve.streaming import merged
from paceline.speculation.stats import SpeculationStats

ROUNDS = 4
OF_A_REQUEST: tuple[type, ...] = (
    Record, Request, SamplingParams, Sequence, Emitter, SampleState, SequenceGrammar, SpeculationStats, asyncio.Task,
    types.TracebackType, types.FrameType)
"""What there is of each, and of no other. Rings of recent requests hold none of these."""
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
SHORT: dict[str, Any] = {"prompt": "one two one two one two", "max_tokens": 3, "seed": 1, "ignore_eos": True}
MESSAGES = [{"role": "user", "content": "Hello."}]
ASKED: list[tuple[str, dict[str, Any]]] = [
    (COMPLETIONS, SHORT | {"logprobs": 2}), (COMPLETIONS, SHORT | {"n": 2, "cache_salt": "salt"}),
    (COMPLETIONS, SHORT | {"stream": True, "prompt": ["one", "two"]}),
    (COMPLETIONS, SHORT | {"use_beam_search": True, "best_of": 2, "temperature": 0}),
    (COMPLETIONS, SHORT | {"stop": ["a", "ab"], "speculation": "suffix"}),
    (CHAT, {"messages": MESSAGES, "max_tokens": 3, "stream": True}),
    (COMPLETIONS, SHORT | {"structured_outputs": {"choice": ["red", "green"]}}),
    (COMPLETIONS, SHORT | {"structured_outputs": {"regex": "(("}}),
    (COMPLETIONS, SHORT | {"speculation": "no such method"}), (COMPLETIONS, {"prompt": [10 ** 9]}),
    (CHAT, {"messages": []})]


def round_of_requests(client: httpx.Client, clients: ThreadPoolExecutor) -> None:
    list(clients.map(lambda ask: client.post(ask[0], json=ask[1]), ASKED))
    with client.stream("POST", COMPLETIONS, json=SHORT | {"max_tokens": 400, "stream": True}) as response:
        next(response.iter_lines())  # and leaves


def kept() -> Counter[str]:
    gc.collect()
    return Counter(type(one).__name__ for one in gc.get_objects() if isinstance(one, OF_A_REQUEST))


def test_nothing_of_a_request_is_kept(server: ServerThread) -> None:
    def rounds() -> Counter[str]:
        for _ in range(ROUNDS):
            round_of_requests(client, clients)
        until(lambda: not server.engine.has_work)
        client.get("/metrics")
        return kept()

    with httpx.Client(base_url=server.url, timeout=WAIT) as client, ThreadPoolExecutor(4) as clients:
        first, second = rounds(), rounds()
    grown = {name: count - first[name] for name, count in second.items() if count - first[name] >= ROUNDS}
    assert not grown, f"left behind by {ROUNDS} rounds of requests: {grown}"


class Heard:
    """A listener that hears one thing."""

    def __init__(self) -> None:
        self._left = 1

    def __aiter__(self) -> AsyncIterator[Any]:
        return self

    async def __anext__(self) -> Any:
        if not self._left:
            raise StopAsyncIteration
        self._left -= 1
        return "something"


def test_streams_that_have_ended_do_not_wait_for_the_collector() -> None:
    async def listen() -> list[weakref.ref[Heard]]:
        listeners: list[Any] = [Heard(), Heard()]
        assert [place async for place, _ in merged(listeners)] in ([0, 1], [1, 0])
        return [weakref.ref(one) for one in listeners]

    collects = gc.isenabled()
    gc.disable()
    try:
        assert [one() for one in asyncio.run(listen())] == [None, None]
    finally:
        if collects:
            gc.enable()
