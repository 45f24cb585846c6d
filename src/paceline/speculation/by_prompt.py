"""ByPrompt: what is made of a prompt, once for all sequences that begin with it: the samples of a request above all.

A request may ask for many samples of a long prompt. To read that anew for each of them, in the moment in which they all
begin, would keep everybody waiting.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Generic, TypeVar

from paceline.speculation.sequence import DraftedSequence

Made = TypeVar("Made")
Key = tuple[str, bytes]


class ByPrompt(Generic[Made]):
    """Kept as long as a sequence that has joined has not left. Only sequences of one scope share anything."""

    def __init__(self, make: Callable[[list[int]], Made]) -> None:
        """`make`: of a prompt."""
        self._make = make
        self._made: dict[Key, Made] = {}
        self._members: dict[Key, int] = {}
        self._keys: dict[DraftedSequence, Key] = {}

    def __len__(self) -> int:
        """Prompts of which something is kept."""
        return len(self._made)

    def join(self, sequence: DraftedSequence) -> tuple[Made, bool]:
        """What was made of the sequence's prompt, and whether that was just now."""
        prompt = sequence.tokens[:sequence.prompt_len]
        key = sequence.scope, array("q", prompt).tobytes()
        made, new = self._made.get(key), False
        if made is None:
            made, new = self._make(prompt), True
        self._made[key], self._keys[sequence] = made, key
        self._members[key] = self._members.get(key, 0) + 1
        return made, new

    def leave(self, sequence: DraftedSequence) -> None:
        key = self._keys.pop(sequence, None)
        if key is None:
            return
        self._members[key] -= 1
        if not self._members[key]:
            del self._members[key], self._made[key]
