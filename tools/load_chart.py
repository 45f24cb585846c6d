"""The picture of a sweep over offered load: requests a second that were served in time, one line a way.

    python tools/load_chart.py load.json -o load.svg                          (bench gpu --cases load)
    python tools/load_chart.py off=a.json on=b.json control=c.json -o load.svg (bench serve --rate ... --slo ...)
    python tools/load_chart.py off=a.json on=b.json -o load.svg                (the same with --beside)

Of servers beside each other the first of every pair is `control` and the second the way that is named. Pairs are
measured one after the other, so each way stands to the mean of all pairs' first servers as it stood to its own.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from paceline.plan.charts import Chart, Line, draw

NAMES = {"off": "plain decoding", "on": "always drafted for", "control": "as the engine sees fit"}
Points = list[tuple[float, float]]


def of_card(result: dict[str, Any]) -> dict[str, Points]:
    """From the rows load_PERCENT_WAY and capacity."""
    found: dict[str, Points] = {}
    values = {row["case"]: row["paceline"] for row in result["rows"]}
    for case, value in values.items():
        if case.startswith("load_"):
            _, load, way = case.split("_")
            found.setdefault(way, []).append((values["capacity"] * float(load) / 100, value))
    return found


def of_server(result: dict[str, Any]) -> Points:
    """Goodput by rate, of every level."""
    values = {row["case"]: row["paceline"] for row in result["rows"]}
    return [(level["rate"], values[f"{level['name']}_goodput"]) for level in result["levels"]]


def of_pairs(results: dict[str, dict[str, Any]]) -> dict[str, Points]:
    """Goodput by rate, the mean over the turns."""
    sides: dict[str, dict[float, tuple[float, float]]] = {}
    for way, result in results.items():
        for row in result["rows"]:
            level, _, figure = row["case"].rpartition("_")
            if figure == "goodput":
                first, second = (fmean(row[side]["turns"]) for side in ("a", "b"))
                sides.setdefault(way, {})[float(level.rpartition("_")[2])] = first, second
    rates = sorted(set.intersection(*(set(found) for found in sides.values())))
    control = {rate: fmean(found[rate][0] for found in sides.values()) for rate in rates}
    ways = {way: [(rate, control[rate] * found[rate][1] / found[rate][0] if found[rate][0] else found[rate][1])
                  for rate in rates] for way, found in sides.items()}
    return ways | {"control": list(control.items())}


def lines(files: Sequence[str]) -> dict[str, Points]:
    named = [one.partition("=") for one in files]
    if all(path for _, _, path in named):
        results = {way: json.loads(Path(path).read_text()) for way, _, path in named}
        if all("servers" in result for result in results.values()):
            return of_pairs(results)
        return {way: of_server(result) for way, result in results.items()}
    return of_card(json.loads(Path(files[0]).read_text()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+")
    parser.add_argument("-o", "--out", required=True)
    parser.add_argument("--title", default="Served in time")
    given = parser.parse_args()
    found = lines(given.files)
    draw([Chart(given.title, "requests a second that come", "requests a second in time",
                [Line(NAMES.get(way, way), points) for way, points in found.items()])], given.out)


if __name__ == "__main__":
    main()
