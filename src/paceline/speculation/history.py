"""History: what is known of a drafter's luck and cost, learnt as drafts meet the text. Control and auto go by it.

Luck depends on texts, so it is known scope by scope; what is known of a drafter whatever it reads (Traits) is known to
all.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from hashlib import sha256
from math import ceil
from typing import TypeVar

from paceline.speculation.acceptance import Places, Trust, Worth, Yield
from paceline.speculation.costs import CostCurve, OpeningCost
from paceline.speculation.tree import DraftTree

Kept = TypeVar("Kept")

SHORTEST_PAUSE = 16
LONGEST_PAUSE = 256
"""Tokens between two tries of a drafter that does not pay."""
BESIDE = 0.5
MOST_BESIDE = 4
"""Tokens that others promise: yields are told apart in steps of so many, up to so many steps."""
DEARER = 0.1
MOST_DEAR = 10
"""Likewise by what a row costs, in tokens: where rows are dear fewer nodes are worth it, and surer ones."""
MOST_HISTORIES = 1024
MOST_TRAITS = 256


def round_prior(sequences: int) -> float:
    """What drafts for so many sequences together take, relative to one, before anything was measured."""
    return 1.0 + 0.15 * (sequences - 1)


class Traits:
    """What one drafter of an engine is like, whoever it drafts for: speeds, and nothing of any text."""

    __slots__ = ("cost", "opening", "rounds", "scored")

    def __init__(self) -> None:
        self.cost: CostCurve = CostCurve(float)
        """Seconds by the depth that was asked for."""
        self.rounds: CostCurve = CostCurve(round_prior)
        """Seconds of a step's drafts by the sequences that it was asked about."""
        self.opening: OpeningCost = OpeningCost()
        """Seconds until the first draft."""
        self.scored: bool | None = None
        """Whether its drafts carry scores, by the last one that somebody told of; None: nobody did."""


class History:
    """What came of one drafter's drafts: all requests' of a scope, or one sequence's where there is a `wider` one.

    A sequence's history starts from what the wider one knows, forgets faster, and hands on all that it learns. Time is
    learnt about for all together: both have the same `traits`, as have those of other scopes.
    """

    __slots__ = ("_wider", "_worth", "_yields", "by_depth", "by_node", "by_score", "cycles", "proposal", "traits")

    def __init__(self, wider: History | None = None, traits: Traits | None = None) -> None:
        """`traits`: the drafter's; without any, those of the wider history, or new ones."""
        self._wider = wider
        self.traits: Traits = traits or (Traits() if wider is None else wider.traits)
        self.by_score: Trust = Trust(None if wider is None else wider.by_score)
        """Acceptance of a token once those before it are accepted, by the drafter's own score."""
        self.by_depth: Places = Places(None if wider is None else wider.by_depth)
        """The same by depth, for drafts without scores: of siblings one at most is right, and counts for all."""
        self.by_node: Places = Places(None if wider is None else wider.by_node)
        """Acceptance of a tree's nodes in their order, whatever came of their parents: what trimming cuts at."""
        self._yields: dict[tuple[int, int], Yield] = {}
        self._worth: dict[int, Worth] = {}
        self.cycles = 0
        """Drafts that were verified."""
        self.proposal: DraftTree | None = None
        """The last one, whole, until what came instead is known."""

    def worth(self, running: int) -> Worth:
        """Of proposals in steps of about so many sequences: in a crowd neither the drafts nor what they save take as
        long."""
        company = running.bit_length()
        known = self._worth.get(company)
        if known is None:
            known = self._worth[company] = Worth(None if self._wider is None else self._wider.worth(running))
        return known

    def yields(self, beside: float, price: float) -> Yield:
        """Of whole drafts where somebody else's draft promises to win about so much and a row costs about so much, for
        who has to forecast what a draft will bring before there is one: where others know how a text goes on, so does
        a model, and better than where it is asked because they do not. While nothing is known it is taken to know
        better. (Who pays nothing for rows takes all of a draft, which says little of anybody else's.)"""
        place = steps, dear = min(MOST_BESIDE, ceil(beside / BESIDE)), ceil(min(MOST_DEAR, price / DEARER))
        known = self._yields.get(place)
        if known is None:
            wider = None if self._wider is None else self._wider.yields(beside, price)
            known = self._yields[place] = Yield(wider, max(0.0, dear - 0.5) * DEARER, steps * BESIDE)
        return known

    def fade(self, running: int) -> None:
        """What is known of this sequence alone is old: it counts half."""
        self.worth(running).fade()
        self.by_depth.fade()
        self.by_node.fade()

    def settled(self) -> DraftTree | None:
        """The proposal whose fate is known now, or None: there was none. It is waited for no more."""
        proposal, self.proposal = self.proposal, None
        return proposal

    def verified(self) -> None:
        """A draft was verified, whatever came of it."""
        self.cycles += 1
        if self._wider is not None:
            self._wider.verified()

    def learn(self, draft: DraftTree, outcomes: Iterable[tuple[int, bool]], trusting: bool = True) -> None:
        """Take up (node, accepted) of the nodes whose parents were accepted: by their scores where they have any and
        `trusting` says that these are about acceptance, else by depth."""
        if draft.scores is not None and trusting:
            for node, accepted in outcomes:
                self.by_score.learn(draft.scores[node], accepted)
            return
        depths, hits = draft.depths(), dict[int, bool]()
        for node, accepted in outcomes:
            hits[depths[node]] = accepted or hits.get(depths[node], False)
        for depth, hit in hits.items():
            self.by_depth.learn(depth - 1, hit)

    def learn_nodes(self, draft: DraftTree, accepted: Iterable[int]) -> None:
        """Take up a tree that was verified, node by node."""
        path = set(accepted)
        for node in range(len(draft)):
            self.by_node.learn(node, node in path)


