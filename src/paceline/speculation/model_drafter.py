"""ModelDrafter: what every drafter that runs a model does, whatever the model: grow a tree level by level."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar
from weakref import WeakValueDictionary

from paceline.errors import RequestError
from paceline.speculation.branching import CHAIN, Branching
from paceline.speculation.drafter import Budget, DraftContext, Needs, Observation
from paceline.speculation.dynamic_tree import DynamicTree
from paceline.speculation.growth import Shape
from paceline.speculation.models import DraftModel, DraftModels, Samples
from paceline.speculation.options import Options
from paceline.speculation.sequence import DraftedSequence
from paceline.speculation.sparse_tree import SparseTree
from paceline.speculation.tree import DraftTree
from paceline.speculation.verify import RULES

D = TypeVar("D")
MOST_CHILDREN = 64
"""A pass of a dynamic tree has as many rows for each sequence."""


class ModelDrafter:
    """A drafter around a DraftModel. One object serves every request with the same options, so that a step's drafts
    are sampled together."""

    def __init__(self, name: str, model: DraftModel, shape: Shape = CHAIN, min_confidence: float = 0.0,
                 clock: Callable[[], float] = time.perf_counter) -> None:
        self.name = name
        self.model = model
        device = model.lookup if shape.is_chain and min_confidence == 0.0 else None
        self.needs = Needs(samples=True, runs_model=True, lookup=device)
        self._shape = shape
        self._min_confidence = min_confidence
        self._clock = clock

    def begin(self, sequence: DraftedSequence) -> None:
        pass

    def propose(self, sequences: Sequence[DraftedSequence], budgets: Sequence[Budget]) -> list[DraftTree | None]:
        depths = self.model.open(sequences, [budget.depth for budget in budgets])
        if self._shape.is_chain:
            chains = self.model.chains(sequences, [budget.price for budget in budgets])
            if chains is not None:
                return [self._chain(found, min(budget.nodes, depth))
                        for found, budget, depth in zip(chains, budgets, depths)]
        growths = [self._shape_of(sequence).start(sequence, budget, depth, self._min_confidence)
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

    def _chain(self, found: Samples, most: int) -> DraftTree | None:
        """At most so many tokens of what a model made in one go."""
        scores = (found.confidences or [])[:most]
        sure = next((at + 1 for at, score in enumerate(scores) if score < self._min_confidence), len(scores))
        return DraftTree.chain(found.tokens[:sure], self.name, scores[:sure]) if sure else None

    def observe(self, sequence: DraftedSequence, observation: Observation) -> None:
        pass

    def release(self, sequence: DraftedSequence) -> None:
        self.model.release(sequence)

    def _shape_of(self, sequence: DraftedSequence) -> Shape:
        # The chain rule looks at one child of a node; further ones would only cost rows.
        return CHAIN if sequence.rule == "rejection" else self._shape


def models_of(context: DraftContext, method: str) -> DraftModels:
    if context.models is None:
        raise RequestError(f"speculation method {method!r} runs a model, and there is none in this context.",
                           "speculation")
    return context.models


def read_shape(options: Options) -> Shape:
    """One of "branches" (Branching), "tree" with its "top_k" (DynamicTree) and "choices" with their "accuracies"
    (SparseTree); a chain by default."""
    branches, choices = options.take("branches", 1), options.take("choices", None)
    dynamic, accuracies = options.flag("tree", False), options.take("accuracies", None)
    top_k = options.integer("top_k", 10, 1, MOST_CHILDREN) if dynamic else None
    named = [name for name, there in (("branches", branches != 1), ("tree", dynamic), ("choices", choices is not None))
             if there]
    if len(named) > 1:
        raise RequestError(f"speculation {' and '.join(named)} each say what the draft looks like: leave one out.",
                           "speculation")
    if choices is not None or accuracies is not None:
        return SparseTree.read(choices, accuracies)
    return Branching.read(branches) if top_k is None else DynamicTree(top_k)


def shared_drafter(method: str, options: Options, context: DraftContext, model: DraftModel,
                   key: tuple[Any, ...]) -> ModelDrafter:
    """The one drafter of all requests that ask for this model in this way. Reads the options that all have."""
    shape = read_shape(options)
    confidence = options.number("min_confidence", 0.0, 0.0, 1.0)
    rule = RULES[options.verify]
    if rule.chains_only and not shape.is_chain:
        raise RequestError(f"verify={rule.name!r} verifies chains: leave branches, tree and choices out, or use "
                           "'multi-round', 'without-replacement' or 'coupled'.", "speculation")
    if rule.reads_q and confidence > 0.0:
        raise RequestError("min_confidence looks at what was sampled, which bends the text under "
                           f"verify={rule.name!r}: leave it out or use 'coupled'.", "speculation")
    return shared_by(context, f"{method} {key} {shape} {confidence}",
                     lambda: ModelDrafter(method, model, shape, confidence))


def shared_by(context: DraftContext, name: str, make: Callable[[], D]) -> D:
    """The object of this name that some request holds, or a new one; it goes when the last of them does."""
    holders: WeakValueDictionary[str, D] = context.shared.setdefault("model drafters", WeakValueDictionary())
    found = holders.get(name)
    if found is None:
        found = holders[name] = make()
    return found
