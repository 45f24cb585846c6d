"""What the sampler and the verifier of a device take and give."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

MOST_ALTERNATIVES = 20
"""Log-probabilities of tokens that were not sampled, of one row."""


@dataclass(frozen=True, slots=True)
class Controls:
    """Which parts of the pipeline some rows need: what is left out is not launched. Part of a graph's identity."""

    edits: bool = False
    """Penalties, bias, min_tokens, allowed tokens."""
    truncation: bool = False
    """top-k, top-p, min-p."""
    logprobs: int | None = None
    """None: no log-probabilities. n: those of the sampled tokens and the n best."""
    masks: bool = False
    """What only the host knows: masks of the rows' own."""
    further: int = 0
    """Tokens to sample beside the first: what would have come without it (Sampler.several)."""


@dataclass(frozen=True, slots=True)
class SampledRows:
    """The rows of a step that are sampled, [R] each, on the device. R may be padded: seat -1 is skipped."""

    seats: Tensor
    """int32."""
    positions: Tensor
    """int64, absolute position of the token sampled at the row."""
    parents: Tensor | None = None
    """Of a step with drafts: the row above, below 0 for roots and plain rows."""
    fed: Tensor | None = None
    """The draft token that each row was fed; a root's is not looked at. Goes with `parents`."""
    masks: Tensor | None = None
    """[R, words] int32, one bit per token that may come."""
    masked: Tensor | None = None
    """[R] int32: whether masks[row] counts. Goes with `masks`."""


@dataclass(frozen=True, slots=True)
class PackedDrafts:
    """The draft trees of a step, packed: the rows that are sampled, group after group. A group without a draft is its
    root alone. Padding: groups without rows (equal offsets), rows without a seat."""

    offsets: Tensor
    """[G + 1] int32, first row of each group."""
    parents: Tensor
    """[R] int32, the row above; roots have any number below 0."""
    tokens: Tensor
    """[R] int32 or int64, what each row was fed; a root's is not looked at."""
    seats: Tensor
    """[R] int32; the root's counts."""
    widest: int
    """Rows of the largest group, or more. Part of a graph's identity."""


@dataclass(frozen=True, slots=True)
class Verdicts:
    """What became of the drafts of G groups, int32. Views of `packed`."""

    accepted: Tensor
    """[G] drafts that stand; -1 for padding."""
    bonus: Tensor
    """[G] 1: nothing had been drafted where the last token came from; 0: it corrects a draft."""
    tokens: Tensor
    """[G, room] the accepted drafts and one more token (negative where there is none), then -1."""
    rows: Tensor
    """[G, room] the row each of those tokens was sampled at, then -1: the root, then the accepted rows."""
    packed: Tensor
    """All four in one piece, for one copy: accepted, bonus, tokens, rows, one after the other."""

    @staticmethod
    def size(groups: int, room: int) -> int:
        return groups * (2 + 2 * room)

    @staticmethod
    def over(memory: Tensor, groups: int, room: int) -> Verdicts:
        """In the beginning of `memory`, flat int32 of at least Verdicts.size."""
        packed = memory[:Verdicts.size(groups, room)]
        accepted, bonus = packed[:2 * groups].view(2, groups)
        tokens, rows = packed[2 * groups:].view(2, groups, room)
        return Verdicts(accepted, bonus, tokens, rows, packed)
