"""The coupled rule: the target samples for itself, and drafts that guessed its tokens stand."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.speculation.rules.verdict import Verdict


def coupled(parents: Sequence[int], tokens: Sequence[int], chosen: Sequence[int]) -> Verdict:
    """The coupled (Gumbel) rule: descend while the target's own choice is among the children.

    Row 0 is the last committed token; rows 1.. are the draft (`tokens[row]`, `parents[row]`). `chosen[row]` is what
    the target samples after that row: a function of (model, prompt, parameters, seed) alone, so whatever the draft
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
    verdict.bonus = verdict.rows[-1] not in parents
    return verdict
