"""ContextTokens: which tokens of a sequence's own text lie outside a head's draft vocabulary.

Names, numbers and rare words are what a draft vocabulary leaves out, and a text that has one of them is likely to have
it again: a summary, a translation, an answer from a passage.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from paceline.engine.schedule.sequence import Sequence
from paceline.models.heads.further import MOST, Further, FurtherTokens
from paceline.models.heads.interface import Head


@dataclass(slots=True)
class Context:
    read: int = 0
    """Tokens of the text that have been looked at."""
    tokens: FurtherTokens | None = None
    """None: all of them are in the draft vocabulary."""


class ContextTokens:
    """For one head. A text only grows, so each of its tokens is looked at once."""

    def __init__(self, head: Head) -> None:
        """`head`: one that drafts_further."""
        assert head.target_ids is not None
        self._head = head
        self._known = frozenset(head.target_ids.tolist())
        self._contexts: dict[Sequence, Context] = {}

    def __len__(self) -> int:
        """Sequences that something is kept of."""
        return len(self._contexts)

    def of(self, seqs: Seq[Sequence]) -> Further | None:
        """None: there are none in any of these texts."""
        found = [self._caught_up(seq) for seq in seqs]
        return None if all(one is None for one in found) else Further(found)

    def release(self, seq: Sequence) -> None:
        self._contexts.pop(seq, None)

    def _caught_up(self, seq: Sequence) -> FurtherTokens | None:
        context = self._contexts.get(seq)
        if context is None:
            context = self._contexts[seq] = Context()
        outside = [token for token in seq.tokens[context.read:] if token not in self._known]
        context.read = len(seq.tokens)
        if outside:
            if context.tokens is None:
                context.tokens = self._head.further_tokens()
            there = set(context.tokens.ids.tolist())
            newest = [token for token in dict.fromkeys(reversed(outside)) if token not in there][:MOST]
            context.tokens.add(reversed(newest))
        return context.tokens
