"""What each rule does with a draft, and which drafts it takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from paceline.engine.decide.randomness import KeyedRandomness, inverse
from paceline.errors import NotYetError, RequestError
from paceline.sampling.noise import ACCEPT, RESIDUAL, accept_uniform, residual_uniform, scalar_bits, token_bits
from paceline.speculation.rules.typical import threshold
from paceline.speculation.spec import parse
from paceline.speculation.stats import Provenance, SpeculationStats
from paceline.speculation.tree import DraftTree
from paceline.speculation.verify import RULES, check, multi_round, rejection, rule_for, typical, without_replacement

HALF = np.array([0.5, 0.5, 0.0, 0.0])


class Scripted:
    """Draws as told: uniforms in order, the residual's likeliest token, the target's tokens by row."""

    def __init__(self, uniforms: list[float], target: list[int]) -> None:
        self._uniforms, self._target = uniforms, target
        self.tests: list[tuple[int, int]] = []
        self.weights: list[np.ndarray] = []

    def accept(self, row: int, index: int) -> float:
        self.tests.append((row, index))
        return self._uniforms.pop(0)

    def residual(self, row: int, weights: np.ndarray) -> int:
        self.weights.append(weights)
        return int(weights.argmax())

    def target(self, row: int) -> int:
        return self._target[row]


def always(*probs: float) -> Callable[[int], np.ndarray]:
    return lambda row: np.array(probs)


def drawn(tokens: list[int], parents: list[int], q: np.ndarray = HALF) -> DraftTree:
    return DraftTree(tokens, parents, "test", q=[q] * len(tokens))


def test_a_chain_that_is_accepted_ends_with_the_target_s_own_token() -> None:
    randomness = Scripted([0.9, 0.9], [7, 7, 3])
    verdict = rejection(drawn([0, 1], [-1, 0]), always(0.5, 0.5, 0.0, 0.0), randomness)
    assert (verdict.tokens, verdict.rows, verdict.path, verdict.bonus) == ([0, 1, 3], [0, 1, 2], [1, 2], True)
    assert randomness.tests == [(0, 0), (1, 0)]


def test_a_rejection_ends_the_text_with_what_the_target_has_more() -> None:
    randomness = Scripted([0.5], [])
    verdict = rejection(drawn([0, 1], [-1, 0]), always(0.2, 0.5, 0.3, 0.0), randomness)
    assert (verdict.tokens, verdict.rows, verdict.path, verdict.bonus) == ([2], [0], [], False)
    assert randomness.weights[0].tolist() == [0.0, 0.0, 1.0, 0.0]


def test_every_sibling_is_tested_once_and_in_order() -> None:
    randomness = Scripted([0.9, 0.9, 0.0], [0, 0, 0, 3])
    verdict = multi_round(drawn([0, 0, 1], [-1, -1, -1]), always(0.1, 0.1, 0.4, 0.4), randomness)
    assert randomness.tests == [(0, 0), (0, 1), (0, 2)]
    assert verdict.tokens == [2] and not verdict.bonus, "nothing is left of token 1 after two rejections"


def test_a_repeated_draw_without_replacement_is_passed_over() -> None:
    randomness = Scripted([0.9, 0.9], [])
    without_replacement(drawn([0, 0, 1], [-1, -1, -1]), always(0.1, 0.1, 0.4, 0.4), randomness)
    assert randomness.tests == [(0, 0), (0, 2)]


def test_coinciding_drafts_share_what_was_drafted_below_them() -> None:
    """Both branches begin with token 0; the accepted second token stands below the other one."""
    tree = DraftTree([0, 0, 1, 0], [-1, -1, 0, 1], "test", q=[HALF] * 4)
    verdict = multi_round(tree, always(0.9, 0.0, 0.1, 0.0), Scripted([0.0, 0.5, 0.5], [9] * 5))
    assert verdict.tokens == [0, 0, 9] and verdict.path == [2, 4], "rows of one branch, so that the cache fits"


@pytest.mark.parametrize("rule", ["rejection", "multi-round", "without-replacement", "typical"])
def test_a_row_that_cannot_be_sampled_ends_the_path_there(rule: str) -> None:
    """And only there: rows of branches that were not taken are never looked at."""
    def p(row: int) -> np.ndarray | None:
        assert row != 2, "this branch was not taken"
        return None if row == 1 else np.array([1.0, 0.0, 0.0, 0.0])

    tree = DraftTree([0, 1, 0, 1], [-1, -1, 0, 1], "test", q=[np.eye(4)[t] for t in (0, 1, 0, 1)])
    if rule == "rejection":
        tree = DraftTree([0, 1], [-1, 0], "test", q=[HALF] * 2)
    verdict = RULES[rule].verify(tree, p, Scripted([0.0], [0, -1, 5, 5, 5]))
    assert verdict.tokens == [0, -1] and verdict.rows == [0, 1]


def test_equal_p_and_q_never_divide_by_nothing() -> None:
    with np.errstate(all="raise"):
        for rule in (multi_round, without_replacement):
            randomness = Scripted([1.0 - 2.0**-24] * 4, [0] * 5)  # the largest uniform there is
            assert rule(drawn([0, 1], [-1, -1]), lambda row: HALF, randomness).path == [1]
            only = np.eye(4)[0]
            randomness = Scripted([0.5] * 4, [0] * 5)
            assert rule(drawn([0, 0], [-1, -1], only), lambda row: np.eye(4)[1], randomness).tokens == [1]


def test_deterministic_drafts_get_the_target_s_own_token() -> None:
    tree = DraftTree([4, 5, 6], [-1, -1, 1], "test")
    for rule in ("coupled", "rejection", "multi-round", "without-replacement"):
        verdict = RULES[rule].verify(tree, always(), Scripted([], [5, 0, 6, 8]))
        assert (verdict.tokens, verdict.path, verdict.bonus) == ([5, 6, 8], [2, 3], True)


# -------------------------------------------------------------------------------------------------- typical

def test_the_bar_of_typical_acceptance() -> None:
    assert threshold(np.eye(5)[2]) == 0.09
    flat = np.full(100, 0.01)
    assert threshold(flat) == pytest.approx(0.3 * 0.01)


def test_typical_acceptance_takes_the_longest_path_that_passes() -> None:
    tree = DraftTree([0, 1, 2, 3], [-1, -1, 1, 2], "test")
    verdict = typical(tree, always(0.6, 0.2, 0.2, 0.0), Scripted([], [0, 0, 0, 1, 0]))
    assert verdict.tokens == [1, 2, 1] and verdict.path == [2, 3], "token 3 is impossible, token 0 leads nowhere"
    assert not verdict.bonus


def test_typical_acceptance_goes_on_below_the_target_s_own_token() -> None:
    tree = DraftTree([1, 0], [-1, 0], "test")
    verdict = typical(tree, always(0.97, 0.03), Scripted([], [1, 0, 1]))
    assert verdict.tokens == [1, 0, 1] and verdict.path == [1, 2] and verdict.bonus


# -------------------------------------------------------------------------------------------------- by name

def test_names() -> None:
    assert list(RULES) == ["coupled", "rejection", "multi-round", "without-replacement", "typical"]
    assert [name for name, rule in RULES.items() if rule.lossy] == ["typical"]
    for name in RULES:
        assert parse({"method": "oracle", "tokens": [1], "verify": name}).verify == name
    with pytest.raises(NotYetError):
        parse({"method": "oracle", "tokens": [1], "verify": "block"})
    with pytest.raises(RequestError, match="without-replacement"):
        parse({"method": "oracle", "tokens": [1], "verify": "with-replacement"})


def test_exact_rules_are_the_coupled_one_for_drafters_that_do_not_sample() -> None:
    for name in ("coupled", "rejection", "multi-round", "without-replacement"):
        assert rule_for(name, samples=False).name == "coupled"
        assert rule_for(name, samples=True).name == name
    assert rule_for("typical", samples=False).name == "typical"


def test_the_label_and_the_provenance_can_be_read() -> None:
    assert SpeculationStats("ngram", "typical", "typical").as_dict()["lossy"] is True
    assert SpeculationStats("ngram").as_dict()["lossy"] is False
    assert str(Provenance("accepted", "ngram")) == "accepted (ngram)" and str(Provenance("plain")) == "plain"


@pytest.mark.parametrize(("q", "complaint"), [
    ([HALF], "each of its 2 tokens"),
    ([HALF, np.array([0.5, 0.5])], "4 probabilities"),
    ([HALF, HALF * 1.01], "sum to 1"),
    ([HALF, np.array([0.5, np.nan, 0.0, 0.5])], "sum to 1"),
    ([HALF, np.array([1.5, 0.5, -1.0, 0.0])], "sum to 1"),
    ([HALF, np.eye(4)[2]], "gives it no probability"),
])
def test_a_q_that_cannot_be_true_is_refused(q: list[np.ndarray], complaint: str) -> None:
    tree = DraftTree([0, 1], [-1, 0], "test", q=q)
    for rule in RULES.values():
        if rule.reads_q:
            with pytest.raises(ValueError, match=complaint):
                check(rule, tree, 4)
        else:
            check(rule, tree, 4)


def test_branches_are_for_the_rules_that_take_them() -> None:
    tree = drawn([0, 1], [-1, -1])
    with pytest.raises(ValueError, match="multi-round"):
        check(RULES["rejection"], tree, 4)
    check(RULES["multi-round"], tree, 4)
    check(RULES["without-replacement"], tree, 4)
    check(RULES["rejection"], DraftTree([0, 1], [-1, -1], "guess"), 4)
    check(RULES["rejection"], DraftTree([0, 1], [-1, -1], "mixed", q=[HALF, None]), 4)


# ------------------------------------------------------------------------------------------------- keyed randomness

def test_draws_are_keyed_by_position_cycle_and_index() -> None:
    randomness = KeyedRandomness(7, cycle=10, position=lambda row: 10 + row, chosen=[3, 4, 5])
    assert randomness.accept(2, 0) == (0x65A9C979 >> 8) * 2.0**-24, "the golden value"
    assert randomness.accept(2, 1) == accept_uniform(7, 12, 1, cycle=10)
    later = KeyedRandomness(7, cycle=11, position=lambda row: 11 + row, chosen=[])
    assert later.accept(1, 0) != randomness.accept(2, 0), "drafted again: fresh noise"
    assert randomness.target(1) == 4
    weights = np.array([0.0, 0.25, 0.75])
    assert randomness.residual(2, weights) == inverse(residual_uniform(7, 12, cycle=10), weights)


@pytest.mark.parametrize("purpose", [ACCEPT, RESIDUAL])
def test_single_draws_have_the_bits_of_the_generator(purpose: int) -> None:
    rng = np.random.default_rng(purpose)
    for _ in range(50):
        seed, position, index, cycle = (int(rng.integers(high, dtype=np.uint64))
                                        for high in (2**64 - 1, 2**31, 9, 2**31))
        one = scalar_bits(seed, position, index, purpose, cycle=cycle)
        assert one == int(token_bits(seed, position, index, purpose=purpose, cycle=cycle)[0])


def test_the_inverse_never_picks_what_has_no_weight() -> None:
    weights = np.array([0.0, 0.5, 0.0, 0.5, 0.0])
    assert inverse(0.0, weights) == 1
    assert inverse(0.5, weights) == 3
    assert inverse(np.nextafter(1.0, 0.0), weights) == 3
    assert inverse(1.0, weights) == 3


def test_overlaps_say_how_likely_a_sampled_draft_was_whatever_became_of_it() -> None:
    p, q = np.array([0.5, 0.3, 0.2]), np.array([0.1, 0.3, 0.6])
    draft = DraftTree([2, 2], [-1, 0], q=[q, p])

    class Luck:
        def accept(self, row: int, index: int) -> float:
            return 0.0 if row == 0 else 0.999

        def residual(self, row: int, weights: Any) -> int:
            return 0

        def target(self, row: int) -> int:
            return 0

    verdict = RULES["rejection"].verify(draft, lambda row: p, Luck())
    assert verdict.overlaps == pytest.approx([0.1 + 0.3 + 0.2, 1.0])
