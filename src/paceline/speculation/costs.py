"""What things take, measured as the engine goes: seconds by a count, by a line, until a request's first draft."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Collection, Mapping
from statistics import median

FIRST = 5
"""Samples of a count whose median counts; from then on a moving average."""
WEIGHT = 0.02
LEVEL_WEIGHT = 0.1
"""Of a sample, in what is known of its count and of all counts together."""
SHAPE_WEIGHT = 0.004
"""The same of its count where some were measured on purpose, beside each other, once many were seen: what slows a
machine slows all counts, the one that is seen no more than others, and drafts go by how two of them differ."""
RARE = 32
RARE_WEIGHT = 0.1
"""Of a sample that is smaller than what is known of a count which was not seen for so many observations: nothing takes
less than it needs, so what is known is old, or was measured while the machine was busy."""
TRUSTED = 2
"""Samples from which on a count is known."""
STALE_AFTER = 1000
"""Observations after which a count that was not seen again is forgotten: the machine may have changed."""
KNOWN_WELL = 30
"""Samples that what was measured on purpose counts for, beside counts that were seen as the engine went."""
REMEMBERED = 100
"""Samples that an average remembers: it counts for no more."""
REFRESH_EVERY = 16
STEADY = 0.001
"""What a slope is held by, as a share of all that is remembered: with little to tell it by, it stays what it was."""
SURPRISE = 3.0
"""Times what was expected that a sample of a line counts for, at most: what keeps the machine busy now and then is not
its rows. To be twice as dear is to be expected of twice as much."""
OPENINGS = 2
"""Requests after which a drafter's first drafts are taken to cost what they have cost."""
OPENING_MEMORY = 0.9


class _Point:
    __slots__ = ("anchored", "first", "guess", "last_seen", "least", "samples", "value")

    def __init__(self, seconds: float, guess: float | None) -> None:
        """`guess`: what other counts say of it; None: nothing."""
        self.anchored = False
        self.first = [seconds]
        self.least = math.inf
        """Of all samples, whatever the level of all costs was."""
        self.samples = 1
        self.guess = guess
        self.value = self.median()
        self.last_seen = 0

    def median(self) -> float:
        """Of the first samples, and of the guess as of one more."""
        return median(self.first if self.guess is None else [self.guess, *self.first])

    @property
    def weight(self) -> float:
        """How well it is known, beside others: what was seen often is not what a few odd samples of another say."""
        return min(REMEMBERED, self.samples + (KNOWN_WELL if self.anchored else 0))


class CostCurve:
    """Seconds by count. `prior` gives the shape (any unit) where nothing was measured.

    Every exact count has its own average. Between measured counts the curve is a straight line, outside it follows
    the prior's shape; and since more rows never take less time, counts that seem to are taken to cost the same, each
    weighing as much as it is known. One odd sample (another process, a cold page) moves little: averages start as
    medians, in which those around a new count have a voice, and large values are clipped.

    Longer texts and a busy machine make all counts dearer at once. What is kept of a count is therefore what it takes
    at one level of all costs, and samples of well-known counts move that level sooner than the counts: else one that
    was last seen behind short texts would seem cheap beside one that was just seen behind a long one.
    """

    def __init__(self, prior: Callable[[int], float]) -> None:
        self._prior = prior
        self._points: dict[int, _Point] = {}
        self._counts: list[int] = []
        self._values: list[float] = []
        self._answers: dict[int, float] = {}
        self._seen = 0
        self._level = 1.0
        self._anchored = False
        self._doubted = False

    @property
    def measured(self) -> bool:
        """Whether answers are seconds; before, they are in the prior's unit."""
        return bool(self._points)

    def knows(self, count: int) -> bool:
        """Whether this count, or one within a fifth of it, was measured lately and more than once, or a smaller and a
        larger one were."""
        trusted = [known for known, point in self._points.items() if len(point.first) >= TRUSTED]
        near = [known for known in trusted if 4 * count <= 5 * known and 4 * known <= 5 * count]
        return bool(near) or (bool(trusted) and min(trusted) < count < max(trusted))

    def anchor(self, counts: Collection[int] = ()) -> None:
        """What is known now was measured on purpose, all of it at one time: it is not forgotten, and what comes moves
        all counts together sooner than one. Of each count the best sample holds, or that of a larger one if it is
        better still, for beside each other they have to be right: what else the machine did meanwhile made some dearer,
        and none cheaper. `counts`: those that were; what is known of others came by the way, and goes."""
        self._points = {count: point for count, point in self._points.items() if count in counts} or self._points
        self._anchored, self._level = bool(self._points), 1.0
        least = math.inf
        for _, point in sorted(self._points.items(), reverse=True):
            point.anchored = True
            least = point.value = min(least, point.least)
            point.first += [point.value] * (FIRST - len(point.first))
        self._refresh()

    def points(self) -> dict[int, float]:
        """Seconds of the counts that were measured more than once."""
        return {count: self._level * point.value for count, point in self._points.items()
                if len(point.first) >= TRUSTED}

    def restore(self, points: Mapping[int, float]) -> None:
        """As if these had been measured, on purpose."""
        for count, seconds in points.items():
            for _ in range(TRUSTED):
                self.observe(count, seconds)
        self.anchor()

    def doubt(self) -> None:
        """What is known may be old, or of the first and coldest times: if the next sample is smaller than that says,
        all of it is as much too large. (Nothing takes less than it needs; that it takes more proves nothing.)"""
        self._doubted = True

    def observe(self, count: int, seconds: float) -> None:
        self._seen += 1
        if self._doubted and self.measured and 0.0 < seconds < self(count):
            self._level *= seconds / self(count)
        self._doubted = False
        raw, seconds = seconds, seconds / self._level
        point = self._points.get(count)
        early = point is None or len(point.first) < FIRST
        if point is None:
            between = bool(self._counts) and self._counts[0] < count < self._counts[-1]
            self._points[count] = point = _Point(seconds, self._estimate(count) if between else None)
        elif len(point.first) < FIRST:
            point.samples += 1
            point.first.append(seconds)
            point.value = point.median()
        else:
            point.samples += 1
            off = min(seconds, 2.0 * point.value) - point.value
            rare = off < 0.0 and self._seen - point.last_seen > RARE
            usual = max(SHAPE_WEIGHT, 1.0 / (KNOWN_WELL + point.samples)) if self._anchored else WEIGHT
            point.value += (RARE_WEIGHT if rare else usual) * off
            if point.value > 0.0:
                self._level *= 1.0 + LEVEL_WEIGHT * off / point.value
        point.least = min(point.least, raw)
        point.last_seen = self._seen
        if early or self._seen % REFRESH_EVERY == 0:
            self._refresh()

    def __call__(self, count: int) -> float:
        answer = self._answers.get(count)
        if answer is None:
            answer = self._answers[count] = self._estimate(count)
        return self._level * answer

    def _refresh(self) -> None:
        """Take up what was observed: drop what is stale, make the values rise with the counts."""
        oldest = self._seen - STALE_AFTER
        if any(point.last_seen < oldest and not point.anchored for point in self._points.values()):
            self._points = {count: point for count, point in self._points.items()
                            if point.last_seen >= oldest or point.anchored}
        self._counts = sorted(self._points)
        plains: list[tuple[float, float, int]] = []
        """Value, weight and number of neighbours that are taken to cost the same."""
        for count in self._counts:
            value, weight, counts = self._points[count].value, self._points[count].weight, 1
            while plains and plains[-1][0] > value:
                before, heavy, several = plains.pop()
                value = (heavy * before + weight * value) / (heavy + weight)
                weight, counts = heavy + weight, several + counts
            plains.append((value, weight, counts))
        self._values = [value for value, _, counts in plains for _ in range(counts)]
        self._answers.clear()

    def _estimate(self, count: int) -> float:
        counts, values, prior = self._counts, self._values, self._prior
        if not counts:
            return prior(count)
        place = bisect_left(counts, count)
        if place == len(counts):
            return values[-1] * prior(count) / prior(counts[-1])
        if counts[place] == count:
            return values[place]
        if place == 0:
            return values[0] * prior(count) / prior(counts[0])
        low, high = counts[place - 1], counts[place]
        share = (count - low) / (high - low)
        return values[place - 1] + share * (values[place] - values[place - 1])


