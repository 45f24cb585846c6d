"""bench crowd: every method beside plain decoding, so many at once, and what differs is counted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engine.tiny import tiny_llm, tiny_model
from paceline import LLM
from paceline.bench import crowd
from paceline.bench.null_model import byte_tokenizer
from paceline.cli.main import main
from paceline.errors import ConfigError, RequestError
from paceline.request import SamplingParams


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    path = tmp_path / "question.jsonl"
    path.write_text("\n".join(json.dumps({"category": "qa", "turns": [f"{i} abcabcabc" + "x" * (i % 3)]})
                              for i in range(40)))
    return path


@pytest.fixture(autouse=True)
def _few_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crowd, "LEAST", 3)
    monkeypatch.setattr(crowd, "BATCHES", 1)


@pytest.fixture
def llm() -> LLM:
    return tiny_llm(tiny_model(vocab_size=256), byte_tokenizer(), max_model_len=256, max_num_seqs=4)


def test_every_method_at_every_number_and_temperature(dataset: Path, llm: LLM) -> None:
    found = crowd.run(dataset, methods="ngram,suffix", at_once=(1, 4), temperatures=(0.0, 0.8), max_tokens=4, llm=llm)
    assert [row["case"] for row in found["rows"]] == [
        "ngram 1", "suffix 1", "ngram 1 t0.8", "suffix 1 t0.8", "ngram 4", "suffix 4", "ngram 4 t0.8", "suffix 4 t0.8"]
    assert found["differences"] == 0 and found["settings"]["deterministic"] is llm.engine.kernels.deterministic
    assert all(row["paceline"] > 0 and row["peers"]["plain"] > 0 for row in found["rows"])
    assert ["3 of 3 texts equal" in row["note"] for row in found["rows"]] == [True] * 4 + [False] * 4
    assert all("4 of 4 texts equal" in row["note"] for row in found["rows"][4:])


def test_texts_that_differ_are_counted(dataset: Path, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = crowd.ask

    def bent(llm: LLM, prompts: Any, at_once: int, one: Any, params: Any) -> crowd.Round:
        found = honest(llm, prompts, at_once, one, params)
        if one.name == "ngram":
            found.texts[3] = (0, 0, 0)
        return found

    monkeypatch.setattr(crowd, "ask", bent)
    found = crowd.run(dataset, methods="ngram", at_once=(4,), max_tokens=4, rounds=1, llm=llm)
    assert found["differences"] == 1 and "3 of 4" in found["rows"][0]["note"]


def test_the_next_prompt_comes_when_one_is_answered(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    under_way: list[int] = []
    add = llm.engine.add

    def counted(*args: Any, **options: Any) -> str:
        request = add(*args, **options)
        under_way.append(sum(1 for _ in llm.engine.scheduler.running) + llm.engine.scheduler.queue_length)
        return request

    monkeypatch.setattr(llm.engine, "add", counted)
    plain = crowd.Contender("plain", None)
    found = crowd.ask(llm, ["a", "bb", "ccc", "dd", "e"], 2, plain, SamplingParams(max_tokens=3, temperature=0.0))
    lengths = [crowd.length(place, 3) for place in range(5)]
    assert lengths == [3, 2, 3, 2, 3]
    assert under_way == [1, 2, 2, 2, 1]  # the last one comes when two have ended together
    assert [len(text) for text in found.texts] == lengths and found.rate > 0
    alone = crowd.ask(llm, ["ccc"], 2, plain, SamplingParams(max_tokens=3, temperature=0.0))
    assert alone.texts == found.texts[2:3]
    assert crowd.length(3, None) is None
    for most in (72, 128, 146):
        found_lengths = {crowd.length(place, most) for place in range(most)}
        assert found_lengths <= set(range(most // 2, most + 1)) and len(found_lengths) > 0.45 * most


def test_prompts_too_few_or_too_long_are_refused(dataset: Path, llm: LLM) -> None:
    with pytest.raises(ConfigError, match="no two prompts of up to 5 characters"):
        crowd.run(dataset, longest=5, llm=llm)
    dataset.write_text("\n".join(json.dumps({"category": "qa", "turns": ["a" * 400]}) for _ in range(4)))
    with pytest.raises(RequestError, match="your prompt resulted in 400 "):
        crowd.run(dataset, at_once=(1,), llm=llm)


def test_the_command_line(dataset: Path, llm: LLM, monkeypatch: pytest.MonkeyPatch,
                          capsys: pytest.CaptureFixture[str]) -> None:
    seen: dict[str, Any] = {}

    def made(model: Any, **options: Any) -> LLM:
        seen.update(options)
        return llm

    monkeypatch.setattr(crowd, "LLM", made)
    monkeypatch.setattr("paceline.cli.bench._fetch", lambda model: None)
    arguments = ["bench", "crowd", "--dataset", str(dataset), "--methods", "ngram", "--max-tokens", "4"]
    assert main([*arguments, "--at-once", "1,2", "--check", "--json", "-"]) == 0
    assert [row["case"] for row in json.loads(capsys.readouterr().out)["rows"]] == ["ngram 1", "ngram 2"]
    assert seen["max_num_seqs"] == 2 and seen["deterministic"] is None
    for wrong in (["--at-once", "0"], ["--temperatures", "hot"], ["--temperatures", "-1"]):
        assert main([*arguments, *wrong]) != 0
    monkeypatch.setattr(crowd, "compare", lambda *_: {
        "plain": crowd.Rounds((crowd.Round(1.0, [(1,)] * 3, 1.0),)),
        "ngram": crowd.Rounds((crowd.Round(1.0, [(2,)] * 3, 1.0),))})
    assert main([*arguments, "--at-once", "1", "--check"]) == 1
    assert "3 texts differ" in capsys.readouterr().err


def test_rounds_count_by_their_median_and_texts_only_where_every_round_wrote_them() -> None:
    rounds = crowd.Rounds(tuple(crowd.Round(rate, [(1,), (second,)], 1.0)
                                for rate, second in ((2.0, 2), (9.0, 2), (4.0, 3))))
    assert rounds.rate == 4.0 and rounds.beside(rounds) == "0.50x to 2.25x"
    assert rounds.equal([(1,), (2,)]) == 1 and rounds.equal([(1,), (9,)]) == 1
