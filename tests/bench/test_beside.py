"""bench serve --beside: two servers in turn, the same requests to both, ratios of turns, and texts that differ."""

from __future__ import annotations

import json
import socket
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from serving import ServerThread, write_model

from bench.stub_server import Stub
from paceline.bench.report import Row
from paceline.bench.serving.arrivals import Level
from paceline.bench.serving.beside import run
from paceline.bench.serving.datasets import Asks, Lengths
from paceline.bench.serving.load_test import LoadTest
from paceline.bench.serving.paired import Pair, interval, middle, paired
from paceline.cli.main import main


@pytest.fixture(autouse=True)
def no_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.bench.serving.beside.sleep", lambda seconds: None)


class Two:
    """Two stubs, and what came to whom in which order: pairs of a side and a body."""

    def __init__(self, **of_the_second: Any) -> None:
        self.came: list[tuple[str, dict[str, Any]]] = []
        second = {"answer": lambda place, body: None} | of_the_second
        answer = second.pop("answer")
        self.a = Stub(answer=lambda place, body: self.came.append(("a", body)))
        self.b = Stub(answer=lambda place, body: (self.came.append(("b", body)), answer(place, body))[1], **second)

    def __enter__(self) -> Two:
        return self

    def __exit__(self, *_: object) -> None:
        self.a.__exit__()
        self.b.__exit__()

    def bench(self, *options: str) -> int:
        return main(["bench", "serve", "--url", self.a.url, "--beside", self.b.url, *options])

    def blocks(self) -> list[tuple[str, list[dict[str, Any]]]]:
        """Those that came to the same side one after another."""
        found: list[tuple[str, list[dict[str, Any]]]] = []
        for side, body in self.came:
            if not found or found[-1][0] != side:
                found.append((side, []))
            found[-1][1].append(body)
        return found


def prompts(bodies: Sequence[dict[str, Any]]) -> list[str]:
    return sorted(body["prompt"] for body in bodies)


def write_prompts(target: Path, texts: Sequence[str]) -> str:
    target.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    return str(target)


def said(capsys: pytest.CaptureFixture[str]) -> str:
    return " ".join(capsys.readouterr().err.split())


