"""lookahead (Jacobi decoding): the target guesses ahead of itself in the same forward that verifies older guesses.

A window of probe tokens rides along with every step. Its rows are what the target made of the positions ahead in the
last few steps, each row better informed than the one above. The target's picks after the newest row complete one
n-gram per column; those go to a pool, and the n-grams that begin with the last token of the text are the next guesses.

The window is W columns wide and N - 1 rows high. Row 0 continues the text, one column per token; below each of its
tokens hangs the rest of the column, a chain of its own:

    text - a0 - b0 - c0 - d0         row 0
           |    |    |    |
           a1   b1   c1   d1         row 1
           |    |    |    |
           a2   b2   c2   d2         row 2 (newest); the picks a3 b3 c3 d3 after it complete a0 a1 a2 a3, ...

One token later row 1 stands where row 0 stood, and the picks are the newest row.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from paceline.speculation.drafter import Budget, DraftContext, Drafter, Needs, Observation
from paceline.speculation.growing import ROOT, GrowingTree
from paceline.speculation.options import Options
from paceline.speculation.sequence import DraftedSequence
from paceline.speculation.tree import DraftTree

POOL = 4096
"""n-grams kept for a sequence."""


class NgramPool:
    """n-grams by their first token, `per_token` of each, at most `most` in all; the least recently seen go first."""

    def __init__(self, per_token: int, most: int = POOL) -> None:
        self._per_token = per_token
        self._most = most
        self._of: OrderedDict[int, OrderedDict[tuple[int, ...], None]] = OrderedDict()
        """First token -> what follows it, both with the most recently seen last."""
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def add(self, ngram: Sequence[int]) -> None:
        first, rest = ngram[0], tuple(ngram[1:])
        group = self._of.setdefault(first, OrderedDict())
        self._of.move_to_end(first)
        if rest in group:
            group.move_to_end(rest)
            return
        group[rest] = None
        self._size += 1
        if len(group) > self._per_token:
            group.popitem(last=False)
            self._size -= 1
        while self._size > self._most:
            self._size -= len(self._of.popitem(last=False)[1])

    def after(self, token: int) -> list[tuple[int, ...]]:
        """What may follow a token, the most recently seen first."""
        return list(reversed(self._of.get(token, ())))


@dataclass(slots=True)
class Window:
    """columns[c][r]: the probe of column c in row r. All columns have the same height, 1 .. N - 1."""

    columns: list[list[int]]
    nodes: list[list[int]] = field(default_factory=list)
    """Of the columns that the last draft held: the draft's node of each probe."""

    def lay(self, tree: GrowingTree, depth: int, nodes: int) -> None:
        """Hang as many whole columns, from the left, into a tree as fit in; nothing of the next."""
        self.nodes = []
        above = ROOT
        for index, column in enumerate(self.columns):
            if index + len(column) > depth:
                return
            # Room is reckoned as if no node were there already: a column is taken whole or left whole.
            if len(tree) + len(column) > nodes:
                return
            above = tree.add(above, column[0])
            path = [above]
            for token in column[1:]:
                path.append(tree.add(path[-1], token))
            self.nodes.append(path)

    def picks(self, chosen: Sequence[int]) -> list[int | None]:
        """What the target sampled after the newest row; None for columns that were not asked or not answered."""
        sampled: list[int | None] = []
        for path in self.nodes:
            row = path[-1] + 1
            sampled.append(chosen[row] if row < len(chosen) and chosen[row] >= 0 else None)
        return sampled + [None] * (len(self.columns) - len(sampled))


class _LookaheadState:
    __slots__ = ("indexed", "luck", "pool", "window")

    def __init__(self, pool: NgramPool, seed: int) -> None:
        self.pool = pool
        self.luck = random.Random(seed)
        self.window = Window([])
        self.indexed = 0
        """How many tokens of the text are in the pool as n-grams."""