class Line:
    """y = level + slope x by least squares, both at least 0; what is older weighs less."""

    def __init__(self, memory: float, spread: float) -> None:
        """`memory`: how much weight is remembered; `spread`: of x, as one would expect it."""
        self._memory = memory
        self._hold = STEADY * memory * spread * spread
        self._weight = 0.0
        self._x = self._y = 0.0
        """Means."""
        self._xx = self._xy = 0.0
        """About the means."""
        self.slope = 0.0

    @property
    def measured(self) -> bool:
        return self._weight > 0.0

    @property
    def weight(self) -> float:
        """Of all that it has seen, older things less."""
        return self._weight

    @property
    def told(self) -> bool:
        """Whether x varied, so that the slope is one that was seen."""
        return self._xx > 0.0 and self.slope > 0.0

    @property
    def proportion(self) -> float | None:
        """y by x while x was always the same, and not 1: what grows with it cannot be told. None: it can, or must be
        tried."""
        return None if self._xx or self._x <= 1.0 else self._y / self._x

    def observe(self, x: float, y: float, weight: float = 1.0) -> None:
        if self._y > 0.0:
            y = min(y, SURPRISE * max(self(x), self._y * x / self._x if self._x > 0.0 else y))
        kept = math.exp(-weight / self._memory)
        old = kept * self._weight
        self._weight = old + weight
        share, off_x, off_y = weight / self._weight, x - self._x, y - self._y
        self._x += share * off_x
        self._y += share * off_y
        self._xx = kept * self._xx + old * share * off_x * off_x
        self._xy = kept * self._xy + old * share * off_x * off_y
        self.slope = max(0.0, (self._xy + self._hold * self.slope) / (self._xx + self._hold))

    def __call__(self, x: float) -> float:
        return max(0.0, self._y + self.slope * (x - self._x))


class OpeningCost:
    """Seconds until a request's first draft, by the tokens it begins with: a model that drafts reads them first."""

    __slots__ = ("_opened", "_seconds", "_tokens")

    def __init__(self) -> None:
        self._opened = 0
        self._tokens = self._seconds = 0.0
        """Of the requests so far, both forgotten slowly."""

    def observe(self, tokens: int, seconds: float) -> None:
        self._opened += 1
        self._tokens = OPENING_MEMORY * self._tokens + tokens
        self._seconds = OPENING_MEMORY * self._seconds + seconds

    def __call__(self, tokens: int) -> float:
        """0 while it is not known."""
        return self._seconds / self._tokens * tokens if self._opened >= OPENINGS and self._tokens else 0.0
