"""What is known of a drafter's luck: acceptance by place in the draft, and how far its own scores can be trusted."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import log2

from paceline.speculation.tree import DraftTree

MEMORY = 0.93
"""Of one request: what a cycle still weighs after the next, so that about 14 cycles count."""
LONG_MEMORY = 0.995
"""Of all requests of an engine together."""
FIRST_GUESS = 0.6
"""Acceptance of a drafter of which nothing is known: sanguine, so that it is tried."""
PRIOR_WEIGHT = 2.0
SCORE_WEIGHT = 10.0
"""Cycles a guess is worth, by place and by score."""
WORTH_WEIGHT = 4.0
"""Proposals that what is known of all requests is worth: one that is unlucky says little of a drafter that pays."""
WORTH_MEMORY = 0.95
FIRST_DEPTH = 8
"""Tokens of a draft of which nothing is known."""
BEST = 0.995
BINS = 12
SCORE_STEPS = 256


class Places:
    """Acceptance by place. In chains the place is the depth and the rate that of the token once those before it are
    accepted; in trees the place is the node's index, which is what trimming cuts at, and the rate its own. Each place
    starts from the same place of `wider` (all requests together) and from its neighbour before it."""

    __slots__ = ("_hits", "_memory", "_tries", "_wider")

    def __init__(self, wider: Places | None = None) -> None:
        self._wider = wider
        self._memory = LONG_MEMORY if wider is None else MEMORY
        self._hits: list[float] = []
        self._tries: list[float] = []

    def learn(self, place: int, accepted: bool) -> None:
        while len(self._tries) <= place:
            self._hits.append(0.0)
            self._tries.append(0.0)
        self._hits[place] = self._memory * self._hits[place] + accepted
        self._tries[place] = self._memory * self._tries[place] + 1.0
        if self._wider is not None:
            self._wider.learn(place, accepted)

    def fade(self) -> None:
        """What is known is old: it counts half."""
        self._hits = [0.5 * one for one in self._hits]
        self._tries = [0.5 * one for one in self._tries]

    def rates(self, count: int) -> list[float]:
        """Of the first `count` places."""
        wider = self._wider.rates(count) if self._wider is not None else None
        rates: list[float] = []
        before = FIRST_GUESS
        for place in range(count):
            guess = before
            if wider is not None:
                guess = wider[place] if place == 0 else 0.5 * (wider[place] + before)
            if place < len(self._tries):
                before = (self._hits[place] + PRIOR_WEIGHT * guess) / (self._tries[place] + PRIOR_WEIGHT)
            else:
                before = guess
            before = min(before, BEST)
            rates.append(before)
        return rates


class Yield:
    """Of a drafter that ends its drafts itself, where they are not sure any more: how many tokens of a draft should be
    accepted, by scores that the text has put right, and how many nodes that takes. Starts from `wider` (all requests
    together), or from a guess at what is worth it where a row costs `price`, and so much `more`."""

    __slots__ = ("_accepted", "_guess", "_memory", "_nodes", "_tries", "_wider")

    def __init__(self, wider: Yield | None = None, price: float = 0.0, more: float = 0.0) -> None:
        self._wider = wider
        self._guess = (0.0, 0.0) if wider is not None else _first_yield(price, more)
        self._memory = LONG_MEMORY if wider is None else MEMORY
        self._accepted = self._nodes = self._tries = 0.0

    def learn(self, accepted: float, nodes: int) -> None:
        self._accepted = self._memory * self._accepted + accepted
        self._nodes = self._memory * self._nodes + nodes
        self._tries = self._memory * self._tries + 1.0
        if self._wider is not None:
            self._wider.learn(accepted, nodes)

    def expected(self) -> tuple[float, float]:
        """Accepted tokens and nodes of the next draft."""
        accepted, nodes = self._guess if self._wider is None else self._wider.expected()
        weight = self._tries + PRIOR_WEIGHT
        return ((self._accepted + PRIOR_WEIGHT * accepted) / weight, (self._nodes + PRIOR_WEIGHT * nodes) / weight)


def _first_yield(price: float, more: float) -> tuple[float, float]:
    worth_it = [chance for depth in range(1, FIRST_DEPTH + 1) if (chance := FIRST_GUESS ** depth) > price]
    return sum(worth_it) + more, len(worth_it) + more


class Worth:
    """Of a drafter with scores: the seconds that a proposal should save, those that came to nothing counted, for who
    has to say whether asking is worth its time. Starts from `wider` (all requests together)."""

    __slots__ = ("_asked", "_memory", "_saved", "_wider")

    def __init__(self, wider: Worth | None = None) -> None:
        self._wider = wider
        self._memory = LONG_MEMORY if wider is None else WORTH_MEMORY
        self._asked = self._saved = 0.0

    def learn(self, saved: float) -> None:
        self._asked = self._memory * self._asked + 1.0
        self._saved = self._memory * self._saved + saved
        if self._wider is not None:
            self._wider.learn(saved)

    @property
    def asked(self) -> float:
        """Proposals that are remembered, older ones weighing less."""
        return self._asked

    def expected(self, guess: float) -> float:
        """Of the next proposal; `guess`: while nothing is known."""
        prior = guess if self._wider is None else self._wider.expected(guess)
        return (self._saved + WORTH_WEIGHT * prior) / (self._asked + WORTH_WEIGHT)

    def fade(self) -> None:
        """What is known is old: it counts half."""
        self._asked *= 0.5
        self._saved *= 0.5


def _bin(score: float) -> int:
    """Finer towards 1, where a tenth is the difference between two tokens and ten."""
    return min(BINS - 1, int(-2.0 * log2(max(1.0 - score, 1e-9)))) if score > 0.0 else 0


_BIN_OF = tuple(_bin(step / SCORE_STEPS) for step in range(SCORE_STEPS + 1))


class Trust:
    """From a drafter's score to the acceptance that scores like it met with: counts by steps of the score, those of
    one request on top of those of all."""

    __slots__ = ("_base", "_hits", "_memory", "_slope", "_tries", "_wider")

    def __init__(self, wider: Trust | None = None) -> None:
        self._wider = wider
        self._memory = LONG_MEMORY if wider is None else MEMORY
        self._hits = [0.0] * BINS
        self._tries = [0.0] * BINS
        self._base: list[float] = [0.0] * BINS if wider is None else list(wider._base)
        self._slope: list[float] = [1.0] * BINS if wider is None else list(wider._slope)
        """The rate is base + slope * score, of its bin."""

    def learn(self, score: float, accepted: bool) -> None:
        if self._wider is not None:
            self._wider.learn(score, accepted)
        place = _BIN_OF[int(min(max(score, 0.0), 1.0) * SCORE_STEPS)]
        self._hits[place] = self._memory * self._hits[place] + accepted
        self._tries[place] = self._memory * self._tries[place] + 1.0
        base, slope = (0.0, 1.0) if self._wider is None else (self._wider._base[place], self._wider._slope[place])
        weight = self._tries[place] + SCORE_WEIGHT
        self._base[place] = (self._hits[place] + SCORE_WEIGHT * base) / weight
        self._slope[place] = SCORE_WEIGHT * slope / weight

    def rate(self, score: float) -> float:
        score = min(max(score, 0.0), 1.0)
        place = _BIN_OF[int(score * SCORE_STEPS)]
        return min(BEST, self._base[place] + self._slope[place] * score)

    def worth(self, draft: DraftTree, least: float = 0.0) -> tuple[list[float], list[float]]:
        """Rates and survival of a scored draft's nodes, in order, up to the first one that less than `least` of all
        such drafts would survive to. (In a chain all that follow are worse; a tree's best come first.)"""
        rates: list[float] = []
        chances: list[float] = []
        base, slope = self._base, self._slope
        for score, parent in zip(draft.scores or (), draft.parents):
            # rate(), written out: this runs for every node of every proposal
            score = 0.0 if score < 0.0 else 1.0 if score > 1.0 else score
            place = _BIN_OF[int(score * SCORE_STEPS)]
            rate = base[place] + slope[place] * score
            if rate > BEST:
                rate = BEST
            chance = rate if parent < 0 else rate * chances[parent]
            if chance < least:
                break
            rates.append(rate)
            chances.append(chance)
        return rates, chances


def survival(parents: Sequence[int], rates: Iterable[float]) -> list[float]:
    """Probability that each node is accepted, from the probability that it is once its parent is."""
    out: list[float] = []
    for parent, rate in zip(parents, rates):
        out.append(rate if parent < 0 else rate * out[parent])
    return out


def outcomes(draft: DraftTree, tokens: Sequence[int]) -> list[tuple[int, bool]]:
    """(node, accepted) for every node of a draft about which the text that came instead says something: the children
    of the nodes on its path. True to coupled verification and to deterministic drafts, sent or not."""
    found: list[tuple[int, bool]] = []
    if draft.is_chain:
        for node, token in enumerate(tokens[:len(draft)]):
            hit = draft.tokens[node] == token
            found.append((node, hit))
            if not hit:
                break
        return found
    at = -1
    for token in tokens:
        below = [node for node, parent in enumerate(draft.parents) if parent == at]
        found += [(node, draft.tokens[node] == token) for node in below]
        following = [node for node in below if draft.tokens[node] == token]
        if not following:
            break
        at = following[0]
    return found


def verdicts(draft: DraftTree, accepted: Sequence[int]) -> list[tuple[int, bool]]:
    """The same for a draft that was verified by another rule, from its accepted nodes."""
    path = {-1, *accepted}
    return [(node, node in path) for node, parent in enumerate(draft.parents) if parent in path]
