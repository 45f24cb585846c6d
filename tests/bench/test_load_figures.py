"""What a load test makes of what it saw: arrivals, streams as bytes, figures and their intervals."""

from __future__ import annotations

import json
import random
import statistics
from typing import Any

import numpy as np
import pytest

from paceline.bench.report import Row
from paceline.bench.serving.arrivals import Level, levels, read_trace, schedule
from paceline.bench.serving.bootstrap import Resampled, percentile
from paceline.bench.serving.exchange import Exchange, read
from paceline.bench.serving.figures import Run, rows
from paceline.bench.serving.svg import ticks
from paceline.bench.serving.target import Target
from paceline.errors import ConfigError

HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


def exchange(*pieces: tuple[float, bytes]) -> Exchange:
    made = object.__new__(Exchange)
    made.started, made.hung_up, made.pieces = 10.0, False, list(pieces)
    return made


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def test_a_stream_is_read_however_it_is_torn() -> None:
    events = [b'data: {"choices": [{"text": "a", "finish_reason": null}]}\n\n',
              b'data: {"choices": [{"text": "b", "finish_reason": "length"}]}\r\n\r\n',
              b'data: {"choices": [], "usage": {"completion_tokens": 7}}\n\n', b"data: [DONE]\n\n"]
    whole = HEAD + b"".join(chunk(event[:30]) + chunk(event[30:]) for event in events if len(event) > 30) + b"0\r\n\r\n"
    for size in (1, 3, 7, len(whole)):
        found = read(exchange(*((11.0 + at, whole[at:at + size]) for at in range(0, len(whole), size))))
        assert (found["text"], found["tokens"], found["finish_reason"]) == ("ab", 7, "length")
        assert found["error"] is None and len(found["times"]) == 2
    first = whole.index(b"null}]}\n") + len(b"null}]}\n") - 1
    assert read(exchange(*((11.0 + at, whole[at:at + 1]) for at in range(len(whole)))))["times"][0] == 1.0 + first


def test_choices_and_thoughts_are_told_apart() -> None:
    """The same answer is the same text, whichever choice was quicker."""
    pieces = [{"index": 0, "delta": {"reasoning_content": "hm "}}, {"index": 1, "delta": {"content": "c"}},
              {"index": 0, "delta": {"content": "a"}}, {"index": 1, "delta": {"content": "d"}},
              {"index": 0, "delta": {"content": "b"}, "finish_reason": "stop"}]
    for order in (pieces, sorted(pieces, key=lambda one: one["index"])):
        events = b"".join(b"data: " + json.dumps({"choices": [piece]}).encode() + b"\n\n" for piece in order)
        found = read(exchange((11.0, HEAD + chunk(events) + b"0\r\n\r\n")))
        assert (found["text"], found["thoughts"], len(found["times"])) == ("abcd", "hm ", 5)


def test_calls_of_tools_are_part_of_what_is_written() -> None:
    """Names and arguments, in the order of the calls, however their pieces come; no ids, which are by chance."""
    def call(place: int, **function: str) -> dict[str, Any]:
        return {"index": place, "id": f"call_{random.random()}", "function": function}

    pieces = [[call(0, name="find", arguments="")], [call(1, name="open", arguments='{"b"')],
              [call(0, arguments='{"a": '), call(1, arguments=": 2}")], [call(0, arguments="1}")]]
    whole = [[{"function": {"name": "find", "arguments": '{"a": 1}'}},
              {"function": {"name": "open", "arguments": '{"b": 2}'}}]]
    for calls in (pieces, whole):
        events = b"".join(b"data: " + json.dumps({"choices": [{"index": 0, "delta": {"tool_calls": some}}]}).encode()
                          + b"\n\n" for some in calls)
        found = read(exchange((11.0, HEAD + chunk(events + b"data: [DONE]\n\n") + b"0\r\n\r\n")))
        assert (found["text"], found["calls"], found["error"]) == ("", 'find{"a": 1}open{"b": 2}', None)
        assert len(found["times"]) == len(calls)


