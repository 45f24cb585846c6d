"""matrix: the equality matrix with real drafters, here in Triton's interpreter on a tiny model (few cells in
every run, the rest with the long matrices), on a card with a larger one."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

import matrix
from paceline.errors import ConfigError
from paceline.speculation.spec import BUILDERS
from subjects import FamilySubject, RandomSubject

TINY = {"vocab_size": 97, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "intermediate_size": 48}
CIRCUMSTANCES = list(matrix.CIRCUMSTANCES)
SLOW = [(name, matrix.STYLES[number % 4], CIRCUMSTANCES[number % len(CIRCUMSTANCES)])
        for number, name in enumerate(name for name in matrix.WISHES if name not in matrix.HEADED)]
FAMILY = Path(__file__).parents[1] / "family"


class Short(RandomSubject):
    """Its prompts are short: the interpreter takes a second for what a card does in a millisecond."""

    def prompt(self, seed: int) -> list[int]:
        return super().prompt(seed)[:13]


def subject(layers: int = 1, kv_dtype: str = "auto") -> RandomSubject:
    """One layer is enough, but for drafters that leave out some."""
    made = RandomSubject.small("cpu", "float32", **TINY, num_hidden_layers=layers)
    return Short(made.name, made.model, made.device, made.dtype, made.source, made.more, kv_dtype=kv_dtype)


def test_every_drafter_is_in_the_matrix() -> None:
    assert {wish["method"] for wish in matrix.WISHES.values() if wish} == set(BUILDERS) - {"rest"}


def test_a_wrong_name_lists_the_right_ones() -> None:
    with pytest.raises(ConfigError, match="No drafter 'ngrams': use some of ngram"):
        matrix.run(subject(), ["ngrams"])


@pytest.mark.parametrize(("name", "style", "circumstance", "layers"), [
    ("right tree", "greedy", "crowd", 1), *(pytest.param(*cell, 3, marks=pytest.mark.full) for cell in SLOW)])
def test_cells_in_the_interpreter(device: torch.device, name: str, style: str, circumstance: str, layers: int) -> None:
    if device.type != "cpu":
        pytest.skip("the whole matrix runs on the card")
    beside = ["plain", "ngram", "suffix", "wrong tree"] if circumstance in matrix.CROWDED else ["plain"]
    names = [name, *(other for other in beside if other != name)]
    result = matrix.run(subject(layers), names, [style], [circumstance], 6)
    assert result["differences"] == []
    assert f"{name}" in matrix.table(result)


def test_an_fp8_cache_in_the_interpreter(device: torch.device) -> None:
    if device.type != "cpu":
        pytest.skip("the whole matrix runs on the card")
    result = matrix.run(subject(kv_dtype="fp8"), ["right tree", "ngram"], ["greedy"], ["crowd"], 6)
    assert result["differences"] == []


def test_a_difference_is_reported(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    if device.type != "cpu":
        pytest.skip("shown in the interpreter")
    expected = matrix.plain_texts
    monkeypatch.setattr(matrix, "plain_texts",
                        lambda *given: [([*tokens[:2], (tokens[2] + 1) % 97], end) for tokens, end in expected(*given)])
    result = matrix.run(subject(), ["plain"], ["greedy"], ["alone"], 3)
    assert [one["first_difference"] for one in result["differences"]] == [2]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("kv_dtype", ["auto", "fp8"])
def test_the_whole_matrix_on_a_card(kv_dtype: str) -> None:
    made = dataclasses.replace(RandomSubject.small("cuda", "bfloat16"), kv_dtype=kv_dtype)
    assert matrix.run(made)["differences"] == []


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("kv_dtype", ["auto", "fp8"])
def test_trained_heads_on_a_card(kv_dtype: str) -> None:
    family = FamilySubject.of(FAMILY, "cuda", "bfloat16", kv_dtype=kv_dtype)
    assert matrix.run(family)["differences"] == []
    assert matrix.run(family, matrix.HEADS, least=matrix.LEAST)["differences"] == []
