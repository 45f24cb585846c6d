"""Routing: which replica a request goes to. Plain Python: a router drives it, and so does a simulator."""

from __future__ import annotations

import hashlib
import heapq
import math
import random
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Protocol

SEQUENCE_TOKENS = 64
"""What a sequence that runs costs who comes after it, in prompt tokens to compute."""
ADAPTER_TOKENS = 1024
"""What it costs to go where an adapter is not at hand."""
FRESH_S = 10.0
"""So long a replica is believed to hold what was just sent to it, whatever it published before."""
HANDED_OVER = 1 / 64
"""What a prompt token costs where it was computed elsewhere and is only brought in, in such that are computed."""
LISTED = 16
"""Of many replicas so many are weighed of each kind: who is least busy, who has the prompt's first block, who has most
of it."""
REMEMBERED = 1 << 16
"""Most blocks that are remembered of what was sent to a replica."""
SHORT = (1 << 32) - 1


def short(digest: int) -> int:
    """A chain hash as replicas publish it. Two that look alike cost a detour at most: caches compare tokens."""
    return digest & SHORT


@dataclass(frozen=True, slots=True)
class Candidate:
    """A replica as it last described itself."""

    name: str
    blocks: AbstractSet[int] = frozenset()
    """short() chain hashes of the blocks of text that its cache holds."""
    running: int = 0
    """Sequences that have a seat."""
    waiting: Mapping[int, int] = field(default_factory=dict)
    """Prompt tokens that nobody has begun to compute, by priority."""
    adapters: AbstractSet[str] = frozenset()
    draining: bool = False
    """It is about to leave: nothing new."""
    orders: Mapping[int, int] | None = None
    """Those that it had when it said this, by Features.id: prompt tokens that were left of each, all part of `waiting`.
    None: all that it was sent before this was heard."""


@dataclass(slots=True)
class Progress:
    """How far an order is, as who sent it knows: sooner than any replica publishes it."""

    answered: bool = False
    """Its prompt has been computed: the first token is here."""
    over: bool = False
    replica: str | None = None
    """Where it was sent."""


@dataclass(frozen=True, slots=True)
class Features:
    """What of a request decides where it goes. No token of it: chain hashes alone."""

    prompt_tokens: int
    digests: tuple[int, ...] = ()
    """short() chain hashes of its whole blocks, the first block's first."""
    block_size: int = 16
    adapter: str | None = None
    priority: int = 0
    avoid: AbstractSet[str] = frozenset()
    """Replicas that were lost over it: only where there is no other."""
    id: int = 0
    """By which a replica that publishes its orders knows it."""
    progress: Progress = field(default_factory=Progress, compare=False, repr=False)

    def cached(self, blocks: AbstractSet[int], recent: AbstractSet[int] = frozenset()) -> int:
        """Prompt tokens that a replica need not compute which holds `blocks`, or was just sent `recent`. The last
        token always is."""
        count = 0
        for digest in self.digests:
            if digest not in blocks and digest not in recent:
                break
            count += 1
        return min(count * self.block_size, max(0, self.prompt_tokens - 1))


class Policy(Protocol):
    """Chooses, and hears what came of it. One front's, in one thread."""

    def choose(self, order: Features, candidates: Sequence[Candidate]) -> str | None:
        """A candidate's name; None: nobody takes anything now."""

    def begun(self, order: Features, name: str) -> None:
        """It was sent there."""

    def ended(self, order: Features, name: str) -> None:
        """It is there no more, however it ended."""


class RoundRobin:
    """One after the other, whoever they are."""

    def __init__(self) -> None:
        self._last = ""

    def choose(self, order: Features, candidates: Sequence[Candidate]) -> str | None:
        names = sorted(one.name for one in welcome(order, candidates))
        return next((name for name in names if name > self._last), names[0] if names else None)

    def begun(self, order: Features, name: str) -> None:
        self._last = name

    def ended(self, order: Features, name: str) -> None:
        pass