@pytest.mark.parametrize(("raw", "said"), [
    (HEAD + chunk(b'data: {"error": {"message": "too full"}}\n\n'), "too full"),
    (HEAD + chunk(b'data: {"choices": [{"text": "a"}]}\n\n'), "the stream ended early"),
    (HEAD + chunk(b"data: {oops}\n\n"), "not a stream of completions"),
    (HEAD + b"what?\r\n", "not a stream of completions"),
    (b'HTTP/1.1 400 Bad\r\nContent-Length: 9\r\n\r\n{"error": {"message": "no such field"}}', "no such field"),
    (b"HTTP/1.1 502 Bad\r\n\r\n<html>gateway</html>", "<html>gateway"), (b"nonsense", "no answer")])
def test_what_is_no_answer_says_why(raw: bytes, said: str) -> None:
    assert said in read(exchange((11.0, raw)))["error"]


def test_arrivals() -> None:
    times = schedule(Level("poisson", 20.0), 4000, random.Random(1), 1)
    assert times[0] == 0.0 and times == sorted(times)
    gaps = np.diff(times)
    assert statistics.mean(gaps) == pytest.approx(0.05, rel=0.1) and gaps.std() == pytest.approx(0.05, rel=0.1)
    assert schedule(Level("poisson", 20.0), 9, random.Random(1), 1) == times[:9]
    assert schedule(Level("constant", 4.0), 3, random.Random(0), 8) == [0.0, 0.25, 0.5]
    assert schedule(Level("burst", 4.0), 5, random.Random(0), 2) == [0.0, 0.0, 0.5, 0.5, 1.0]
    assert schedule(Level("burst"), 3, random.Random(0), 2) == [0.0] * 3
    assert [one.name for one in levels(None, [1, 2.5, 1], [], False)] == ["poisson_1", "poisson_2.5"]
    assert [one.name for one in levels(None, [], [4, 16], False)] == ["closed_4", "closed_16"]
    assert levels(None, [], [], True) == [Level("trace")]


def test_a_trace_begins_at_nought_and_says_which_line_is_wrong(tmp_path: Any) -> None:
    file = tmp_path / "trace"
    file.write_text("7\n5.5\n\n6\n")
    assert [one.at_s for one in read_trace(file, 2.0)] == [0.0, 1.0, 3.0]
    for text, said in (("1\nsoon\n", "Line 2"), ("NaN", "Line 1"), ('{"time": 1}', "Line 1"), ("\n", "no arrivals")):
        file.write_text(text)
        with pytest.raises(ConfigError, match=said):
            read_trace(file)


def seen(start: float, times: list[float], fault: str | None = None, **more: Any) -> dict[str, Any]:
    return {"start_s": start, "late_s": 0.0, "connect_s": 0.0, "e2e_s": (times or [0.0])[-1] + 0.1, "status": 200,
            "fault": fault, "message": fault, "times": times, "tokens": None, "prompt_tokens": None,
            "cached_tokens": None, "text": ""} | more


def by_name(found: list[Row], level: str) -> dict[str, Row]:
    return {row.case.removeprefix(f"{level}_"): row for row in found}


