"""rest: what followed in a body of text that was prepared beforehand (`paceline train datastore`)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from paceline.errors import RequestError
from paceline.speculation.datastore import Datastore
from paceline.speculation.drafter import Budget, DraftContext, Drafter, Needs, Observation
from paceline.speculation.options import Options
from paceline.speculation.sequence import DraftedSequence
from paceline.speculation.tree import DraftTree

LONGEST = 16
SHORTEST = 2
HITS = 5000
CONTINUATION = 10
"""Tokens read after each hit."""


class RestDrafter:
    """Finds the longest suffix of the text (longest .. shortest tokens) in the datastore and drafts the most frequent
    continuations as a tree, or with chain=True the best path of it."""

    needs = Needs()

    def __init__(self, name: str, store: Datastore, *, longest: int = LONGEST, shortest: int = SHORTEST,
                 hits: int = HITS, chain: bool = False) -> None:
        self.name = name
        self._store = store
        self._longest = longest
        self._shortest = shortest
        self._hits = hits
        self._chain = chain

    def begin(self, sequence: DraftedSequence) -> None:
        pass

    def observe(self, sequence: DraftedSequence, observation: Observation) -> None:
        pass

    def release(self, sequence: DraftedSequence) -> None:
        pass

    def propose(self, sequences: Sequence[DraftedSequence], budgets: Sequence[Budget]) -> list[DraftTree | None]:
        return [self._draft(sequence.tokens, budget) for sequence, budget in zip(sequences, budgets)]

    def _draft(self, tokens: list[int], budget: Budget) -> DraftTree | None:
        length, first, last = self._store.longest_suffix(tokens[-self._longest:], self._longest, self._shortest)
        if not length:
            return None
        rows = self._store.following(first, last, length, min(budget.depth, CONTINUATION), self._hits)
        tree = best_path(rows) if self._chain else frequent_prefixes(rows, budget.nodes)
        if tree is None:
            return None
        tree.drafter = self.name
        return tree.trimmed(budget.nodes)


def frequent_prefixes(rows: NDArray[np.int64], nodes: int) -> DraftTree | None:
    """The `nodes` most frequent prefixes of sorted rows [hits, depth] as a tree, the most frequent first; of equally
    frequent ones the shorter, then the one that sorts first. A row ends at its first -1."""
    differs = np.ones(rows.shape, bool)
    if len(rows) > 1:
        differs[1:] = np.logical_or.accumulate(rows[1:] != rows[:-1], axis=1)
    # In sorted rows all with the same prefix stand together: a prefix is a run of rows, known by depth and first row.
    counts, depths, begins = [], [], []
    for depth in range(rows.shape[1]):
        begin = np.flatnonzero(differs[:, depth])
        counts.append(np.diff(begin, append=len(rows)))
        depths.append(np.full(len(begin), depth))
        begins.append(begin)
    count, level, begin = (np.concatenate(parts) for parts in (counts, depths, begins))
    real = rows[begin, level] >= 0
    count, level, begin = count[real], level[real], begin[real]
    # A parent is at least as frequent as its child, and shorter: it always comes first.
    best = np.lexsort((begin, level, -count))[:nodes]
    numbers: dict[tuple[int, int], int] = {}
    tokens: list[int] = []
    parents: list[int] = []
    scores: list[float] = []
    sizes = [len(rows)]
    for size, depth, start in zip(count[best].tolist(), level[best].tolist(), begin[best].tolist()):
        above = start - int(np.argmax(differs[start::-1, depth - 1])) if depth else 0
        parent = numbers[depth - 1, above] if depth else -1
        numbers[depth, start] = len(tokens)
        tokens.append(int(rows[start, depth]))
        parents.append(parent)
        scores.append(size / sizes[parent + 1])
        sizes.append(size)
    return DraftTree(tokens, parents, scores=scores) if tokens else None


def best_path(rows: NDArray[np.int64]) -> DraftTree | None:
    """The most frequent token, then the most frequent one among those that went on with it, and so on."""
    tokens: list[int] = []
    scores: list[float] = []
    for depth in range(rows.shape[1]):
        found, counts = np.unique(rows[rows[:, depth] >= 0, depth], return_counts=True)
        if not len(found):
            break
        best = int(np.argmax(counts))
        tokens.append(int(found[best]))
        scores.append(int(counts[best]) / len(rows))
        rows = rows[rows[:, depth] == found[best]]
    return DraftTree.chain(tokens, scores=scores) if tokens else None


def build(method: str, options: Options, context: DraftContext) -> Drafter:
    given = options.text("datastore")
    if given is None:
        raise RequestError("speculation method 'rest' needs 'datastore': the path of a file that `paceline train "
                           "datastore` wrote.", "speculation")
    longest = options.integer("longest", LONGEST, 1, LONGEST)
    shortest = options.integer("shortest", min(SHORTEST, longest), 1, longest)
    path = Path(given).absolute()
    name = f"rest datastore {path}"
    store = context.shared.get(name)
    if store is None:
        store = Datastore(path)
        context.shared[name] = store
    store.fits(context.vocab_size, context.fingerprint())
    return RestDrafter(method, store, longest=longest, shortest=shortest,
                       hits=options.integer("hits", HITS, 1, 1_000_000), chain=options.flag("chain", False))
