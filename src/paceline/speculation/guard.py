"""Guard: between drafters and whoever calls them. One that raises costs a sequence its drafts, never its text."""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import suppress
from typing import Any, Generic, NamedTuple, TypeVar

from paceline.speculation.drafter import Budget, Drafter, WeighsItself
from paceline.speculation.sequence import DraftedSequence
from paceline.speculation.tree import DraftTree

log = logging.getLogger("paceline.speculation")

S = TypeVar("S", bound=DraftedSequence)
Answer = TypeVar("Answer")


class Proposal(NamedTuple, Generic[S]):
    """What a drafter said about one sequence, unchecked."""

    sequence: S
    budget: Budget
    draft: DraftTree | None
    seconds: float
    """The sequence's share of what the drafter took."""
    weighed: float = 0.0
    """Of that, what the drafter had weighed itself against what it wins: nobody needs to do so again."""


def reason(problem: Exception) -> str:
    """What was raised, in a line."""
    return f"{type(problem).__name__}: {problem}"


class Guard(ABC, Generic[S]):
    """Base of whoever calls drafters.

    A drafter that raises is dropped for the sequence that it was called for and those that share its fate (`sharers`):
    the owner loses it there (`lose`), then the drafter gives back what it holds of them.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._guard_clock = clock
        self._said: set[Hashable] = set()

    # ---------------------------------------------------------------- what an owner says

    @abstractmethod
    def lose(self, drafter: Drafter, sequences: Sequence[S], problem: Exception) -> None:
        """Call the drafter no more for these sequences, and tell of it. What this raises passes on to the caller, once
        the drafter has given everything back."""

    def sharers(self, sequence: S) -> Iterable[S]:
        """The sequences that lose a drafter which fails on this one."""
        return [sequence]

    # ---------------------------------------------------------------- what it is offered

    def guarded(self, drafter: Drafter, sequence: S, action: Callable[..., Answer], *given: Any) -> Answer | None:
        """action(*given), which the drafter answers for; None where it raises."""
        try:
            return action(*given)
        except Exception as problem:
            self._drop(drafter, sequence, problem)
            return None

    def proposals(self, drafter: Drafter, sequences: Sequence[S], budgets: Sequence[Budget]) -> list[Proposal[S]]:
        """What a drafter says to those who share it, less those it raises on. Where it raises on several together, each
        of them is asked alone: one sequence must not cost the others their drafter."""
        started = self._guard_clock()
        try:
            answers = list(zip(sequences, budgets, drafter.propose(sequences, budgets), strict=True))
        except Exception as problem:
            if len(sequences) == 1:
                self._drop(drafter, sequences[0], problem)
                return []
            found = [one for sequence, budget in zip(sequences, budgets)
                     for one in self.proposals(drafter, [sequence], [budget])]
            if len(found) == len(sequences):
                self.say_once(drafter.name, "drafter %s failed on %d requests together, and on none of them alone: %s",
                              drafter.name, len(sequences), reason(problem), problem=problem)
            return found
        count = len(sequences)
        share = (self._guard_clock() - started) / count
        weighed = drafter.weighed / count if isinstance(drafter, WeighsItself) else 0.0
        return [Proposal(sequence, budget, draft, share, min(share, weighed)) for sequence, budget, draft in answers]

    def say_once(self, key: Hashable, sentence: str, *given: object, problem: Exception | None = None) -> None:
        """A warning in the log, the first time that there is one about `key`; with the traceback of `problem`."""
        if key not in self._said:
            self._said.add(key)
            log.warning(sentence, *given, exc_info=problem)

    def new_to_the_log(self, problem: Exception) -> Exception | None:
        """The problem, the first time that one like it comes from its line of code: a traceback for each request would
        drown everything else."""
        last = problem.__traceback__
        while last is not None and last.tb_next is not None:
            last = last.tb_next
        key = type(problem), None if last is None else (last.tb_frame.f_code, last.tb_lineno)
        if key in self._said:
            return None
        self._said.add(key)
        return problem

    def _drop(self, drafter: Drafter, sequence: S, problem: Exception) -> None:
        theirs = list(self.sharers(sequence))
        try:
            self.lose(drafter, theirs, problem)
        finally:
            for one in theirs:
                with suppress(Exception):  # it has failed already
                    drafter.release(one)
