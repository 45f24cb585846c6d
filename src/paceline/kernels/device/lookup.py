"""Looking drafts up in a text: what the host and a device agree on. Plain numbers, no torch."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

LONGEST_N = 16
LOOK_BACK = 32
"""How far a match is followed backwards, beyond its n-gram, to judge how much it is worth."""
ALWAYS = 1 << 24
HIGHEST = 15
"""Of the levels of chance that a drafted token can have; 0: it is not worth a row."""
LEAST_CHANCE = 0.12
"""A token that is less likely to be reached and accepted is not drafted."""
LOG_LEAST = math.log(LEAST_CHANCE)
MOST_DRAFTED = 15
"""Tokens that a device drafts for one sequence at a time, at most."""
HEAD = 1 << 25
"""Times its number, the head that a word of columns.LOOKUP asks for."""
MOST_HEADS = 15
"""That can be told apart."""


class Lookup(NamedTuple):
    """Drafts what followed the most recent occurrence of the longest n-gram, n = max_n .. min_n, that a text ends with
    (speculation/drafters/ngram.py)."""

    min_n: int
    max_n: int

    def packed(self, most: int, always: bool = False) -> int:
        """As columns.LOOKUP holds it, with the tokens that may be drafted, `always`: whatever they are worth."""
        return self.min_n + 256 * self.max_n + 65536 * min(most, MOST_DRAFTED) + (ALWAYS if always else 0)


class HeadDraft(NamedTuple):
    """Drafts by a trained head of the target, where a device runs it as a part of the step."""

    number: int
    """Among those that are loaded, from 1 on."""

    def packed(self, most: int, always: bool = False) -> int:
        """As columns.LOOKUP holds it; nothing is looked up in the text."""
        return self.number * HEAD + 65536 * min(most, MOST_DRAFTED) + (ALWAYS if always else 0)


class EitherDraft(NamedTuple):
    """Looks a draft up and lets a head make one, and takes what promises more."""

    lookup: Lookup
    head: HeadDraft

    def packed(self, most: int, always: bool = False) -> int:
        """As columns.LOOKUP holds it."""
        return self.lookup.packed(most, always) | self.head.packed(most, always)


DeviceDraft = Lookup | HeadDraft | EitherDraft
"""How a device drafts by itself."""


def most_wanted(word: Any) -> Any:
    """Tokens that may be drafted at a time for whom a word of columns.LOOKUP stands. A number, or a tensor of them."""
    return word >> 16 & 255


def head_number(word: Any) -> Any:
    """Of the head that a word of columns.LOOKUP asks for; 0: of none. A number, or a tensor of them."""
    return word // HEAD


def looks_up(word: Any) -> Any:
    """Whether who has this word in columns.LOOKUP wants drafts that are looked up. A number, or a tensor of them."""
    return word & 0xFFFF != 0


def without_head(word: int) -> int:
    """The word of who looks drafts up, and has lost the head that it had besides."""
    return word % HEAD
