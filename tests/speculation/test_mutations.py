"""Ten mistakes that real systems made. Each is made here on purpose, and the check that should catch it must.

Every test first shows that the same set-up without the mistake passes, so that what is caught is the mistake.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from paceline.speculation.rules.verdict import Verdict, children_of, path_to
from paceline.speculation.tree import DraftTree
from paceline.speculation.verify import RULES, coupled, multi_round, rejection, without_replacement
from speculation.enumeration import (
    ADVERSARIES,
    Draft,
    Fork,
    ForkRandomness,
    Growing,
    Rule,
    Table,
    Uniform,
    cycle_law,
    deviation,
    grow,
    law,
    sampled,
    table,
)

EXACT, CAUGHT = 1e-12, 1e-3
P, Q = ADVERSARIES["random"](3)


def off(rule: Rule, draft: Draft, length: int = 2, *, p: Table = P, q: Table = Q,
        randomness: type = ForkRandomness) -> float:
    return deviation(cycle_law(rule, draft, p, q, randomness), p, length)


def guesses(fork: Fork, q: Table) -> DraftTree:
    """Two deterministic branches of two tokens."""
    return DraftTree([0, 1, 2, 0], [-1, -1, 0, 1], "test")


def test_1_a_rejection_resamples_from_p() -> None:
    class FromTarget(ForkRandomness):
        def residual(self, row: int, weights: np.ndarray) -> int:
            return self.fork.pick(self.p(row))

    for rule, draft in ((rejection, sampled([1, 1])), (multi_round, sampled([2])),
                        (without_replacement, sampled([2], replace=False))):
        assert off(rule, draft) < EXACT
        assert off(rule, draft, randomness=FromTarget) > CAUGHT


def test_2_tree_rows_sampled_alone_the_longest_kept_the_correction_drawn_again() -> None:
    def longest(tree: DraftTree, p: Any, randomness: Any) -> Verdict:
        children = children_of(tree)
        at = 0
        while (step := [c for c in children.get(at, ()) if tree.tokens[c - 1] == randomness.target(at)]):
            at = step[0]
        path = path_to(tree, at)
        again = randomness.fork.pick(p(at))
        return Verdict([*(tree.tokens[row - 1] for row in path), again], [0, *path], path)

    for exact in ("coupled", "rejection", "multi-round", "without-replacement"):
        assert off(RULES[exact].verify, guesses, 3) < EXACT
    assert off(longest, guesses, 3) > CAUGHT


def test_3_drafts_by_argmax_scored_as_if_they_were_sampled() -> None:
    def best(fork: Fork, q: Table) -> DraftTree:
        tree = DraftTree.chain([int(q(()).argmax())])
        tree.q = [q(())]
        return tree

    def best_declared(fork: Fork, q: Table) -> DraftTree:
        tree = best(fork, q)
        tree.q = [np.eye(3)[tree.tokens[0]]]
        return tree

    assert off(rejection, best_declared) < EXACT
    assert off(rejection, best) > CAUGHT


def test_4_the_root_token_by_argmax() -> None:
    class SureOfTheRoot(ForkRandomness):
        def target(self, row: int) -> int:
            return int(self.p(0).argmax()) if row == 0 else super().target(row)

    for rule in RULES.values():
        if not rule.lossy:
            assert off(rule.verify, guesses, 3) < EXACT
            assert off(rule.verify, guesses, 3, randomness=SureOfTheRoot) > CAUGHT


def test_5_the_first_q_instead_of_the_reduced_one() -> None:
    distinct = sampled([2], replace=False)
    p, q = ADVERSARIES["random"](5)
    assert off(without_replacement, distinct, p=p, q=q) < EXACT
    assert off(multi_round, distinct, p=p, q=q) > CAUGHT


def cut(context: tuple[int, ...], floor: float = 0.0) -> np.ndarray:
    """Q without its least likely token."""
    kept = np.where(Q(context) >= np.sort(Q(context))[-2], Q(context), 0.0)
    return np.maximum(kept / kept.sum(), floor)


def barely_cut(context: tuple[int, ...]) -> np.ndarray:
    """The same as a rule sees it that divides by zero and accepts."""
    return cut(context, floor=1e-300)


@pytest.mark.parametrize(("drawn", "declared"), [(cut, Q), (Q, barely_cut)])
def test_6_drawn_from_one_q_and_tested_with_the_other(drawn: Table, declared: Table) -> None:
    def draft(fork: Fork, q: Table) -> DraftTree:
        tree = sampled([1, 1])(fork, drawn)
        tree.q = [q(tuple(tree.path(node)[:-1])) for node in range(2)]
        return tree

    assert off(rejection, draft, 3, q=drawn) < EXACT
    assert off(rejection, draft, 3, q=declared) > CAUGHT
    # A token of probability 0 by its own q is passed over, which happens to be sound; the engine refuses the draft.
    assert off(rejection, draft, 3, q=cut) < EXACT


def test_7_a_drawn_token_is_looked_at_and_left_out() -> None:
    def keep(likely_only: bool) -> Draft:
        def draft(fork: Fork, q: Table) -> DraftTree:
            tree = Growing()
            (node,) = grow(fork, tree, -1, q(()), 1, True)
            if q(())[tree.tokens[node]] < 0.4:
                return DraftTree([], []) if likely_only else tree.done()
            grow(fork, tree, node, q(tree.context(node)), 1, True)
            return tree.done()
        return draft

    assert off(rejection, keep(likely_only=False)) < EXACT
    assert off(rejection, keep(likely_only=True)) > CAUGHT


def test_7_siblings_put_in_order_of_probability_after_they_were_drawn() -> None:
    """The same mistake in another coat: which token is tested first then depends on the tokens."""
    def in_order(fork: Fork, q: Table) -> DraftTree:
        tree = sampled([2])(fork, q)
        tree.tokens.sort(key=lambda token: -q(())[token])
        return tree

    assert off(multi_round, sampled([2])) < EXACT
    assert off(multi_round, in_order) > CAUGHT


def test_8_draft_and_accept_test_share_their_noise() -> None:
    shared: list[Uniform] = []

    class Shared(ForkRandomness):
        def accept(self, row: int, index: int) -> Any:
            return shared[-1]

    def draft(fork: Fork, q: Table) -> DraftTree:
        shared.append(fork.uniform())
        tree = DraftTree.chain([shared[-1].index(q(()))])
        tree.q = [q(())]
        return tree

    assert off(rejection, draft) < EXACT
    assert off(rejection, draft, randomness=Shared) > CAUGHT


@pytest.mark.parametrize("fresh", [True, False])
def test_9_the_same_noise_when_a_position_is_drafted_again(fresh: bool) -> None:
    """A drafter that learns from what it proposed: after a rejection it leans towards the token it had drafted at the
    next position. It says so in its q, which is sound as long as the next draw is a new one."""
    flat = np.full(3, 1 / 3)
    target, other = np.array([0.2, 0.3, 0.5]), np.array([0.7, 0.2, 0.1])

    def run(fork: Fork) -> int:
        """The token at position 1, whichever cycle it comes from."""
        noise = [fork.uniform(), fork.uniform()]
        first = DraftTree.chain([noise[0].index(other), noise[1].index(flat)])
        first.q = [other, flat]
        verdict = rejection(first, lambda row: target, ForkRandomness(fork, lambda row: target))
        if len(verdict.tokens) > 1:
            return verdict.tokens[1]
        leaning = 0.1 * flat + 0.9 * np.eye(3)[first.tokens[1]]
        again = DraftTree.chain([(fork.uniform() if fresh else noise[1]).index(leaning)])
        again.q = [leaning]
        return rejection(again, lambda row: target, ForkRandomness(fork, lambda row: target)).tokens[0]

    got = law(run)
    worst = max(abs(got.get(token, 0.0) - target[token]) for token in range(3))
    assert worst < EXACT if fresh else worst > CAUGHT


class Zero(ForkRandomness):
    """The smallest uniform there is."""

    def accept(self, row: int, index: int) -> Any:
        return 0.0


class LenientZero(ForkRandomness):
    """The same, where the rule's < means <=."""

    def accept(self, row: int, index: int) -> Any:
        class Lenient(float):
            __lt__ = float.__le__
        return Lenient(0.0)


