"""cascade: a drafter that drafts for a drafter. The middle one runs a model and verifies the small one's guesses.

The middle model samples its own token after every guess, with the noise its own drafts are sampled with, and a guess
stands where it is that very token. So what is passed up is what the middle model would have drafted alone, and its
distribution is the true q, whatever the small drafter guessed; only the number of its passes is smaller.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.errors import RequestError
from paceline.speculation.drafter import Budget, DraftContext, Drafter, Needs, Observation
from paceline.speculation.model_drafter import shared_by
from paceline.speculation.models import Ask, DraftModel, Samples
from paceline.speculation.options import MAX_NODES, Options
from paceline.speculation.parts import MadeOfParts, Part, part_of
from paceline.speculation.sequence import Continued, DraftedSequence
from paceline.speculation.tree import DraftTree

MOST_LEVELS = 4
OF_THE_WHOLE = ("k", "nodes", "adaptive", "branches", "tree", "top_k", "choices", "accuracies", "min_confidence")
"""Options of drafters with a model that do not say which model."""


class CascadeDrafter(MadeOfParts):
    """Rounds of (small drafter proposes, middle model reads it all in one pass) until the chain is deep enough."""

    needs = Needs(samples=True, runs_model=True)

    def __init__(self, small: Part, middle: Drafter, model: DraftModel, small_k: int,
                 clock: Callable[[], float] = time.perf_counter) -> None:
        self.name = "cascade"
        self._small = small.drafter
        self._limits = small
        self._middle = middle
        self._model = model
        self._small_k = small_k
        self._clock = clock
        self._chains: dict[DraftedSequence, _Chain] = {}

    def drafters(self) -> Sequence[Drafter]:
        return [self._small, self._middle]

    def begin(self, sequence: DraftedSequence) -> None:
        chain = self._chains[sequence] = _Chain(sequence)
        self._small.begin(chain.view)

    def propose(self, sequences: Sequence[DraftedSequence], budgets: Sequence[Budget]) -> list[DraftTree | None]:
        chains = [self._chains[sequence] for sequence in sequences]
        for chain, budget, room in zip(chains, budgets,
                                       self._model.open(sequences, [budget.depth for budget in budgets])):
            chain.restart(budget, room)
        while True:
            growing = [chain for chain in chains if chain.left]
            if not growing:
                return [chain.tree(self.name) for chain in chains]
            started = self._clock()
            self._guess(growing)
            answers = self._model.sample([chain.ask() for chain in growing])
            share = (self._clock() - started) / len(growing)
            for chain, samples in zip(growing, answers, strict=True):
                chain.follow(samples, share)

    def _guess(self, chains: Sequence[_Chain]) -> None:
        # Of a guess that is right to the end the chain gets one token more than it is deep.
        longer = [chain for chain in chains if chain.left > 1]
        if longer:
            guesses = self._small.propose([chain.view for chain in longer], [
                self._limits.budget(Budget(min(self._small_k, chain.left - 1), self._small_k)) for chain in longer])
            for chain, guess in zip(longer, guesses, strict=True):
                chain.guess = guess

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
    """One sequence's draft: what the middle model has sampled so far in this cycle."""

    def __init__(self, sequence: DraftedSequence) -> None:
        self.view = Continued(sequence)
        self.left = 0
        """How much deeper the draft may get."""
        self.guess: DraftTree | None = None
        """The small drafter's, of this round."""
        self._budget = Budget(1, 1)
        self._chance = 1.0
        """How likely the middle model thinks that all so far comes true."""
        self._q: list[NDArray[np.float64] | None] = []
        self._scores: list[float] = []

    def restart(self, budget: Budget, room: int) -> None:
        self.view.restart()
        self.left = min(budget.depth, budget.nodes, room)
        self._budget = budget
        self._chance = 1.0
        self._q, self._scores = [], []

    def ask(self) -> Ask:
        tokens, parents = ([], []) if self.guess is None else (self.guess.tokens, self.guess.parents)
        nodes = list(range(-1, len(tokens)))
        return Ask(self.view, tokens, parents, nodes, [1] * len(nodes))

    def follow(self, samples: Sequence[Samples], seconds: float) -> None:
        """Follow the middle model's own tokens down the guess; the first that is not in it is the last of the round,
        which took so many seconds."""
        children: dict[tuple[int, int], int] = {}
        if self.guess is not None:
            for child, parent_and_token in enumerate(zip(self.guess.parents, self.guess.tokens)):
                children.setdefault(parent_and_token, child)
            self.guess = None
        tokens: list[int] = []
        node: int | None = -1
        while node is not None and len(tokens) < self.left:
            found = samples[node + 1]
            if not found.tokens:
                self.left = len(tokens)
                break
            tokens.append(found.tokens[0])
            self._q.append(found.q)
            if found.confidences is not None:
                self._scores.append(found.confidences[0])
                self._chance *= found.confidences[0]
            node = children.get((node, found.tokens[0]))
        self.left -= len(tokens)
        self.view.extend(tokens)
        if self._scores and self._chance < self._budget.price + seconds * self._budget.pace:
            self.left = 0  # another round costs more than it is likely to bring

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
    runs a model), "small_k" (how deep the small one guesses in a round; its own "k" and "nodes" are limits too)."""
    wishes: list[Any] = []
    for name in ("drafter", "by"):
        wishes.append(options.take(name, None))
        if wishes[-1] is None:
            raise RequestError(f"speculation method 'cascade' needs {name!r}: a method's name, or a dict with its "
                               "options.", "speculation")
    if not _flat_enough(wishes, 2 * MOST_LEVELS):
        raise RequestError(f"speculation drafters may be made of drafters at most {MOST_LEVELS} levels deep: leave "
                           "some out.", "speculation")
    for name in OF_THE_WHOLE if isinstance(wishes[1], Mapping) else ():
        if name in wishes[1]:
            raise RequestError(f"speculation 'cascade' takes the model from 'by' and samples a chain from it: {name!r} "
                               "has no meaning there, leave it out.", "speculation")
    small_k = options.integer("small_k", 4, 1, MAX_NODES)

    def make() -> CascadeDrafter:
        part, by = (part_of(wish, method, context) for wish in wishes)
        small, middle = part.drafter, by.drafter
        model = getattr(middle, "model", None)
        if model is None:
            raise RequestError(f"speculation method 'cascade' needs a drafter that runs a model as 'by', and "
                               f"{middle.name!r} runs none: use draft, skip, exit or precision.", "speculation")
        if model.one_by_one:
            raise RequestError(f"{middle.name!r} goes on from its own tokens alone and cannot judge another drafter's: "
                               "use draft, skip, exit or precision as 'by'.", "speculation")
        if small.needs.probes or small.needs.taps:
            raise RequestError(f"{small.name!r} reads what the target itself computes, so it cannot draft for a "
                               "drafter: use another one, or use it alone.", "speculation")
        return CascadeDrafter(part, middle, model, small_k)

    return shared_by(context, f"{method} {wishes} {small_k}", make)


def _flat_enough(wish: Any, levels: int) -> bool:
    """Whether dicts and lists stand inside one another at most so deep."""
    if not isinstance(wish, dict | list | tuple):
        return True
    inner = wish.values() if isinstance(wish, dict) else wish
    return levels > 0 and all(_flat_enough(more, levels - 1) for more in inner)
