"""bench acceptance: what is measured for which methods, that it is counted as papers count, and long prompts."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline import LLM, SamplingParams
from paceline.bench import acceptance
from paceline.bench.acceptance_table import markdown
from paceline.bench.long_prompts import behind
from paceline.bench.questions import read_questions
from paceline.bench.spec import OVERALL, Contender
from paceline.cli.main import main
from paceline.errors import ConfigError

FAMILY = Path(__file__).parents[1] / "family"
TURNS = {"writing": ("The captain looked at the sea, and", "and then he said"), "qa": ("My dear Mr. Bennet,",),
         "rag": ("To Sherlock Holmes she is always",)}


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    heads = [str(FAMILY / kind) for kind in ("dspark", "medusa")]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # threads of so small a model wait for each other where others want the cores
    yield LLM(str(FAMILY / "target"), device="cpu", heads=heads, kv_blocks=256)
    torch.set_num_threads(threads)


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    path = tmp_path / "question.jsonl"
    path.write_text("".join(json.dumps({"question_id": number, "category": category, "turns": turns}) + "\n"
                            for number, (category, turns) in enumerate(TURNS.items())))
    return path


@pytest.fixture
def text(tmp_path: Path) -> str:
    path = tmp_path / "book.txt"
    path.write_text("Call me Ishmael. Some years ago, never mind how long, I thought I would sail. " * 40)
    return str(path)


def wishes(methods: list[dict[str, Any]], **more: Any) -> list[tuple[str, str, float, str]]:
    given: dict[str, Any] = {"depths": (3, 5), "nodes": 8, "temperatures": (0.0, 1.0)} | more
    wanted = [Contender(wish["method"], wish) for wish in methods]
    return [(one.method, one.draft, one.temperature, one.wish["verify"])
            for one in acceptance.settings_of(wanted, **given)]


def test_chains_and_a_tree_greedy_and_sampled() -> None:
    assert wishes([{"method": "dspark"}]) == [
        ("dspark", "K=3", 0.0, "coupled"), ("dspark", "K=5", 0.0, "coupled"), ("dspark", "tree of 8", 0.0, "coupled"),
        ("dspark", "K=3", 1.0, "coupled"), ("dspark", "K=3", 1.0, "rejection"),
        ("dspark", "K=5", 1.0, "coupled"), ("dspark", "K=5", 1.0, "rejection"), ("dspark", "tree of 8", 1.0, "coupled")]
    assert wishes([{"method": "dspark"}], nodes=0, temperatures=(0.0,)) == [
        ("dspark", "K=3", 0.0, "coupled"), ("dspark", "K=5", 0.0, "coupled")]


def test_a_method_that_says_what_its_drafts_look_like_is_taken_at_its_word() -> None:
    assert wishes([{"method": "medusa", "choices": [[0], [1]]}]) == [
        ("medusa", "", 0.0, "coupled"), ("medusa", "", 1.0, "coupled")]
    assert wishes([{"method": "dspark", "verify": "multi-round"}], depths=(3,), nodes=0) == [
        ("dspark", "K=3", 0.0, "multi-round"), ("dspark", "K=3", 1.0, "multi-round")]


def test_nothing_adapts_and_only_methods_that_remember_texts_are_kept_apart() -> None:
    found = acceptance.settings_of([Contender("suffix", {"method": "suffix"}), Contender("mtp", {"method": "mtp"})],
                                   (2, 4), 0, (0.0,))
    assert all(one.wish["adaptive"] is False for one in found)
    assert [one.wish["k"] for one in found] == [2, 4, 2, 4]
    salts = [one.salt for one in found]
    assert len(set(salts[:2])) == 2 and salts[2:] == ["", ""]


def test_every_loaded_head_is_measured_and_texts_are_those_of_plain_decoding(
        dataset: Path, llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    result = acceptance.run(dataset, depths=(2, 3), nodes=6, temperatures=(0.0, 0.7), max_tokens=10, at_once=2, llm=llm)
    rows = {(row["method"], row["draft"], row["verify"], row["temperature"], row["category"]): row
            for row in result["rows"]}
    assert len(rows) == len(result["rows"]) == 2 * (3 + 5) * (3 + 1)
    assert {row["method"] for row in result["rows"]} == {"dspark", "medusa"}
    assert result["differences"] == 0
    for row in result["rows"]:
        assert row["drafts"] and 1.0 <= row["mean_accepted_tokens"] <= 4.0
        assert row["accepted"] == sum(round(share * reached) for share, reached in
                                      zip(row["conditional_acceptance"], row["reached"]))
    for (*key, category), row in rows.items():
        parts = [rows[*key, name]["drafts"] for name in ("mt_bench", "qa", "rag")]  # type: ignore[index]
        assert category != OVERALL or row["drafts"] == sum(parts)
    deep, flat = (rows["dspark", draft, "coupled", 0.0, OVERALL] for draft in ("K=3", "K=2"))
    assert len(deep["reached"]) == 3 and len(flat["reached"]) == 2
    assert rows["dspark", "tree of 6", "coupled", 0.0, OVERALL]["drafted"] > deep["drafted"], "siblings are counted"
    assert "3/3 questions" in capsys.readouterr().err, "progress is shown"
    json.dumps(result)


def test_the_texts_are_plain_decodings_own(dataset: Path, llm: LLM) -> None:
    question = read_questions(dataset)[1]
    (one,) = acceptance.settings_of(acceptance.contenders("medusa"), (3,), 0, (0.0,))
    found = acceptance.measure(llm, [question], one, 12, at_once=4)
    plain = llm.generate([question.turns[0]], SamplingParams(max_tokens=12, temperature=0.0))[0].outputs[0].token_ids
    assert found.texts == {(question.id, 0): tuple(plain)}


def test_a_text_that_differs_is_counted(dataset: Path, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    honest, calls = acceptance.measure, []

    def bent(*given: Any) -> acceptance.Outcome:
        out = honest(*given)
        calls.append(out)
        if len(calls) == 2:
            out.texts[next(iter(out.texts))] = (1, 2, 3)
        return out

    monkeypatch.setattr(acceptance, "measure", bent)
    result = acceptance.run(dataset, methods="dspark", depths=(1, 2), nodes=0, temperatures=(0.0,), max_tokens=4,
                            llm=llm)
    assert result["differences"] == 1 and "1 texts differ" in markdown(result)


def test_what_a_method_cannot_do_is_left_out_with_the_reason(dataset: Path, llm: LLM) -> None:
    result = acceptance.run(dataset, methods="ngram", depths=(2,), nodes=6, temperatures=(0.0,), max_tokens=4, llm=llm)
    assert {row["draft"] for row in result["rows"]} == {"K=2"}
    (reason,) = result["settings"]["left_out"].values()
    assert "tree" in reason and reason in markdown(result)


def test_no_head_and_no_method_is_explained() -> None:
    bare = LLM(str(FAMILY / "target"), device="cpu", heads=[], kv_blocks=8, max_model_len=64)
    with pytest.raises(ConfigError, match="--head"):
        acceptance.loaded_heads(bare)


def test_questions_are_asked_behind_a_text(dataset: Path, llm: LLM, text: str) -> None:
    found = behind(llm, read_questions(dataset), text, 200, 16)
    assert [question.group for question in found] == ["mt_bench", "qa", "rag"]
    for question in found:
        assert len(question.turns) == 1 and question.turns[0].startswith("Call me Ishmael.")
        assert question.turns[0].endswith(TURNS[question.category][0])
        assert 190 <= len(llm.render([{"role": "user", "content": question.turns[0]}])) <= 200


def test_the_answer_has_room_at_the_end_of_the_models_positions(dataset: Path, llm: LLM, text: str) -> None:
    positions = llm.engine.config.max_model_len
    for question in behind(llm, read_questions(dataset), text, positions, 16):
        assert len(llm.render([{"role": "user", "content": question.turns[0]}])) <= positions - 16


def test_texts_and_contexts_that_are_too_short_are_refused(dataset: Path, llm: LLM, text: str, tmp_path: Path) -> None:
    questions = read_questions(dataset)
    with pytest.raises(ConfigError, match="No question has room in 3"):
        behind(llm, questions, text, 3, 16)
    short = tmp_path / "short.txt"
    short.write_text("Call me Ishmael.")
    with pytest.raises(ConfigError, match="longer"):
        behind(llm, questions, str(short), 200, 16)
    with pytest.raises(ConfigError, match="--text"):
        acceptance.run(dataset, contexts=(200,), llm=llm)


def test_a_question_longer_than_the_context_is_left_out_alone(dataset: Path, llm: LLM, text: str,
                                                              capsys: pytest.CaptureFixture[str]) -> None:
    questions = read_questions(dataset)
    sizes = [len(llm.render([{"role": "user", "content": question.turns[0]}])) for question in questions]
    found = behind(llm, questions, text, min(sizes) + 4, 16)
    assert len(found) < len(questions) and "left out" in capsys.readouterr().err


def test_the_tables_are_markdown(dataset: Path, llm: LLM, text: str) -> None:
    result = acceptance.run(dataset, methods="dspark", depths=(2,), nodes=0, temperatures=(0.0, 1.0), contexts=(0, 128),
                            text=text, max_tokens=6, llm=llm)
    printed = markdown(result)
    assert printed.count("Mean accepted tokens") == 4 and "greedy, prompts of 128 tokens" in printed
    lines = printed.splitlines()
    assert "| draft | verified | drafted | overall | mt_bench | qa | rag | drafts |" in lines
    assert "| draft | verified | 1 | 2 |" in lines
    assert sum(line.startswith("| dspark K=2 | rejection |") for line in lines) == 4


def test_the_command_line_hands_everything_over(dataset: Path, llm: LLM, text: str, monkeypatch: pytest.MonkeyPatch,
                                                tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked: list[dict[str, Any]] = []

    def made(model: str | None, **given: Any) -> LLM:
        asked.append(given)
        return llm

    monkeypatch.setattr(acceptance, "LLM", made)
    monkeypatch.setattr("paceline.cli.bench._fetch", lambda model: None)
    target = tmp_path / "out.json"
    arguments = ["--dataset", str(dataset), "--methods", "dspark", "--head", "some", "--depths", "2", "--nodes", "0",
                 "--temperatures", "0", "--context", "0,64", "--text", text, "--limit", "2", "--max-tokens", "4",
                 "--at-once", "3", "--device", "cpu", "--json", str(target)]
    assert main(["bench", "acceptance", *arguments]) == 0
    assert {row["context"] for row in json.loads(target.read_text())["rows"]} == {0, 64}
    assert "| dspark K=2 | coupled |" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["acceptance", *arguments[:-1], "-"])
    acceptance.main()
    assert json.loads(capsys.readouterr().out)["settings"]["at_once"] == 3
    assert [given["heads"] for given in asked] == [["some"]] * 2 and asked[0] == asked[1]


def test_mistakes_are_refused_before_a_model_is_loaded(dataset: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["--methods", "warp"], ["--categories", "sports"], ["--context", "4096"], ["--depths", "three"],
                      ["--temperatures", "hot"], ["--context", "64", "--text", "nowhere.txt"]):
        assert main(["bench", "acceptance", "--dataset", str(dataset), *arguments]) == 2, arguments
        assert capsys.readouterr().err.startswith("error: ")


def test_what_a_device_drafts_by_itself_is_counted_too(dataset: Path) -> None:
    device = LLM(str(FAMILY / "target"), device="cpu", kernels="stepped", heads=[str(FAMILY / "dspark")], kv_blocks=64)
    result = acceptance.run(dataset, depths=(3,), nodes=0, temperatures=(0.0,), max_tokens=16, llm=device)
    for row in result["rows"]:
        assert row["reached"][0] == row["drafts"] and row["drafted"] > 2 * row["drafts"]
        assert row["accepted"] == sum(round(share * reached) for share, reached in
                                      zip(row["conditional_acceptance"], row["reached"]))
    assert result["rows"][0]["mean_accepted_tokens"] > 1.2
