"""cascade: a drafter that drafts for a drafter. The middle one runs a model and verifies the small one's guesses.

The middle model draws its own token after every guess, with the noise its own drafts are drawn with, and a guess
stands where it is that very token. So what is passed up is what the middle model would have drafted alone, and its
distribution is the true q, whatever the small drafter guessed; only the number of its passes is smaller.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.errors import RequestError
from paceline.speculation.drafter import Budget, DraftContext, DraftedSequence, Drafter, Needs, Observation
from paceline.speculation.models import Ask, Continued, DraftModel, Draw
from paceline.speculation.options import MAX_NODES, Options
from paceline.speculation.tree import DraftTree


class CascadeDrafter:
    """Rounds of (small drafter proposes, middle model reads it all in one pass) until the chain is deep enough."""

    needs = Needs(samples=True)

    def __init__(self, small: Drafter, middle: Drafter, model: DraftModel, small_k: int) -> None:
        self.name = "cascade"
        self._small = small
        self._middle = middle
        self._model = model
        self._small_budget = Budget(small_k, small_k)
        self._chains: dict[DraftedSequence, _Chain] = {}

    def begin(self, sequence: DraftedSequence) -> None:
        chain = self._chains[sequence] = _Chain(sequence)
        self._small.begin(chain.view)

    def propose(self, sequences: Sequence[DraftedSequence], budgets: Sequence[Budget]) -> list[DraftTree | None]:
        chains = [self._chains[sequence] for sequence in sequences]
        for chain, budget, room in zip(chains, budgets, self._model.open(sequences)):
            chain.restart(min(budget.depth, budget.nodes, room))
        while True:
            growing = [chain for chain in chains if chain.left]
            if not growing:
                return [chain.tree(self.name) for chain in chains]
            # What the middle model reads in a pass is worth it only as far as the chain may still grow.
            guesses = self._small.propose([chain.view for chain in growing], [
                Budget(min(self._small_budget.depth, chain.left), self._small_budget.nodes) for chain in growing])
            asks = [chain.ask(guess) for chain, guess in zip(growing, guesses)]
            for chain, guess, draws in zip(growing, guesses, self._model.draw(asks)):
                chain.take(guess, draws)

    def observe(self, sequence: DraftedSequence, observation: Observation) -> None:
        chain = self._chains[sequence]
        chain.view.restart()
        # What the small drafter proposed was judged by the middle model; of the target it hears the tokens only.
        self._small.observe(chain.view, Observation(observation.tokens))
        self._middle.observe(sequence, observation)

    def release(self, sequence: DraftedSequence) -> None:
        chain = self._chains.pop(sequence, None)
        if chain is not None:
            self._small.release(chain.view)
        self._middle.release(sequence)


class _Chain:
    """One sequence's draft: what the middle model has drawn so far in this cycle."""

    def __init__(self, sequence: DraftedSequence) -> None:
        self.view = Continued(sequence)
        self.left = 0
        """How much deeper the draft may get."""
        self._q: list[NDArray[np.float64] | None] = []
        self._scores: list[float] = []

    def restart(self, depth: int) -> None:
        self.view.restart()
        self.left = depth
        self._q, self._scores = [], []

    def ask(self, guess: DraftTree | None) -> Ask:
        tokens, parents = ([], []) if guess is None else (guess.tokens, guess.parents)
        nodes = list(range(-1, len(tokens)))
        return Ask(self.view, tokens, parents, nodes, [1] * len(nodes))

    def take(self, guess: DraftTree | None, draws: Sequence[Draw]) -> None:
        """Follow the middle model's own tokens down the guess; the first that is not in it is the last of the round."""
        children: dict[tuple[int, int], int] = {}
        if guess is not None:
            for child, parent_and_token in enumerate(zip(guess.parents, guess.tokens)):
                children.setdefault(parent_and_token, child)
        drawn: list[int] = []
        node: int | None = -1
        while node is not None and len(drawn) < self.left:
            draw = draws[node + 1]
            if not draw.tokens:
                self.left = len(drawn)
                break
            drawn.append(draw.tokens[0])
            self._q.append(draw.q)
            self._scores += [] if draw.confidences is None else draw.confidences[:1]
            node = children.get((node, draw.tokens[0]))
        self.left -= len(drawn)
        self.view.extend(drawn)

    def tree(self, name: str) -> DraftTree | None:
        tokens = self.view.path
        if not tokens:
            return None
        tree = DraftTree.chain(tokens, name)
        if any(q is not None for q in self._q):
            tree.q = list(self._q)
        elif len(self._scores) == len(tokens):
            tree.scores = self._scores
        return tree


def build(method: str, options: Options, context: DraftContext) -> Drafter:
    """Options: "drafter" (the small one: any method, or a dict with its options), "by" (the middle one: a drafter that
    runs a model), "small_k" (how deep the small one guesses in a round)."""
    small = _nested(options, "drafter", context)
    middle = _nested(options, "by", context)
    model = getattr(middle, "model", None)
    if model is None:
        raise RequestError(f"speculation method 'cascade' needs a drafter that runs a model as 'by', and "
                           f"{middle.name!r} runs none: use draft, skip, exit or precision.", "speculation")
    return CascadeDrafter(small, middle, model, options.integer("small_k", 4, 1, MAX_NODES))


def _nested(options: Options, name: str, context: DraftContext) -> Drafter:
    wish: Any = options.take(name, None)
    if wish is None:
        raise RequestError(f"speculation method 'cascade' needs {name!r}: a method's name, or a dict with its options.",
                           "speculation")
    return context.build(wish)
