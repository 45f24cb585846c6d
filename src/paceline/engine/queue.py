"""WaitingQueue: sequences that wait for a seat, by priority and then by arrival."""

from __future__ import annotations

from heapq import heappop, heappush

from paceline.engine.sequence import Sequence


class WaitingQueue:
    """A heap by Sequence.rank. Removal from the middle is lazy: the entry is skipped when it surfaces."""

    __slots__ = ("_heap", "_members")

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, int], Sequence]] = []
        self._members: set[Sequence] = set()

    def __len__(self) -> int:
        return len(self._members)

    def push(self, seq: Sequence) -> None:
        heappush(self._heap, (seq.rank, seq))
        self._members.add(seq)

    def peek(self) -> Sequence | None:
        """The one to serve next; None if nobody waits."""
        while self._heap:
            seq = self._heap[0][1]
            if seq in self._members:
                return seq
            heappop(self._heap)
        return None

    def discard(self, seq: Sequence) -> None:
        """Take it out, wherever it stands. A discarded sequence may be pushed again only after peek() passed it."""
        self._members.discard(seq)
        if self._heap and self._heap[0][1] is seq:
            heappop(self._heap)

    def snapshot(self) -> list[Sequence]:
        """Those waiting, in the order in which they will be served. O(n log n): for reports and tests."""
        return sorted(self._members, key=lambda seq: seq.rank)
