"""What drafts of models look like: dynamic and sparse trees against their definitions, and under every rule the law of
the text stays the target's."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from paceline.errors import RequestError
from paceline.speculation.branching import Branching
from paceline.speculation.drafter import Budget
from paceline.speculation.dynamic_tree import DynamicTree
from paceline.speculation.growth import Shape
from paceline.speculation.model_drafter import ModelDrafter, read_shape
from paceline.speculation.models import Ask, Samples
from paceline.speculation.options import Options
from paceline.speculation.sparse_tree import USUAL_ACCURACIES, SparseTree, likeliest_tree
from paceline.speculation.tree import DraftTree
from paceline.speculation.verify import RULES
from speculation.enumeration import ADVERSARIES, Fork, Table, cycle_law, deviation, table


@dataclass(eq=False)
class Text:
    rule: str = "coupled"
    tokens: list[int] = field(default_factory=lambda: [0])
    prompt_len: int = 1
    seed: int = 0
    scope: str = ""


class TableModel:
    """A DraftModel that goes by a table: the best tokens, or with a fork every way that drawing them can fall."""

    one_by_one = True
    lookup = None

    def __init__(self, q: Table, fork: Fork | None = None, replace: bool = True) -> None:
        self.q, self.fork, self.replace = q, fork, replace
        self.read: list[int] = []
        """Rows of every pass."""

    def open(self, sequences: Sequence[Any], depths: Sequence[int]) -> list[int]:
        return list(depths)

    def chains(self, sequences: Sequence[Any], least: Sequence[float]) -> None:
        return None

    def release(self, sequence: Any) -> None:
        pass

    def sample(self, asks: Sequence[Ask]) -> list[list[Samples]]:
        self.read.append(sum(len(ask.at) for ask in asks))
        known: dict[tuple[int, ...], Samples] = {}
        found = []
        for ask in asks:
            paths: list[tuple[int, ...]] = [()]
            for token, parent in zip(ask.tokens, ask.parents):
                paths.append((*paths[parent + 1], token))
            own = []
            for node, count in zip(ask.at, ask.counts):
                path = paths[node + 1]
                # The engine's noise is keyed by position: the same text goes on in the same way.
                samples = known[path] if path in known else self._sampled(self.q(path), count)
                own.append(known.setdefault(path, samples))
            found.append(own)
        return found

    def _sampled(self, q: np.ndarray, count: int) -> Samples:
        if self.fork is None:
            best = np.argsort(-q, kind="stable")[:count].tolist()
            return Samples(best, confidences=[float(q[token]) for token in best])
        left, tokens = q, []
        for _ in range(count):
            if left.sum() > 0.0:
                tokens.append(self.fork.pick(left / left.sum()))
                if not self.replace:
                    left = left.copy()
                    left[tokens[-1]] = 0.0
        return Samples(tokens, q=q)


def drafted(model: Any, shape: Shape, depth: int, nodes: int, rule: str = "coupled") -> DraftTree:
    tree, = ModelDrafter("test", model, shape).propose([Text(rule)], [Budget(depth, nodes)])
    assert tree is not None
    tree.check()
    return tree


def by_definition(q: Table, top_k: int, depth: int, nodes: int) -> set[tuple[int, ...]]:
    """EAGLE-2's tree, nothing left out before the end."""
    pool: dict[tuple[int, ...], float] = {}
    level: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(depth):
        best = sorted(level, key=lambda path: -level[path])[:top_k]
        level = {(*path, int(token)): level[path] * float(q(path)[token])
                 for path in best for token in np.argsort(-q(path), kind="stable")[:top_k]}
        pool |= level
    return set(sorted(pool, key=lambda path: -pool[path])[:nodes])


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("top_k", "depth", "nodes"), [(3, 4, 12), (5, 3, 40), (2, 6, 9), (4, 5, 7), (1, 4, 4)])
def test_a_dynamic_tree_is_eagle_2s(seed: int, top_k: int, depth: int, nodes: int) -> None:
    q = table(seed, 8, "sharp" if seed % 2 else "random")
    model = TableModel(q)
    tree = drafted(model, DynamicTree(top_k), depth, nodes)
    assert {tuple(tree.path(node)) for node in range(len(tree))} == by_definition(q, top_k, depth, nodes)
    chances = [math.prod(float(q(tuple(path[:place]))[token]) for place, token in enumerate(path))
               for path in map(tree.path, range(len(tree)))]
    assert chances == pytest.approx(sorted(chances, reverse=True)), "what is cut off first comes last"
    assert len(model.read) <= depth and max(model.read) <= top_k


def test_passes_that_cannot_change_a_dynamic_tree_are_not_run() -> None:
    model = TableModel(lambda path: np.array([0.5, 0.3, 0.2]))
    assert len(drafted(model, DynamicTree(3), 9, 3)) == 3
    assert len(model.read) < 4


