"""GrowingTree: a draft tree in the making, in which equal paths are one node."""

from __future__ import annotations

from collections.abc import Iterable

from paceline.speculation.tree import DraftTree

ROOT = -1
"""The last committed token, which every path starts from."""


class GrowingTree:
    """Nodes are numbered in the order in which they were first added. Verification follows one of two siblings with
    the same token, so a path that is added twice must be one path, or what hangs below the second is lost."""

    __slots__ = ("_children", "parents", "tokens")

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self._children: dict[tuple[int, int], int] = {}

    def __len__(self) -> int:
        return len(self.tokens)

    def find(self, parent: int, token: int) -> int | None:
        """The child of `parent` with this token, if there is one."""
        return self._children.get((parent, token))

    def add(self, parent: int, token: int) -> int:
        """The child of `parent` with this token, made if there is none."""
        node = self._children.setdefault((parent, token), len(self.tokens))
        if node == len(self.tokens):
            self.tokens.append(token)
            self.parents.append(parent)
        return node

    def add_path(self, path: Iterable[int], parent: int = ROOT) -> int:
        """The last node of a path below `parent`."""
        for token in path:
            parent = self.add(parent, token)
        return parent

    def finish(self, drafter: str, scores: list[float] | None = None) -> DraftTree | None:
        """The tree; None if it is empty."""
        return DraftTree(self.tokens, self.parents, drafter, scores=scores) if self.tokens else None
