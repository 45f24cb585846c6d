"""What the page asks for, without a browser: frames of the live view, stories of requests, traces."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from serving import ServerThread, served, until
from small_tokenizers import byte_level

from engine.tiny import tiny_engine
from paceline.engine.core import Engine
from paceline.engine.observe.timeline import DECODE, Event
from paceline.models.tokenizer import Tokenizer
from paceline.sampling.trace import Trace
from paceline.serve import live, snapshot, stories
from paceline.serve.snapshot import CACHED, FREE, SHARED, USED, block_states, engine_state, packed, percentiles, runs
from paceline.serve.stories import piece, story

WAIT = 90.0
IDS = [5, 9, 5, 9, 5, 9, 11, 5, 9, 5, 9, 5]


@pytest.fixture
def engine() -> Engine:
    return tiny_engine(kv_blocks=30, max_num_seqs=3)


@pytest.fixture
def url(engine: Engine) -> Iterator[str]:
    with served(engine) as address:
        yield address


def ask(url: str, name: str = "one", **more: Any) -> dict[str, Any]:
    body = {"prompt": IDS, "max_tokens": 20, "temperature": 0, "ignore_eos": True} | more
    answer = httpx.post(f"{url}/v1/completions", json=body, headers={"x-request-id": name}, timeout=WAIT)
    assert answer.status_code == 200, answer.text
    told: dict[str, Any] = answer.json()
    return told


def get(url: str, path: str, **params: str) -> httpx.Response:
    return httpx.get(f"{url}/paceline/{path}", params=params, timeout=WAIT)


def frames(url: str) -> Iterator[dict[str, Any]]:
    with httpx.stream("GET", f"{url}/paceline/live", timeout=WAIT) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        for line in response.iter_lines():
            if line:
                yield json.loads(line.removeprefix("data: "))


def unpacked(group: dict[str, Any]) -> list[int]:
    packs = base64.b64decode(group["map"])
    return [packs[i // 4] >> i % 4 * 2 & 3 for i in range(group["blocks"])]


def test_every_way_to_speculate_that_the_page_offers_is_taken(server: ServerThread) -> None:
    told = get(server.url, "about").json()
    assert told["model"] == "tiny" and told["chat"] is True and told["speculation"] == "auto"
    for wish in told["methods"].values():
        spoken = ask(server.url, speculation=wish, prompt="the quick brown fox", max_tokens=6)
        assert spoken["paceline"]["speculation"]["failure"] is None


def test_a_frame_accounts_for_every_block_and_every_second(url: str) -> None:
    ask(url, speculation="ngram")
    told = next(frames(url))
    (group,) = told["cache"]["groups"]
    states = unpacked(group)
    assert group["blocks"] == len(states) == 30
    counted = [group[name] for name in ("free", "used", "shared", "cached")]
    assert counted == [states.count(state) for state in (FREE, USED, SHARED, CACHED)]
    assert group["cached"] == (len(IDS) + 20 - 1) // 8, "whole blocks of the finished text stay in the prefix cache"
    assert sum(tokens for _, tokens, *_ in told["seconds"]) == told["totals"]["output_tokens"] == 20
    assert sum(prompt for _, _, prompt, _ in told["seconds"]) == told["totals"]["prefill_tokens"]
    assert told["latency"]["count"] == 1 and len(told["latency"]["ttft_s"]) == 3
    assert told["speculation"][0]["method"] == "ngram"


def test_frames_show_who_runs_and_who_waits_and_their_blocks(url: str) -> None:
    threads = [threading.Thread(target=ask, args=(url, f"r{i}"), kwargs={"max_tokens": 120, "cache_salt": f"{i}"})
               for i in range(5)]
    for thread in threads:
        thread.start()
    for told in frames(url):
        running, waiting = told["running"], told["waiting"]
        assert len(running) == told["running_count"] <= 3
        if running and waiting:
            break
    assert all(one["id"].startswith("cmpl-r") and one["limit"] == 120 for one in (*running, *waiting))
    (group,) = told["cache"]["groups"]
    states = unpacked(group)
    held = [block for one in running for first, count in zip(one["blocks"][::2], one["blocks"][1::2])
            for block in range(first, first + count)]
    assert sorted(held) == [block for block, state in enumerate(states) if state in (USED, SHARED)]
    for thread in threads:
        thread.join(WAIT)


def test_many_viewers_cost_the_engine_no_more_than_one(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[float] = []

    def counted(engine: Engine, *more: Any) -> Any:
        taken.append(engine.clock())
        return engine_state(engine, *more)

    monkeypatch.setattr(snapshot, "engine_state", counted)

    def view() -> None:
        seen = frames(url)
        for _ in range(6):
            next(seen)

    viewers = [threading.Thread(target=view) for _ in range(6)]
    for viewer in viewers:
        viewer.start()
    for viewer in viewers:
        viewer.join(WAIT)
    gaps = [later - sooner for sooner, later in pairwise(taken)]
    assert len(taken) >= 6
    assert min(gaps) > 0.5 / live.FRAMES_A_SECOND


def test_a_story_has_all_tokens_and_the_line_agrees(url: str) -> None:
    told = ask(url, speculation={"method": "ngram", "k": 3, "adaptive": False}, provenance=True)
    name = told["paceline"]["request_id"]
    story = get(url, "request", id=name).json()
    tokens = told["choices"][0]["tokens"]
    assert [token for event in story["events"] for token in event["tokens"]] == [token["id"] for token in tokens]
    assert [origin for event in story["events"] for origin in event["origins"]] == [t["origin"] for t in tokens]
    drafted = [event["draft"] for event in story["events"] if event["draft"]]
    assert drafted and sum(len(draft["path"]) for draft in drafted) == story["speculation"]["accepted"]
    assert all(event["begun"] >= 0 for event in story["events"])
    (line,) = get(url, "requests").json()["requests"]
    assert {key: story[key] for key in line if key not in ("age_s",)} == {
        key: value for key, value in line.items() if key != "age_s"}
    assert line["state"] == "finished" and line["reason"] == "length" and not line["traced"]


def test_what_is_made_of_requests_is_made_off_the_engines_thread(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dicts for two hundred requests take milliseconds, in which nobody would get a token."""
    where: list[str] = []
    plain = stories.line

    def noted(*args: Any) -> Any:
        where.append(threading.current_thread().name)
        return plain(*args)

    monkeypatch.setattr(stories, "line", noted)
    asking = threading.Thread(target=ask, args=(url, "runs"), kwargs={"max_tokens": 80, "n": 2})
    ask(url, "over", n=2)
    asking.start()
    listed = until(lambda: [one for one in get(url, "requests").json()["requests"] if one["state"] != "finished"]
                   or not asking.is_alive())
    for one in listed if isinstance(listed, list) else ():
        assert one["reason"] is None and one["reasons"] == [] and one["metrics"]["prompt_tokens"] == len(IDS)
    asking.join(WAIT)
    over = get(url, "requests").json()["requests"][1]
    assert over["id"] == "cmpl-over" and over["reasons"] == ["length", "length"]
    assert where and not any("paceline-engine" in name for name in where)


