"""ModelDrafter: what every drafter that runs a model does, whatever the model: grow a tree level by level."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar
from weakref import WeakValueDictionary

import numpy as np
from numpy.typing import NDArray

from paceline.errors import RequestError
from paceline.speculation.drafter import Budget, DraftContext, Needs, Observation
from paceline.speculation.models import Ask, DraftModel, DraftModels, Samples
from paceline.speculation.options import MAX_NODES, Options
from paceline.speculation.sequence import DraftedSequence
from paceline.speculation.tree import DraftTree
from paceline.speculation.verify import RULES

D = TypeVar("D")


@dataclass(frozen=True, slots=True)
class Branching:
    """How wide a draft is at each depth. `everywhere`: every node goes on (a full tree); else the first of each
    level's siblings alone does, and the others are leaves beside the chain."""

    widths: tuple[int, ...] = (1,)
    """Children of a node at depth 0, 1, ...; the last stands for all that follow unless the tree is full, where one
    child each follows."""
    everywhere: bool = False

    def width(self, depth: int) -> int:
        if depth < len(self.widths):
            return self.widths[depth]
        return 1 if self.everywhere else self.widths[-1]

    @property
    def is_chain(self) -> bool:
        return all(width == 1 for width in self.widths)

    @classmethod
    def read(cls, options: Options) -> Branching:
        """Option "branches": a number (siblings at every depth) or a list (children of every node, by depth)."""
        raw: Any = options.take("branches", 1)
        widths = raw if isinstance(raw, list | tuple) else [raw]
        if not widths or not all(isinstance(width, int) and not isinstance(width, bool) and 1 <= width <= MAX_NODES
                                 for width in widths):
            raise RequestError(f"speculation branches must be a whole number from 1 to {MAX_NODES} or a list of such "
                               f"numbers, one per depth, got {raw!r}.", "speculation")
        return cls(tuple(widths), everywhere=isinstance(raw, list | tuple))


CHAIN = Branching()


class Growth:
    """One sequence's tree while it grows. Nodes that go on are read by the model; leaves never are."""

    def __init__(self, sequence: DraftedSequence, budget: Budget, depth: int, branching: Branching,
                 min_confidence: float) -> None:
        self.sequence = sequence
        self.budget = budget
        self._depth = min(budget.depth, depth)
        self._nodes = budget.nodes
        self._branching = branching
        self._min_confidence = min_confidence
        self._level = 0
        self._frontier = [-1] if self._depth else []
        self._tokens: list[int] = []
        self._parents: list[int] = []
        self._q: list[NDArray[np.float64] | None] = []
        self._scores: list[float] = []
        self._chances: list[float] = []
        """Of each node: how likely the model thinks that all down to it comes true."""
        self._read: dict[int, int] = {-1: -1}
        """Nodes that the model reads, and their places among those."""

    def ask(self) -> Ask | None:
        """The next question to the model; None: grown."""
        left = self._nodes - len(self._tokens)
        if not self._frontier or left < 1 or self._level >= self._depth:
            return None
        for node in self._frontier:
            self._read.setdefault(node, len(self._read) - 1)
        # Which nodes get how many children is settled before their values are sampled: rules that read q need that.
        counts: list[int] = []
        for _ in self._frontier:
            counts.append(min(self._branching.width(self._level), left))
            left -= counts[-1]
        asked = [(node, count) for node, count in zip(self._frontier, counts) if count]
        self._frontier = [node for node, _ in asked]
        nodes = [node for node in self._read if node >= 0]
        return Ask(self.sequence, [self._tokens[node] for node in nodes],
                   [self._read[self._parents[node]] for node in nodes],
                   [self._read[node] for node in self._frontier], [count for _, count in asked])

    def grow(self, samples: Sequence[Samples], least: float) -> None:
        """The answer, the Samples after each node of the last question. A node goes on if its chance is at least
        `least`, where the rule allows to look."""
        grown: list[int] = []
        for node, found in zip(self._frontier, samples):
            above = 1.0 if node < 0 else self._chances[node]
            for place, token in enumerate(found.tokens):
                confidence = 1.0 if found.confidences is None else found.confidences[place]
                chance = above * confidence
                likely = found.confidences is None or (confidence >= self._min_confidence and chance >= least)
                if likely and (place == 0 or self._branching.everywhere):
                    grown.append(len(self._tokens))
                self._chances.append(chance)
                self._tokens.append(token)
                self._parents.append(node)
                self._q.append(found.q)
                if found.confidences is not None:
                    self._scores.append(confidence)
        self._frontier = grown
        self._level += 1

    def tree(self, drafter: str) -> DraftTree | None:
        if not self._tokens:
            return None
        sampled = any(q is not None for q in self._q)
        scored = len(self._scores) == len(self._tokens)
        return DraftTree(self._tokens, self._parents, drafter, q=self._q if sampled else None,
                         scores=self._scores if scored else None)


