"""bench spec: which questions, which methods, what is counted, and that --check can fail."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from engine.tiny import tiny_llm, tiny_model
from paceline import LLM
from paceline.bench import picture, spec, spec_chart
from paceline.bench.null_model import byte_tokenizer
from paceline.bench.questions import OWN_QUESTIONS, choose, read_questions
from paceline.bench.spec_table import beside, cells, show
from paceline.cli.main import main
from paceline.errors import ConfigError
from paceline.speculation.stats import SpeculationStats

SPEC_BENCH_CATEGORIES = ("writing", "roleplay", "coding", "translation", "summarization", "qa", "math_reasoning", "rag")


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    lines = [{"question_id": 10 * index + number, "category": category,
              "turns": [f"{category} {number} abcabcabcabc", "again abcabc"][:1 + (category == "writing")]}
             for index, category in enumerate(SPEC_BENCH_CATEGORIES) for number in range(3)]
    path = tmp_path / "question.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)) + "\n")
    return path


@pytest.fixture
def llm() -> LLM:
    return tiny_llm(tiny_model(vocab_size=256), byte_tokenizer(), max_model_len=256)


def test_mt_bench_is_one_category_and_shows_all_its_parts(dataset: Path) -> None:
    chosen = choose(read_questions(dataset), per_category=4)
    mt_bench = [question.category for question in chosen if question.group == "mt_bench"]
    assert mt_bench == ["writing", "roleplay", "coding", "writing"]
    assert [question.id for question in chosen if question.group == "rag"] == ["70", "71", "72"]


def test_a_cut_leaves_some_of_each_category(dataset: Path) -> None:
    chosen = choose(read_questions(dataset), per_category=2, limit=7)
    assert {question.group for question in chosen} == {"mt_bench", "translation", "summarization", "qa",
                                                       "math_reasoning", "rag"}
    assert len(chosen) == 7
    assert {question.group for question in choose(read_questions(dataset), categories="rag, writing")} == {
        "rag", "mt_bench"}


@pytest.mark.parametrize("text", ["", "not json", '{"category": "qa"}', '{"category": "qa", "turns": []}',
                                  '{"category": 3, "turns": ["x"]}', '{"category": "qa", "turns": [1]}', "[]"])
def test_a_file_that_is_no_dataset_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "q.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"q\.jsonl"):
        read_questions(path)


def test_a_missing_file_and_an_unknown_category_are_refused(dataset: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Cannot read"):
        read_questions(tmp_path / "none")
    with pytest.raises(ConfigError, match="'sports'"):
        choose(read_questions(dataset), categories="sports")
    with pytest.raises(ConfigError, match="limit"):
        choose(read_questions(dataset), limit=0)


def test_methods_are_names_or_json_with_options() -> None:
    found = spec.contenders("auto,ngram", ["ngram.max_n=4", "ngram.k=3"])
    assert [(one.name, one.wish) for one in found] == [
        ("auto", {"method": "auto"}), ("ngram", {"method": "ngram", "max_n": 4, "k": 3})]
    twice = spec.contenders('[{"method": "ngram", "k": 2}, {"method": "ngram", "k": 4}]')
    assert twice[0].name == "ngram" and "4" in twice[1].name
    trees = spec.contenders('[{"method": "medusa", "k": 3}, {"method": "medusa", "tree": true, "k": 3, "top_k": 4}, '
                            '{"method": "medusa", "choices": [[0], [1], [0, 0], [0, 1], [2]]}]')
    assert [one.name for one in trees] == [
        "medusa", "medusa tree=true top_k=4", "medusa choices=[[0], [1], [0, 0... no k"]
    assert not {"oracle", "wrong"} & {one.name for one in spec.contenders("all")}


@pytest.mark.parametrize(("methods", "options"), [
    ("{", ()), ('[{"k": 3}]', ()), ("ngram", ["k=3"]), ("ngram", ["ngram.k"]), ("ngram", ["suffix.k=3"])])
def test_mistakes_in_methods_are_explained(methods: str, options: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match="--"):
        spec.contenders(methods, options)


def test_a_tally_counts_as_spec_bench_does() -> None:
    tally = spec.Tally()
    stats = SpeculationStats("x", plain=2)
    stats.record(3, 3, 3, 4)
    stats.record(3, 1, 3, 2)
    tally.add(8, 2.0, [stats])
    tally.add(6, 1.0, [])
    assert tally.rate == pytest.approx((4.0 + 6.0) / 2)
    assert tally.stats.mean_accepted_length == 3.0
    assert tally.stats.tokens_per_step == 8 / 4
    assert tally.stats.acceptance_by_position == [1.0, 0.5, 0.5]


def test_every_method_runs_beside_plain_decoding(dataset: Path, llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    result = spec.run(dataset, methods="ngram,auto", per_category=1, max_tokens=8, check=True, llm=llm)
    rows = {(row["method"], row["category"]): row for row in result["rows"]}
    assert len(rows) == 2 * (6 + 1)
    for row in rows.values():
        assert row["ratio"] == pytest.approx(row["paceline"] / row["peers"]["plain"])
        assert row["mean_accepted_tokens"] >= 1.0 and row["tokens_per_step"] >= 1.0
    assert rows["auto", "overall"]["questions"] == 6
    assert rows["auto", "mt_bench"]["tokens"] == 2 * 7, "both turns are asked"
    assert "6/6" in capsys.readouterr().err
    header, lines = cells(result)
    assert header == ["", "plain", "ngram", "auto"]
    assert [line[0] for line in lines[:9]] == [
        *(f"speed-up, {name}" for name in ("mt_bench", "translation", "summarization", "qa", "math_reasoning", "rag",
                                           "overall")), "tok/s", "tokens a draft"]
    assert all(len(line) == 4 for line in lines)
    json.dumps(result)


def test_the_questions_of_a_conversation_follow_one_another(dataset: Path, llm: LLM) -> None:
    question = read_questions(dataset)[0]
    outs = spec.run_question(llm, question, spec.Contender("plain", None),
                             lambda name: spec.SamplingParams(max_tokens=3, temperature=0.0))
    assert len(outs) == 2
    assert outs[1].prompt == f"{question.turns[0]}\n{outs[0].outputs[0].text}\n{question.turns[1]}"


def test_all_takes_in_what_is_made_of_others(llm: LLM) -> None:
    admitted, left_out = spec.admit(llm, spec.contenders("all"), everyone=True)
    assert {"auto", "ngram", "specinfer", "merge", "cascade"} <= {one.name for one in admitted}
    assert not {"specinfer", "merge", "cascade"} & set(left_out) and "datastore" in left_out["rest"]
    chosen = {one.name: one.wish for one in spec.contenders("all", ['merge.drafters=["ngram"]'])}
    assert chosen["merge"] == {"method": "merge", "drafters": ["ngram"]}
    assert chosen["specinfer"] == {"method": "specinfer", "drafters": ["ngram", "suffix"]}


def test_all_leaves_out_what_needs_more_and_says_why(llm: LLM) -> None:
    wanted = [spec.Contender("ngram", {"method": "ngram"}), spec.Contender("oracle", {"method": "oracle"})]
    admitted, left_out = spec.admit(llm, wanted, everyone=True)
    assert [one.name for one in admitted] == ["ngram"]
    assert "tokens" in left_out["oracle"]
    with pytest.raises(Exception, match="tokens"):
        spec.admit(llm, wanted, everyone=False)


def test_check_fails_on_the_first_difference_with_both_lists(dataset: Path, llm: LLM,
                                                             monkeypatch: pytest.MonkeyPatch) -> None:
    honest = spec.run_question

    def bent(llm: LLM, question: Any, one: spec.Contender, params: Any) -> Any:
        outs = honest(llm, question, one, params)
        if one.name == "ngram":
            outs[0].outputs[0].token_ids[2] ^= 1
        return outs

    monkeypatch.setattr(spec, "run_question", bent)
    with pytest.raises(spec.Difference, match="token 2 of question") as caught:
        spec.run(dataset, methods="ngram", limit=1, max_tokens=6, check=True, llm=llm)
    assert len(caught.value.plain) == len(caught.value.drafted) == 6
    assert str(caught.value.plain) in str(caught.value) and str(caught.value.drafted) in str(caught.value)
    spec.run(dataset, methods="ngram", limit=1, max_tokens=6, check=False, llm=llm)


def test_the_command_line_refuses_before_it_loads_anything(dataset: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["--methods", "warp"], ["--categories", "sports"], ["--option", "x"]):
        assert main(["bench", "spec", "--dataset", str(dataset), *arguments]) == 2
        assert capsys.readouterr().err.startswith("error: ")


def test_the_command_line_hands_everything_over(dataset: Path, llm: LLM, monkeypatch: pytest.MonkeyPatch,
                                                tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(spec, "LLM", lambda model, kernels, heads: llm)
    monkeypatch.setattr("paceline.cli.bench._fetch", lambda model: None)
    target = tmp_path / "out.json"
    arguments = ["--dataset", str(dataset), "--methods", "auto", "--limit", "2", "--max-tokens", "4", "--check",
                 "--json", str(target)]
    assert main(["bench", "spec", *arguments]) == 0
    assert json.loads(target.read_text())["settings"]["checked"] is True
    assert "auto" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["spec", *arguments])
    spec.main()
    assert "auto" in capsys.readouterr().out


def test_a_difference_is_exit_code_1(dataset: Path, monkeypatch: pytest.MonkeyPatch,
                                     capsys: pytest.CaptureFixture[str]) -> None:
    def differ(*args: Any, **kwargs: Any) -> Any:
        raise spec.Difference("ngram", read_questions(dataset)[0], 0, [1, 2], [1, 3])

    monkeypatch.setattr(spec, "run", differ)
    monkeypatch.setattr("paceline.cli.bench._fetch", lambda model: None)
    assert main(["bench", "spec", "--dataset", str(dataset), "--methods", "ngram"]) == 1
    assert "[1, 2]" in capsys.readouterr().err


def test_without_a_dataset_a_few_questions_of_each_kind_are_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    questions = read_questions(OWN_QUESTIONS)
    kinds = [question.group for question in questions]
    assert {kind: kinds.count(kind) >= 3 for kind in kinds} == dict.fromkeys(
        ("mt_bench", "translation", "summarization", "qa", "math_reasoning", "rag"), True)
    assert OWN_QUESTIONS.stat().st_size < 20_000
    asked: list[Any] = []

    def differ(dataset: Any, *args: Any, **kwargs: Any) -> None:
        asked.append(dataset)
        raise spec.Difference("ngram", questions[0], 0, [1, 2], [1, 3])

    monkeypatch.setattr(spec, "run", differ)
    monkeypatch.setattr("paceline.cli.bench._fetch", lambda model: None)
    assert main(["bench", "spec", "--methods", "ngram"]) == 1
    assert asked == [str(OWN_QUESTIONS)]


def test_a_chart_without_matplotlib_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match=r"paceline\[bench\]"):
        picture.ready(tmp_path / "x.png")
    monkeypatch.setitem(sys.modules, "matplotlib", ModuleType("matplotlib"))
    with pytest.raises(ConfigError, match="folder"):
        picture.ready(tmp_path / "none" / "x.png")


def test_the_chart_is_drawn(dataset: Path, llm: LLM, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    result = spec.run(dataset, methods="ngram,auto", limit=2, max_tokens=3, llm=llm)
    spec_chart.draw(result, tmp_path / "x.png")
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


def test_a_table_too_wide_for_the_terminal_is_cut_into_several(capsys, monkeypatch):
    methods = ["merge", "specinfer", "rest", "lookahead", "precision", "cascade"]
    rows = [{"method": name, "category": "overall", "ratio": 1.25, "paceline": 125.0, "peers": {"plain": 100.0},
             "mean_accepted_tokens": 2.0, "tokens_per_step": 1.5, "acceptance_by_position": [0.5]} for name in methods]
    monkeypatch.setenv("COLUMNS", "80")
    show({"rows": rows, "machine": {"cpu": "a cpu", "threads": 2},
          "settings": {"model": "m", "kernels": "native", "questions": 1, "max_tokens": 8, "temperature": 0.0,
                       "left_out": {}}})
    printed = capsys.readouterr().out
    assert all(name in printed for name in methods)
    assert printed.count("1.25x") == len(methods) and "…" not in printed
    header = ["", "plain", *methods]
    assert beside(header, 1000) == [list(range(8))]
    assert sorted(index for columns in beside(header, 10) for index in columns[2:]) == list(range(2, 8))
