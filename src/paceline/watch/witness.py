"""What is kept of a watched request while it runs: laws of its draws, and some of its distributions."""

from __future__ import annotations

import logging
import random

import numpy as np
from numpy.typing import NDArray

from paceline.engine.records.witness import Verified
from paceline.request import TokenLogprob
from paceline.speculation.rules.verdict import children_of
from paceline.speculation.verify import RULES
from paceline.watch.alarm import ACCEPTED, DRAFTED, EMITTED
from paceline.watch.laws import Law

log = logging.getLogger("paceline.watch")

TOP = 20
"""Tokens of a distribution that are kept: those that sampling would choose among."""
EVERY = 16
LEAST = 1e-12
"""In place of a probability that is zero, or less by rounding."""
MOST = 8
"""Distributions are kept of one in EVERY drafts that are verified, of MOST at most."""


class MethodLaws:
    """The three laws of drafts that go by q, for one method over all its watched requests."""

    def __init__(self, rng: random.Random) -> None:
        self.laws = {DRAFTED: Law(("probability", "id"), rng), ACCEPTED: Law(("chance",), rng),
                     EMITTED: Law(("probability", "ratio", "id"), rng)}

    def verified(self, seen: Verified) -> None:
        """Judge what was drawn for one draft: its tokens, its accept tests, and the tokens that came of it."""
        draft, verdict = seen.draft, seen.verdict
        children = children_of(draft)
        if draft.q is not None:
            for rows in children.values():
                q = draft.q[rows[0] - 1]
                if q is not None:  # siblings after the first may be drawn from what is left of q
                    self.laws[DRAFTED].drawn(q, draft.tokens[rows[0] - 1])
        twins = [0]
        """Rows that hold the text so far: drafts that coincide are verified together."""
        for index, (row, token) in enumerate(zip(verdict.rows, verdict.tokens)):
            p = seen.target(row)
            if p is None:
                return
            candidates = sorted(child for twin in twins for child in children.get(twin, ()))
            first = candidates[0] if candidates else None
            q = None if first is None or draft.q is None else draft.q[first - 1]
            self.laws[EMITTED].drawn(p, token, q)
            if first is not None:
                # Before it is drawn a draft is accepted with the overlap of p and q; one that was not drawn, with p.
                chance = p[draft.tokens[first - 1]] if q is None else np.minimum(p, q).sum()
                taken = index < len(verdict.path) and verdict.path[index] == first
                self.laws[ACCEPTED].happened(float(chance), taken)
            twins = [child for child in candidates if draft.tokens[child - 1] == token]


class RequestWitness:
    """Sits in one watched request (engine.records.witness.Witness)."""

    def __init__(self, laws: MethodLaws, rule: str) -> None:
        self._laws = laws
        self._drafts = 0
        self._failed = False
        self._reads_q = RULES[rule].reads_q
        self.scores: dict[tuple[int, int], TokenLogprob] = {}
        """What the verify step said, by sample and position."""

    def verified(self, seen: Verified) -> None:
        if self._failed:
            return
        try:
            self._drafts += 1
            if self._reads_q:
                self._laws.verified(seen)
            if self._drafts % EVERY == 1 and len(self.scores) < MOST:
                self._keep(seen)
        except Exception as problem:  # a watch that fails must not cost a request its step
            log.error("the drift watch failed on a draft and leaves its request alone", exc_info=problem)
            self._failed = True

    def _keep(self, seen: Verified) -> None:
        """The last token of a draft is sampled at its deepest row, where most of it could have gone wrong."""
        at = len(seen.verdict.tokens) - 1
        if seen.target(seen.verdict.rows[at]) is not None:
            self.scores[seen.sample, seen.position + at] = seen.score(
                seen.verdict.rows[at], seen.verdict.tokens[at], TOP)


def divergence(one: TokenLogprob, other: TokenLogprob) -> float:
    """KL(one || other), in nats, with all tokens outside the likeliest of both taken for one; never more than it is."""
    a, b = ({score.token: score.raw, **score.top} for score in (one, other))
    common = sorted(a.keys() & b.keys())
    p, q = (_with_the_rest(np.exp([shares[token] for token in common])) for shares in (a, b))
    return max(0.0, float((p * np.log(p / q)).sum()))


def _with_the_rest(shares: NDArray[np.float64]) -> NDArray[np.float64]:
    whole = np.array([*np.maximum(shares, LEAST), max(1.0 - float(shares.sum()), LEAST)])
    whole /= whole.sum()
    return whole
