"""bench soak, small: a tiny model for a second or two; and what it would notice."""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path

import pytest
from serving import write_model

from paceline import LLM
from paceline.bench import soak
from paceline.bench.soak import Look, Seen, differences, failed, leaks, offline
from paceline.bench.soak_client import Answer, _read
from paceline.bench.soak_traffic import PLAIN, asks


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


def test_what_grows_is_found() -> None:
    flat = [Look(float(at), 500 << 20, 9, 30 + at % 5) for at in range(400)]
    flat.append(Look(400.0, 500 << 20, 9, 30))
    assert leaks(flat)[0] == [] and leaks(flat)[1] == pytest.approx(0.0)
    files = [*flat, Look(401.0, 500 << 20, 9, 60)]
    threads = [*flat, Look(401.0, 500 << 20, 19, 30)]
    memory = [Look(float(at), (500 << 20) + at * (1 << 20), 9, 30) for at in range(400)]
    assert [leaks(looks)[0][0].split(":")[0] for looks in (files, threads, memory)] == ["files", "threads", "memory"]
    assert leaks(memory)[1] == pytest.approx(60 << 20, rel=0.01)
    assert leaks([Look(0.0)])[0] == []


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
