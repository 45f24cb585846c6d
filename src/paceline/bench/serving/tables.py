"""A load test's table: a figure a line, a level a column, with its interval."""

from __future__ import annotations

from typing import Any

from paceline.bench.report import number

Cells = list[list[str]]


def cells(result: dict[str, Any]) -> Cells:
    """The header first."""
    names = [level["name"] for level in result["levels"]]
    found: dict[tuple[str, str], dict[str, str]] = {}
    for row in result["rows"]:
        level = max((name for name in names if row["case"].startswith(f"{name}_")), key=len)
        found.setdefault((row["case"].removeprefix(f"{level}_"), row["unit"]), {})[level] = _cell(row)
    return [["", "", *names], *([figure, unit, *(by.get(name, "-") for name in names)]
                                for (figure, unit), by in found.items())]


def _cell(row: dict[str, Any]) -> str:
    bounds = row.get("interval")
    return number(row["paceline"]) + (f" [{number(bounds[0])}, {number(bounds[1])}]" if bounds else "")


def aligned(lines: Cells) -> list[str]:
    """The first two columns to the left."""
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    return ["  ".join(cell.ljust(width) if column < 2 else cell.rjust(width)
                      for column, (cell, width) in enumerate(zip(line, widths))).rstrip() for line in lines]


def plain(result: dict[str, Any]) -> str:
    notes = [f"{row['case']}: {row['note']}" for row in result["rows"]
             if row.get("note") and row["case"].endswith("_failed")]
    return "\n".join([*aligned(cells(result)), *notes, "In brackets: 95 % intervals by resampling requests."])
