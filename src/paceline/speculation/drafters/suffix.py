"""suffix: what followed most often when a text ended like this, in this request or in any other of the engine.

The longest suffix of the text that occurred before is looked up in a suffix tree of the sequence itself and in the
library of what all requests read and wrote. The longer it is, the more is drafted.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from paceline.speculation.drafter import Budget, DraftContext, DraftedSequence, Drafter, Needs, Observation
from paceline.speculation.options import MAX_NODES, Options
from paceline.speculation.suffix_library import SuffixLibrary, Volume
from paceline.speculation.suffix_tree import Continuation, SuffixTree, Text
from paceline.speculation.tree import DraftTree

DEPTH = 64
LIBRARY_TOKENS = 200_000
_WORK = 64
"""Tokens sorted into the library at each call: more than a step brings in, little enough to go unnoticed."""
_DOUBT = 2.0
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
        own = (history.tree, *history.tree.match_end(history.text, self._longest))
        end = sequence.tokens[-self._longest:]
        shared = () if self._library is None else (
            (tree, *tree.match(end, self._longest)) for tree in self._library.trees(sequence.cache_salt))
        best: DraftTree | None = None
        most = 0.0
        for tree, state, matched in chain((own,), shared):
            found = self._continue(tree, state, matched, budget) if matched else None
            if found is None or not found.tokens:
                continue
            draft = DraftTree(found.tokens, found.parents, self.name, scores=_scores(found, matched))
            expected = _expected(draft)
            if expected > most:
                best, most = draft, expected
        return best

    def _continue(self, tree: SuffixTree, state: int, matched: int, budget: Budget) -> Continuation | None:
        size = int(self._factor * matched + self._offset)
        depth = min(budget.depth, self._depth - matched)
        if size < 1 or depth < 1:
            return None
        if self._tree:
            return tree.branches(state, min(size, budget.nodes), depth, self._min_prob)
        return tree.chain(state, min(size, budget.nodes, depth), self._min_prob)


def _scores(found: Continuation, matched: int) -> list[float]:
    """Counted probabilities, less what is in doubt where little was counted after a short match."""
    lengths: list[int] = []
    scores: list[float] = []
    for parent, count, continued in zip(found.parents, found.counts, found.continued):
        lengths.append(matched if parent < 0 else lengths[parent] + 1)
        scores.append(count / (continued + _DOUBT / lengths[-1]))
    return scores


def _expected(draft: DraftTree) -> float:
    """Expected accepted tokens: the sum over all nodes of the probability that the whole path to it is right."""
    paths: list[float] = []
    for parent, score in zip(draft.parents, draft.scores or ()):
        paths.append(score if parent < 0 else paths[parent] * score)
    return sum(paths)


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