def test_a_trace_is_given_to_those_who_asked_for_one(url: str) -> None:
    told = ask(url, "with", trace=True)
    answer = get(url, "trace", id=told["paceline"]["request_id"])
    assert answer.headers["content-disposition"] == 'attachment; filename="trace-cmpl-with.json"'
    assert Trace.from_json(answer.text).as_dict() == told["paceline"]["trace"]
    without = get(url, "trace", id=ask(url, "without")["paceline"]["request_id"])
    assert without.status_code == 404 and '"trace": true' in without.json()["error"]["message"]


@pytest.mark.parametrize("path", ["request", "trace"])
def test_an_unknown_request_is_a_clear_404(url: str, path: str) -> None:
    answer = get(url, path, id="never was")
    assert answer.status_code == 404 and "never was" in answer.json()["error"]["message"]
    assert get(url, path).status_code == 400


def test_text_is_whole_where_characters_are_split_between_tokens() -> None:
    tokenizer = Tokenizer(byte_level("smollm"))
    ids = tokenizer.encode("🚴 rides", add_special=False)
    told = story({}, [Event(DECODE, 0, 1.0, 2.0, 0, 1, 1, (token,)) for token in ids], 1.0, 0, tokenizer)
    pieces = [one for event in told["events"] for one in event["pieces"]]
    assert "".join(pieces) == "🚴 rides"
    assert pieces[0] == "", "the first token has only some of the bytes"


def test_a_prompt_is_known_by_its_last_message() -> None:
    tokenizer = Tokenizer(byte_level("smollm"))

    def known_by(message: str) -> str | None:
        chat = f"<|im_start|>user\n{message}<|im_end|>\n<|im_start|>assistant\n"
        return piece(tokenizer.encode(chat, add_special=False, parse_special=True), tokenizer)

    assert known_by("why is  the\nsky blue?") == "user why is the sky blue?"
    assert known_by("why " * 100) == f"user {'why ' * 100}"[:160] + "…"
    assert piece([1, 2, 3], None) is None and piece([], tokenizer) == ""


def test_the_live_stream_ends_when_the_server_is_told_to_leave(model_folder: Path) -> None:
    with ServerThread(model_folder) as server:
        for seen, _ in enumerate(frames(server.url)):
            if seen == 1:
                server.signal()
        server.wait()
        assert "Traceback" not in server.log()


def test_an_operator_can_do_without_the_page_and_nothing_is_recorded_then(engine: Engine) -> None:
    with served(engine, page=False) as url:
        ask(url)
        for path in ("/", "/page/app.js", "/paceline/live", "/paceline/requests"):
            assert httpx.get(f"{url}{path}", timeout=WAIT).status_code == 404
    assert not engine.observers


def test_states_are_two_bits_a_block_and_the_null_block_is_left_out() -> None:
    states = block_states([0, 0, 1, 2, 0, 3], bytes([0, 0, 1, 1, 1, 0]))
    assert states.tolist() == [FREE, USED, SHARED, CACHED, SHARED]
    assert base64.b64decode(packed(states)) == bytes([FREE | USED << 2 | SHARED << 4 | CACHED << 6, SHARED])
    many = np.random.default_rng(1).integers(0, 4, 1001).astype(np.uint8)
    assert unpacked({"map": packed(many), "blocks": 1001}) == many.tolist()


def test_runs_and_percentiles() -> None:
    assert runs([0, 0, 5, 6, 7, 3, 9]) == [4, 3, 2, 1, 8, 1]
    assert percentiles([None]) is None
    assert percentiles([3.0, None, 1.0, 2.0]) == [2.0, 3.0, 3.0]
    assert percentiles(map(float, range(1, 101))) == [50.0, 90.0, 99.0]
