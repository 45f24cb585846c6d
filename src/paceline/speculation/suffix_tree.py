"""SuffixTree: every substring of some growing texts, how often it occurred and what followed it most often.

There are two of them, with the same answers token by token: native/suffix_tree.h where the native library is built, and
suffix_automaton.py everywhere else. Here is what a drafter asks of either, and who decides which one it gets.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from paceline.kernels import cpu
from paceline.speculation.suffix_automaton import SuffixAutomaton


class Reach(NamedTuple):
    """How far a drafter follows what it finds."""

    longest: int
    """Tokens at the end of a text that are looked for; at most the depth of the trees."""
    factor: float
    """A match of m tokens is continued by at most factor * m + offset."""
    offset: float
    min_prob: float
    """And no further than where the probability of the whole path, as counted, falls below this."""
    branching: bool
    """A tree of the most probable continuations instead of a chain of the most frequent tokens."""


class Text(Protocol):
    """One text of one tree, which alone can read and extend it."""

    @property
    def length(self) -> int: ...


class Continuation(Protocol):
    """What followed a string, as a tree: parents before children, -1 for what follows the string itself."""

    @property
    def matched(self) -> int:
        """How many tokens the string has; 0: it was never continued."""
    @property
    def tokens(self) -> list[int]: ...
    @property
    def parents(self) -> list[int]: ...
    @property
    def scores(self) -> list[float]:
        """Each node's counted probability, less what is in doubt where little was counted after a short match."""
    @property
    def expected(self) -> float:
        """How many of the nodes will be accepted: the sum of the chances that the whole path to a node is right."""


class SuffixTree(Protocol):
    """Grows by `extend` only. Several texts may grow in turns; no substring spans two of them."""

    @property
    def tokens(self) -> int:
        """How many tokens it holds, over all texts."""

    def begin(self, like: Text | None = None) -> Text:
        """A further text, empty yet, or one that goes on from where another one of this tree ends now."""

    def extend(self, text: Text, tokens: Sequence[int]) -> None:
        """Append tokens to one of the texts."""

    def draft(self, end: Sequence[int], reach: Reach, nodes: int, depth: int, beyond: int) -> Continuation:
        """What followed the longest suffix of `end` that occurs here and was continued: up to `nodes` tokens, up to
        `depth` one after the other. Empty where that suffix has no more than `beyond` tokens."""

    def draft_end(self, text: Text, reach: Reach, nodes: int, depth: int) -> Continuation:
        """draft() for the end of one of the texts: how it went on where it occurred before."""


def new_tree(depth: int) -> SuffixTree:
    """An empty tree that counts strings of up to `depth` tokens."""
    module: Any = cpu.load()
    # A library that was built from older sources has none. Either kind takes no texts but its own: hence Any.
    kind: Any = module.SuffixTree if hasattr(module, "SuffixTree") else SuffixAutomaton
    tree: SuffixTree = kind(depth)
    return tree
