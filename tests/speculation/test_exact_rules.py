"""Every exact rule gives the target's law to 1e-12: all drafts, all accept tests, all residual draws enumerated."""

from __future__ import annotations

import numpy as np
import pytest

from paceline.speculation.tree import DraftTree
from paceline.speculation.verify import RULES
from pairwise import each
from speculation.enumeration import (
    ADVERSARIES,
    Draft,
    Fork,
    ForkRandomness,
    Growing,
    Table,
    cycle_law,
    deviation,
    grow,
    law,
    sampled,
    table,
)

TINY = 1e-12


def is_exact(rule: str, draft: Draft, p: Table, q: Table, length: int) -> None:
    emitted = cycle_law(RULES[rule].verify, draft, p, q)
    assert sum(emitted.values()) == pytest.approx(1.0, abs=TINY)
    assert deviation(emitted, p, length) < TINY


@pytest.mark.parametrize("pair", ADVERSARIES)
@pytest.mark.parametrize(("size", "depth"), [(3, 2), (3, 3), (4, 2), (5, 2)])
def test_chain_rejection(pair: str, size: int, depth: int) -> None:
    is_exact("rejection", sampled([1] * depth), *ADVERSARIES[pair](size), depth + 1)


@pytest.mark.parametrize("pair", ADVERSARIES)
@pytest.mark.parametrize(("size", "shape"), [(3, (2, 1)), (3, (3, )), (4, (2, )), (5, (3, )), (3, (1, 2))])
def test_multi_round(pair: str, size: int, shape: tuple[int, ...]) -> None:
    is_exact("multi-round", sampled(shape), *ADVERSARIES[pair](size), len(shape) + 1)


@pytest.mark.parametrize("pair", ADVERSARIES)
@pytest.mark.parametrize(("size", "shape"), [(3, (2, 1)), (3, (3, )), (4, (3, )), (5, (2, )), (3, (1, 2)), (4, (4, ))])
def test_without_replacement(pair: str, size: int, shape: tuple[int, ...]) -> None:
    is_exact("without-replacement", sampled(shape, replace=False), *ADVERSARIES[pair](size), len(shape) + 1)


@pytest.mark.parametrize("pair", ADVERSARIES)
def test_without_replacement_takes_independent_draws_too(pair: str) -> None:
    is_exact("without-replacement", sampled([3]), *ADVERSARIES[pair](4), 2)


@pytest.mark.full
@pytest.mark.parametrize("pair", ADVERSARIES)
@pytest.mark.parametrize(("size", "shape"), [(3, (2, 2)), (3, (2, 1, 1)), (4, (2, 1)), (4, (1, 2)), (5, (2, 1)),
                                             (5, (1, 2)), (4, (1, 1, 2)), (5, (1, 1, 1))])
@pytest.mark.parametrize("rule", ["multi-round", "without-replacement"])
def test_larger_trees(rule: str, pair: str, size: int, shape: tuple[int, ...]) -> None:
    is_exact(rule, sampled(shape, replace=rule == "multi-round"), *ADVERSARIES[pair](size), len(shape) + 1)


@pytest.mark.full
@pytest.mark.parametrize("pair", ADVERSARIES)
@pytest.mark.parametrize("size", [4, 5])
def test_deeper_chains(pair: str, size: int) -> None:
    is_exact("rejection", sampled([1, 1, 1]), *ADVERSARIES[pair](size), 4)


@pytest.mark.parametrize("pair", ADVERSARIES)
@pytest.mark.parametrize("rule", ["coupled", "rejection", "multi-round", "without-replacement"])
def test_deterministic_trees(rule: str, pair: str) -> None:
    """The likeliest two children of every node, by the drafter's opinion: q is a point mass and none is declared."""

    def draft(fork: Fork, q: Table) -> DraftTree:
        tokens, parents = [], []
        for parent, context in ((-1, ()), (0, None), (1, None)):
            context = () if context == () else (tokens[parent],)
            for token in np.argsort(-q(context), kind="stable")[:2]:
                tokens.append(int(token))
                parents.append(parent)
        return DraftTree(tokens, parents, "test")

    is_exact(rule, draft, *ADVERSARIES[pair](3), 3)


