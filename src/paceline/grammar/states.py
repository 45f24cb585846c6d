"""CompiledGrammar: a structure ready for use, and what is known of its states, shared by all requests that ask for it.

A state is reached by output tokens and says which may follow. States form a tree by those tokens: a state that was
visited before, by another sample, a draft or an earlier request, is a dictionary look-up away and not computed again.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.grammar.structure import Structure

MOST_STATES = 20_000
MOST_BYTES = 8 << 20
"""What a grammar may remember before it starts anew."""


class State:
    """A place in a structured text."""

    __slots__ = ("allowed", "closed", "forced", "may_end", "next")

    def __init__(self, allowed: NDArray[np.uint8], may_end: bool, closed: bool) -> None:
        self.allowed = allowed
        """One bit for each token of the vocabulary, lowest first: 1 where it may follow. Equal ones are one array."""
        self.may_end = may_end
        self.closed = closed
        """The text is complete and nothing can follow."""
        self.forced: tuple[int, ...] | None = None
        """The tokens that spell the only possible continuation; None: not asked for yet."""
        self.next: dict[int, State] = {}

    def allows(self, token: int) -> bool:
        at = token >> 3
        return at < len(self.allowed) and bool(self.allowed[at] >> (token & 7) & 1)


class CompiledGrammar:
    """Owned by one engine; all but the compilation happens in the engine's thread."""

    def __init__(self, structure: Structure, matcher: Any, vocabulary: int) -> None:
        """`vocabulary`: how many ids have bits; the end of a text, an id the matcher has beyond them, has none."""
        self.structure = structure
        self._matcher = matcher
        self._bytes = (vocabulary + 7) // 8
        self._spare = np.uint8((1 << (vocabulary % 8 or 8)) - 1)
        """Clears the bits beyond the vocabulary in the last byte."""
        self._masks: dict[bytes, NDArray[np.uint8]] = {}
        self._held = self.states = 0
        self.root = self.read(matcher)

    def matcher(self) -> Any:
        """A matcher of the caller's own, at the beginning of a text."""
        return self._matcher.deep_copy()

    def read(self, matcher: Any) -> State:
        """The state a matcher is in. The matcher may be in error afterwards: the caller asks."""
        bits = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)[:self._bytes].copy()
        bits[-1] &= self._spare
        stopped, accepting = matcher.is_stopped(), matcher.is_accepting()
        key = bits.tobytes()
        mask = self._masks.get(key)
        if mask is None:
            mask = self._masks[key] = bits
            self._held += 2 * len(key)
        self.states += 1
        return State(mask, accepting, stopped and accepting)

    def start(self) -> State:
        """The state at the beginning of a text, and the time to forget when too much is held."""
        if self.states > MOST_STATES or self._held > MOST_BYTES:
            self.forget()
        return self.root

    def forget(self) -> None:
        """Start anew; texts under way keep what they have in hand."""
        self._masks = {}
        self._held = self.states = 0
        self.root = self.read(self.matcher())
