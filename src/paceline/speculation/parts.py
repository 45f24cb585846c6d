"""Parts: what all drafters made of other drafters have in common, from reading their wishes to losing one of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.errors import RequestError
from paceline.speculation.drafter import Budget, DraftContext, Drafter, Needs
from paceline.speculation.options import MAX_NODES, MOST_LEVELS, shown
from paceline.speculation.sequence import DraftedSequence
from paceline.speculation.tree import DraftTree

MOST_PARTS = 8

PartFailed = Callable[[DraftedSequence, str, Exception], None]
"""(the sequence, the part's name, what it raised)"""


@dataclass(slots=True)
class Part:
    """One drafter of several, and how much of it was asked for."""

    drafter: Drafter
    depth: int = MAX_NODES
    nodes: int = MAX_NODES

    def budget(self, given: Budget) -> Budget:
        if given.depth <= self.depth and given.nodes <= self.nodes:
            return given
        return Budget(min(given.depth, self.depth), min(given.nodes, self.nodes), given.price, given.pace,
                      given.allowance)


class MadeOfParts:
    """A drafter made of others. A part that fails is left out while the others go on; whoever listens hears of it."""

    _report: PartFailed | None = None

    def drafters(self) -> Sequence[Drafter]:
        """Of its parts."""
        raise NotImplementedError

    def listen(self, report: PartFailed) -> None:
        """Tell `report` of every part that is dropped from now on, those of parts included."""
        self._report = report
        for drafter in self.drafters():
            if isinstance(drafter, MadeOfParts):
                drafter.listen(report)

    def tell(self, drafter: Drafter, sequences: Sequence[DraftedSequence], problem: Exception) -> None:
        """A part is left out of these sequences from now on: whoever listens hears of it."""
        if self._report is not None:
            for sequence in sequences:
                self._report(sequence, drafter.name, problem)


def all_taps(needs: Sequence[Needs]) -> tuple[int, ...]:
    """What any of the parts reads of the target."""
    return tuple(sorted({tap for one in needs for tap in one.taps}))


def fitted(draft: DraftTree | None, budget: Budget) -> DraftTree | None:
    """A part's draft within its budget, None where it is empty. A malformed one raises."""
    if draft is None:
        return None
    draft.check()
    return draft.trimmed(budget.nodes) if len(draft) else None


def part_of(wish: Any, method: str, context: DraftContext) -> Part:
    """The part that a method's name or a dict describes; its "k" and "nodes" are limits of its own."""
    if not isinstance(wish, str | Mapping):
        raise RequestError(f"{method!r} is made of drafters, each a method's name or a dict, got {shown(wish)}.",
                           "speculation")
    limits = wish if isinstance(wish, Mapping) else {}
    if "verify" in limits:
        raise RequestError(f"speculation 'verify' belongs to {method!r} as a whole: take it out of its drafters.",
                           "speculation")
    return Part(context.build(wish), limits.get("k", MAX_NODES), limits.get("nodes", MAX_NODES))


def check_wishes(wishes: Any, method: str) -> None:
    """Refuse what is no list of drafters, or too many of them, or too many levels."""
    if not isinstance(wishes, list | tuple) or not 1 <= len(wishes) <= MOST_PARTS:
        raise RequestError(f"speculation method {method!r} needs 'drafters': a list of 1 to {MOST_PARTS} methods' "
                           "names or dicts.", "speculation")
    if not _flat_enough(wishes, MOST_LEVELS):
        raise RequestError(f"speculation drafters may stand inside drafters at most {MOST_LEVELS} levels deep: leave "
                           "some out.", "speculation")


def _flat_enough(wishes: Sequence[Any], levels: int) -> bool:
    """Whether lists of drafters stand inside one another at most so deep."""
    if levels == 0:
        return False
    inner = [wish["drafters"] for wish in wishes
             if isinstance(wish, Mapping) and isinstance(wish.get("drafters"), list | tuple)]
    return all(_flat_enough(more, levels - 1) for more in inner)
