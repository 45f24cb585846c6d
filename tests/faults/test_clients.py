"""Clients that vanish, in every way and at every moment: the others' answers are what they are alone, and the server
keeps nothing of those who left."""

from __future__ import annotations

import asyncio
import json
import os
import random
import socket
import struct
import threading
import time
from collections.abc import Iterable
from typing import Any

import httpx
import pytest
from serving import WAIT, events, served, until

from engine.tiny import VOCAB, tiny_engine, tiny_llm
from engine.whole import check_at_rest, check_nobody_is_remembered
from paceline import SamplingParams
from paceline.async_llm import AsyncLLM
from paceline.engine.core import Engine
from speculation.worded import tokenizer

MOMENTS = range(12)
"""Engine steps that were taken when a client leaves."""
WAYS = ("closes", "aborts", "half closes", "half a head", "half a body", "reads nothing")
BODY: dict[str, Any] = {"prompt": [3, 1, 4, 1, 5], "max_tokens": 40, "temperature": 0.0, "stream": True,
                        "ignore_eos": True}
NEIGHBOUR: dict[str, Any] = BODY | {"prompt": [2, 7, 1, 8], "max_tokens": 24}


def sent(url: str, way: str, luck: random.Random) -> socket.socket:
    """What a client has sent when it leaves."""
    host, port = url.removeprefix("http://").split(":")
    content = json.dumps(BODY).encode()
    head = (f"POST /v1/completions HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(content)}\r\n\r\n").encode()
    made = socket.create_connection((host, int(port)), timeout=WAIT)
    if way == "half a head":
        made.sendall(head[:luck.randrange(1, len(head))])
    elif way == "half a body":
        made.sendall(head + content[:luck.randrange(len(content))])
    else:
        made.sendall(head + content)
    return made


def leave(made: socket.socket, way: str) -> None:
    if way in ("aborts", "reads nothing"):
        made.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    if way == "half closes":
        made.shutdown(socket.SHUT_WR)
        while made.recv(1 << 16):
            pass
    made.close()


def files() -> int:
    return len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0


def counted(engine: Engine) -> list[int]:
    """Steps that the engine has taken, each of them slow enough to leave in."""
    step, taken = engine.step, [0]

    def slow() -> Any:
        time.sleep(0.002)
        taken[0] += 1
        return step()

    engine.step = slow  # type: ignore[method-assign]
    return taken


class Names:
    """An observer that notes who was there."""

    def __init__(self) -> None:
        self.seen: set[str] = set()

    def admitted(self, record: Any) -> None:
        self.seen.add(record.request.id)

    def stepped(self, *_: Any) -> None: ...

    def closed(self, record: Any) -> None: ...


def check(moments: Iterable[int]) -> None:
    """One server; for each moment and way a client that leaves there, beside a neighbour."""
    before, threads = files(), threading.active_count()
    engine, names = tiny_engine(tokenizer=tokenizer()), Names()
    expected = tiny_llm(tokenizer=tokenizer()).generate([NEIGHBOUR["prompt"]], SamplingParams(
        max_tokens=24, temperature=0.0, ignore_eos=True))[0].outputs[0].text
    engine.observers.add(names)
    taken = counted(engine)
    with served(engine) as url:
        for number, (moment, way) in enumerate((moment, way) for moment in moments for way in WAYS):
            begun, found = taken[0], list[str]()
            neighbour = threading.Thread(target=listen, args=(url, found))
            neighbour.start()
            gone = sent(url, way, random.Random(number))
            until(lambda begun=begun, moment=moment: taken[0] >= begun + moment)
            leave(gone, way)
            neighbour.join(WAIT)
            assert "".join(found) == expected, (moment, way)
            until(lambda: not engine._records and not engine.has_work)
    check_at_rest(engine)
    check_nobody_is_remembered(engine, names.seen)
    until(lambda: files() <= before + 2 and threading.active_count() <= threads)


def listen(url: str, found: list[str]) -> None:
    with httpx.Client(base_url=url, timeout=WAIT) as http, http.stream(
            "POST", "/v1/completions", json=NEIGHBOUR) as stream:
        for chunk in events(stream):
            found.extend(choice["text"] for choice in chunk["choices"])


def test_clients_that_vanish_leave_nothing() -> None:
    check([0, 5])


@pytest.mark.full
@pytest.mark.parametrize("moment", MOMENTS)
def test_clients_that_vanish_at_any_moment_leave_nothing(moment: int) -> None:
    check([moment])


def test_who_fails_to_hear_of_an_end_harms_nobody() -> None:
    """What a server notes of requests that have ended is none of the clients' business."""
    llm = AsyncLLM(engine=tiny_engine())
    llm.on_end = lambda record: (_ for _ in ()).throw(ValueError(record.request.id))

    async def ask() -> list[Any]:
        params = SamplingParams(max_tokens=4, temperature=0.0)
        return [await llm.complete([number, 2], params) for number in range(1, VOCAB, 40)]

    try:
        assert all(out.finished and out.error is None for out in asyncio.run(ask()))
        assert llm.alive
    finally:
        llm.close()
    check_at_rest(llm.engine)
