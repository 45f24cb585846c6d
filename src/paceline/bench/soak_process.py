"""What a server's process has, look by look, and whether that grows."""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

CACHE = "cache"
PARTS = {CACHE: 'paceline_memory_bytes{part="cache"}', "files": 'paceline_memory_bytes{part="files"}',
         "heap": 'paceline_memory_bytes{part="heap"}', "other": 'paceline_memory_bytes{part="other"}',
         "malloc used": 'paceline_malloc_bytes{state="used"}', "malloc free": 'paceline_malloc_bytes{state="free"}'}
"""What memory consists of, as a server's metrics call it. The last two are what the C library says of heap and other;
it counts what nobody has written yet, too."""
OBJECTS = "paceline_python_blocks"
JUDGED = 240.0
"""Seconds from which on a run is judged by what grew: before that caches fill, pools get their threads, and it says
nothing."""
ALLOWED = 1 << 19
"""Bytes a minute that memory may grow, the cache apart: what is kept of each block in use, say."""
SPANS = 10
STUDENT = 2.306
"""Looks a second apart tell nearly the same, so of each of so many spans there is one figure, its median. Student's t
for a line through so many: 95 %."""


@dataclass
class Look:
    """What a process had at some moment."""

    at: float
    rss: int = 0
    threads: int = 0
    files: int = 0
    parts: Mapping[str, float] = field(default_factory=dict)
    """What the server tells of its memory: PARTS."""
    objects: float = 0.0
    """Python's."""

    @property
    def judged(self) -> float:
        """Memory that may not go on growing. Pages of the cache may: they are given when a block is first used."""
        return self.rss - self.parts.get(CACHE, 0.0)


def look_at(process: int, at: float, metrics: Mapping[str, float]) -> Look:
    """`metrics`: what its server tells. Zeros where the system does not."""
    found = Look(at, parts={part: metrics[name] for part, name in PARTS.items() if name in metrics},
                 objects=metrics.get(OBJECTS, 0.0))
    try:
        with open(f"/proc/{process}/status") as lines:
            about = dict(line.split(":", 1) for line in lines if ":" in line)
        found.rss, found.threads = int(about["VmRSS"].split()[0]) * 1024, int(about["Threads"])
        found.files = len(os.listdir(f"/proc/{process}/fd"))
    except (OSError, KeyError):
        pass
    return found


class Trend(NamedTuple):
    """How fast something grows, a minute."""

    slope: float
    margin: float
    """The slope lies within so much of it, 95 %."""

    @property
    def least(self) -> float:
        return self.slope - self.margin

    def told(self, unit: int = 1 << 20, name: str = "MiB ") -> str:
        if math.isinf(self.margin):
            return "too few looks to tell how it grows"
        return f"{self.slope / unit:+.2f} ± {self.margin / unit:.2f} {name}a minute"


UNKNOWN = Trend(0.0, math.inf)


def trend(looks: Sequence[Look], value: Callable[[Look], float]) -> Trend:
    """Over the last half: what is filled once, is filled by then."""
    late = looks[len(looks) // 2:]
    if len(late) < SPANS:
        return UNKNOWN
    bounds = [len(late) * place // SPANS for place in range(SPANS + 1)]
    spans = [late[begin:end] for begin, end in pairwise(bounds)]
    times = [statistics.mean(one.at for one in span) / 60.0 for span in spans]
    values = [statistics.median(value(one) for one in span) for span in spans]
    slope, intercept = statistics.linear_regression(times, values)
    left = sum((y - intercept - slope * x) ** 2 for x, y in zip(times, values)) / (SPANS - 2)
    middle = statistics.mean(times)
    return Trend(slope, STUDENT * math.sqrt(left / sum((x - middle) ** 2 for x in times)))


def growth(looks: Sequence[Look]) -> Trend:
    """Of memory, the cache apart."""
    return trend(looks, lambda look: look.judged)


def part_growth(looks: Sequence[Look]) -> dict[str, Trend]:
    """Of each part that the server tells of."""
    return {part: trend(looks, lambda look, part=part: look.parts.get(part, 0.0))  # type: ignore[misc]
            for part in PARTS if looks and part in looks[-1].parts}


def leaks(looks: Sequence[Look]) -> list[str]:
    """What has grown in a run of some minutes and should not have."""
    if len(looks) < 4 or not looks[-1].rss or looks[-1].at - looks[0].at < JUDGED:
        return []
    found: list[str] = []
    for name in ("threads", "files"):
        most = max(getattr(one, name) for one in looks[:max(2, len(looks) // 2)])
        if getattr(looks[-1], name) > most:
            found.append(f"{name}: {getattr(looks[-1], name)} at rest, at most {most} before")
    grown = growth(looks)
    if grown.least > ALLOWED:
        parts = ", ".join(f"{part} {one.slope / 2**20:+.2f}" for part, one in part_growth(looks).items())
        objects = trend(looks, lambda look: look.objects)
        found.append(f"memory: {grown.told()} over the last half, the cache apart ({parts}; Python's objects "
                     f"{objects.told(1, '')})")
    return found
