"""truth: what it finds where a machine differs, and what it takes for a tie."""

from __future__ import annotations

from pathlib import Path

import pytest

import truth
from engine.tiny import tiny_llm, tiny_model
from paceline.errors import ConfigError
from paceline.llm import LLM
from truth import Item, compare, decoded, read, reference

PROMPTS = [[1, 2, 3, 4], [50, 60, 70], [9, 8, 7, 6, 5]]


@pytest.fixture(scope="module")
def llm() -> LLM:
    return tiny_llm(tiny_model())


@pytest.fixture(scope="module")
def items(llm: LLM) -> list[Item]:
    return reference(llm, PROMPTS, 12)


def test_the_same_machine_agrees_with_itself(llm: LLM, items: list[Item]) -> None:
    assert all(len(item.tokens) == len(item.gaps) == 12 for item in items)
    assert decoded(llm, items) == []
    differences, deviations = read(llm, items)
    assert differences == [] and len(deviations) == 36 and max(deviations) < 1e-5
    rows, notes = compare(llm, items, "same")
    assert notes == [] and [row.paceline for row in rows[:2]] == [36, 36]


def bent(items: list[Item], place: int, gap: float) -> list[Item]:
    """The reference, as if it had taken its second best token at one place and gone on from there."""
    item = items[1]
    tokens = [*item.tokens[:place], item.seconds[place]]
    seconds = [*item.seconds[:place], item.tokens[place]]
    return [items[0], Item(item.prompt, tokens, [*item.gaps[:place], gap], seconds)]


def test_another_token_is_found_both_ways_and_no_tie_where_the_best_are_apart(llm: LLM, items: list[Item]) -> None:
    wrong = bent(items, 6, 0.5)
    for found in (decoded(llm, wrong), read(llm, wrong)[0]):
        assert [(one.item, one.place, one.expected, one.found) for one in found] == [
            (1, 6, items[1].seconds[6], items[1].tokens[6])]
    _, notes = compare(llm, wrong, "bent")
    assert len(notes) == 2 and not any(note["tie"] for note in notes)


def test_after_a_difference_the_reference_goes_on(llm: LLM, items: list[Item]) -> None:
    twice = [Item(item.prompt, [*item.tokens[:3], (item.tokens[3] + 1) % 97, *item.tokens[4:]], item.gaps, item.seconds)
             for item in items]
    assert {(one.item, one.place) for one in decoded(llm, twice) if one.place == 3} == {(0, 3), (1, 3), (2, 3)}


def test_a_file_that_is_no_reference_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "reference.json"
    path.write_text("[]")
    with pytest.raises(ConfigError, match="is no reference"):
        truth.run(path, None, device="cpu")
