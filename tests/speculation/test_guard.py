"""Guard: one sequence, and one drafter, cost nobody else anything."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

import pytest

from paceline.speculation.drafter import Budget, Drafter, Needs, Observation, WeighsItself
from paceline.speculation.guard import Guard, reason
from paceline.speculation.sequence import DraftedSequence
from paceline.speculation.tree import DraftTree
from speculation.fake_text import FakeText

BUDGETS = [Budget(4, 8)] * 3


class Moody:
    """Raises when it is asked about certain sequences."""

    name, needs = "moody", Needs()

    def __init__(self, fails: Callable[[Sequence[DraftedSequence]], bool]) -> None:
        self._fails = fails
        self.released: list[DraftedSequence] = []

    def begin(self, sequence: DraftedSequence) -> None:
        pass

    def propose(self, sequences: Sequence[DraftedSequence], budgets: Sequence[Budget]) -> list[DraftTree | None]:
        if self._fails(sequences):
            raise RuntimeError("not in the mood")
        return [DraftTree.chain([sequence.tokens[0]]) for sequence in sequences]

    def observe(self, sequence: DraftedSequence, observation: Observation) -> None:
        pass

    def release(self, sequence: DraftedSequence) -> None:
        self.released.append(sequence)
        raise RuntimeError("nor in this one")


class Owner(Guard[FakeText]):
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(clock)
        self.lost: list[tuple[list[FakeText], str]] = []

    def lose(self, drafter: Drafter, sequences: Sequence[FakeText], problem: Exception) -> None:
        self.lost.append((list(sequences), reason(problem)))


def texts() -> list[FakeText]:
    return [FakeText([number]) for number in (1, 2, 3)]


def test_whoever_a_drafter_fails_on_is_lost_alone_and_what_it_held_is_given_back() -> None:
    some, guard = texts(), Owner()
    drafter = Moody(lambda sequences: some[1] in sequences)
    found = guard.proposals(drafter, some, BUDGETS)
    assert [(one.sequence, one.draft and one.draft.tokens) for one in found] == [(some[0], [1]), (some[2], [3])]
    assert guard.lost == [([some[1]], "RuntimeError: not in the mood")] and drafter.released == [some[1]]


def test_a_drafter_that_answers_too_little_has_failed() -> None:
    (text, *_), guard = texts(), Owner()
    drafter = Moody(lambda sequences: False)
    drafter.propose = lambda sequences, budgets: []  # type: ignore[method-assign]
    assert guard.proposals(drafter, [text], BUDGETS[:1]) == [] and guard.lost[0][0] == [text]


def test_failing_on_several_together_alone_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    some, guard = texts(), Owner()
    drafter = Moody(lambda sequences: len(sequences) > 1)
    with caplog.at_level(logging.WARNING, "paceline"):
        for _ in range(2):
            assert len(guard.proposals(drafter, some, BUDGETS)) == 3
    assert not guard.lost and len([entry for entry in caplog.records if "3 requests together" in entry.message]) == 1


def test_shares_of_the_time_are_those_of_each_ask() -> None:
    ticks = iter([0.0, 6.0, 10.0, 10.0, 11.0, 20.0, 22.0, 30.0])
    some = texts()
    guard = Owner(lambda: next(ticks))
    assert [one.seconds for one in guard.proposals(Moody(lambda seqs: False), some, BUDGETS)] == [2.0] * 3
    one_by_one = guard.proposals(Moody(lambda seqs: len(seqs) > 1), some[:2], BUDGETS[:2])
    assert [one.seconds for one in one_by_one] == [1.0, 2.0]


def test_what_a_drafter_has_weighed_itself_is_told_by_its_share() -> None:
    ticks = iter([0.0, 6.0])

    class Choosy(WeighsItself, Moody):
        weighed = 4.5

    proposals = Owner(lambda: next(ticks)).proposals(Choosy(lambda seqs: False), texts(), BUDGETS)
    assert [one.weighed for one in proposals] == [1.5] * 3


def test_where_everyone_loses_a_drafter_it_gives_all_back_whatever_its_owner_raises() -> None:
    some = texts()
    drafter = Moody(lambda sequences: True)

    class Whole(Owner):
        def lose(self, drafter: Drafter, sequences: Sequence[FakeText], problem: Exception) -> None:
            raise problem

        def sharers(self, sequence: FakeText) -> list[FakeText]:
            return some

    with pytest.raises(RuntimeError, match="not in the mood"):
        Whole().proposals(drafter, some[:1], BUDGETS[:1])
    assert drafter.released == some


def test_a_call_passes_on_what_comes_back() -> None:
    (text, *_), guard = texts(), Owner()
    drafter = Moody(lambda sequences: False)
    assert guard.guarded(drafter, text, divmod, 7, 2) == (3, 1) and not guard.lost
    assert guard.guarded(drafter, text, divmod, 7, 0) is None and guard.lost[0][1].startswith("ZeroDivisionError")
