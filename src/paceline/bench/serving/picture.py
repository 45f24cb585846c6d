"""The picture of a load test: latencies and rates of each level, with their intervals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from paceline.bench.picture import COLOURS, picture
from paceline.bench.serving.figures import LATENCIES
from paceline.bench.serving.html_report import TITLES


def draw(result: dict[str, Any], target: str | Path) -> None:
    names = [level["name"] for level in result["levels"]]
    by_case = {row["case"]: row for row in result["rows"]}
    panels = [(TITLES[name], _figures(by_case, names[0], f"{name}_p")) for name in LATENCIES]
    panels += [("Output", ["output_rate"]), ("Requests", ["request_rate", "goodput"])]
    with picture(target, (12.0, 6.4), across=3, down=2) as (figure, axes):
        for (title, figures), own in zip(panels, axes):
            unit = ""
            for number, name in enumerate(figures):
                found = [(place, row) for place, level in enumerate(names)
                         if (row := by_case.get(f"{level}_{name}")) is not None]
                if not found:
                    continue
                unit = found[0][1]["unit"]
                values = [row["paceline"] for _, row in found]
                bounds = [row.get("interval") or (row["paceline"], row["paceline"]) for _, row in found]
                spread = [[max(0.0, value - low) for value, (low, _) in zip(values, bounds)],
                          [max(0.0, high - value) for value, (_, high) in zip(values, bounds)]]
                own.errorbar([place for place, _ in found], values, yerr=spread, marker="o", capsize=3,
                             color=COLOURS[number % len(COLOURS)], label=name.replace("_", " "))
            own.set_xticks(range(len(names)), [name.replace("_", " ") for name in names], fontsize=8)
            own.set_ylim(bottom=0)
            own.set_title(title, fontsize=10)
            own.set_ylabel(unit)
            own.spines[["top", "right"]].set_visible(False)
            if unit:
                own.legend(frameon=False, fontsize=8)
        figure.suptitle(f"Load test of {result['settings'].get('server_model', 'a server')}", fontsize=11)


def _figures(by_case: dict[str, Any], level: str, start: str) -> list[str]:
    """Those of a level that begin so: its percentiles."""
    return [case.removeprefix(f"{level}_") for case in by_case if case.startswith(f"{level}_{start}")]