@each(pair=list(ADVERSARIES), rule=["multi-round", "without-replacement"])
def test_guesses_beside_drawn_tokens(rule: str, pair: str) -> None:
    """Several drafters in one tree: two draws of one, a guess, and a draw of another, each with a child of its own."""
    p, q = ADVERSARIES[pair](3)
    other = table(99, 3)

    def draft(fork: Fork, q: Table) -> DraftTree:
        tree = Growing()
        first = grow(fork, tree, -1, q(()), 2, rule == "multi-round")
        guess = tree.add(-1, 1, None)
        second = grow(fork, tree, -1, other(()), 1, True)
        grow(fork, tree, first[0], q(tree.context(first[0])), 1, True)
        tree.add(guess, 2, None)
        grow(fork, tree, second[0], other(tree.context(second[0])), 1, True)
        return tree.done()

    is_exact(rule, draft, p, q, 3)


@pytest.mark.parametrize("pair", ADVERSARIES)
@pytest.mark.parametrize("rule", ["multi-round", "without-replacement"])
def test_drafts_that_coincide_go_on_together(rule: str, pair: str) -> None:
    """The same guess twice, and below each a draw of its own from one and the same array."""

    def draft(fork: Fork, q: Table) -> DraftTree:
        tree = Growing()
        for node in (tree.add(-1, 1, None), tree.add(-1, 1, None)):
            grow(fork, tree, node, q((1,)), 1, True)
        return tree.done()

    is_exact(rule, draft, *ADVERSARIES[pair](3), 3)


@pytest.mark.parametrize("pair", ADVERSARIES)
def test_a_drafter_may_look_at_a_token_to_decide_what_comes_below_it(pair: str) -> None:
    def draft(fork: Fork, q: Table) -> DraftTree:
        tree = Growing()
        for node in grow(fork, tree, -1, q(()), 2, True):
            if tree.tokens[node] > 0:
                grow(fork, tree, node, q(tree.context(node)), 1, True)
        return tree.done()

    is_exact("multi-round", draft, *ADVERSARIES[pair](3), 3)


@pytest.mark.parametrize("pair", ["random", "zeros", "sharp drafter"])
def test_truncation_is_exact_as_long_as_the_drafter_declares_what_it_draws_from(pair: str) -> None:
    """Target cut to its two best tokens, drafter not, and the other way round."""
    p, q = ADVERSARIES[pair](4)
    is_exact("rejection", sampled([1, 1]), truncated(p), q, 3)
    is_exact("rejection", sampled([1, 1]), p, truncated(q), 3)


@pytest.mark.parametrize("pair", ["random", "zeros"])
def test_several_cycles_in_a_row(pair: str) -> None:
    """Not by induction but in one enumeration: cycle after cycle until three tokens are out."""
    p, q = ADVERSARIES[pair](3)

    def cycle(fork: Fork, text: tuple[int, ...]) -> tuple[int, ...]:
        tree = sampled([1])(fork, lambda context: q((*text, *context)))

        def after(row: int) -> np.ndarray:
            return p((*text, *tree.path(row - 1)))

        return (*text, *RULES["rejection"].verify(tree, after, ForkRandomness(fork, after)).tokens)

    def run(fork: Fork) -> tuple[int, ...]:
        text: tuple[int, ...] = ()
        while len(text) < 3:
            text = cycle(fork, text)
        return text[:3]

    assert deviation(law(run), p, 3) < TINY


@pytest.mark.parametrize("pair", ADVERSARIES)
def test_acceptance_is_the_overlap_of_p_and_q(pair: str) -> None:
    p, q = ADVERSARIES[pair](5)

    def run(fork: Fork) -> bool:
        tree = sampled([1])(fork, q)
        verdict = RULES["rejection"].verify(tree, lambda row: p(()), ForkRandomness(fork, lambda row: p(())))
        return bool(verdict.path)

    assert law(run).get(True, 0.0) == pytest.approx(float(np.minimum(p(()), q(())).sum()), abs=TINY)


def test_typical_acceptance_is_another_law() -> None:
    """It is lossy, and has to be: this is what the label is about."""
    p, q = ADVERSARIES["sharp drafter"](4)
    assert deviation(cycle_law(RULES["typical"].verify, sampled([1, 1]), p, q), p, 3) > 0.01


def test_typical_acceptance_of_a_sure_target_is_exact() -> None:
    """Greedy decoding stays greedy decoding."""
    p, q = ADVERSARIES["sure target"](4)
    is_exact("typical", sampled([2, 1]), p, q, 3)


def truncated(t: Table) -> Table:
    """The two best tokens of each distribution."""

    def at(context: tuple[int, ...]) -> np.ndarray:
        whole = t(context)
        kept = np.where(np.isin(np.arange(len(whole)), np.argsort(-whole, kind="stable")[:2]), whole, 0.0)
        return kept / kept.sum()

    return at