def test_they_take_turns_at_the_same_requests(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target, html = tmp_path / "out.json", tmp_path / "out.html"
    with Two() as two:
        assert two.bench("--turns", "3", "--requests", "4", "--concurrency", "1,2", "--warmup", "2", "--temperature",
                         "0.7", "--slo", "e2e=30", "--json", str(target), "--html", str(html)) == 0
        warm, blocks = two.came[:4], two.came[4:]
    assert [side for side, _ in warm] == ["a", "a", "b", "b"]
    runs = [blocks[place:place + 4] for place in range(0, len(blocks), 4)]
    assert [{side for side, _ in run} for run in runs] == [{side} for side in 2 * "abbaab"], "who is first alternates"
    slices = [[sorted((body for _, body in run), key=json.dumps) for run in runs[place:place + 2]]
              for place in range(0, len(runs), 2)]
    assert all(first == second for first, second in slices), "seeds and all"
    asked = [body["prompt"] for first, _ in slices for body in first]
    assert len(asked) == len(set(asked)) == 24
    assert not {body["prompt"] for _, body in warm} & set(asked)
    assert prompts([body for _, body in warm[:2]]) == prompts([body for _, body in warm[2:]])

    document = json.loads(target.read_text())
    assert document["servers"] == {"a": two.a.url, "b": two.b.url} and document["settings"]["turns"] == 3
    assert [turn["order"] for turn in document["turns"]] == 2 * [["a", "b"], ["b", "a"], ["a", "b"]]
    assert document["texts"] == {"equal": 24, "of": 24, "unanswered": 0, "first_difference": None}
    rows = {row["case"]: row for row in document["rows"]}
    for case in ("closed_1_output_rate", "closed_2_ttft_p50", "closed_2_e2e_p90", "closed_1_goodput"):
        row = rows[case]
        assert len(row["a"]["turns"]) == len(row["b"]["turns"]) == 3
        assert row["ratio"]["turns"] == [a / b for a, b in zip(row["a"]["turns"], row["b"]["turns"])]
        assert row["a"]["range"][0] <= row["a"]["median"] <= row["a"]["range"][1]
    assert rows["closed_1_completed"]["a"]["turns"] == [4, 4, 4] and rows["closed_1_failed"]["ratio"] is None
    out = capsys.readouterr()
    assert "24 of 24 texts equal" in out.out and "closed_2_ttft_p50" in out.out and "first difference" not in out.out
    assert "closed_2, turn 3: A / B" in out.err and "4 of 4 texts equal" in out.err
    page = ElementTree.fromstring(html.read_text().removeprefix("<!doctype html>"))
    assert "24 of 24 texts equal" in "".join(page.itertext())
    assert len([one for one in page.iter() if one.tag.endswith("svg")]) == 2 * (1 + 2 + 4 * 3)


def test_six_turns_unless_it_is_said() -> None:
    with Two() as two:
        assert two.bench("--requests", "1", "--warmup", "0", "--input-len", "9") == 0
        assert "".join(side for side, _ in two.came) == "abbaabbaabba"


def test_arrivals_are_the_same_for_both(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text("".join(json.dumps({"timestamp": 0.01 * place, "input_length": 4 + place, "output_length": 2})
                             + "\n" for place in range(3)))
    with Two() as two:
        assert two.bench("--turns", "2", "--trace", str(trace), "--warmup", "0") == 0
        blocks = [(side, [len(body["prompt"].split()) for body in bodies]) for side, bodies in two.blocks()]
    assert blocks == [("a", [4, 5, 6]), ("b", 2 * [4, 5, 6]), ("a", [4, 5, 6])]


def test_texts_that_differ_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = write_prompts(tmp_path / "data.jsonl", [f"{'odd' if place % 3 else 'even'} prompt {place}\n{'x ' * 90}"
                                                   for place in range(12)])
    with Two(word=lambda body: "v" if body["prompt"].startswith("even") else "w") as two:
        assert two.bench("--turns", "3", "--requests", "4", "--concurrency", "3", "--warmup", "0", "--dataset", data,
                         "--json", str(tmp_path / "out.json")) == 0
        asked = [body["prompt"] for body in two.a.bodies]
    texts = json.loads((tmp_path / "out.json").read_text())["texts"]
    assert (texts["equal"], texts["of"], texts["unanswered"]) == (8, 12, 0)
    first = texts["first_difference"]
    shown = first["prompt"].removesuffix("…")
    assert len(shown) == 80 and shown.startswith("even prompt") and "\n" not in shown
    assert first["turn"] == next(place // 4 + 1 for place, text in enumerate(asked) if text.startswith("even"))
    assert (first["at"], first["a"], first["b"]) == (0, "w0 w1 w2 w3 w4 ", "v0 v1 v2 v3 v4 ")
    out = capsys.readouterr()
    assert "8 of 12 texts equal" in out.out and f"first difference (closed_3, turn {first['turn']}" in out.out


def test_calls_of_tools_are_compared(tmp_path: Path) -> None:
    data, target = tmp_path / "data.jsonl", tmp_path / "out.json"
    data.write_text("".join(json.dumps({"messages": [{"role": "user", "content": f"q{place}"}]}) + "\n"
                            for place in range(4)))
    with Two(calls=True, word=lambda body: "v" if body["messages"][0]["content"] == "q1" else "w") as two:
        two.a.calls = True
        assert two.bench("--turns", "2", "--requests", "2", "--warmup", "0", "--dataset", str(data), "--json",
                         str(target)) == 0
    texts = json.loads(target.read_text())["texts"]
    assert (texts["equal"], texts["of"]) == (3, 4) and texts["first_difference"]["prompt"] == "q1"
    assert texts["first_difference"]["b"].startswith("v0 v1")


def test_what_one_does_not_answer_is_no_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Two(answer=lambda place, body: 429 if place == 1 else None) as two:
        assert two.bench("--turns", "1", "--requests", "3", "--warmup", "0", "--json", str(tmp_path / "out.json")) == 0
    texts = json.loads((tmp_path / "out.json").read_text())["texts"]
    assert (texts["equal"], texts["of"], texts["unanswered"]) == (2, 2, 1)
    out = capsys.readouterr().out
    assert "2 of 2 texts equal, 1 not answered by both" in out and "turn 1, B: http_429: said 429" in out


def ratios(target: Path) -> dict[str, Any]:
    return {row["case"]: row["ratio"] for row in json.loads(target.read_text())["rows"]}


def test_a_turn_that_one_does_not_answer_has_no_ratios(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "out.json"
    for broken in ("a", "b"):
        with Two(answer=lambda place, body: 503 if place in (2, 3) else None) as two:
            url, beside = (two.b.url, two.a.url) if broken == "a" else (two.a.url, two.b.url)
            assert main(["bench", "serve", "--url", url, "--beside", beside, "--turns", "3", "--requests", "2",
                         "--warmup", "0", "--json", str(target)]) == 0
        turns = json.loads(target.read_text())["turns"]
        assert [list(turn["faults"]) for turn in turns] == [[], [broken], []]
        there = {case: [one is not None for one in ratio["turns"]] for case, ratio in ratios(target).items() if ratio}
        assert there["closed_8_output_rate"] == there["closed_8_ttft_p50"] == [True, False, True]
        assert all(not turn[1] for turn in there.values()), "a rate of nothing is no ratio of 0 either"
        out = capsys.readouterr()
        assert f"closed_8, turn 2, {broken.upper()}: http_503: said 503" in out.out
        assert "closed_8, turn 2: A / B - tok/s, 0 of 0 texts equal" in out.err


def test_a_level_that_they_never_both_answer_leaves_what_was_before_it(tmp_path: Path,
                                                                      capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "out.json"
    with Two(answer=lambda place, body: 503 if place >= 4 else None) as two:
        assert two.bench("--turns", "2", "--requests", "2", "--concurrency", "1,2", "--warmup", "0", "--json",
                         str(target)) == 0
    found = ratios(target)
    assert found["closed_1_output_rate"] and not found["closed_2_output_rate"]
    assert "closed_2, turn 2, B: http_503: said 503" in capsys.readouterr().out


@pytest.mark.parametrize("usage", [True, False])
def test_tokens_that_are_not_counted_are_not_compared(usage: bool, tmp_path: Path,
                                                      capsys: pytest.CaptureFixture[str]) -> None:
    """Events stand for them elsewhere, but drafts have several tokens in one."""
    target, html = tmp_path / "out.json", tmp_path / "out.html"
    options = ("--turns", "2", "--requests", "3", "--warmup", "0", "--slo", "tpot=1", "--json", str(target), "--html",
               str(html), *(() if usage else ("--no-usage",)))
    with Two(usage=False) as two:
        assert two.bench(*options) == 0
    rows = {row["case"].removeprefix("closed_8_"): row for row in json.loads(target.read_text())["rows"]}
    for name in ("output_rate", "total_rate", "tpot_p50", "output_tokens_mean", "prompt_tokens_mean", "goodput"):
        assert usage == (name in rows), name
        assert not usage or (rows[name]["b"] is None and rows[name]["ratio"] is None and rows[name]["a"] is not None)
    assert rows["ttft_p50"]["ratio"] is not None and rows["request_rate"]["ratio"] is not None
    out = capsys.readouterr()
    assert "B: 6 answers without a count of their tokens" in out.out and "A / B - tok/s, 3 of 3" in out.err
    assert ("A: 6 answers without" in out.out) == (not usage)
    assert ElementTree.fromstring(html.read_text().removeprefix("<!doctype html>")) is not None


def test_a_prompt_that_is_there_twice_is_asked_once(tmp_path: Path) -> None:
    data = write_prompts(tmp_path / "data.jsonl", [f"p{place % 6}" for place in range(12)])
    with Two() as two:
        assert two.bench("--turns", "3", "--requests", "2", "--warmup", "0", "--dataset", data) == 0
        assert prompts(two.a.bodies) == prompts(two.b.bodies) == [f"p{place}" for place in range(6)]


@pytest.mark.parametrize(("requests", "warmup", "words"), [
    (4, 0, "need 12 prompts that come once, and the dataset has 6: give a larger one, lower --turns or --requests."),
    (2, 1, "need 6 prompts that come once and 1 to warm up with, and the dataset has 6: give a larger one, lower "
           "--turns or --requests, or say --warmup 0.")])
def test_prompts_that_do_not_suffice_are_not_asked_again(requests: int, warmup: int, words: str, tmp_path: Path,
                                                         capsys: pytest.CaptureFixture[str]) -> None:
    """Not to warm up either: a prompt that has come is one that caches and drafters know."""
    data = write_prompts(tmp_path / "data.jsonl", [f"p{place}" for place in range(6)])
    with Two() as two:
        assert two.bench("--turns", "3", "--requests", str(requests), "--warmup", str(warmup), "--dataset", data) == 2
        assert not two.came
    assert f"3 turns of {requests} requests (levels: 1) {words}" in said(capsys)


def rates(a: float | None, b: float | None, a_first: bool = True) -> Pair:
    first, second = ([] if value is None else [Row("rate", "tok/s", value), Row("failed", "requests", 0.0)]
                     for value in (a, b))
    return Pair(first, second, a_first)


def test_figures_by_hand() -> None:
    rate, failed = paired([rates(10, 5), rates(30, 10, False), rates(12, 10), rates(7, None, False), rates(40, 10)], 0)
    assert (rate["unit"], rate["better"]) == ("tok/s", "higher")
    assert rate["a"] == {"median": 12, "range": [7, 40], "turns": [10, 30, 12, 7, 40]}
    assert rate["b"] == {"median": 10, "range": [5, 10], "turns": [5, 10, 10, None, 10]}
    assert rate["ratio"] == {"value": pytest.approx((2 * 3) ** 0.5), "range": [1.2, 4], "turns": [2, 3, 1.2, None, 4],
                             "interval": None}
    assert failed["ratio"] is None, "nothing is a multiple of nothing"
    only, = paired([Pair([Row("acceptance", "", 0.5)], [])], 0)
    assert only["b"] is None and only["ratio"] is None and only["a"]["median"] == 0.5
    one_order = middle([2.0, None, 3.0, None, 7.0], [True, False] * 2 + [True], 0)
    assert one_order is not None and one_order["value"] == 3.0 and one_order["interval"] is None


def test_the_ratio_is_that_of_turns_and_not_of_medians() -> None:
    """Both become slower by half: every turn still says 1.1."""
    speeds = [100.0, 90.0, 80.0, 70.0, 60.0, 50.0]
    rate = paired([rates(1.1 * speed, speed, place % 2 == 0) for place, speed in enumerate(speeds)], 0)[0]
    assert rate["ratio"]["interval"] == pytest.approx([1.1, 1.1]) and rate["ratio"]["value"] == pytest.approx(1.1)


class Slowing:
    """Stands for a server, of two equal ones on a machine on which every run is slower than the one before by 3 %."""

    base, model = "http://slowing", "m"

    def __init__(self, runs: list[str], **more: Any) -> None:
        self.runs, self.more = runs, more

    def counters(self) -> None:
        return None

    def drive(self, path: str, plan: dict[str, Any], progress: Any) -> dict[str, Any]:
        self.runs.append(path)
        second = 1.03 ** len(self.runs)
        one = {"start_s": 0.0, "late_s": 0.0, "e2e_s": second, "status": 200, "fault": None, "message": None,
               "times": [second / 2, second], "tokens": 8, "text": "w", "prompt_tokens": 4, "cached_tokens": None}
        return {"elapsed_s": second, "cpu_s": 0.0, "requests": [one | self.more for _ in plan["bodies"]]}


def slowly(turns: int, **of_the_second: Any) -> dict[str, Any]:
    runs: list[str] = []
    test = LoadTest([Level("closed", clients=1)], Asks("synthetic", Lengths(9, 9), Lengths(8, 8), 1, 1, 0), 2, warmup=0)
    targets: Any = {"a": Slowing(runs), "b": Slowing(runs, **of_the_second)}
    return run(targets, test, turns, 0.0, {})


@pytest.mark.parametrize("turns", [2, 3, 5, 6])
def test_a_steady_drift_is_no_difference(turns: int) -> None:
    """Equal servers are equal, though whoever comes second is always slower; a median of all ratios would say 3 %."""
    found = {row["case"]: row["ratio"] for row in slowly(turns)["rows"]}
    for case in ("closed_1_output_rate", "closed_1_ttft_p50", "closed_1_tpot_p90"):
        assert sorted({round(abs(one - 1), 2) for one in found[case]["turns"]}) == [0.03]
        assert found[case]["value"] == pytest.approx(1.0)
        assert found[case]["interval"] == (None if turns < 6 else pytest.approx([1.0, 1.0]))


@pytest.mark.parametrize(("turns", "effect"), [(6, 1.0), (10, 1.0), (10, 1.1)])
def test_intervals_hold_what_they_promise(turns: int, effect: float) -> None:
    """Of 100 tests about 90 have the true ratio in their interval, whatever it costs to come second."""
    luck = np.random.default_rng(5)
    a_first = [place % 2 == 0 for place in range(turns)]
    inside = 0
    for _ in range(300):
        ratios = luck.normal(1.0, 0.03, turns) * [effect if first else 1 / effect for first in a_first]
        low, high = interval(ratios.tolist(), a_first, 0) or (0.0, 0.0)
        inside += low <= 1.0 <= high
    assert 258 <= inside <= 294


def test_an_interval_needs_three_turns_of_each_order() -> None:
    ratios = [0.9, 1.0, 1.1, 1.2, 1.3, 1.4, 1.5]
    a_first = [place % 2 == 0 for place in range(7)]
    low, high = interval(ratios, a_first, 3) or (0.0, 0.0)
    assert interval(ratios, a_first, 3) == [low, high] and 0.9 < low < 1.2 < high < 1.5
    assert interval(ratios[:5], a_first, 0) is None and interval([*ratios[:5], None], a_first, 0) is None
    assert interval(ratios, [True] * 7, 0) is None


@pytest.mark.parametrize(("options", "words"), [
    (["--url", "http://x", "--turns", "3"], "give the second one with --beside"),
    (["--url", "http://x", "--rest", "3"], "--rest is for two servers"),
    (["--url", "http://x", "--beside", "http://y", "--rest", "inf"], "--rest is a number of seconds"),
    (["--beside", "http://x"], "give the first one with --url"),
    (["--url", "http://x", "--beside", "http://y", "--turns", "0"], "--turns"),
    (["--url", "http://x:80/v1", "--beside", "X"], "are the same server"),
    (["--url", "http://localhost:8000", "--beside", "127.0.0.1:8000/v1"], "are the same server"),
    (["--url", "[::1]:8000/a", "--beside", "http://LOCALHOST:8000/a/"], "are the same server"),
    (["--url", "http://x", "--beside", "ftp://y"], "--beside 'ftp://y' is no address"),
    (["--url", "http://x", "--beside", "http://y", "--chart", "x.png"], "leave it out with --beside"),
    (["--url", "http://x", "--beside", "http://y", "--repeats", "2"], "say with --turns how often"),
])
def test_mistakes_are_explained(options: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "serve", *options]) == 2
    assert words in said(capsys)


@pytest.mark.parametrize(("options", "seconds"), [([], 2.0), (["--rest", "0.25"], 0.25), (["--rest", "0"], 0.0)])
def test_nobody_is_asked_for_a_while_before_each_part(options: list[str], seconds: float, tmp_path: Path,
                                                      monkeypatch: pytest.MonkeyPatch) -> None:
    result = tmp_path / "out.json"
    with Two() as two:
        rests: list[tuple[float, int]] = []
        monkeypatch.setattr("paceline.bench.serving.beside.sleep",
                            lambda seconds: rests.append((seconds, len(two.came))))
        assert two.bench("--turns", "3", "--requests", "2", "--warmup", "0", "--json", str(result), *options) == 0
    assert rests == [(seconds, asked) for asked in range(0, 12, 2)]
    assert json.loads(result.read_text())["settings"]["rest"] == seconds


def test_a_second_server_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    with Stub() as stub, socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        assert main(["bench", "serve", "--url", stub.url, "--beside", f"127.0.0.1:{free.getsockname()[1]}"]) == 2
        assert not stub.bodies
    words = said(capsys)
    assert "No server answers at" in words and "correct --beside" in words


def test_second_servers_that_are_no_peers(capsys: pytest.CaptureFixture[str]) -> None:
    with Two(model="another") as two:
        assert two.bench() == 2 and not two.came
        words = said(capsys)
        assert "serves 'stub-model'" in words and "'another'" in words
        assert two.bench("--model", "both", "--requests", "1", "--turns", "1") == 0, "whoever says so knows it"
        assert {body["model"] for _, body in two.came} == {"both"}
    with Two(answer=lambda place, body: 404) as two:
        assert two.bench("--requests", "2") == 2
        assert f"{two.b.url} refuses what is asked (HTTP 404: said 404)" in said(capsys)
        assert two.bench("--requests", "2", "--warmup", "0") == 2
        assert f"{two.b.url} answered no request of turn 1 (http_404: said 404)" in said(capsys)


def test_ours_with_and_without_drafts_write_the_same(tmp_path: Path) -> None:
    folder, target = write_model(tmp_path / "tiny"), tmp_path / "out.json"
    with ServerThread(folder, speculation={"method": "ngram", "adaptive": False}, deterministic=True) as drafts, \
            ServerThread(folder, speculation=None, deterministic=True) as plain:
        assert main(["bench", "serve", "--url", drafts.url, "--beside", plain.url, "--turns", "2", "--requests", "2",
                     "--concurrency", "2", "--warmup", "0", "--input-len", "20", "--output-len", "16", "--ignore-eos",
                     "--json", str(target)]) == 0
    document = json.loads(target.read_text())
    assert document["texts"] == {"equal": 4, "of": 4, "unanswered": 0, "first_difference": None}
    rows = {row["case"]: row for row in document["rows"]}
    assert rows["closed_2_output_tokens_mean"]["ratio"]["turns"] == [1.0, 1.0]
    assert rows["closed_2_output_rate"]["ratio"]["value"] > 0
    assert rows["closed_2_acceptance"]["a"] is not None and rows["closed_2_acceptance"]["b"] is None
