"""Stop strings over streamed text: holds back what may still become one, and never looks at a character twice."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy


class _Node:
    """A prefix of some stop string."""

    __slots__ = ("depth", "fallback", "found", "next")

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self.next: dict[str, _Node] = {}
        self.fallback: _Node = self
        """The longest proper suffix of this prefix that is a prefix too."""
        self.found: str | None = None
        """The longest stop string that ends here."""


class StopMatcher:
    """Finds the first of several stop strings to be completed.

    A stop takes effect with its last character: the stop string that ends earliest wins, and of those that end
    together the one that starts earliest (the longest). So the outcome is a function of the text alone, however it
    was cut into pieces, and never waits for text beyond a complete stop string.
    """

    __slots__ = ("_held", "_node", "_root", "stopped")

    def __init__(self, stops: Sequence[str]) -> None:
        self._root = _automaton(stops)
        self._node = self._root
        self._held = ""
        self.stopped: str | None = None
        """The stop string that was found."""

    def fork(self) -> StopMatcher:
        """For another text, from its beginning: the stop strings are read once for all samples of a request."""
        other = copy(self)
        other._node, other._held, other.stopped = self._root, "", None
        return other

    def push(self, text: str) -> tuple[str, str | None]:
        """Take more text; give back what is safe to show and the stop string found, if one was.

        Of a text that stops, what comes before the stop string is shown; whatever is pushed later is swallowed.
        """
        root, node = self._root, self._node
        if not root.next:
            return text, None
        if self.stopped is not None:
            return "", self.stopped
        for at, character in enumerate(text):
            while character not in node.next and node is not root:
                node = node.fallback
            node = node.next.get(character, root)
            if node.found is not None:
                self.stopped = node.found
                whole = self._held + text[:at + 1]
                self._held = ""
                return whole[:len(whole) - len(node.found)], node.found
        self._node = node
        whole = self._held + text
        safe = len(whole) - node.depth
        self._held = whole[safe:]
        return whole[:safe], None

    def flush(self) -> str:
        """The text has ended: what was held back is just text."""
        held, self._held, self._node = self._held, "", self._root
        return held


def _automaton(stops: Sequence[str]) -> _Node:
    root = _Node(0)
    for stop in stops:
        node = root
        for character in stop:
            node = node.next.setdefault(character, _Node(node.depth + 1))
        node.found = stop
    level = list(root.next.values())
    for node in level:
        node.fallback = root
    while level:
        deeper: list[_Node] = []
        for node in level:
            if node.found is None:
                node.found = node.fallback.found
            for character, child in node.next.items():
                back = node.fallback
                while character not in back.next and back is not root:
                    back = back.fallback
                child.fallback = back.next.get(character, root)
                deeper.append(child)
        level = deeper
    return root