@pytest.mark.parametrize("rule", ["rejection", "multi-round", "without-replacement"])
def test_10_a_masked_token_passes_when_u_is_zero(rule: str) -> None:
    masked = np.array([0.0, 0.25, 0.75])

    def emitted(randomness: type) -> set[int]:
        def draft(fork: Fork, q: Table) -> DraftTree:
            tree = DraftTree.chain([0])
            tree.q = [np.array([0.5, 0.25, 0.25])]
            return tree

        return {tokens[0] for tokens in cycle_law(RULES[rule].verify, draft, lambda context: masked, Q, randomness)}

    assert 0 not in emitted(Zero)
    assert 0 in emitted(LenientZero)


def test_the_check_itself_sees_a_small_mistake() -> None:
    """A rule that never tests: it lets every draft pass where p and q are almost the same."""
    def credulous(tree: DraftTree, p: Any, randomness: Any) -> Verdict:
        return coupled([-1, 0], [-1, *tree.tokens], [tree.tokens[0], randomness.target(1)])

    near = table(2, 3)

    def nearly(context: tuple[int, ...]) -> np.ndarray:
        return near(context) * 0.999 + 0.001 / 3

    assert off(rejection, sampled([1]), p=nearly, q=near) < EXACT
    assert 1e-6 < off(credulous, sampled([1]), p=nearly, q=near) < CAUGHT
