"""Witness: who looks at how drafts of one request are verified, and changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

from paceline.request import TokenLogprob
from paceline.speculation.tree import DraftTree
from paceline.speculation.verify import Target, Verdict


class Verified(NamedTuple):
    """One draft and what became of it. `target` and `score` are of use until the call returns."""

    sample: int
    draft: DraftTree
    verdict: Verdict
    position: int
    """Of the first token that was decided."""
    target: Target
    """The target's distribution after a row, every control applied."""
    score: Callable[[int, int, int], TokenLogprob]
    """(row, token, k): the raw log-probabilities of a token after a row and of the k best."""


class Witness(Protocol):
    """Called on the engine's thread, inside a step: whatever it raises would cost the whole step, so it raises
    nothing. Only drafts that the host verifies are shown."""

    def verified(self, seen: Verified) -> None:
        """A draft was verified; its tokens are not part of the text yet."""
