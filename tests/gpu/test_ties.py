"""ties.py: what counts as a difference and as a tie, and that something else is not excused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch

import ties
from engine.tiny import tiny_llm, tiny_model
from paceline import LLM, SamplingParams
from paceline.bench.null_model import byte_tokenizer
from paceline.errors import ConfigError, PacelineError

PROMPT = list(b"abcabcabcabc")
WIDTHS = (3, 5, 40)


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    path = tmp_path / "question.jsonl"
    lines = [{"question_id": number, "category": "qa", "turns": [f"{number} abcabcabc"]} for number in range(5)]
    path.write_text("\n".join(map(json.dumps, lines)) + "\n")
    return path


@pytest.fixture
def llm() -> LLM:
    return tiny_llm(tiny_model(vocab_size=256), byte_tokenizer(), max_model_len=256, deterministic=False,
                    kernels="eager", max_num_seqs=4)


def test_the_first_difference_is_a_place() -> None:
    assert ties.first_difference([1, 2, 3], [1, 2, 3]) is None
    assert ties.first_difference([1, 2, 3], [1, 5, 3]) == 1
    assert ties.first_difference([1, 2, 3], [1, 5]) == 1
    with pytest.raises(PacelineError, match="cut short"):
        ties.first_difference([1, 2, 3], [1, 2])


def test_a_tie_needs_a_gap_within_a_deviation_that_rounding_explains() -> None:
    close = ties.Difference("7", 3, 10, 11, gap=1e-5, deviation=2e-5, rounding=True)
    assert close.tie and "a tie" in close.as_row()["note"]
    assert replace(close, gap=2e-5).tie, "equal is within"
    assert not replace(close, gap=2.1e-5).tie
    assert not replace(close, rounding=False).tie
    assert "NOT A TIE" in replace(close, gap=1.0).as_row()["note"]


def test_the_gap_is_from_the_highest_logit_to_the_lesser_candidate() -> None:
    measured = ties.Deviation(torch.tensor([1.0, -8.0, 3.0, 2.5]), 0.001)
    assert measured.gap(2, 3) == measured.gap(3, 2) == 0.5
    assert measured.gap(0, 3) == 2.0, "two candidates that are close to one another and not on top are no tie"
    assert measured.rounding and not ties.Deviation(measured.single, 0.01).rounding


@pytest.mark.parametrize("answered", [0, 1, 23])
def test_forcing_gives_the_logits_plain_decoding_draws_from(llm: LLM, answered: int) -> None:
    answer = llm.generate([PROMPT], SamplingParams(max_tokens=24, temperature=0.0))[0].outputs[0].token_ids
    free = llm.engine.cache.usage().used
    measured = ties.deviate(llm.engine, PROMPT, answer[:answered], answer[answered:], WIDTHS)
    assert int(measured.single.argmax()) == answer[answered]
    assert measured.largest > 0.0, "other widths sum in another order"
    assert measured.rounding
    assert llm.engine.cache.usage().used == free


def test_deterministic_kernels_do_not_deviate() -> None:
    llm = tiny_llm(tiny_model(vocab_size=256), max_model_len=256, kernels="reference")
    assert ties.deviate(llm.engine, PROMPT, [5, 6, 7, 8], [9, 1], WIDTHS).largest == 0.0


def test_forcing_stops_at_the_longest_context(llm: LLM) -> None:
    prompt = (PROMPT * 30)[:250]
    assert ties.deviate(llm.engine, prompt, [1, 2, 3, 4, 5], [6], WIDTHS).rounding


def test_a_forged_difference_is_no_tie_and_an_equal_one_none(llm: LLM) -> None:
    prompts = [PROMPT, PROMPT[1:], PROMPT[2:]]
    outs = llm.generate(prompts, SamplingParams(max_tokens=8, temperature=0.0))
    plain = [out.outputs[0].token_ids for out in outs]
    forged = [list(answer) for answer in plain]
    forged[1][3] ^= 1
    differences, deviations = ties.compare(llm.engine, ["a", "b", "c"], prompts, plain, forged, WIDTHS)
    assert [(one.question, one.position, one.plain, one.drafted) for one in differences] == [
        ("b", 3, plain[1][3], forged[1][3])]
    assert differences[0].gap > differences[0].deviation > 0.0 and not differences[0].tie
    assert len(deviations) == 3, "the answers without a difference are samples of the deviation"


def test_a_real_tie_is_found_to_be_one(llm: LLM) -> None:
    """Two tokens with the same row in the (tied) embedding have the same logit, bar rounding."""
    plain = llm.generate([PROMPT], SamplingParams(max_tokens=4, temperature=0.0))[0].outputs[0].token_ids
    twin = next(token for token in range(256) if token not in (*PROMPT, *plain))
    weight = cast(Any, llm.engine.model).embedding
    weight[twin] = weight[plain[2]]
    differences, _ = ties.compare(llm.engine, ["a"], [PROMPT], [plain], [[*plain[:2], twin, plain[3]]], WIDTHS)
    assert differences[0].tie


def test_the_document_counts_and_measures(dataset: Path, llm: LLM) -> None:
    result = ties.run(dataset, prompts=4, max_tokens=10, k=3, llm=llm)
    rows = {row["case"]: row["paceline"] for row in result["rows"]}
    assert rows["prompts"] == 4 and rows["plain answers"] == 40
    assert rows["drafted"] > 0, "drafts really happened"
    assert rows["differing"] == rows["of them ties"] and ties.only_ties(result)
    assert 0.0 < rows["largest deviation"] < 1e-2
    assert result["settings"]["widths"] == [1, 4, 16]
    assert result["settings"]["dataset"] == "question.jsonl"


def test_when_time_is_over_the_rest_is_left_out_and_not_counted(dataset: Path, llm: LLM) -> None:
    with dataset.open("a") as file:
        file.writelines(json.dumps({"category": "qa", "turns": [f"more {number}"]}) + "\n" for number in range(5))
    result = ties.run(dataset, max_tokens=2, llm=llm, minutes=0.0)
    assert result["settings"]["prompts"] == 8 and result["rows"][1]["paceline"] == 16, "two at a seat, then no more"


def test_a_difference_that_is_no_tie_fails_the_command(dataset: Path, llm: LLM, monkeypatch: pytest.MonkeyPatch,
                                                       tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    honest = ties.answers

    def bent(*arguments: Any) -> Any:
        plain, drafted = honest(*arguments)
        drafted[1].outputs[0].token_ids[2] ^= 1
        return plain, drafted

    monkeypatch.setattr(ties, "LLM", lambda *args, **kwargs: llm)
    target = tmp_path / "out.json"
    arguments = ["--dataset", str(dataset), "--prompts", "2", "--max-tokens", "4", "--json", str(target)]
    ties.main(arguments)
    monkeypatch.setattr(ties, "answers", bent)
    with pytest.raises(SystemExit) as left:
        ties.main(arguments)
    assert left.value.code == 1
    row = json.loads(target.read_text())["rows"][-1]
    assert (row["question"], row["position"], row["tie"]) == ("1", 2, False)
    assert "NOT A TIE" in capsys.readouterr().out


@pytest.mark.parametrize(("wrong", "said"), [
    (["--method", "warp"], "warp"), (["--dataset", "no-such.jsonl"], "no-such.jsonl"), (["--device", "warp"], "device"),
    (["--dtype", "float8"], "float32, bfloat16, float16")])
def test_mistakes_are_refused_before_anything_is_loaded(dataset: Path, wrong: list[str], said: str,
                                                        monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ties, "LLM", None)
    with pytest.raises(SystemExit, match=f"error: .*{said}"):
        ties.main(["--dataset", str(dataset), *wrong])


def test_numbers_and_types_out_of_range_are_named(dataset: Path) -> None:
    with pytest.raises(ConfigError, match="--prompts"):
        ties.run(dataset, prompts=0)
    with pytest.raises(ConfigError, match=r"float32, bfloat16, float16, not in 'float8'"):
        ties.run(dataset, dtype="float8")


def test_device_and_dtype_reach_the_engine(dataset: Path, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def loaded(*args: Any, device: str, dtype: str, **kwargs: Any) -> LLM:
        asked.append((device, dtype))
        return llm

    monkeypatch.setattr(ties, "LLM", loaded)
    arguments = ["--dataset", str(dataset), "--prompts", "1", "--max-tokens", "2"]
    ties.main(arguments)
    ties.main([*arguments, "--device", "auto", "--dtype", "bfloat16"])
    assert asked == [("cpu", "float32"), ("auto", "bfloat16")]


def test_a_cache_whose_rounding_nobody_measured_is_refused(llm: LLM) -> None:
    keys = cast(Any, llm.engine.runner.storage.keys)
    for layer in list(keys):
        keys[layer] = keys[layer].double()
    with pytest.raises(ConfigError, match="'float64'"):
        ties.deviate(llm.engine, PROMPT, [1, 2], [3], WIDTHS)