class Histories:
    """The wider histories of an engine by what they are of and whose texts they come from, the last ones asked for:
    there is no end of wishes."""

    def __init__(self) -> None:
        self._known: OrderedDict[bytes, History] = OrderedDict()
        self._traits: OrderedDict[bytes, Traits] = OrderedDict()

    def __len__(self) -> int:
        return len(self._known)

    def of(self, wish: object, scope: str = "") -> History:
        """Of a method's name or a wish; equal ones of the same scope share it."""
        traits = self.traits(wish)
        return _latest(self._known, (wish, scope), lambda: History(traits=traits), MOST_HISTORIES)

    def traits(self, wish: object) -> Traits:
        """Equal wishes share them, of whatever scope."""
        return _latest(self._traits, wish, Traits, MOST_TRAITS)


def _latest(known: OrderedDict[bytes, Kept], wish: object, make: Callable[[], Kept], most: int) -> Kept:
    """What is kept of a wish, or something new; of more than so many the one that was asked for longest ago goes."""
    key = sha256(repr(wish).encode(errors="replace")).digest()
    if key not in known:
        known[key] = make()
    known.move_to_end(key)
    if len(known) > most:
        known.popitem(last=False)
    return known[key]


class Pause:
    """How long a drafter that did not pay is left alone on a sequence: twice as long each time, until it pays again."""

    __slots__ = ("_left", "_next")

    def __init__(self) -> None:
        self._left, self._next = 0, SHORTEST_PAUSE

    @property
    def over(self) -> bool:
        return self._left <= 0

    def begin(self) -> None:
        self._left, self._next = self._next, min(LONGEST_PAUSE, 2 * self._next)

    def passed(self, tokens: int) -> None:
        """The sequence has so many tokens more."""
        self._left -= tokens

    def forgive(self) -> None:
        """It pays: the next pause is a short one again."""
        self._next = SHORTEST_PAUSE
