"""SuffixLibrary: what an engine's requests read and wrote, as suffix trees, in bounded memory.

A suffix tree cannot forget a single text. So the library is a row of trees: texts go to the newest one, and when the
whole holds too much, the oldest tree is dropped. Requests of different scopes never share a tree: what one of them
wrote must not show in how another one is drafted.
"""

from __future__ import annotations

from collections import deque

from paceline.speculation.suffix_tree import SuffixTree, Text, new_tree

_TREES = 4
"""A full library holds about this many trees, so it forgets a quarter at a time."""


class _Shelf:
    """A tree and the scope it is for."""

    __slots__ = ("scope", "tree")

    def __init__(self, scope: str, depth: int) -> None:
        self.scope = scope
        self.tree = new_tree(depth)


class Volume:
    """A text on its way into the library."""

    __slots__ = ("_place", "scope")

    def __init__(self, scope: str) -> None:
        self.scope = scope
        self._place: tuple[_Shelf, Text] | None = None

    def write(self, shelf: _Shelf, tokens: list[int]) -> None:
        if self._place is None or self._place[0] is not shelf:  # the old tree is full or gone: here a new text begins
            self._place = shelf, shelf.tree.begin()
        shelf.tree.extend(self._place[1], tokens)

    def tear(self) -> None:
        """Some tokens were lost: what comes next does not follow what was written last."""
        self._place = None


class _Delivery:
    """Tokens of a volume that wait to be sorted in, from `begin` on."""

    __slots__ = ("begin", "tokens", "volume")

    def __init__(self, volume: Volume, tokens: list[int]) -> None:
        self.volume = volume
        self.tokens = tokens
        self.begin = 0

    def __len__(self) -> int:
        return len(self.tokens) - self.begin

    def take(self, count: int) -> list[int]:
        begin = self.begin
        self.begin += count
        return self.tokens[begin:self.begin]


class SuffixLibrary:
    """`add` only takes note; `work` does the sorting in, a little at a time, so that no request waits for the long
    prompt of another. The tree that nothing was added to for longest goes first; `capacity` bounds tokens over all
    scopes."""

    def __init__(self, capacity: int, depth: int = 64) -> None:
        self.capacity = capacity
        self._depth = depth
        self._shelves: dict[_Shelf, None] = {}
        """All of them, the one that was written to last at the end."""
        self._of: dict[str, list[_Shelf]] = {}
        """Of a scope, oldest first; the last one is written to."""
        self._pending: deque[_Delivery] = deque()
        self._waiting = 0
        self.tokens = 0
        """Held now, without what waits to be sorted in."""

    def trees(self, scope: str) -> list[SuffixTree]:
        """What requests of this scope may look at, the newest first."""
        return [shelf.tree for shelf in reversed(self._of.get(scope, ()))]

    def add(self, volume: Volume, tokens: list[int]) -> None:
        """Take note of a text's next tokens. What waits is bounded like what is held: the oldest is forgotten."""
        if not tokens:
            return
        self._pending.append(_Delivery(volume, tokens))
        self._waiting += len(tokens)
        while self._waiting > self.capacity:
            lost = self._pending.popleft()
            lost.volume.tear()
            self._waiting -= len(lost)

    def work(self, most: int) -> None:
        """Sort in up to `most` tokens."""
        while most > 0 and self._pending:
            first = self._pending[0]
            shelf = self._open_shelf(first.volume.scope)
            count = min(most, len(first), max(1, self.capacity // _TREES - shelf.tree.tokens))
            first.volume.write(shelf, first.take(count))
            self._shelves.pop(shelf, None)
            self._shelves[shelf] = None
            most -= count
            self._waiting -= count
            self.tokens += count
            if not first:
                self._pending.popleft()
            self._forget()

    def _open_shelf(self, scope: str) -> _Shelf:
        shelves = self._of.setdefault(scope, [])
        if not shelves or shelves[-1].tree.tokens >= self.capacity // _TREES:
            shelf = _Shelf(scope, self._depth)
            shelves.append(shelf)
        return shelves[-1]

    def _forget(self) -> None:
        while self.tokens > self.capacity:
            shelf = next(iter(self._shelves))
            del self._shelves[shelf]
            self.tokens -= shelf.tree.tokens
            left = self._of[shelf.scope]
            left.remove(shelf)
            if not left:
                del self._of[shelf.scope]
