"""When requests arrive: by a clock that waits for nobody (open loop), or whenever a client is free (closed loop)."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

from paceline.errors import ConfigError

OPEN = ("poisson", "constant", "burst", "trace")
KINDS = ("closed", *OPEN)


@dataclass(frozen=True)
class Level:
    """One load of a sweep."""

    kind: str
    rate: float | None = None
    """Requests a second that are offered; None: whatever comes out."""
    clients: int | None = None
    """Of a closed loop."""

    @property
    def name(self) -> str:
        figure = self.rate if self.clients is None else self.clients
        return self.kind if figure is None else f"{self.kind}_{figure:g}"


@dataclass(frozen=True)
class Arrival:
    """A line of a trace. Lengths are those of a prompt and an answer; None: the dataset's own."""

    at_s: float
    input_len: int | None = None
    output_len: int | None = None


def levels(kind: str | None, rates: Sequence[float], clients: Sequence[int], trace: bool) -> list[Level]:
    """What `--arrivals`, `--rate`, `--concurrency` and `--trace` stand for together."""
    kind = kind or ("trace" if trace else "poisson" if rates else "closed")
    if kind not in KINDS:
        raise ConfigError(f"--arrivals must be one of {', '.join(KINDS)}, got {kind!r}.")
    if trace != (kind == "trace"):
        raise ConfigError("--arrivals trace and --trace FILE go together: give both, or the file alone.")
    if rates and kind in ("closed", "trace"):
        raise ConfigError(f"--rate has no meaning with --arrivals {kind}: leave one of them out.")
    if clients and kind != "closed":
        raise ConfigError(f"--concurrency is for closed loops, which --arrivals {kind} is not: leave one of them out.")
    if kind == "closed":
        return [Level(kind, clients=count) for count in dict.fromkeys(clients or (8,))]
    if kind in ("trace", "burst") and not rates:
        return [Level(kind)]
    if not rates:
        raise ConfigError(f"--arrivals {kind} needs --rate: requests a second, several separated by commas.")
    if not all(math.isfinite(rate) and rate > 0 for rate in rates):
        raise ConfigError("--rate must be numbers above 0, separated by commas.")
    return [Level(kind, rate) for rate in dict.fromkeys(rates)]


def schedule(level: Level, count: int, luck: random.Random, burst: int) -> list[float]:
    """Seconds after the start, of an open loop. `burst`: requests of one burst; all of them where there is no rate."""
    if level.kind == "poisson":
        assert level.rate is not None
        return list(accumulate((luck.expovariate(level.rate) for _ in range(count - 1)), initial=0.0))
    if level.rate is None:
        return [0.0] * count
    group = burst if level.kind == "burst" else 1
    return [place // group * group / level.rate for place in range(count)]


def read_trace(path: str | Path, scale: float = 1.0) -> list[Arrival]:
    """A number a line (seconds), or a JSON object a line with `timestamp` and, if they are to count, `input_length`
    and `output_length`. The first arrival is at 0; `scale` stretches the times."""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"Cannot read {path} ({error}): give a file with an arrival a line.") from None
    found = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            raw = json.loads(line)
            raw = raw if isinstance(raw, dict) else {"timestamp": raw}
            at = float(raw["timestamp"])
            if not math.isfinite(at):
                raise ValueError("a time must be finite")
            lengths = [None if raw.get(name) is None else max(1, int(raw[name])) for name in (
                "input_length", "output_length")]
        except (ValueError, TypeError, KeyError) as error:
            raise ConfigError(f"Line {number} of {path} is not an arrival ({type(error).__name__}: {error}): it needs "
                              "a number of seconds, or a JSON object with timestamp.") from None
        found.append(Arrival(at, *lengths))
    if not found:
        raise ConfigError(f"{path} has no arrivals.")
    found.sort(key=lambda one: one.at_s)
    first = found[0].at_s
    return [Arrival((one.at_s - first) * scale, one.input_len, one.output_len) for one in found]
