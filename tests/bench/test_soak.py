"""bench soak, small: a tiny model for a second or two; and what it would notice."""

from __future__ import annotations

import json
import math
import random
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from serving import write_model

from paceline import LLM
from paceline.bench import soak
from paceline.bench.soak import Seen, differences, failed, offline
from paceline.bench.soak_client import Answer, _read
from paceline.bench.soak_process import Look, growth, leaks
from paceline.bench.soak_traffic import PLAIN, asks

MIB = 1 << 20


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("tiny"))


@pytest.mark.slow
def test_a_small_soak_finds_nothing_amiss(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(soak, "EVERY", 0.2)
    monkeypatch.setattr(soak, "DIFFERENT", 2 * len(PLAIN))
    result = soak.run(str(folder), minutes=0.05, clients=6, seed=3)
    assert not failed(result), [row for row in result["rows"] if row.get("note")]
    rows = {row["case"]: row["paceline"] for row in result["rows"]}
    assert rows["requests"] > 10 and rows["compared"] > 3 and rows["threads at rest"] > 0
    if sys.platform == "linux":
        assert 0 < rows["memory at rest: cache"] < rows["memory at rest"] and rows["Python objects at rest"] > 10_000
    json.dumps(result, allow_nan=False)


def test_requests_are_those_of_the_seed_and_of_every_kind() -> None:
    some = asks(60, 1, ("mine",))
    assert [one.key for one in some] == [one.key for one in asks(60, 1, ("mine",))] != [one.key for one in asks(60, 2)]
    assert {one.kind for one in some} == set(PLAIN) and "tools" not in {one.kind for one in asks(60, 1, tools=False)}
    assert any(one.adapter == "mine" == one.body["model"] for one in some)
    for ask in some:
        assert ask.params is None or ask.body["seed"] == ask.params.seed


def test_an_answer_that_differs_is_found(folder: Path) -> None:
    llm, seen = LLM(str(folder), deterministic=True), Seen()
    for ask in asks(3, 1):
        texts = offline(ask, llm) or ["always the same"]
        seen.asked[ask.key], seen.answers[ask.key] = ask, Counter({json.dumps(texts): 3})
    assert differences(seen, llm) == []
    for answers in seen.answers.values():
        answers[json.dumps(["something else"])] += 1
    assert len(differences(seen, llm)) == 3


def looks(memory: Callable[[float], float], cache: Callable[[float], float] = lambda at: 0.0,
          seconds: int = 1200) -> list[Look]:
    """MiB by minutes; memory is what there is without the cache."""
    return [Look(float(at), int((memory(at / 60) + cache(at / 60)) * MIB), 9, 30 + at % 5,
                 {"cache": cache(at / 60) * MIB, "heap": memory(at / 60) * MIB}) for at in range(0, seconds + 1, 5)]


def test_what_grows_is_found() -> None:
    flat = looks(lambda at: 500.0)
    assert leaks(flat) == [] and growth(flat).slope == pytest.approx(0.0)
    files, threads = replace(flat[-1], files=60), replace(flat[-1], threads=19)
    memory = looks(lambda at: 500.0 + at)
    assert [leaks(some)[0].split(":")[0] for some in ([*flat, files], [*flat, threads], memory)] == [
        "files", "threads", "memory"]
    assert "heap +1.00" in leaks(memory)[0] and growth(memory).slope == pytest.approx(MIB)
    kept = [replace(one, objects=40.0 * one.at) for one in memory]
    assert "Python's objects +2400.00" in leaks(kept)[0], "what is kept shows there, what is split up does not"
    assert leaks(looks(lambda at: 500.0 + 9 * at, seconds=200)) == [], "too short a run to be judged"
    assert leaks([Look(0.0)]) == [] and math.isinf(growth(flat[:4]).margin)


def test_pages_of_the_cache_and_what_is_filled_once_are_no_leak() -> None:
    def filling(at: float) -> float:
        return 4096 * (1 - math.exp(-at / 60))

    assert leaks(looks(lambda at: 640.0, filling)) == []
    assert leaks(looks(lambda at: 500.0 + 140 * min(1.0, at / 8))) == []
    assert [one.split(":")[0] for one in leaks(looks(lambda at: 640.0 + at, filling))] == ["memory"]


def test_noise_is_told_from_growth_by_its_margin() -> None:
    luck = random.Random(1)

    def noisy(slope: float) -> list[Look]:
        return looks(lambda at: 640.0 + slope * at + luck.gauss(0.0, 5.0))

    flat, leak = noisy(0.0), noisy(4.0)
    assert leaks(flat) == [] and 0.0 < growth(flat).margin < 2 * MIB
    assert abs(growth(flat).slope) < 2 * growth(flat).margin
    assert len(leaks(leak)) == 1 and abs(growth(leak).slope - 4 * MIB) < 2 * growth(leak).margin


def test_answers_are_read_whole_streamed_and_cut_off() -> None:
    def read(raw: bytes) -> Answer:
        answer = Answer(whole=True)
        _read(raw, answer)
        return answer

    whole = read(b'HTTP/1.1 200 OK\r\n\r\n{"choices": [{"text": "a"}, {"message": {"content": null, "tool_calls": '
                 b'[{"function": {"name": "f", "arguments": "{}"}}]}}]}')
    assert whole.texts == ["a", '[["f", "{}"]]'] and whole.whole
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    events = b'data: {"choices": [{"index": 0, "delta": {"content": "a"}}]}\n\ndata: {"choices": [{"index": 0, ' \
             b'"delta": {"content": "b"}}]}\n\n'
    pieces = [events[:40], events[40:], b"data: [DONE]\n\n"]
    body = b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces)
    assert read(head + body + b"0\r\n\r\n").texts == ["ab"]
    cut = read(head + body[:random.Random(1).randrange(60, 90)])
    assert not cut.whole
    refused = read(b"HTTP/1.1 429 Too Many\r\n\r\nfull")
    assert refused.status == 429 and refused.error == "full"