class LookaheadDrafter:
    """Drafts a tree: up to `guesses` n-grams from the pool, then the window. All are ordinary nodes, so a probe that
    happens to be right is accepted like any guess. Equal paths share their nodes."""

    needs = Needs(probes=True)

    def __init__(self, name: str = "lookahead", *, window: int = 5, ngram: int = 4, guesses: int = 5) -> None:
        """`ngram` at least 2."""
        self.name = name
        self._width = window
        self._n = ngram
        self._guesses = guesses
        self._states: dict[DraftedSequence, _LookaheadState] = {}

    def begin(self, sequence: DraftedSequence) -> None:
        state = self._states[sequence] = _LookaheadState(NgramPool(self._guesses), sequence.seed)
        self._index(state, sequence.tokens)
        self._refill(state, sequence.tokens)

    def release(self, sequence: DraftedSequence) -> None:
        self._states.pop(sequence, None)

    def propose(self, sequences: Sequence[DraftedSequence], budgets: Sequence[Budget]) -> list[DraftTree | None]:
        return [self._draft(sequence, budget) for sequence, budget in zip(sequences, budgets)]

    def _draft(self, sequence: DraftedSequence, budget: Budget) -> DraftTree | None:
        state = self._states[sequence]
        tree = GrowingTree()
        for guess in state.pool.after(sequence.tokens[-1]):
            at = ROOT
            for token in guess[:budget.depth]:
                if len(tree) >= budget.nodes and tree.find(at, token) is None:
                    break
                at = tree.add(at, token)
        state.window.lay(tree, budget.depth, budget.nodes)
        return tree.finish(self.name)

    def observe(self, sequence: DraftedSequence, observation: Observation) -> None:
        state = self._states[sequence]
        if observation.draft is not None and observation.chosen:
            self._harvest(state, observation.chosen)
        self._index(state, sequence.tokens)
        # The window stays ahead of the text: what the text has caught up with falls off on the left. Moving a row up
        # is worth one token; the rest costs columns.
        if observation.tokens:
            moved = self._shift(state, observation.chosen if observation.draft is not None else ())
            lost = max(len(observation.tokens) - moved, 0)
            state.window = Window(state.window.columns[lost:])
        self._refill(state, sequence.tokens)

    def _harvest(self, state: _LookaheadState, chosen: Sequence[int]) -> None:
        """Complete columns and the target's picks below them are n-grams."""
        for column, pick in zip(state.window.columns, state.window.picks(chosen)):
            if pick is not None and len(column) == self._n - 1:
                state.pool.add([*column, pick])

    def _shift(self, state: _LookaheadState, chosen: Sequence[int]) -> int:
        """Add the picks as the newest row and drop row 0 where that makes the columns too high. Returns by how many
        positions the window moved ahead by that."""
        window = state.window
        picks = window.picks(chosen)
        if not any(pick is not None for pick in picks):
            return 0
        full = len(window.columns[0]) == self._n - 1
        for column, pick in zip(window.columns, picks):
            # A column that was not in the draft has no pick: any token keeps the rectangle, and time will mend it.
            column.append(pick if pick is not None else column[-1])
            if full:
                del column[0]
        return int(full)

    def _refill(self, state: _LookaheadState, tokens: Sequence[int]) -> None:
        """New columns on the right, made of tokens of the text: likelier to be near the mark than any others."""
        columns = state.window.columns
        height = len(columns[0]) if columns else 1
        while len(columns) < self._width:
            columns.append([state.luck.choice(tokens) for _ in range(height)])

    def _index(self, state: _LookaheadState, tokens: Sequence[int]) -> None:
        """The text's own n-grams are guesses too."""
        for end in range(max(state.indexed, self._n - 1), len(tokens)):
            state.pool.add(tokens[end - self._n + 1:end + 1])
        state.indexed = len(tokens)


def build(method: str, options: Options, context: DraftContext) -> Drafter:
    return LookaheadDrafter(
        method, window=options.integer("window", 5, 1, 64), ngram=options.integer("ngram", 4, 2, 16),
        guesses=options.integer("guesses", 5, 1, 64))
