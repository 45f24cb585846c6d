"""A predicted text is followed, left where it is wrong, and found again."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from paceline.speculation.drafter import Budget, Observation
from paceline.speculation.drafters.prediction import PredictionDrafter
from paceline.speculation.tree import DraftTree
from paceline.speculation.verify import RULES
from pairwise import each
from speculation.enumeration import ADVERSARIES, Fork, ForkRandomness, law

PREDICTED = [10, 11, 12, 13, 14, 15, 16, 17, 18, 14, 15, 16, 19]


class Text(SimpleNamespace):
    __hash__ = object.__hash__


def begun(drafter: PredictionDrafter, *said: int) -> Any:
    text: Any = Text(tokens=[1, 2, 3, *said], prompt_len=3, seed=0, rule="coupled", scope="")
    drafter.begin(text)
    return text


def say(drafter: PredictionDrafter, text: Any, *tokens: int) -> None:
    text.tokens += tokens
    drafter.observe(text, Observation(list(tokens)))


def drafted(drafter: PredictionDrafter, text: Any, most: int = 3) -> list[int] | None:
    tree, = drafter.propose([text], [Budget(most, most)])
    return None if tree is None else tree.tokens


def test_it_is_followed_left_and_found_again() -> None:
    drafter = PredictionDrafter("prediction", PREDICTED)
    text = begun(drafter)
    assert drafted(drafter, text) == [10, 11, 12]
    say(drafter, text, 10, 11)
    assert drafted(drafter, text, 2) == [12, 13]
    say(drafter, text, 12, 77)
    assert drafted(drafter, text) is None, "it is wrong, and the text itself has nothing alike"
    say(drafter, text, 14)
    assert drafted(drafter, text) is None, "one token is too little to go by"
    say(drafter, text, 15)
    assert drafted(drafter, text) == [16, 17, 18], "the nearest place from where it was left"
    say(drafter, text, 16, 17, 18, 88, 14, 15)
    assert drafted(drafter, text) == [16, 19], "and then the next"
    drafter.release(text)


def test_samples_follow_it_each_for_itself() -> None:
    drafter = PredictionDrafter("prediction", PREDICTED)
    one, other = begun(drafter), begun(drafter, 10, 11, 12)
    assert drafted(drafter, one, 1) == [10] and drafted(drafter, other, 1) == [13], "what was said elsewhere counts"
    say(drafter, one, 50)
    assert drafted(drafter, one) is None and drafted(drafter, other, 1) == [13]


def test_behind_its_end_the_text_is_looked_up() -> None:
    drafter = PredictionDrafter("prediction", [10, 11])
    text = begun(drafter)
    say(drafter, text, 10, 11, 7, 8, 9, 7, 8)
    tree, = drafter.propose([text], [Budget(2, 2)])
    assert tree is not None and tree.tokens[0] == 9 and tree.drafter == "ngram"


LENGTH = 4


def verified(rule: str, fork: Fork, tree: DraftTree, p: Any) -> list[int]:
    def after(row: int) -> np.ndarray:
        return np.asarray(p(tree.path(row - 1)))

    return RULES[rule].verify(tree, after, ForkRandomness(fork, after)).tokens


@each(pair=["random", "zeros", "sure target"], rule=["coupled", "rejection", "multi-round", "without-replacement"],
      predicted=[(0, 1, 2, 0, 1), (1, 0, 1, 0, 1, 0), (2,)])
def test_whatever_is_predicted_the_law_is_the_targets(pair: str, rule: str, predicted: tuple[int, ...]) -> None:
    """Every way that a text of some cycles can go, all choices enumerated: followed, left, found again."""
    p, _ = ADVERSARIES[pair](3)
    drafts = 0

    def run(fork: Fork) -> tuple[int, ...]:
        nonlocal drafts
        drafter = PredictionDrafter("prediction", predicted)
        text = begun(drafter)
        while (said := len(text.tokens) - text.prompt_len) < LENGTH:
            most = min(2, LENGTH - said - 1)
            tree, = drafter.propose([text], [Budget(most, most)]) if most else [None]
            so_far = tuple(text.tokens[text.prompt_len:])
            drafts += tree is not None
            say(drafter, text, *(verified(rule, fork, tree, lambda path, so_far=so_far: p((*so_far, *path)))
                                 if tree is not None else [fork.pick(p(so_far))]))
        return tuple(text.tokens[text.prompt_len:])

    got = law(run)
    assert drafts > 0 and sum(got.values()) == pytest.approx(1.0, abs=1e-12)
    for tokens in got.keys() | {tuple(map(int, np.base_repr(n, 3).zfill(LENGTH))) for n in range(3 ** LENGTH)}:
        want = float(np.prod([p(tokens[:at])[tokens[at]] for at in range(LENGTH)]))
        assert got.get(tokens, 0.0) == pytest.approx(want, abs=1e-12), tokens