class ModelDrafter:
    """A drafter around a DraftModel. One object serves every request with the same options, so that a step's drafts
    are sampled together."""

    def __init__(self, name: str, model: DraftModel, branching: Branching = CHAIN, min_confidence: float = 0.0,
                 clock: Callable[[], float] = time.perf_counter) -> None:
        self.name = name
        self.model = model
        device = model.lookup if branching.is_chain and min_confidence == 0.0 else None
        self.needs = Needs(samples=True, runs_model=True, lookup=device)
        self._branching = branching
        self._min_confidence = min_confidence
        self._clock = clock

    def begin(self, sequence: DraftedSequence) -> None:
        pass

    def propose(self, sequences: Sequence[DraftedSequence], budgets: Sequence[Budget]) -> list[DraftTree | None]:
        depths = self.model.open(sequences, [budget.depth for budget in budgets])
        growths = [Growth(sequence, budget, depth, self._shape(sequence), self._min_confidence)
                   for sequence, budget, depth in zip(sequences, budgets, depths)]
        while True:
            asked = [(growth, ask) for growth in growths if (ask := growth.ask()) is not None]
            if not asked:
                return [growth.tree(self.name) for growth in growths]
            started = self._clock()
            answers = self.model.sample([ask for _, ask in asked])
            share = (self._clock() - started) / len(asked)
            for (growth, _), samples in zip(asked, answers, strict=True):
                # One level more costs a row of the target's step and as much time as this one: a node has to be
                # that likely to be reached.
                growth.grow(samples, growth.budget.price + share * growth.budget.pace)

    def observe(self, sequence: DraftedSequence, observation: Observation) -> None:
        pass

    def release(self, sequence: DraftedSequence) -> None:
        self.model.release(sequence)

    def _shape(self, sequence: DraftedSequence) -> Branching:
        # The chain rule looks at one child of a node; further ones would only cost rows.
        return CHAIN if sequence.rule == "rejection" else self._branching


def models_of(context: DraftContext, method: str) -> DraftModels:
    if context.models is None:
        raise RequestError(f"speculation method {method!r} runs a model, and there is none in this context.",
                           "speculation")
    return context.models


def shared_drafter(method: str, options: Options, context: DraftContext, model: DraftModel,
                   key: tuple[Any, ...]) -> ModelDrafter:
    """The one drafter of all requests that ask for this model in this way. Reads the options that all have."""
    branching = Branching.read(options)
    confidence = options.number("min_confidence", 0.0, 0.0, 1.0)
    rule = RULES[options.verify]
    if not model.trees and branching.everywhere and not branching.is_chain:
        raise RequestError(f"speculation method {method!r} drafts a chain, and siblings beside it: write branches as "
                           "one number.", "speculation")
    if rule.chains_only and not branching.is_chain:
        raise RequestError(f"verify={rule.name!r} verifies chains: leave branches out, or use 'multi-round', "
                           "'without-replacement' or 'coupled'.", "speculation")
    if rule.reads_q and confidence > 0.0:
        raise RequestError("min_confidence looks at what was sampled, which bends the text under "
                           f"verify={rule.name!r}: leave it out or use 'coupled'.", "speculation")
    return shared_by(context, f"{method} {key} {branching} {confidence}",
                     lambda: ModelDrafter(method, model, branching, confidence))


def shared_by(context: DraftContext, name: str, make: Callable[[], D]) -> D:
    """The object of this name that some request holds, or a new one; it goes when the last of them does."""
    holders: WeakValueDictionary[str, D] = context.shared.setdefault("model drafters", WeakValueDictionary())
    found = holders.get(name)
    if found is None:
        found = holders[name] = make()
    return found
