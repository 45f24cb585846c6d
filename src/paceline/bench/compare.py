"""Two benchmarks beside each other: ratios with intervals, and which differences are beyond noise."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.bench.report import number
from paceline.errors import ConfigError

LOWER = {"ms", "us", "s", "us/step", "us/proposal", "nats", "perplexity", "MiB"}
"""Units of which less is better, for files whose rows do not say it."""
NAMES = ("method", "draft", "verify", "temperature", "context", "category")
"""What a row is called that has no case."""
FURTHER = {"mean_accepted_tokens": ("tokens", "higher"), "tokens_per_step": ("tokens", "higher"),
           "top1_percent": ("%", "higher"), "kl": ("nats", "lower")}
"""What rows have beside their figure."""
STUDENT = (12.71, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)
"""Student's t at 97.5 % with 1, 2, ... degrees of freedom; 2.1 is near enough beyond."""


@dataclass(frozen=True)
class Figure:
    """`better`: higher, lower, or unknown. `interval`: 95 %; None: nothing is known of its noise."""

    value: float
    unit: str
    better: str
    interval: tuple[float, float] | None = None


def read_document(path: str | Path) -> dict[str, Any]:
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
        if not isinstance(found["rows"], list):
            raise ValueError("rows are no list")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"Cannot read {path} ({error}): give a file that a benchmark has written with --json."
                          ) from None
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} is not what a benchmark writes with --json ({type(error).__name__}: {error})."
                          ) from None
    return dict(found)


def figures(document: dict[str, Any]) -> dict[str, Figure]:
    """By name, in the order of the rows. A name that comes again has its number behind it. Of two servers beside each
    other their ratios, without the intervals, which are of 90 %."""
    found: dict[str, Figure] = {}

    def add(name: str, value: Any, unit: str, better: str, interval: Any = None) -> None:
        if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
            again = sum(1 for known in found if known == name or known.startswith(f"{name} #"))
            found[f"{name} #{again + 1}" if again else name] = Figure(
                float(value), unit, better, None if interval is None else (float(interval[0]), float(interval[1])))

    for row in document["rows"]:
        case = row.get("case") or " ".join(str(row[name]) for name in NAMES if name in row)
        unit = row.get("unit", "")
        if document.get("measured") == "two servers":
            add(f"{case} ratio", (row["ratio"] or {}).get("value"), "x", row["better"])
            continue
        add(case, row.get("paceline"), unit, row.get("better") or _better(unit), row.get("interval"))
        for name, (own, better) in FURTHER.items():
            add(f"{case} {name}", row.get(name), own, better)
    return found


def _better(unit: str) -> str:
    return "lower" if unit in LOWER else "higher" if unit.endswith("/s") else "unknown"


def together(documents: Sequence[dict[str, Any]]) -> dict[str, Figure]:
    """Of several runs of the same: means, and how far they spread. Of one: what its rows say of it."""
    every = [figures(one) for one in documents]
    if len(every) == 1:
        return every[0]
    found = {}
    for name, figure in every[0].items():
        values = [one[name].value for one in every if name in one]
        if len(values) == len(every):
            student = STUDENT[len(values) - 2] if len(values) - 2 < len(STUDENT) else 2.1
            mean, half = statistics.mean(values), student * statistics.stdev(values) / math.sqrt(len(values))
            found[name] = Figure(mean, figure.unit, figure.better, (mean - half, mean + half))
    return found


def ratio(before: Figure, after: Figure) -> tuple[float | None, tuple[float, float] | None]:
    """After over before and its interval: distances from the middle to each end add up as squares, in logarithms."""
    if before.value <= 0 or after.value <= 0:
        return None, None
    middle = after.value / before.value
    if before.interval is None or after.interval is None:
        return middle, None

    def far(figure: Figure, end: int) -> float:
        assert figure.interval is not None
        bound = figure.interval[end]
        return math.inf if bound <= 0 else abs(math.log(bound / figure.value))

    down, up = math.hypot(far(after, 0), far(before, 1)), math.hypot(far(after, 1), far(before, 0))
    return middle, (middle * math.exp(-down), middle * math.exp(up))


def verdict(before: Figure, after: Figure) -> str:
    middle, interval = ratio(before, after)
    if before.value == after.value:
        return "same"
    if middle is None or interval is None:
        return "noise unknown"
    if interval[0] <= 1.0 <= interval[1]:
        return "within noise"
    if before.better == "unknown":
        return "different"
    return "better" if (middle > 1.0) == (before.better == "higher") else "worse"


def compare(before: Sequence[dict[str, Any]], after: Sequence[dict[str, Any]]) -> dict[str, Any]:
    old, new = together(before), together(after)
    rows = []
    for name in [name for name in old if name in new]:
        middle, interval = ratio(old[name], new[name])
        rows.append({"case": name, "unit": old[name].unit, "a": old[name].value, "b": new[name].value,
                     "ratio": middle,
                     "interval": interval and [end if math.isfinite(end) else None for end in interval],
                     "verdict": verdict(old[name], new[name])})
    if not rows:
        raise ConfigError("The two have no figure in common: compare two runs of the same benchmark.")
    return {"rows": rows, "differ": {part: _differences(before[0].get(part), after[0].get(part))
                                     for part in ("machine", "settings")},
            "only_a": [name for name in old if name not in new], "only_b": [name for name in new if name not in old]}


def _differences(old: Any, new: Any) -> dict[str, list[Any]]:
    old, new = old or {}, new or {}
    return {name: [old.get(name), new.get(name)] for name in {**old, **new} if old.get(name) != new.get(name)}


def table(result: dict[str, Any]) -> str:
    lines = [["case", "unit", "A", "B", "B / A", "95 %", ""]]
    for row in result["rows"]:
        bounds = row["interval"]
        lines.append([row["case"], row["unit"], number(row["a"]), number(row["b"]),
                      "-" if row["ratio"] is None else f"{row['ratio']:.3f}",
                      "-" if bounds is None else f"{bounds[0]:.3f} and more" if bounds[1] is None
                      else f"{bounds[0]:.3f} to {bounds[1]:.3f}", row["verdict"]])
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    text = ["  ".join(cell.rjust(width) if 2 <= column < 6 else cell.ljust(width)
                      for column, (cell, width) in enumerate(zip(line, widths))).rstrip() for line in lines]
    for part, differences in result["differ"].items():
        text += [f"different {part}: {name}: {old} / {new}" for name, (old, new) in differences.items()]
    for side in ("a", "b"):
        if missing := result[f"only_{side}"]:
            text.append(f"only in {side.upper()}: {', '.join(missing)}")
    judged = [row for row in result["rows"] if row["interval"] is not None]
    beyond = sum(row["verdict"] in ("better", "worse", "different") for row in judged)
    if judged:
        text.append(f"{beyond} of {len(judged)} figures with intervals differ beyond noise; of equals about one in "
                    "twenty would by chance.")
    if len(judged) < len(result["rows"]):
        text.append("Where noise is unknown: several runs of each side tell it, A1.json,A2.json,A3.json B1.json,...")
    return "\n".join(text)


def run(before: str, after: str) -> dict[str, Any]:
    """Files; several runs of one side are separated by commas."""
    first, second = ([read_document(path) for path in side.split(",")] for side in (before, after))
    return compare(first, second)
