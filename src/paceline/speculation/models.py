"""How a drafter reaches models: the protocol that the engine implements, so that no drafter touches a cache.

A DraftModel is some model over some cache, shared by all sequences that draft with it: another model with a cache of
its own, or the target in a reduced form (fewer layers, fewer bits) that reads the target's cache.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from paceline.kernels.device.lookup import HeadDraft
from paceline.speculation.sequence import DraftedSequence

SAMPLED_RULES = frozenset({"rejection", "multi-round", "without-replacement"})
"""Rules that read q: drafts for them are sampled with private noise, and carry the distribution they were sampled from.
For all others a draft is sampled with the target's own noise, so that it agrees with the target as often as can be."""

ATTENTION, MLP = "attn", "mlp"
Sublayer = tuple[int, str]
"""(layer, ATTENTION or MLP)."""


@dataclass(slots=True)
class Ask:
    """What a drafter wants to know about one sequence: how it goes on after some nodes of its draft.

    `tokens` and `parents` are the nodes the model has to read (parents before children, -1: after the sequence's last
    token); `at` names the nodes after which to sample (-1: right after the sequence), `counts` how many tokens each.
    From one ask to the next the nodes may only be added to; those that form a chain from the root are read once.
    """

    sequence: DraftedSequence
    tokens: list[int]
    parents: list[int]
    at: list[int]
    counts: list[int]


@dataclass(slots=True)
class Samples:
    """Continuations of one node. Empty: the model has none (no room in the cache, nothing left to sample)."""

    tokens: list[int]
    """In the order in which they were sampled; best first where the noise is the target's. Under the multi-round rule
    the same token may come twice."""
    q: NDArray[np.float64] | None = None
    """[V] what they were sampled from, every sampling control applied; None: sampled with the target's noise."""
    confidences: list[float] | None = None
    """The model's probability of each token; None under the rules that read q, which must not look at values."""
    agreement: list[float] | None = None
    """How likely each is to be what the target samples with the same noise, where somebody has worked that out: for
    trees, in which they compete."""


NO_SAMPLES = Samples([])


class DraftModel(Protocol):
    """A model that drafts for many sequences at once."""

    @property
    def one_by_one(self) -> bool:
        """It can be asked level by level alone, for what follows its own tokens: no guesses of another drafter's."""

    @property
    def lookup(self) -> HeadDraft | None:
        """What a device, if there is one, does in its place; None: it cannot."""

    def open(self, sequences: Sequence[DraftedSequence], depths: Sequence[int]) -> list[int]:
        """Before a draft of at most these depths: catch up with the sequences' tokens. Per sequence how deep a draft
        may be; 0: not now."""

    def sample(self, asks: Sequence[Ask]) -> list[list[Samples]]:
        """One forward pass for all: per ask the Samples after each of its `at`. Only for sequences that open() let
        in."""

    def chains(self, sequences: Sequence[DraftedSequence], least: Sequence[float]) -> list[Samples] | None:
        """In place of asking level by level, where all these sequences, which were opened, want a greedy chain and the
        model makes it in one go: tokens that follow each other, with their confidences, down to the first that is less
        likely than its sequence's `least` to be accepted with all before it. None: ask."""

    def release(self, sequence: DraftedSequence) -> None:
        """Forget a sequence; its cache is free."""


class DraftModels(Protocol):
    """The models an engine can draft with. Each is made once and shared; a wish that cannot be met is a PacelineError
    that says what to change."""

    @property
    def layers(self) -> int:
        """Layers of the target."""

    @property
    def heads(self) -> Mapping[str, str]:
        """The kinds of the trained heads that the engine was built with, by their names, less those that failed."""

    def load(self, model: str, cache_tokens: int | None = None) -> DraftModel:
        """Another model with the target's vocabulary, its cache sized for so many tokens (None: like the target's)."""

    def skipping(self, sublayers: frozenset[Sublayer]) -> DraftModel:
        """The target without some of its sublayers."""

    def exiting(self, layers: int) -> DraftModel:
        """The target's first layers, then its norm and head."""

    def rounded(self, bits: int | None) -> DraftModel:
        """The target's weights in so many bits (None: the nearest below what it has)."""

    def head(self, kind: str, name: str | None = None) -> DraftModel:
        """A trained head of this kind that the engine was built with (None: the only one)."""
