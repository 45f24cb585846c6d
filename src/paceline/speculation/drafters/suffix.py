"""suffix: what followed most often when a text ended like this, in this request or in any other of the engine.

The longest suffix of the text that occurred before is looked up in a suffix tree of the sequence itself and in the
library of what all requests read and wrote. The longer it is, the more is drafted.
"""

from __future__ import annotations

from collections.abc import Sequence

from paceline.speculation.drafter import Budget, DraftContext, Drafter, Needs, Observation
from paceline.speculation.options import MAX_NODES, Options
from paceline.speculation.sequence import DraftedSequence
from paceline.speculation.suffix_library import SuffixLibrary, Volume
from paceline.speculation.suffix_tree import Continuation, SuffixTree, Text
from paceline.speculation.tree import DraftTree

DEPTH = 64
LIBRARY_TOKENS = 200_000
_WORK = 64
"""Tokens sorted into the library at each call: more than a step brings in, little enough to go unnoticed."""
_DOUBT = 2.5
"""Weight of what was never seen, against one sighting after a match of one token; a longer match leaves less doubt."""


class _History:
    """A sequence as a tree of its own, and its way into the library."""

    __slots__ = ("seen", "text", "tree", "volume")

    def __init__(self, depth: int, salt: str) -> None:
        self.tree = SuffixTree(depth)
        self.text = Text()
        self.volume = Volume(salt)
        self.seen = 0

    def news(self, tokens: list[int]) -> list[int]:
        """What came since the last call, now in the tree."""
        new = tokens[self.seen:]
        self.tree.extend(self.text, new)
        self.seen = len(tokens)
        return new


class SuffixDrafter:
    """Drafts a chain, or with tree=True a tree of the most probable continuations.

    After a match of m tokens the draft holds at most factor * m + offset tokens, and it stops where the probability of
    the whole path (as counted) falls below min_prob. Of the sequence's own tree and the library's, the one with more
    expected accepted tokens is followed.
    """

    needs = Needs()

    def __init__(self, name: str = "suffix", library: SuffixLibrary | None = None, *, depth: int = DEPTH,
                 factor: float = 1.0, offset: float = 0.0, min_prob: float = 0.1, tree: bool = False) -> None:
        """`library` None: each sequence for itself."""
        self.name = name
        self._library = library
        self._depth = depth
        self._longest = depth // 2
        self._factor = factor
        self._offset = offset
        self._min_prob = min_prob
        self._tree = tree
        self._histories: dict[DraftedSequence, _History] = {}

    def begin(self, sequence: DraftedSequence) -> None:
        self._histories[sequence] = _History(self._depth, sequence.cache_salt)
        self._learn(sequence)

    def observe(self, sequence: DraftedSequence, observation: Observation) -> None:
        self._learn(sequence)

    def release(self, sequence: DraftedSequence) -> None:
        self._histories.pop(sequence, None)

    def _learn(self, sequence: DraftedSequence) -> None:
        history = self._histories[sequence]
        new = history.news(sequence.tokens)
        if self._library is not None:
            self._library.add(history.volume, new)
            self._library.work(_WORK)

    def propose(self, sequences: Sequence[DraftedSequence], budgets: Sequence[Budget]) -> list[DraftTree | None]:
        return [self._draft(sequence, budget) for sequence, budget in zip(sequences, budgets)]

    def _draft(self, sequence: DraftedSequence, budget: Budget) -> DraftTree | None:
        history = self._histories[sequence]
        found = self._continue(history.tree, *history.tree.match_end(history.text, self._longest), budget)
        scores, expected = _weighed(found)
        if self._library is not None:
            other = self._continue(*self._look_up(sequence), budget)
            other_scores, other_expected = _weighed(other)
            if other_expected > expected:
                found, scores = other, other_scores
        return DraftTree(found.tokens, found.parents, self.name, scores=scores) if found.tokens else None

    def _look_up(self, sequence: DraftedSequence) -> tuple[SuffixTree, int, int]:
        """(tree, state, length) of the longest match in the library; of equally long ones the newest."""
        best = (self._histories[sequence].tree, 0, 0)
        if self._library is not None:
            end = sequence.tokens[-self._longest:]
            for tree in self._library.trees(sequence.cache_salt):
                state, matched = tree.match(end, self._longest)
                if matched > best[2]:
                    best = (tree, state, matched)
        return best

    def _continue(self, tree: SuffixTree, state: int, matched: int, budget: Budget) -> Continuation:
        size = min(int(self._factor * matched + self._offset), budget.nodes) if matched else 0
        depth = min(budget.depth, self._depth - matched)
        if self._tree:
            return tree.branches(state, matched, size, depth, self._min_prob)
        return tree.chain(state, matched, min(size, depth), self._min_prob)


def _weighed(found: Continuation) -> tuple[list[float], float]:
    """The score of each node, its counted probability less what is in doubt where little was counted after a short
    match; and the tokens expected to be accepted: the sum of the chances that the whole path to a node is right."""
    scores: list[float] = []
    paths: list[float] = []
    for parent, count, continued, context in zip(found.parents, found.counts, found.continued, found.contexts):
        scores.append(count / (continued + _DOUBT / context))
        paths.append(scores[-1] if parent < 0 else paths[parent] * scores[-1])
    return scores, sum(paths)


def build(method: str, options: Options, context: DraftContext) -> Drafter:
    tokens = options.integer("library_tokens", LIBRARY_TOKENS, 0, 10_000_000)
    library: SuffixLibrary | None = None
    if tokens:
        # One library an engine; whoever names another size sets it for all.
        library = context.shared.setdefault("suffix library", SuffixLibrary(LIBRARY_TOKENS, DEPTH))
        library.capacity = max(tokens, _WORK)
    return SuffixDrafter(
        method, library, factor=options.number("factor", 1.0, 0.0, 64.0),
        offset=options.number("offset", 0.0, -64.0, float(MAX_NODES)),
        min_prob=options.number("min_prob", 0.1, 0.0, 1.0), tree=options.flag("tree", False))
