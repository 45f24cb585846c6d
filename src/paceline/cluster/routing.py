"""Routing: which replica a request goes to. Plain Python: a router drives it, and so does a simulator."""

from __future__ import annotations

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
LAG_S = 1.0
"""What a replica publishes is about so old when it is heard."""
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

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._replicas: dict[str, _Sent] = {}

    def choose(self, order: Features, candidates: Sequence[Candidate]) -> str | None:
        here = welcome(order, candidates)
        if not here:
            return None
        return min(here, key=lambda one: (self.cost(order, one), *self._preference(order, one.name))).name

    def cost(self, order: Features, candidate: Candidate) -> float:
        """Prompt tokens to compute until its first token, and what counts like them."""
        sent, now = self._sent(candidate.name), self._clock()
        sent.hear(candidate, now)
        own = order.prompt_tokens - order.cached(candidate.blocks, sent.recent(now))
        far = order.adapter is not None and order.adapter not in candidate.adapters
        return own + sent.before(candidate, order.priority) + far * ADAPTER_TOKENS + SEQUENCE_TOKENS * sent.running(
            candidate)

    def begun(self, order: Features, name: str) -> None:
        self._sent(name).begin(order, self._clock())

    def ended(self, order: Features, name: str) -> None:
        if (sent := self._replicas.get(name)) is not None:  # forgotten: it ended with its replica
            sent.end(order)

    def forget(self, name: str) -> None:
        """The replica is gone."""
        self._replicas.pop(name, None)

    def _sent(self, name: str) -> _Sent:
        return self._replicas.setdefault(name, _Sent())

    def _preference(self, order: Features, name: str) -> tuple[float, int, str]:
        """Among equals. Prompts without a whole block have nothing in common: who got fewest."""
        if not order.digests:
            return (self._sent(name).count, 0, name)
        return (0, mixed(order.digests[0], name), name)


@dataclass(slots=True, eq=False)
class _Live:
    """An order that has not ended."""

    order: Features
    since: float
    tokens: int
    """It had to compute."""


class _Sent:
    """What this front sent to a replica: known here before the replica publishes it, and known here to have ended."""

    def __init__(self) -> None:
        self.count = 0
        self.live: list[_Live] = []
        self._blocks: OrderedDict[int, float] = OrderedDict()
        """When each block was last sent, oldest first."""
        self._said: Candidate | None = None
        self._heard = -math.inf
        """When that was."""
        self._over: list[_Live] = []
        """Ended since then, begun before: the replica may have counted them."""

    def hear(self, candidate: Candidate, now: float) -> None:
        if candidate is not self._said:
            self._said, self._heard, self._over = candidate, now, []

    def begin(self, order: Features, now: float) -> None:
        tokens = order.prompt_tokens - order.cached(frozenset(), self.recent(now))
        self.count += 1
        self.live.append(_Live(order, now, tokens))
        for digest in order.digests:
            self._blocks.pop(digest, None)
            self._blocks[digest] = now
        while len(self._blocks) > REMEMBERED:
            self._blocks.popitem(last=False)

    def end(self, order: Features) -> None:
        found = next((one for one in self.live if one.order is order), None)
        if found is not None:
            self.live.remove(found)
            if found.since <= self._heard:
                self._over.append(found)

    def recent(self, now: float) -> AbstractSet[int]:
        while self._blocks and next(iter(self._blocks.values())) < now - FRESH_S:
            self._blocks.popitem(last=False)
        return self._blocks.keys()

    def before(self, candidate: Candidate, priority: int) -> int:
        """Prompt tokens that come before those of a request: as published, less what has ended; or what was sent too
        lately to be in that."""
        def tokens(some: Iterable[_Live]) -> int:
            return sum(one.tokens for one in some if one.order.priority >= priority)

        said = sum(tokens for own, tokens in candidate.waiting.items() if own >= priority)
        done = [*self._over, *(one for one in self.live if one.order.progress.answered and one.since <= self._heard)]
        fresh = (one for one in self.live if one.since >= self._heard - LAG_S and not one.order.progress.answered)
        return max(said - tokens(done), tokens(fresh), 0)

    def running(self, candidate: Candidate) -> int:
        live = sum(not one.order.progress.over for one in self.live)
        return max(candidate.running - len(self._over) - (len(self.live) - live), live)


def welcome(order: Features, candidates: Sequence[Candidate]) -> list[Candidate]:
    """Those that may take it."""
    here = [one for one in candidates if not one.draining]
    return [one for one in here if one.name not in order.avoid] or here


def mixed(digest: int, name: str) -> int:
    """How much a beginning prefers a replica: as good as random, and the same in every process. Who joins or leaves
    changes nobody else's order (rendezvous hashing)."""
    value = digest & SHORT
    for byte in name.encode():
        value = ((value ^ byte) * 0x9E3779B97F4A7C15) & ((1 << 64) - 1)
        value ^= value >> 29
    return value


POLICIES: Mapping[str, Callable[[], Policy]] = {"prefix": PrefixAware, "round-robin": RoundRobin, "random": Random}
"""By the names that --routing takes."""
