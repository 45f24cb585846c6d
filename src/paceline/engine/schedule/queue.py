"""WaitingQueue: sequences that wait for a seat, by priority and then by arrival."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from heapq import heappop, heappush

from paceline.engine.schedule.sequence import Sequence

DEPARTURES_KEPT = 64


class WaitingQueue:
    """A heap by Sequence.rank. Removal from the middle is lazy: the entry is skipped when it surfaces, and where such
    entries become more than half of the heap it is made anew. Some would never surface."""

    __slots__ = ("_clock", "_departures", "_heap", "_members", "samples")

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.samples = 0
        """Places taken: a sequence whose further samples wait for its prompt takes theirs too."""
        self._clock = clock
        self._heap: list[tuple[tuple[int, int], Sequence]] = []
        self._members: dict[Sequence, int] = {}
        """With the places each takes."""
        self._departures: deque[tuple[float, int]] = deque(maxlen=DEPARTURES_KEPT + 1)
        """When the queue was last empty (or, of many departures, when the oldest kept was), then who left it since:
        times and places."""

    def __len__(self) -> int:
        return len(self._members)

    def push(self, seq: Sequence) -> None:
        if not self._members:
            self._departures.clear()
            self._departures.append((self._clock(), 0))
        heappush(self._heap, (seq.rank, seq))
        self._members[seq] = places = 1 + len(seq.siblings)
        self.samples += places

    def peek(self) -> Sequence | None:
        """The one to serve next; None if nobody waits."""
        while self._heap:
            seq = self._heap[0][1]
            if seq in self._members:
                return seq
            heappop(self._heap)
        return None

    def discard(self, seq: Sequence) -> None:
        """Take it out, wherever it stands. If it is pushed again, the entry left behind stands where the new
        one does: no harm."""
        places = self._members.pop(seq, 0)
        if places:
            self.samples -= places
            self._departures.append((self._clock(), places))
        if self._heap and self._heap[0][1] is seq:
            heappop(self._heap)
        if len(self._heap) > 2 * len(self._members):
            self._heap = sorted((one.rank, one) for one in self._members)

    def seconds_until_free(self, places: int) -> float | None:
        """How long it may take until so many places are free, at the rate since the queue was last empty (or of the
        latest departures, if there were many); None: nobody waits."""
        if not self._members:
            return None
        started = self._departures[0][0]
        freed = sum(places for _, places in self._departures) - self._departures[0][1]
        return places * (self._clock() - started) / max(freed, 1)

    def snapshot(self) -> list[Sequence]:
        """Those waiting, in the order in which they will be served. O(n log n): for reports and tests."""
        return sorted(self._members, key=lambda seq: seq.rank)
