"""What is kept of a watched request while it runs: laws of its draws, and some of its distributions."""

from __future__ import annotations

import logging
import random

import numpy as np
from numpy.typing import NDArray

from paceline.engine.records.witness import Verified
from paceline.request import TokenLogprob
from paceline.speculation.rules.verdict import Probs, children_of
from paceline.speculation.tree import DraftTree
from paceline.speculation.verify import RULES
from paceline.watch.alarm import ACCEPTED, DRAFTED, EMITTED
from paceline.watch.laws import Law

log = logging.getLogger("paceline.watch")

TOP = 20
"""Tokens of a distribution that are kept: those that sampling would choose among."""
EVERY = 16
LEAST = 1e-12
"""In place of a probability that is zero, or less by rounding."""
ROUNDING = 1e-5
"""Added to what the rest of the tokens have: where scores are float32 it is nothing or a few millionths by chance."""
MOST = 8
"""Distributions are kept of one in EVERY drafts that are verified, of MOST at most."""


class MethodLaws:
    """The three laws of drafts that go by q, for one method over all its watched requests."""

    def __init__(self, rule: str, rng: random.Random) -> None:
        self._distinct = rule == "without-replacement"
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
            other = q
            if q is None and candidates:  # drafts that were not drawn: whoever they are, the text may favour them
                other = np.zeros_like(p)
                other[[draft.tokens[child - 1] for child in candidates]] = 1.0
            self.laws[EMITTED].drawn(p, token, other)
            self._tested(draft, p, candidates, verdict.path[index] if index < len(verdict.path) else None)
            twins = [child for child in candidates if draft.tokens[child - 1] == token]

    def _tested(self, draft: DraftTree, p: Probs, candidates: list[int], taken: int | None) -> None:
        """Before a draft is drawn it is accepted with the chance that p and q overlap; one that nobody drew, with its
        own. After a rejection what p had more than q is left, and of a q that siblings share, what they have not."""
        rejected: dict[int, list[int]] = {}
        for candidate in candidates:
            token, q = draft.tokens[candidate - 1], None if draft.q is None else draft.q[candidate - 1]
            gone = rejected.setdefault(id(q), [])
            if q is not None and self._distinct and gone:
                if token in gone:
                    continue
                q = q.copy()
                q[gone] = 0.0
                q /= q.sum()
            self.laws[ACCEPTED].happened(float(p[token] if q is None else np.minimum(p, q).sum()), candidate == taken)
            if candidate == taken:
                return
            gone.append(token)
            left = np.where(np.arange(len(p)) == token, 0.0, p) if q is None else np.maximum(p - q, 0.0)
            if not left.sum() > 0.0:
                return
            p = left / left.sum()


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
    whole = np.array([*np.maximum(shares, LEAST), max(1.0 - float(shares.sum()), 0.0) + ROUNDING])
    whole /= whole.sum()
    return whole