def test_figures_by_hand() -> None:
    requests = [seen(1.0, [0.2, 0.3, 0.5], tokens=5, prompt_tokens=10), seen(0.0, [1.0]), seen(2.0, [], "http_429"),
                seen(3.0, []), seen(4.0, [0.1], "timeout", message="gave up")]
    counted = {"drafts": 4.0, "drafted": 20.0, "accepted": 8.0}
    run = Run.of({"elapsed_s": 10.0, "cpu_s": 0.5, "requests": requests}, counted)
    found = by_name(rows(Level("closed", clients=2), [run], {"ttft": 0.5, "tpot": 0.08}, (50, 100), 0), "closed_2")
    value = {name: row.paceline for name, row in found.items()}
    assert value["completed"] == 3 and value["failed"] == 2 and value["http_429"] == 1 and value["timeout"] == 1
    assert "1 timeout: gave up" in found["failed"].note
    assert value["request_rate"] == pytest.approx(0.3) and value["output_rate"] == pytest.approx((5 + 1 + 0) / 10)
    assert "total_rate" not in value, "not every answer says how long its prompt was"
    assert value["ttft_p50"] == pytest.approx(200) and value["ttft_p100"] == pytest.approx(1000)
    assert value["tpot_p50"] == pytest.approx(1e3 * 0.3 / 4), "by the tokens that the server counted"
    assert value["itl_p50"] == pytest.approx(100) and value["itl_p100"] == pytest.approx(200)
    assert value["slo_share"] == pytest.approx(2 / 5) and value["goodput"] == pytest.approx(0.2)
    assert value["acceptance"] == pytest.approx(0.4) and value["accepted_per_draft"] == 2.0
    assert value["client_cpu"] == pytest.approx(0.05)
    assert found["ttft_p50"].interval is None, "five requests say nothing about their spread"
    assert not found["ttft_p50"].higher_is_better and found["goodput"].higher_is_better


def test_intervals_hold_what_they_promise() -> None:
    """Of 200 runs of independent requests about 95 in 100 have the true figure in their interval."""
    luck = np.random.default_rng(3)
    drawn = Resampled([150], seed=1, draws=200)
    inside = inside_ratio = 0
    for _ in range(200):
        values = luck.exponential(1.0, 150)
        low, high = drawn.percentile([[value] for value in values], 0.5) or (0.0, 0.0)
        inside += low <= np.log(2.0) <= high
        low, high = drawn.ratio([1.0] * 150, values.tolist()) or (0.0, 0.0)
        inside_ratio += low <= 1.0 <= high
    assert 172 <= inside <= 200 and 172 <= inside_ratio <= 200


def test_neighbours_that_are_alike_widen_intervals() -> None:
    luck = np.random.default_rng(4)
    alike = np.repeat(luck.normal(10.0, 1.0, 30), 10).tolist()
    mixed = luck.permutation(alike).tolist()
    drawn, ones = Resampled([300], seed=2), [1.0] * 300
    wide, narrow = (high - low for low, high in (drawn.ratio(values, ones) or (0, 0) for values in (alike, mixed)))
    assert wide > 2 * narrow
    several = Resampled([100, 100, 100], seed=2)
    runs = [9.0] * 100 + [10.0] * 100 + [11.0] * 100
    low, high = several.ratio(runs, ones) or (0, 0)
    assert high - low > 1.0, "runs that differ are noise too"


def test_percentiles_that_too_few_lie_beyond_have_no_interval() -> None:
    values = [[float(place)] for place in range(100)]
    assert percentile(values, 0.5) == 49.0 and percentile(values, 1.0) == 99.0 and percentile([[]], 0.5) is None
    drawn = Resampled([100])
    assert drawn.percentile(values, 0.9) is not None and drawn.percentile(values, 0.99) is None


def test_addresses() -> None:
    plan = Target.parse("https://api.example.com/openai/v1/", "k").address("/v1/chat/completions")
    assert (plan["host"], plan["port"], plan["tls"]) == ("api.example.com", 443, True)
    assert plan["path"] == "/openai/v1/chat/completions" and plan["headers"] == {"authorization": "Bearer k"}
    plan = Target.parse("[::1]:8000").address("/v1/completions")
    assert (plan["host"], plan["port"], plan["authority"], plan["headers"]) == ("::1", 8000, "[::1]:8000", {})
    for wrong in ("ftp://x", "http://", "http://x:99999"):
        with pytest.raises(ConfigError, match="no address"):
            Target.parse(wrong)


def test_charts_have_round_marks() -> None:
    assert ticks(0.0) == [0.0, 1.0] and ticks(4.3) == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    for most in (0.003, 7.0, 99.9, 12345.0):
        marks = ticks(most)
        assert 4 <= len(marks) <= 7 and marks[-1] >= most, json.dumps(marks)
