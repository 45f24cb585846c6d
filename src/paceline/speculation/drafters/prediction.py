"""prediction: a text that the caller expects, followed as long as it is right and found again where it was left.

Whoever has a file rewritten knows most of the answer. Where the prediction has nothing to say, the text itself is
looked up, as `ngram` does.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from paceline.speculation.drafter import Budget, DraftContext, Drafter, Needs, Observation
from paceline.speculation.drafters.ngram import NgramDrafter, confidence
from paceline.speculation.options import Options
from paceline.speculation.sequence import DraftedSequence
from paceline.speculation.tree import DraftTree

LENGTHS = (3, 2)
"""Of the n-grams by which the text is found again in the prediction, the longest first."""
TRUST = 8
"""As likely as after so many equal tokens, the text goes on as the caller said."""


class PredictionDrafter:
    """Drafts a chain of what follows in the prediction."""

    needs = Needs()

    def __init__(self, name: str, tokens: Sequence[int]) -> None:
        self.name = name
        self._predicted = list(tokens)
        self._after: dict[tuple[int, ...], list[int]] = {}
        """n-gram of the prediction -> where it goes on, in order."""
        for n in LENGTHS:
            for at in range(n, len(self._predicted)):
                self._after.setdefault(tuple(self._predicted[at - n:at]), []).append(at)
        self._places: dict[DraftedSequence, int] = {}
        """What follows there is expected next."""
        self._lost: set[DraftedSequence] = set()
        """Those whose text has left the prediction at that place."""
        self._own = NgramDrafter()

    def begin(self, sequence: DraftedSequence) -> None:
        self._own.begin(sequence)
        self._places[sequence] = 0
        self._follow(sequence, sequence.tokens[sequence.prompt_len:])

    def propose(self, sequences: Sequence[DraftedSequence], budgets: Sequence[Budget]) -> list[DraftTree | None]:
        return [self._chain(sequence, budget) or self._own.propose([sequence], [budget])[0]
                for sequence, budget in zip(sequences, budgets)]

    def observe(self, sequence: DraftedSequence, observation: Observation) -> None:
        self._own.observe(sequence, observation)
        self._follow(sequence, observation.tokens)

    def release(self, sequence: DraftedSequence) -> None:
        self._own.release(sequence)
        self._places.pop(sequence, None)
        self._lost.discard(sequence)

    def _chain(self, sequence: DraftedSequence, budget: Budget) -> DraftTree | None:
        at = self._places[sequence]
        ahead = [] if sequence in self._lost else self._predicted[at:at + min(budget.depth, budget.nodes)]
        return DraftTree.chain(ahead, self.name, [confidence(TRUST + depth) for depth in range(len(ahead))]) \
            if ahead else None

    def _follow(self, sequence: DraftedSequence, tokens: Sequence[int]) -> None:
        """`tokens` are the last ones of the sequence."""
        for token in tokens:
            at = self._places[sequence]
            if sequence in self._lost or at >= len(self._predicted) or self._predicted[at] != token:
                self._lost.add(sequence)
                break
            self._places[sequence] = at + 1
        if sequence in self._lost:
            self._find(sequence)

    def _find(self, sequence: DraftedSequence) -> None:
        """The nearest place behind the one where the text left the prediction; else the last one before."""
        said = len(sequence.tokens) - sequence.prompt_len
        for n in LENGTHS:
            places = self._after.get(tuple(sequence.tokens[-n:])) if n <= said else None
            if places:
                nearest = bisect_left(places, self._places[sequence])
                self._places[sequence] = places[min(nearest, len(places) - 1)]
                self._lost.discard(sequence)
                return


def build(method: str, options: Options, context: DraftContext) -> Drafter:
    return PredictionDrafter(method, options.tokens("tokens", context.vocab_size))
