"""What goes on at a time and when it ends: on machines of their own, or all on one, whose cores and whose memory's
bandwidth are shared."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import NamedTuple, Protocol


class Work(NamedTuple):
    """Something that is under way."""

    seconds: float
    """That it takes alone."""
    read: float = 0.0
    """Bytes of memory, in all that time."""
    tokens: float = 0.0
    """That it gives, which the front has to stream."""
    threads: int | None = None
    """That it computes with; None: those of a replica."""

    def each(self, amount: float) -> float:
        """So many in a second."""
        return amount / self.seconds if self.seconds > 0.0 else 0.0


@dataclass(frozen=True)
class FrontCost:
    """Seconds of a core that a request and a token of its answer take beside the steps: to be read, routed, handed over
    and streamed."""

    request: float = 0.0
    token: float = 0.0


NO_FRONT = FrontCost()


@dataclass(frozen=True)
class Host:
    """A machine that all replicas and their front share."""

    cores: int
    threads: int = 1
    """Of a replica."""
    bandwidth: float | None = None
    """Bytes a second that its memory gives to all of them together; None: what they want."""

    def speeds(self, busy: Sequence[Work], token_s: float = 0.0) -> list[float]:
        """Of each, beside what it has alone. Cores are shared evenly, also by the front, which takes `token_s` of one
        to stream a token. So is bandwidth: who wants less than an even part of it is not held up, others share what
        that leaves."""
        cores = sum((self.threads if one.threads is None else one.threads) + one.each(one.tokens) * token_s
                    for one in busy)
        share = min(1.0, self.cores / cores)
        if self.bandwidth is None:
            return [share] * len(busy)
        wanted = [share * one.each(one.read) for one in busy]
        left, even = self.bandwidth, math.inf
        for place, rate in enumerate(sorted(wanted)):
            if rate * (len(wanted) - place) > left:
                even = left / (len(wanted) - place)
                break
            left -= rate
        return [share * min(1.0, even / rate) if rate else share for rate in wanted]


class Ends(Protocol):
    """Who is under way, by name, and when that ends."""

    def begin(self, name: str, work: Work) -> None:
        """Now. Of who is under way already: there is less, or more, of what it began."""

    def done(self, name: str) -> float:
        """Seconds of its work that are over, as long as those take alone."""

    def next(self) -> float:
        """When the first of them ends, if nothing else happens; inf: nobody is under way."""

    def end(self) -> str:
        """Who that is. It is under way no more."""

    def advance(self, now: float) -> None:
        """No further than next()."""

    def __bool__(self) -> bool: ...


class Apart:
    """Everybody has a machine of its own."""

    def __init__(self) -> None:
        self._now = -math.inf
        self._ends: list[tuple[float, int, str]] = []
        """Those that changed stand here twice."""
        self._due: dict[str, tuple[int, float]] = {}
        """By name: which of its entries counts, and when it began."""
        self._numbers = count()

    def __bool__(self) -> bool:
        return bool(self._due)

    def begin(self, name: str, work: Work) -> None:
        number, since = next(self._numbers), self._due[name][1] if name in self._due else self._now
        self._due[name] = number, since
        heapq.heappush(self._ends, (since + work.seconds, number, name))

    def done(self, name: str) -> float:
        return self._now - self._due[name][1]

    def next(self) -> float:
        while self._ends and self._due.get(self._ends[0][2], (None,))[0] != self._ends[0][1]:
            heapq.heappop(self._ends)
        return self._ends[0][0] if self._ends else math.inf

    def end(self) -> str:
        name = heapq.heappop(self._ends)[2]
        del self._due[name]
        return name

    def advance(self, now: float) -> None:
        self._now = now


class Shared:
    """All are on one machine. How fast each is changes whenever somebody begins or ends, so all are looked at then."""

    def __init__(self, host: Host, token_s: float = 0.0) -> None:
        self._host, self._token_s = host, token_s
        self._now = -math.inf
        self._busy: dict[str, Work] = {}
        self._done: dict[str, float] = {}
        self._speeds: dict[str, float] | None = None

    def __bool__(self) -> bool:
        return bool(self._busy)

    def begin(self, name: str, work: Work) -> None:
        self._busy[name] = work
        self._done.setdefault(name, 0.0)
        self._speeds = None

    def done(self, name: str) -> float:
        return self._done[name]

    def next(self) -> float:
        return self._first()[0] if self._busy else math.inf

    def end(self) -> str:
        name = self._first()[1]
        del self._busy[name], self._done[name]
        self._speeds = None
        return name

    def advance(self, now: float) -> None:
        if self._busy and now > self._now:
            for name, speed in self._at().items():
                self._done[name] += (now - self._now) * speed
        self._now = now

    def _first(self) -> tuple[float, str]:
        """Of those that end at once: who began first."""
        when, _, name = min((self._now + max(0.0, self._busy[name].seconds - self._done[name]) / speed, place, name)
                            for place, (name, speed) in enumerate(self._at().items()))
        return when, name

    def _at(self) -> dict[str, float]:
        if self._speeds is None:
            self._speeds = dict(zip(self._busy, self._host.speeds(list(self._busy.values()), self._token_s)))
        return self._speeds
