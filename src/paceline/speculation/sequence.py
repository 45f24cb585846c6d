"""What drafting sees of a sequence: the sequence itself, or one that goes on from it with tokens of a draft."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Protocol


class DraftedSequence(Hashable, Protocol):
    """What a drafter sees of a sequence. It must not change any of it."""

    tokens: list[int]
    prompt_len: int
    seed: int

    @property
    def rule(self) -> str:
        """The rule that its drafts are verified by (a name of verify.RULES): the one that its request asked for, unless
        its drafter as a whole does not sample."""

    @property
    def scope(self) -> str:
        """Sequences of different scopes must not learn from one another: they may be of different people."""


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
    def rule(self) -> str:
        return self.base.rule

    @property
    def scope(self) -> str:
        return self.base.scope

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
