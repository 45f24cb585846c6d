"""CompiledGrammar: a structure ready for use, and what is known of its states, shared by all requests that ask for it.

A state is reached by output tokens and says which may follow. States form a tree by those tokens: a state that was
visited before, by another sample, a draft or an earlier request, is a dictionary look-up away and not computed again.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.grammar.structure import Structure

MOST_STATES = 20_000
MOST_BYTES = 8 << 20
"""What a grammar may remember before it starts anew."""
SLOW = 0.004
"""Seconds of computing: a mask that takes longer makes its grammar slow."""
QUICK = 0.001
QUICK_AGAIN = 32
"""Masks in a row that take less than QUICK, after which it is quick again."""
TRIED = 8
"""Masks that are made on trial when a grammar is compiled."""


class State:
    """A place in a structured text."""

    __slots__ = ("allowed", "closed", "forced", "may_end", "next")

    def __init__(self, may_end: bool, closed: bool) -> None:
        self.allowed: NDArray[np.uint8] | None = None
        """One bit for each token of the vocabulary, lowest first: 1 where it may follow. Equal ones are one array.
        None: nobody has asked for it yet; it is what takes long."""
        self.may_end = may_end
        self.closed = closed
        """The text is complete and nothing can follow."""
        self.forced: tuple[int, ...] | None = None
        """The tokens that spell the only possible continuation; None: not asked for yet."""
        self.next: dict[int, State] = {}

    def allows(self, token: int) -> bool:
        at = token >> 3
        return self.allowed is not None and at < len(self.allowed) and bool(self.allowed[at] >> (token & 7) & 1)


class CompiledGrammar:
    """Owned by one engine; all but the compilation, and bits(), happens in the engine's thread."""

    def __init__(self, structure: Structure, matcher: Any, vocabulary: int) -> None:
        """`vocabulary`: how many ids have bits; the end of a text, an id the matcher has beyond them, has none."""
        self.structure = structure
        self._matcher = matcher
        self._bytes = (vocabulary + 7) // 8
        self._spare = np.uint8((1 << (vocabulary % 8 or 8)) - 1)
        """Clears the bits beyond the vocabulary in the last byte."""
        self._masks: dict[bytes, NDArray[np.uint8]] = {}
        self._held = self.states = 0
        self.slow = False
        """Whether its masks take long: they are to be made beside the engine's loop."""
        self._quick_ones = 0
        self.root = self.read(matcher)
        self.keep(self.root, *self.bits(matcher))
        self._try_out()

    def matcher(self) -> Any:
        """A matcher of the caller's own, at the beginning of a text."""
        return self._matcher.deep_copy()

    def read(self, matcher: Any) -> State:
        """The state a matcher is in, without its mask. The matcher may be in error afterwards: the caller asks."""
        stopped, accepting = matcher.is_stopped(), matcher.is_accepting()
        self.states += 1
        return State(accepting, stopped and accepting)

    def bits(self, matcher: Any) -> tuple[NDArray[np.uint8], float]:
        """The mask of the state that a matcher is in, and the seconds it took, in any thread: by its own work, not by
        what others did meanwhile. The matcher may be in error afterwards."""
        started = time.thread_time()
        bits = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)[:self._bytes].copy()
        bits[-1] &= self._spare
        return bits, time.thread_time() - started

    def keep(self, state: State, bits: NDArray[np.uint8], seconds: float) -> None:
        """What bits() has found for a state."""
        key = bits.tobytes()
        mask = self._masks.get(key)
        if mask is None:
            mask = self._masks[key] = bits
            self._held += 2 * len(key)
        state.allowed = mask
        self._quick_ones = self._quick_ones + 1 if seconds < QUICK else 0
        if seconds > SLOW:
            self.slow = True
        elif self._quick_ones >= QUICK_AGAIN:
            self.slow = False

    def _try_out(self) -> None:
        """Write a little of any text, to learn whether masks take long before the engine meets one."""
        state, matcher = self.root, self.matcher()
        for turn in range(TRIED):
            if self.slow or state.allowed is None or not state.allowed.any():
                return
            choices = np.flatnonzero(np.unpackbits(state.allowed, bitorder="little"))
            matcher.consume_tokens([int(choices[(turn * 7919 + 31) % len(choices)])])
            bits, seconds = self.bits(matcher)
            if matcher.is_error() or matcher.is_stopped():
                return
            state = State(False, False)
            self.keep(state, bits, seconds)

    def start(self) -> State:
        """The state at the beginning of a text, and the time to forget when too much is held."""
        if self.states > MOST_STATES or self._held > MOST_BYTES:
            self.forget()
        return self.root

    def forget(self) -> None:
        """Start anew; texts under way keep what they have in hand."""
        old = self.root
        self.root = State(old.may_end, old.closed)
        self.root.allowed = old.allowed
        self._masks = {} if old.allowed is None else {old.allowed.tobytes(): old.allowed}
        self._held, self.states = sum(2 * len(key) for key in self._masks), 1
