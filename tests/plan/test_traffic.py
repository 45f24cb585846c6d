"""Traces of requests as files have them, and traffic that is made up."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import ConfigError
from paceline.plan.simulate.load_test import asked_again
from paceline.plan.simulate.traffic import Asked, Texts, made_up, read, traffic


def written(tmp_path: Path, *lines: Any) -> Path:
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return path


def test_lines_are_requests_in_order_of_time(tmp_path: Path) -> None:
    found = read(written(tmp_path, {"at": 9, "prompt_tokens": 30, "output_tokens": 4, "prefix": "p",
                                    "prefix_tokens": 20, "session": 3, "priority": -1, "tenant": "t"}, "",
                         {"timestamp": 7.5, "input_length": 12, "output_length": 6}, "8"), 100, 50)
    assert found == [Asked(0.0, 12, 6, line=3), Asked(0.5, 100, 50, line=4),
                     Asked(1.5, 30, 4, "p", 20, "3", -1, "t", line=1)]
    assert [one.at for one in read(written(tmp_path, "1000", "3000"), 1, 1, scale=0.001)] == [0.0, 2.0]


def test_prompts_may_be_given(tmp_path: Path) -> None:
    found = read(written(tmp_path, {"at": 0, "prompt": "to be or not"}, {"at": 1, "prompt": [5, 6, 7]},
                         {"at": 2, "prompt": "to be or what"},
                         {"timestamp": 3, "input_length": 700, "output_length": 2, "hash_ids": [4, 9]}), 100, 8)
    assert [one.prompt_tokens for one in found] == [4, 3, 4, 700]
    assert found[0].given[:3] == found[2].given[:3] and found[0].given != found[2].given
    assert found[1].given == (5, 6, 7) and [len(found[3].given), len(set(found[3].given))] == [700, 2]
    small = read(written(tmp_path, {"timestamp": 0, "input_length": 40, "hash_ids": [1, 2, 3], "turn": 1},
                         {"timestamp": 1, "input_length": 35, "hash_ids": [1, 2, 4]}), 100, 8)
    assert [one.prompt_tokens for one in small] == [40, 35] and small[0].given[:32] == small[1].given[:32]
    assert not set(small[0].given[32:]) & set(small[1].given)
    by_letters = read(written(tmp_path, {"at": 0, "prompt": "abc"}), 100, 8, tokenize=lambda text: list(map(ord, text)))
    assert by_letters[0].given == (97, 98, 99)


@pytest.mark.parametrize(("line", "problem"), [
    ("{", "Line 2 .*is not a request"), ({"prompt_tokens": 5}, "at must be a number"), ('{"at": NaN}', "at must be"),
    ({"at": 0, "prompt_tokens": -5}, "prompt_tokens must be a whole number from 1"),
    ({"at": 0, "output_tokens": 0}, "output_tokens must be"), ({"at": 0, "output_tokens": 1.5}, "output_tokens must"),
    ({"at": 0, "prompt": ""}, "prompt is empty"), ({"at": 0, "prompt": [1, "x"]}, "prompt must be a text or a list"),
    ({"at": 0, "prefix": "p"}, "go together"), ({"at": 0, "prefix_tokens": 5}, "go together"),
    ({"at": 0, "prompt_tokens": 5, "prefix": "p", "prefix_tokens": 6}, "whole prompt has 5"),
    ({"at": 0, "priority": "high"}, "priority must"), ({"at": 0, "promt_tokens": 5}, "unknown key 'promt_tokens'"),
    ([1, 2], "at must be")])
def test_lines_that_are_none_are_named(tmp_path: Path, line: Any, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem) as error:
        read(written(tmp_path, "0", line), 10, 10)
    assert str(error.value).startswith("Line 2 of")


def test_files_that_are_none(tmp_path: Path) -> None:
    for path in (tmp_path / "missing.jsonl", tmp_path):
        with pytest.raises(ConfigError, match="--simulate takes a file"):
            traffic(str(path), 1, 1)
    with pytest.raises(ConfigError, match="has no requests"):
        read(written(tmp_path, ""), 1, 1)


def test_times_without_end_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="too long"):
        read(written(tmp_path, "-1e308", "1e308"), 1, 1)
    with pytest.raises(ConfigError, match="--time-scale is for traces"):
        traffic("poisson:rate=1", 1, 1, scale=2.0)


def test_texts_begin_alike_where_they_should() -> None:
    trace = [Asked(0.0, 30, 5, "p", 20), Asked(1.0, 40, 5, "p", 20), Asked(2.0, 30, 5, "q", 20),
             Asked(3.0, 30, 5, session="s"), Asked(4.0, 50, 5, session="s"), Asked(5.0, 3, 5, given=(1, 2, 3))]
    texts = Texts(trace)
    first, second, third, turn, next_turn, given = (texts.tokens(one, place) for place, one in enumerate(trace))
    assert [len(one) for one in (first, second, third, turn, next_turn, given)] == [35, 45, 35, 35, 55, 8]
    assert first[:20] == second[:20] and not set(first[20:]) & set(second[20:]) and not set(first) & set(third)
    assert next_turn[:35] == turn and given[:3] == [1, 2, 3]


def test_made_up_traffic_is_the_same_by_its_seed() -> None:
    asked = "rate=20,seconds=30,prompt=64-128,output=8,prefixes=3,prefix=32"
    found = made_up(asked, 1, 1)
    assert found == made_up(asked, 1, 1) != made_up(asked + ",seed=1", 1, 1)
    assert len(found) == pytest.approx(600, rel=0.2) and {one.prefix for one in found} == {
        "prefix 0", "prefix 1", "prefix 2"}
    assert all(64 <= one.prompt_tokens <= 128 and one.output_tokens == 8 and one.prefix_tokens == 32 for one in found)
    talks = made_up("rate=20,seconds=30,prompt=64,output=8,turns=3", 1, 1)
    assert len({one.session for one in talks}) * 3 == len(talks)
    assert {one.prompt_tokens for one in talks} == {64, 64 + 8 + 64, 64 + 2 * 72}


@pytest.mark.parametrize("wrong", ["", "rate", "rate=x", "rate=0", "prefixes=-1", "prompt=5-2", "speed=3",
                                   "prompt=8,prefix=9,prefixes=2"])
def test_made_up_traffic_that_cannot_be(wrong: str) -> None:
    with pytest.raises(ConfigError, match="--simulate"):
        traffic(f"poisson:{wrong}", 100, 10)


def load_test(**settings: Any) -> dict[str, Any]:
    """As `paceline bench serve --json` writes it."""
    asked = {"trace": None, "time_scale": 1.0, "requests": 3, "dataset": "shared-prefix", "input_len": "8",
             "output_len": "4", "prefixes": 1, "prefix_len": 32, "seed": 0, "warmup": 2} | settings
    names = ["start_ms", "ttft_ms", "tpot_ms", "e2e_ms", "prompt_tokens", "tokens", "fault"]
    samples = [[0.0, 5.0, 1.0, 9.0, 40, 4, None], [10.0, None, None, 1.0, None, 0, "http_429"],
               [20.0, 5.0, 1.0, 9.0, 42, 3, None]]
    rows = [{"case": f"constant_9_{name}", "paceline": value} for name, value in (
        ("request_rate", 50.0), ("output_rate", 150.0), ("ttft_p50", 5.0), ("ttft_p99", 6.0))]
    return {"measured": "server", "settings": asked, "rows": rows,
            "levels": [{"name": "constant_9", "samples_are": names, "samples": samples}]}


def test_a_load_test_is_asked_again(tmp_path: Path) -> None:
    path = tmp_path / "real.json"
    path.write_text(json.dumps(load_test()))
    *before, first, second = asked_again(path)
    assert [(one.at, one.given[:32] == first.given[:32]) for one in before] == [(-60.0, True), (-60.0, True)]
    assert [one.output_tokens for one in before] == [4, 4]  # as many at once, and as long, as they were
    assert (first.at, first.prompt_tokens, first.output_tokens) == (0.0, 40, 4)
    assert (second.at, second.prompt_tokens, second.output_tokens) == (0.02, 42, 3)
    assert first.given[:32] == second.given[:32] and first.given[32:] != second.given[32:40]
    path.write_text(json.dumps(load_test(dataset="questions.jsonl")))
    assert not any(one.given for one in asked_again(path))
    late = load_test()
    late["levels"][0]["samples"] = [[500.0, *one[1:]] for one in late["levels"][0]["samples"]]
    path.write_text(json.dumps(late))
    assert asked_again(path)[-1].at == 0.5  # a run's rates count from its start, and so do times
    wrong_times = load_test()
    wrong_times["levels"][0]["samples"][0][0] = math.nan
    settings = {key: value for key, value in load_test()["settings"].items() if key != "dataset"}
    for wrong in ("{}", "[]", "{", json.dumps(load_test() | {"levels": []}), json.dumps(wrong_times),
                  json.dumps(load_test() | {"settings": settings}), json.dumps(load_test() | {"settings": []})):
        path.write_text(wrong)
        with pytest.raises(ConfigError, match="is not what `paceline bench serve --json FILE` writes"):
            asked_again(path)
