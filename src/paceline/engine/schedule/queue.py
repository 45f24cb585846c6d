"""WaitingQueue: sequences that wait for a seat, by priority; inside one tenants take turns, by what each was given."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from heapq import heapify, heappop, heappush, heapreplace

from paceline.engine.schedule.sequence import Sequence

DEPARTURES_KEPT = 64


def places_of(seq: Sequence) -> int:
    """What it takes of the queue: a sequence whose further samples wait for its prompt has their places too. A shadow
    has none, so that nobody is refused on its account."""
    return 0 if seq.request.shadow else 1 + len(seq.siblings)


class Line:
    """Those of one tenant who wait, by Sequence.rank. Removal from the middle is lazy: an entry is skipped when it
    surfaces, and where such entries become more than half of the heap it is made anew. Some would never surface."""

    __slots__ = ("_heap", "given", "members")

    def __init__(self, given: float) -> None:
        self.given = given
        """Tokens that were computed for the tenant, of prompts and of outputs, from where it began to count."""
        self.members: dict[Sequence, int] = {}
        """With the places each takes."""
        self._heap: list[tuple[tuple[int, int], Sequence]] = []

    @property
    def places(self) -> int:
        return sum(self.members.values())

    def push(self, seq: Sequence, places: int) -> None:
        heappush(self._heap, (seq.rank, seq))
        self.members[seq] = places

    def remove(self, seq: Sequence) -> int:
        """The places it took."""
        places = self.members.pop(seq)
        if self._heap and self._heap[0][1] is seq:
            heappop(self._heap)
        if len(self._heap) > 2 * len(self.members):
            self._heap = sorted((one.rank, one) for one in self.members)
        return places

    def first(self) -> Sequence | None:
        while self._heap:
            seq = self._heap[0][1]
            if seq in self.members:
                return seq
            heappop(self._heap)
        return None


class WaitingQueue:
    """Start-time fair queueing between tenants, first come, first served inside one.

    Of equal priorities the next seat is for the tenant that was given the fewest tokens. One that has had nobody
    waiting starts no lower than where the queue stands (`_level`): rest earns no credit, and a newcomer is not behind
    those who have been waiting in numbers.
    """

    __slots__ = ("_clock", "_departures", "_level", "_lines", "_rivals", "samples")

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.samples = 0
        """Places taken (places_of)."""
        self._clock = clock
        self._lines: dict[str, Line] = {}
        """By tenant: who waits, and those who were given more than `_level`."""
        self._level = 0.0
        """What a tenant would have been given by now that shared with those who wait: newcomers start here."""
        self._rivals = 0
        """Tenants that have somebody waiting."""
        self._departures: deque[tuple[float, int]] = deque(maxlen=DEPARTURES_KEPT + 1)
        """When the queue was last empty (or, of many departures, when the oldest kept was), then who left it since:
        times and places."""

    def __len__(self) -> int:
        return sum(len(line.members) for line in self._lines.values())

    @property
    def shared(self) -> bool:
        """Whether there are several tenants to tell apart: else serve() need not be told of outputs."""
        return len(self._lines) > 1

    def push(self, seq: Sequence) -> None:
        if not self.samples:
            self._departures.clear()
            self._departures.append((self._clock(), 0))
        line = self._line(seq)
        if not line.members:
            line.given = max(line.given, self._level)
            self._rivals += 1
        self.samples += (places := places_of(seq)) - line.members.get(seq, 0)
        line.push(seq, places)

    def peek(self) -> Sequence | None:
        """The one to serve next; None if nobody waits."""
        found: Sequence | None = None
        best: tuple[int, float, int] = (0, 0.0, 0)
        for line in self._lines.values():
            seq = line.first()
            if seq is None:
                continue
            key = (seq.rank[0], line.given, seq.rank[1])
            if found is None or key < best:
                found, best = seq, key
        return found

    def discard(self, seq: Sequence) -> None:
        """Take it out, wherever it stands. If it is pushed again, the entry left behind stands where the new
        one does: no harm."""
        line = self._lines.get(seq.request.tenant.name)
        if line is None or seq not in line.members:
            return
        places = line.remove(seq)
        self.samples -= places
        self._rivals -= not line.members
        self._departures.append((self._clock(), places))

    def seat(self, seq: Sequence, tokens: int) -> None:
        """It leaves the queue for a seat, and so many tokens will be computed for it at once."""
        if not seq.request.shadow:
            self._level = max(self._level, self._line(seq).given)
        self.discard(seq)
        self.serve(seq, tokens)

    def serve(self, seq: Sequence, tokens: int) -> None:
        """So many tokens are computed for the tenant of `seq`; those of a shadow are on nobody's account."""
        if seq.request.shadow:
            return
        self._line(seq).given += tokens
        self._level += tokens / (1 + self._rivals)

    def _line(self, seq: Sequence) -> Line:
        """Its tenant's. Those who neither wait nor were given more than others are forgotten when one is new."""
        name = seq.request.tenant.name
        line = self._lines.get(name)
        if line is None:
            self._lines = {tenant: one for tenant, one in self._lines.items()
                           if one.members or one.given > self._level}
            line = self._lines[name] = Line(self._level)
        return line

    def tenants(self) -> list[str]:
        """Those who have somebody waiting, the one that was given least first."""
        waiting = [(line.given, name) for name, line in self._lines.items() if line.members]
        return [name for _, name in sorted(waiting)]

    def places(self, tenant: str) -> int:
        """Those that one tenant takes."""
        line = self._lines.get(tenant)
        return 0 if line is None else line.places

    def seconds_until_free(self, places: int) -> float | None:
        """How long it may take until so many places are free, at the rate since the queue was last empty (or of the
        latest departures, if there were many); None: nobody waits."""
        if not self.samples:
            return None
        started = self._departures[0][0]
        freed = sum(places for _, places in self._departures) - self._departures[0][1]
        return places * (self._clock() - started) / max(freed, 1)

    def snapshot(self) -> list[Sequence]:
        """Those waiting, in the order in which they would be served if outputs cost nothing. O(n log n): for reports
        and tests."""
        lines = [(line.given, sorted(line.members, key=_rank, reverse=True)) for line in self._lines.values()]
        heap = [((waiting[-1].rank[0], given, waiting[-1].rank[1]), waiting) for given, waiting in lines if waiting]
        heapify(heap)
        order: list[Sequence] = []
        while heap:
            (_, given, _), waiting = heap[0]
            order.append(seq := waiting.pop())
            if waiting:
                key = (waiting[-1].rank[0], given + len(seq.tokens), waiting[-1].rank[1])
                heapreplace(heap, (key, waiting))
            else:
                heappop(heap)
        return order


def _rank(seq: Sequence) -> tuple[int, int]:
    return seq.rank