class Random:
    """Any of them."""

    def __init__(self, seed: int | None = None) -> None:
        self._random = random.Random(seed)

    def choose(self, order: Features, candidates: Sequence[Candidate]) -> str | None:
        names = sorted(one.name for one in welcome(order, candidates))
        return self._random.choice(names) if names else None

    def begun(self, order: Features, name: str) -> None:
        pass

    def ended(self, order: Features, name: str) -> None:
        pass


class PrefixAware:
    """Where a request has the least before its first token: what its prompt leaves to compute after the longest
    beginning that the replica holds, what waits before it, and those who run. All in tokens, so a replica that is much
    busier loses to one that has to compute more. Equals: always the same one for the same beginning, so that
    conversations stay together and different ones spread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, *, prompt_cost: float = 1.0) -> None:
        """`prompt_cost`: of a token that the replica does not hold; below 1 where it need not compute it."""
        self._clock = clock
        self._prompt_cost = prompt_cost
        self._replicas: dict[str, _Sent] = {}

    def choose(self, order: Features, candidates: Sequence[Candidate]) -> str | None:
        here = welcome(order, candidates)
        if not here:
            return None
        if len(here) > 2 * LISTED:
            here = self._listed(order, here)
        return min(here, key=lambda one: (self.cost(order, one), *self._preference(order, one.name))).name

    def cost(self, order: Features, candidate: Candidate) -> float:
        """Prompt tokens to compute until its first token, and what counts like them."""
        sent, now = self._sent(candidate.name), self._clock()
        sent.hear(candidate, now)
        own = order.prompt_tokens - order.cached(candidate.blocks, sent.recent(now))
        far = order.adapter is not None and order.adapter not in candidate.adapters
        return self._prompt_cost * (own + sent.before(order.priority)) + far * ADAPTER_TOKENS + (
            SEQUENCE_TOKENS * sent.running())

    def _listed(self, order: Features, here: Sequence[Candidate]) -> list[Candidate]:
        """Those worth weighing. To weigh a thousand for every request would take longer than all the rest; what is
        looked up here of each is a number, which is made anew where something has changed, and a few of its blocks."""
        now, first = self._clock(), order.digests[0] if order.digests else None
        sent = [self._sent(one.name) for one in here]
        ranks = [(own.load(one, now, self._prompt_cost), own.count if first is None else mixed(first, own.key))
                 for one, own in zip(here, sent)]
        held = [(one.blocks, own.recent(now)) for one, own in zip(here, sent)]

        def holders(places: Iterable[int], depth: int) -> list[int]:
            digest = order.digests[depth]
            return [at for at in places if digest in held[at][0] or digest in held[at][1]]

        listed = set(heapq.nsmallest(LISTED, range(len(here)), key=ranks.__getitem__))
        if first is not None and (deepest := holders(range(len(here)), 0)):
            listed.update(heapq.nsmallest(LISTED, deepest, key=ranks.__getitem__))
            low, high = 0, len(order.digests)
            while high - low > 1:
                middle = (low + high) // 2
                if deeper := holders(deepest, middle):
                    low, deepest = middle, deeper
                else:
                    high = middle
            listed.update(heapq.nsmallest(LISTED, deepest, key=ranks.__getitem__))
        return [here[place] for place in listed]

    def begun(self, order: Features, name: str) -> None:
        self._sent(name).begin(order, self._clock())

    def ended(self, order: Features, name: str) -> None:
        if (sent := self._replicas.get(name)) is not None:  # forgotten: it ended with its replica
            sent.end(order, self._clock())

    def forget(self, name: str) -> None:
        """The replica is gone."""
        self._replicas.pop(name, None)

    def _sent(self, name: str) -> _Sent:
        if (found := self._replicas.get(name)) is None:
            found = self._replicas[name] = _Sent(name)
        return found

    def _preference(self, order: Features, name: str) -> tuple[float, int, str]:
        """Among equals. Prompts without a whole block have nothing in common: who got fewest."""
        sent = self._sent(name)
        return (0, mixed(order.digests[0], sent.key), name) if order.digests else (sent.count, 0, name)


@dataclass(slots=True, eq=False)
class _Live:
    """An order that has not ended."""

    order: Features
    since: float
    tokens: int
    """It had to compute."""
    ended: float = math.inf


class _Sent:
    """What this front sent to a replica: known here before the replica publishes it, and known here to have ended."""

    def __init__(self, name: str) -> None:
        self.key = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big")
        """For mixed()."""
        self.count = 0
        self.live: list[_Live] = []
        self._blocks: OrderedDict[int, float] = OrderedDict()
        """When each block was last sent, oldest first."""
        self._said = Candidate(name)
        self._heard = -math.inf
        """When that was."""
        self._over: list[_Live] = []
        """Ended of late: the replica may have counted them in what it said."""
        self._load: float | None = None

    def hear(self, candidate: Candidate, now: float) -> None:
        """What was ended here before may still be in it: it takes a while until a front hears what a replica said."""
        if candidate is not self._said:
            self._said, self._heard, self._load = candidate, now, None
            self._over = [] if candidate.orders is None else [
                one for one in self._over if one.ended > now - FRESH_S or one.order.id in candidate.orders]

    def load(self, candidate: Candidate, now: float, prompt_cost: float) -> float:
        """About what it costs anybody who comes: made anew when something was heard, sent or ended."""
        self.hear(candidate, now)
        if self._load is None:
            self._load = prompt_cost * self.before(-math.inf) + SEQUENCE_TOKENS * self.running()
        return self._load

    def begin(self, order: Features, now: float) -> None:
        tokens = order.prompt_tokens - order.cached(frozenset(), self.recent(now))
        self.count += 1
        self.live.append(_Live(order, now, tokens))
        self._load = None
        for digest in order.digests:
            self._blocks.pop(digest, None)
            self._blocks[digest] = now
        while len(self._blocks) > REMEMBERED:
            self._blocks.popitem(last=False)

    def end(self, order: Features, now: float) -> None:
        found = next((one for one in self.live if one.order is order), None)
        if found is not None:
            self.live.remove(found)
            self._over.append(found)
            found.ended, self._load = now, None

    def recent(self, now: float) -> AbstractSet[int]:
        while self._blocks and next(iter(self._blocks.values())) < now - FRESH_S:
            self._blocks.popitem(last=False)
        return self._blocks.keys()

    def _counted(self, one: _Live) -> int | None:
        """Prompt tokens of an order in what the replica said; None: it had not got it."""
        if self._said.orders is None:
            return one.tokens if one.since < self._heard else None
        return self._said.orders.get(one.order.id)

    def before(self, priority: float) -> int:
        """Prompt tokens that come before those of a request: as published, less what was computed or has ended since,
        and what the replica had not got when it published."""
        known = sum(tokens for own, tokens in self._said.waiting.items() if own >= priority)
        fresh = 0
        for one in (*self._over, *self.live):
            if one.order.priority < priority:
                continue
            counted = self._counted(one)
            if one.ended < math.inf or one.order.progress.answered:
                known -= counted or 0
            elif counted is None:
                fresh += one.tokens
        return max(known, 0) + fresh

    def running(self) -> int:
        live = sum(not one.order.progress.over for one in self.live)
        over = sum(self._counted(one) is not None for one in (*self._over, *self.live)
                   if one.ended < math.inf or one.order.progress.over)
        return max(self._said.running - over, live)


def welcome(order: Features, candidates: Sequence[Candidate]) -> list[Candidate]:
    """Those that may take it."""
    here = [one for one in candidates if not one.draining]
    return [one for one in here if one.name not in order.avoid] or here


def mixed(digest: int, key: int) -> int:
    """How much a beginning prefers a replica: as good as random, and the same in every process. Who joins or leaves
    changes nobody else's order (rendezvous hashing)."""
    value = ((digest & SHORT ^ key) * 0x9E3779B97F4A7C15) & ((1 << 64) - 1)
    return ((value ^ value >> 29) * 0xBF58476D1CE4E5B9) & ((1 << 64) - 1)


POLICIES: Mapping[str, Callable[[], Policy]] = {"prefix": PrefixAware, "round-robin": RoundRobin, "random": Random}
"""By the names that --routing takes."""
