"""How a drafter reaches models: the protocol that the engine implements, so that no drafter touches a cache.

A DraftModel is some model over some cache, shared by all sequences that draft with it: another model with a cache of
its own, or the target in a reduced form (fewer layers, fewer bits) that reads the target's cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from paceline.speculation.drafter import DraftedSequence

SAMPLED_RULES = frozenset({"rejection", "multi-round", "without-replacement"})
"""Rules that read q: drafts for them are drawn with private noise, and carry the distribution they were drawn from.
For all others a draft is drawn with the target's own noise, so that it agrees with the target as often as can be."""

ATTENTION, MLP = "attn", "mlp"
Sublayer = tuple[int, str]
"""(layer, ATTENTION or MLP)."""


@dataclass(slots=True)
class Ask:
    """What a drafter wants to know about one sequence: how it goes on after some nodes of its draft.

    `tokens` and `parents` are the nodes the model has to read (parents before children, -1: after the sequence's last
    token); `at` names the nodes after which to draw (-1: right after the sequence), `counts` how many tokens each.
    From one ask to the next the nodes may only be added to; those that form a chain from the root are read once.
    """

    sequence: DraftedSequence
    tokens: list[int]
    parents: list[int]
    at: list[int]
    counts: list[int]


@dataclass(slots=True)
class Draw:
    """Continuations of one node. Empty: the model has none (no room in the cache, nothing left to sample)."""

    tokens: list[int]
    """In the order in which they were drawn; best first where the noise is the target's. Under the multi-round rule
    the same token may come twice."""
    q: NDArray[np.float64] | None = None
    """[V] what they were drawn from, every sampling control applied; None: drawn with the target's noise."""
    confidences: list[float] | None = None
    """The model's probability of each token; None under the rules that read q, which must not look at values."""


NOTHING = Draw([])


class DraftModel(Protocol):
    """A model that drafts for many sequences at once."""

    def open(self, sequences: Sequence[DraftedSequence]) -> list[int]:
        """Before a draft: catch up with the sequences' tokens. Per sequence how deep a draft may be; 0: not now."""

    def draw(self, asks: Sequence[Ask]) -> list[list[Draw]]:
        """One forward pass for all: per ask a Draw for each of its `at`. Only for sequences that open() let in."""

    def release(self, sequence: DraftedSequence) -> None:
        """Forget a sequence; its cache is free."""


class DraftModels(Protocol):
    """The models an engine can draft with. Each is made once and shared; a wish that cannot be met is a PacelineError
    that says what to change."""

    @property
    def layers(self) -> int:
        """Layers of the target."""

    def load(self, model: str, cache_tokens: int | None = None) -> DraftModel:
        """Another model with the target's vocabulary, its cache sized for so many tokens (None: like the target's)."""

    def skipping(self, sublayers: frozenset[Sublayer]) -> DraftModel:
        """The target without some of its sublayers."""

    def exiting(self, layers: int) -> DraftModel:
        """The target's first layers, then its norm and head."""

    def rounded(self, bits: int | None) -> DraftModel:
        """The target's weights in so many bits (None: the nearest below what it has)."""


class Continued:
    """A sequence as if `path` had been committed already: what a drafter's drafter sees. `path` may shrink again, so
    only `base` is told what is final."""

    __slots__ = ("base", "path", "prompt_len", "seed", "tokens")

    def __init__(self, base: DraftedSequence) -> None:
        self.base = base
        self.prompt_len = base.prompt_len
        self.seed = base.seed
        self.path: list[int] = []
        self.tokens: list[int] = list(base.tokens)

    @property
    def cache_salt(self) -> str:
        return self.base.cache_salt

    def restart(self) -> None:
        """Follow the base sequence again, without a path."""
        self.path = []
        self.tokens = list(self.base.tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        self.path += tokens
        self.tokens += tokens


def root_of(sequence: DraftedSequence) -> tuple[DraftedSequence, list[int]]:
    """The sequence that is really there, and the draft tokens that `sequence` has beyond it."""
    path: list[int] = []
    while isinstance(sequence, Continued):
        path = sequence.path + path
        sequence = sequence.base
    return sequence, path


def rule_of(sequence: DraftedSequence) -> str:
    """The rule that a sequence's drafts are verified by, which is the one its request asked for unless its drafter as a
    whole does not sample."""
    base: Any = root_of(sequence)[0]
    stats = getattr(getattr(base, "record", None), "speculation", None)
    return getattr(stats, "rule", "coupled")
