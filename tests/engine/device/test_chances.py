"""How likely looked-up tokens are to follow: fitted at first, then what was seen."""

from __future__ import annotations

import numpy as np
import pytest

from paceline.engine.execute.graphs.chances import MEMORY, MOST_SCOPES, Chances, ChancesByScope
from paceline.kernels.device.lookup import HIGHEST, LEAST_CHANCE, LOOK_BACK, MOST_DRAFTED
from paceline.speculation.drafters.ngram import confidence
from paceline.speculation.stats import Round


def test_longer_matches_are_worth_longer_drafts() -> None:
    levels = Chances().levels()
    assert levels.shape == (LOOK_BACK + 1, MOST_DRAFTED) and levels.min() == 0 and levels.max() <= HIGHEST
    depths = (levels > 0).sum(1).tolist()
    assert depths == sorted(depths) and depths[0] == 0 and depths[1] >= 1 and depths[-1] == MOST_DRAFTED
    assert (np.diff(levels, axis=1) <= 0).all() and (np.diff(levels, axis=0) >= 0).all()


def test_nothing_seen_is_what_was_fitted() -> None:
    chances = Chances()
    assert [chances.of(matched) for matched in (1, 3, 30)] == pytest.approx([confidence(n) for n in (1, 3, 30)])


def test_what_is_seen_corrects_it() -> None:
    chances = Chances()
    for _ in range(400):
        chances.learn([Round(4, 0, 2), Round(3, 3, 9)])  # short matches always fail, long ones never do
    assert chances.of(2) < 0.1 and chances.of(9) > 0.95 and chances.of(11) > 0.95
    assert chances.of(1) == pytest.approx(confidence(1))
    assert chances.of(12) == pytest.approx(confidence(12))  # nobody has drafted so far
    levels = chances.levels()
    assert levels[2].max() == 0 and levels[9, 0] == HIGHEST - 1 and LEAST_CHANCE > 0.1


def test_texts_that_change_are_followed() -> None:
    chances = Chances()
    for _ in range(int(2 * MEMORY)):
        chances.learn([Round(1, 1, 5)])
    assert chances.of(5) > 0.95
    for _ in range(int(2 * MEMORY)):
        chances.learn([Round(1, 0, 5)])
    assert chances.of(5) < 0.3


def test_rounds_without_a_draft_say_nothing() -> None:
    chances = Chances()
    chances.learn([Round(0, 0, 0), Round(0, 0, 7)])
    assert chances.of(7) == pytest.approx(confidence(7))


def test_chances_are_those_of_a_scope_and_in_mixed_company_the_fitted_ones() -> None:
    known = ChancesByScope()
    for _ in range(400):
        known.of("hers").learn([Round(4, 0, 2)])
    fitted = Chances().levels().tolist()
    assert known.among(["his", "his"]).levels().tolist() == fitted != known.among(["hers", "hers"]).levels().tolist()
    assert known.among(["hers", "his", "hers"]).levels().tolist() == fitted
    for number in range(MOST_SCOPES):
        known.of(f"{number}")
    assert len(known) == MOST_SCOPES and known.of("hers").of(2) == pytest.approx(confidence(2))
