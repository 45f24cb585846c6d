"""DraftRows: how many rows of a repeated step drafts get, for all of its sequences together, and whether trained heads
take part in finding them. Every choice is judged by what it was measured to yield: tokens a second, of the step as it
really runs."""

from __future__ import annotations

from typing import NamedTuple

from paceline.kernels.device.lookup import MOST_DRAFTED
from paceline.speculation.exploration import Allowance

GROUPS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
"""Sequences of a step with drafts. Far apart, so that few are captured: its rows are what takes time, and padding has
none."""
MOST_ROWS = 512
MOST_HEADED = 32
"""Sequences of a step in which heads take part beside look-ups. A round of a block head has as many rows of its own for
each; at 128 at once that took more than it brought (docs/benchmarks.md)."""
WEIGHT = 0.25
LEAST_WIN = 1.05
"""Times the speed of plain steps that drafts must have: the host has more to do for their tokens, and who ends sooner
than others leaves prompts that come one by one."""
FIRST_PAUSE, LONGEST_PAUSE = 16, 256
"""Steps between two tries of a choice that is not the best, where there is time for them."""


class Sources(NamedTuple):
    """Where the drafts of some sequences can come from."""

    heads: tuple[str, ...] = ()
    """Trained heads that some of them ask for."""
    lookups: bool = True
    """Some look drafts up in their texts."""


class DraftPlan(NamedTuple):
    """A step of a number of rows, and the heads that take part in it."""

    rows: int = 0
    """0: nothing is drafted."""
    heads: tuple[str, ...] = ()

    def takes_as_much_as(self, other: DraftPlan) -> bool:
        """Whether there is no memory for it where there is none for the other."""
        return self.rows >= other.rows and set(self.heads) >= set(other.heads)


PLAIN = DraftPlan()
LOOKUPS = Sources()


def choices(groups: int) -> list[int]:
    """Rows of a step of so many sequences (of GROUPS) that are tried: with few of them texts that repeat themselves are
    worth long drafts, with many every row has its price."""
    factors = (2, 4, 8) if groups <= 4 else (2, 4)
    return [factor * groups for factor in factors if factor * groups <= MOST_ROWS]


class _Choice:
    """What came of one plan."""

    __slots__ = ("host", "left", "pause", "seconds", "tokens")

    def __init__(self) -> None:
        self.tokens = self.seconds = 0.0
        """Of one time the step ran: tokens for each sequence; 0: not tried."""
        self.host = 0.0
        """Seconds that the host had to do because of it, while the device went on."""
        self.pause = self.left = 0

    @property
    def speed(self) -> float:
        """Of whoever is slower, the device or the host."""
        return self.tokens / max(self.seconds, self.host) if self.seconds else 0.0

    def loss(self, best: _Choice) -> float:
        """Seconds that its tokens take longer than with the best choice, each time the step runs."""
        return max(0.0, max(self.seconds, self.host) - self.tokens / best.speed)

    def learn(self, tokens: float, seconds: float) -> None:
        weight = WEIGHT if self.seconds else 1.0
        self.tokens += weight * (tokens - self.tokens)
        self.seconds += weight * (seconds - self.seconds)


class DraftRows:
    """For one engine. Choices are kept by how many sequences there are, roughly, and by where drafts can come from: a
    head's passes take time, and its drafts are accepted more often, or less. Each is tried once; what loses again and
    again only as far as there is time to spare."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, Sources], dict[DraftPlan, _Choice]] = {}
        self._plain: dict[int, _Choice] = {}
        """Without drafts, by how many there are alone: nobody's drafts cost anything then."""
        self._refused: list[DraftPlan] = []
        self._allowance = Allowance()

    def refuse(self, plan: DraftPlan) -> None:
        """There was no memory for such a step."""
        self._refused.append(plan)
        for known in self._known.values():
            for beyond in [other for other in known if other.takes_as_much_as(plan)]:
                del known[beyond]

    def insist(self, running: int, depth: int, heads: tuple[str, ...] = ()) -> DraftPlan:
        """A step in which somebody is to get drafts so deep whatever they are worth; few different ones."""
        groups = _groups(running)
        wanted = groups * (1 + min(depth, MOST_DRAFTED))
        fitting = [plan for factor in (2, 3, 5, 8, 16) if self._fits(plan := DraftPlan(factor * groups, heads))]
        return next((plan for plan in fitting if plan.rows >= wanted), fitting[-1]) if groups and fitting else PLAIN

    def _fits(self, plan: DraftPlan) -> bool:
        """Whether there is memory for it, as far as is known."""
        return plan.rows <= MOST_ROWS and not any(plan.takes_as_much_as(other) for other in self._refused)

    def choose(self, running: int, sources: Sources = LOOKUPS, times: int = 1) -> DraftPlan:
        """For the next step of so many sequences, which runs so many times."""
        groups = _groups(running)
        if not groups:
            return PLAIN
        known = self._choices(groups, sources)
        for plan, one in known.items():
            if not one.seconds:
                return plan
        best = _best(known)
        known[best].pause = 0
        due: list[tuple[int, DraftPlan]] = []
        for plan, one in known.items():
            if plan == best:
                continue
            if not one.pause:
                one.pause = one.left = FIRST_PAUSE
            one.left -= 1
            if one.left <= 0:
                due.append((one.left, plan))
        if due:  # once more, who has waited longest: the texts may have changed
            plan = min(due, key=lambda pair: pair[0])[1]
            one = known[plan]
            if self._allowance.spend(times * one.loss(known[best])):
                one.pause = one.left = min(2 * one.pause, LONGEST_PAUSE)
                return plan
        return best

    def learn_host(self, running: int, plan: DraftPlan, seconds: float, sources: Sources = LOOKUPS) -> None:
        """The host had so much to do for each time of such a step."""
        choice = self._known.get((_groups(running), sources), {}).get(plan)
        if choice is not None:
            choice.host += (WEIGHT if choice.host else 1.0) * (seconds - choice.host)

    def learn(self, running: int, plan: DraftPlan, tokens: float, seconds: float, sources: Sources = LOOKUPS,
              times: int = 1) -> None:
        """Such a step of so many sequences yielded so many tokens for each of them, every time it ran."""
        self._allowance.earn(times * seconds)
        groups = _groups(running)
        choice = self._choices(groups, sources).get(plan) if groups else None
        if choice is not None and seconds > 0.0:
            choice.learn(tokens, seconds)

    def plain(self, running: int) -> float | None:
        """Seconds of a step of so many sequences without drafts; None: it was not measured."""
        choice = self._plain.get(_groups(running))
        return choice.seconds if choice is not None and choice.seconds else None

    def _choices(self, groups: int, sources: Sources) -> dict[DraftPlan, _Choice]:
        known = self._known.get((groups, sources))
        if known is None:
            both = (sources.heads, ()) if groups <= MOST_HEADED else ((),)
            by = dict.fromkeys(both if sources.lookups else (sources.heads,))
            possible = [plan for heads in by for rows in choices(groups) if self._fits(plan := DraftPlan(rows, heads))]
            plain = self._plain.setdefault(groups, _Choice())
            known = self._known[groups, sources] = {PLAIN: plain, **{plan: _Choice() for plan in possible}}
        return known


def _groups(running: int) -> int:
    """Of the step that has room for so many; 0: none has."""
    return next((groups for groups in GROUPS if groups >= running), 0)


def _best(known: dict[DraftPlan, _Choice]) -> DraftPlan:
    return max(known, key=lambda plan: known[plan].speed * (1.0 if plan.rows else LEAST_WIN))