SHAPES: dict[str, tuple[Shape, int, int]] = {
    "dynamic": (DynamicTree(2), 2, 4), "dynamic, one deep": (DynamicTree(3), 1, 3),
    "dynamic, deeper": (DynamicTree(2), 3, 4),
    "sparse": (SparseTree.read([[0], [1], [0, 0], [1, 0]], None), 2, 8),
    "sparse, with gaps": (SparseTree.read([[1], [1, 2], [0], [1, 0]], None), 2, 8),
    "full": (Branching((2, 2), everywhere=True), 2, 8),
}


@pytest.mark.parametrize("pair", ["random", "zeros", "disjoint", "sharp drafter", "flat drafter"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rule", ["multi-round", "without-replacement"])
def test_trees_that_were_sampled_leave_the_law_of_the_text(rule: str, shape: str, pair: str) -> None:
    """Every way that the drafts can fall, in a model whose noise is keyed by position, and every way to verify them.
    Where a token is drawn twice, what is drawn below it counts once."""
    p, q = ADVERSARIES[pair](3)
    form, depth, nodes = SHAPES[shape]

    def draft(fork: Fork, q: Table) -> DraftTree:
        tree = drafted(TableModel(q, fork, rule == "multi-round"), form, depth, nodes, rule)
        assert tree.q is not None and len(tree) <= nodes
        return tree

    emitted = cycle_law(RULES[rule].verify, draft, p, q)
    assert sum(emitted.values()) == pytest.approx(1.0, abs=1e-12)
    assert deviation(emitted, p, depth + 1) < 1e-12


def test_a_greedy_sparse_tree_has_the_paths_that_were_chosen() -> None:
    q = table(3, 8)
    choices = [[0], [0, 0], [2], [0, 1], [2, 0], [0, 0, 3], [5]]
    tree = drafted(TableModel(q), SparseTree.read(choices, None), 5, 64)

    def tokens(path: Sequence[int]) -> tuple[int, ...]:
        found: tuple[int, ...] = ()
        for place in path:
            found = (*found, int(np.argsort(-q(found), kind="stable")[place]))
        return found

    assert [tuple(tree.path(node)) for node in range(len(tree))] == [tokens(path) for path in choices]
    cut = drafted(TableModel(q), SparseTree.read(choices, None), 2, 4)
    assert [tuple(cut.path(node)) for node in range(len(cut))] == [tokens(path) for path in choices[:4]]


def test_the_likeliest_tree_is_the_best_of_all_of_its_size() -> None:
    accuracies = [[0.5, 0.3, 0.1], [0.6, 0.2], [0.4, 0.35]]

    def worth(paths: Sequence[tuple[int, ...]]) -> float:
        return sum(math.prod(accuracies[depth][place] for depth, place in enumerate(path)) for path in paths)

    every = [path for depth in (1, 2, 3)
             for path in itertools.product(*(range(len(one)) for one in accuracies[:depth]))]
    for size in (1, 3, 5):
        best = max(worth(paths) for paths in itertools.combinations(every, size)
                   if all(len(path) == 1 or path[:-1] in paths for path in paths))
        found = likeliest_tree(accuracies, size)
        assert len(found) == size and worth(found) == pytest.approx(best)
    assert len(likeliest_tree(accuracies, 99)) == len(every), "there are no more"


@pytest.mark.parametrize("heads", [3, 4, 5])
def test_the_default_tree_suits_any_number_of_heads(heads: int) -> None:
    paths = likeliest_tree(USUAL_ACCURACIES[:heads], 63)
    assert len(paths) == 63 and max(map(len, paths)) in range(3, heads + 1) and paths[0] == (0,)
    whole = SparseTree.read(True, None).choices
    assert len(whole) == 63 and set(whole[:20]) <= set(likeliest_tree(USUAL_ACCURACIES, 63))


@pytest.mark.parametrize(("wish", "said"), [
    ({"choices": [[0, 1]]}, r"\[0, 1\] and not \[0\]"),
    ({"choices": []}, "choices must be"),
    ({"choices": [[0], ["1"]]}, "choices must be"),
    ({"choices": [[0], [-1]]}, "choices must be"),
    ({"choices": False}, "choices must be"),
    ({"choices": [[0]], "accuracies": [[0.5]]}, "accuracies must be"),
    ({"choices": True, "accuracies": [[0.5], [2.0]]}, "accuracies must be"),
    ({"accuracies": [[0.5]]}, "accuracies must be"),
    ({"tree": True, "branches": 2}, "branches and tree"),
    ({"tree": True, "choices": True}, "tree and choices"),
    ({"tree": 1}, "tree must be"),
    ({"tree": True, "top_k": 0}, "top_k must be"),
])
def test_what_cannot_be_drawn_is_refused(wish: dict[str, Any], said: str) -> None:
    with pytest.raises(RequestError, match=said):
        read_shape(Options("test", wish))
