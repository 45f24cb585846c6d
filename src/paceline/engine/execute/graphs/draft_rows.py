"""DraftRows: how many rows of a repeated step drafts get, for all of its sequences together. Every choice is judged by
what it was measured to yield: tokens a second, of the step as it really runs."""

from __future__ import annotations

from paceline.kernels.device.lookup import MOST_DRAFTED

GROUPS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
"""Sequences of a step with drafts. Far apart, so that few are captured: its rows are what takes time, and padding has
none."""
MOST_ROWS = 512
WEIGHT = 0.25
LEAST_WIN = 1.01
"""Times the speed of plain steps that drafts must have."""
FIRST_PAUSE, LONGEST_PAUSE = 16, 256
"""Steps between two tries of a choice that is not the best."""
TRIAL = 4
"""Times that a step is repeated which is only tried: long enough to be measured, short beside those that pay."""


Heads = tuple[str, ...]


def choices(groups: int) -> list[int]:
    """Rows of a step of so many sequences (of GROUPS) that are tried: with few of them texts that repeat themselves are
    worth long drafts, with many every row has its price."""
    factors = (2, 4, 8) if groups <= 4 else (2, 4)
    return [factor * groups for factor in factors if factor * groups <= MOST_ROWS]


class _Choice:
    """What came of one number of rows."""

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

    def learn(self, tokens: float, seconds: float) -> None:
        weight = WEIGHT if self.seconds else 1.0
        self.tokens += weight * (tokens - self.tokens)
        self.seconds += weight * (seconds - self.seconds)


class DraftRows:
    """For one engine. Choices are kept by how many sequences there are, roughly, and by the trained heads (`heads`)
    that draft for some of them: a head's passes take time, and its drafts are accepted more often, or less."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, Heads], dict[int, _Choice]] = {}
        self._most_rows = MOST_ROWS
        """What there is memory for, as far as is known."""

    def refuse(self, rows: int) -> None:
        """There was no memory for a step of so many rows."""
        self._most_rows = min(self._most_rows, rows - 1)
        for known in self._known.values():
            for beyond in [other for other in known if other > self._most_rows]:
                del known[beyond]

    def insist(self, running: int, depth: int) -> int:
        """Rows of a step in which somebody is to get drafts so deep whatever they are worth; few different ones."""
        groups = _groups(running)
        wanted = groups * (1 + min(depth, MOST_DRAFTED))
        fitting = [rows for factor in (2, 3, 5, 8, 16) if (rows := factor * groups) <= self._most_rows]
        return next((rows for rows in fitting if rows >= wanted), fitting[-1]) if groups and fitting else 0

    def choose(self, running: int, heads: Heads = ()) -> int:
        """Rows of the next step of so many sequences; 0: as many as there are, without drafts."""
        groups = _groups(running)
        if not groups:
            return 0
        known = self._choices(groups, heads)
        for rows, one in known.items():
            if not one.seconds:
                return rows
        best = _best(known)
        known[best].pause = 0
        for rows, one in known.items():
            if rows == best:
                continue
            if not one.pause:
                one.pause = one.left = FIRST_PAUSE
            one.left -= 1
            if one.left <= 0:  # once more: the texts may have changed
                one.pause = one.left = min(2 * one.pause, LONGEST_PAUSE)
                return rows
        return best

    def learn_host(self, running: int, rows: int, seconds: float, heads: Heads = ()) -> None:
        """The host had so much to do for each time of such a step."""
        choice = self._known.get((_groups(running), heads), {}).get(rows)
        if choice is not None:
            choice.host += (WEIGHT if choice.host else 1.0) * (seconds - choice.host)

    def tries(self, running: int, rows: int, heads: Heads = ()) -> bool:
        """Whether so many rows, chosen for so many sequences, are not what is known to be best for them."""
        known = self._known.get((_groups(running), heads))
        return known is not None and (rows != _best(known) or not all(one.seconds for one in known.values()))

    def learn(self, running: int, rows: int, tokens: float, seconds: float, heads: Heads = ()) -> None:
        """A step of so many sequences and rows (0: without drafts) yielded so many tokens for each of them, every time
        it ran."""
        groups = _groups(running)
        choice = self._choices(groups, heads).get(rows) if groups else None
        if choice is not None and seconds > 0.0:
            choice.learn(tokens, seconds)

    def plain(self, running: int, heads: Heads = ()) -> float | None:
        """Seconds of a step of so many sequences without drafts; None: it was not measured."""
        choice = self._known.get((_groups(running), heads), {}).get(0)
        return choice.seconds if choice is not None and choice.seconds else None

    def _choices(self, groups: int, heads: Heads) -> dict[int, _Choice]:
        known = self._known.get((groups, heads))
        if known is None:
            possible = [rows for rows in choices(groups) if rows <= self._most_rows]
            known = self._known[groups, heads] = {rows: _Choice() for rows in (0, *possible)}
        return known


def _groups(running: int) -> int:
    """Of the step that has room for so many; 0: none has."""
    return next((groups for groups in GROUPS if groups >= running), 0)


def _best(known: dict[int, _Choice]) -> int:
    return max(known, key=lambda rows: known[rows].speed if rows else LEAST_WIN * known[rows].speed)
