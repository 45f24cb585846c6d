"""Verification rules: from what the target chose at every row of a draft to the tokens that stand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(slots=True)
class Verdict:
    """tokens: what is emitted, in order: the accepted drafts, then one more (correction or bonus).
    rows: the row each of those tokens was drawn at. path: the accepted rows, ascending, row 0 excluded."""

    tokens: list[int]
    rows: list[int]
    path: list[int]


def coupled(parents: Sequence[int], tokens: Sequence[int], chosen: Sequence[int]) -> Verdict:
    """The coupled (Gumbel) rule: descend while the target's own choice is among the children.

    Row 0 is the last committed token; rows 1.. are the draft (`tokens[row]`, `parents[row]`). `chosen[row]` is what
    the target draws after that row: a function of (model, prompt, parameters, seed) alone, so whatever the draft
    was, the emitted tokens are those of plain decoding.
    """
    children: dict[tuple[int, int], int] = {}
    for row in range(1, len(tokens)):
        # Siblings with equal tokens lead to equal continuations; the first one wins.
        children.setdefault((parents[row], tokens[row]), row)
    verdict = Verdict([chosen[0]], [0], [])
    at = children.get((0, chosen[0]))
    while at is not None:
        verdict.path.append(at)
        verdict.rows.append(at)
        verdict.tokens.append(chosen[at])
        at = children.get((at, chosen[at]))
    return verdict
