"""Drafters that do as they are told, or fail."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from engine.tiny import VOCAB
from paceline.speculation.drafter import Budget, Needs, Observation
from paceline.speculation.sequence import DraftedSequence
from paceline.speculation.tree import DraftTree


def changed(**fields: Any) -> Callable[[], DraftTree]:
    """A tree that was sound when it was made."""

    def make() -> DraftTree:
        tree = DraftTree([1, 2], [-1, 0], "bad", scores=[0.9, 0.9])
        for name, value in fields.items():
            setattr(tree, name, value)
        return tree

    return make


MALFORMED: dict[str, Callable[[], Any]] = {
    "scores nan": changed(scores=[float("nan"), 0.5]),
    "scores none": changed(scores=[None, 0.5]),
    "scores text": changed(scores=["high", 0.5]),
    "scores a text": changed(scores="xy"),
    "scores short": changed(scores=[0.5]),
    "scores number": changed(scores=3),
    "tokens short": changed(tokens=[1]),
    "tokens float": changed(tokens=[1.0, 2.0]),
    "tokens none": changed(tokens=[None, 2]),
    "tokens text": changed(tokens=["a", "b"]),
    "tokens bool": changed(tokens=[True, False]),
    "tokens gone": changed(tokens=None),
    "tokens large": changed(tokens=[1, VOCAB]),
    "parents cyclic": changed(parents=[1, 0]),
    "parents itself": changed(parents=[-1, 1]),
    "parents float": changed(parents=[-1.0, 0.0]),
    "parents low": changed(parents=[-2, -1]),
    "sources short": changed(sources=["bad"]),
    "sources numbers": changed(sources=[1, 2]),
    "drafter none": changed(drafter=None),
    "no tree": lambda: [1, 2],
    "a number": lambda: 7,
}


class Puppet:
    """Proposes what it is told to."""

    needs = Needs()

    def __init__(self, make: Callable[[], Any], name: str = "bad") -> None:
        self.name = name
        self._make = make
        self.released = 0

    def begin(self, sequence: DraftedSequence) -> None:
        pass

    def propose(self, sequences: Sequence[DraftedSequence], budgets: Sequence[Budget]) -> list[DraftTree | None]:
        return [self._make() for _ in sequences]

    def observe(self, sequence: DraftedSequence, observation: Observation) -> None:
        pass

    def release(self, sequence: DraftedSequence) -> None:
        self.released += 1


class Fragile(Puppet):
    """Fails in some call, from the one after `lucky` such calls on."""

    def __init__(self, name: str, fails_at: str = "", lucky: int = 0) -> None:
        super().__init__(lambda: DraftTree.chain([1, 2], name, [0.9, 0.9]), name)
        self._fails_at = fails_at
        self._lucky = lucky

    def _maybe(self, where: str) -> None:
        if where == self._fails_at:
            self._lucky -= 1
            if self._lucky < 0:
                raise RuntimeError(f"in {where}")

    def begin(self, sequence: DraftedSequence) -> None:
        self._maybe("begin")

    def propose(self, sequences: Sequence[DraftedSequence], budgets: Sequence[Budget]) -> list[DraftTree | None]:
        self._maybe("propose")
        return super().propose(sequences, budgets)

    def observe(self, sequence: DraftedSequence, observation: Observation) -> None:
        self._maybe("observe")

    def release(self, sequence: DraftedSequence) -> None:
        super().release(sequence)
        self._maybe("release")
