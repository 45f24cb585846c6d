"""What every benchmark prints and writes: rows of case, unit, Paceline, peers, ratio, and the machine they ran on."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.measure.machine import inspect_machine


@dataclass(slots=True)
class Row:
    """One measurement. `higher_is_better` decides which way the ratio goes; it is > 1 where Paceline is ahead."""

    case: str
    unit: str
    paceline: float
    peers: dict[str, float] = field(default_factory=dict)
    higher_is_better: bool = True
    note: str = ""
    equals: frozenset[str] | None = None
    """Peers whose answers are as good as Paceline's; None: not measured."""
    interval: tuple[float, float] | None = None
    """In which the figure lies, 95 %; None: not known."""

    @property
    def ratio(self) -> float | None:
        """Against the best peer of this row."""
        return self._against(list(self.peers.values()))

    @property
    def equal_ratio(self) -> float | None:
        """Against the best peer of equal quality."""
        return self._against([value for name, value in self.peers.items() if name in (self.equals or ())])

    def _against(self, figures: list[float]) -> float | None:
        values = [value for value in figures if value > 0]
        if not values or self.paceline <= 0:
            return None
        return self.paceline / max(values) if self.higher_is_better else min(values) / self.paceline

    def as_dict(self) -> dict[str, Any]:
        out: dict[str, Any] = {"case": self.case, "unit": self.unit, "paceline": self.paceline, "peers": self.peers,
                               "ratio": self.ratio, "better": "higher" if self.higher_is_better else "lower"}
        if self.interval is not None:
            out["interval"] = list(self.interval)
        if self.equals is not None:
            out["equal_ratio"] = self.equal_ratio
        return out | ({"note": self.note} if self.note else {})


def machine() -> dict[str, Any]:
    import torch

    found: dict[str, Any] = {"cpu": inspect_machine().cpu, "arch": platform.machine(), "cores": os.cpu_count(),
                             "threads": torch.get_num_threads(), "python": platform.python_version(),
                             "torch": torch.__version__}
    if torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name()
    return found


def document(rows: list[Row], **settings: Any) -> dict[str, Any]:
    return {"machine": machine(), "settings": settings, "rows": [row.as_dict() for row in rows]}


def table(result: dict[str, Any]) -> str:
    """Plain text, so that it works without any terminal library."""
    peers = sorted({name for row in result["rows"] for name in row["peers"]})
    ratios = {"ratio": "ratio"} | ({"equal_ratio": "equal quality"}
                                   if any("equal_ratio" in row for row in result["rows"]) else {})
    lines = [["case", "unit", "paceline", *peers, *ratios.values()]]
    for row in result["rows"]:
        found_here = [row.get(name) for name in ratios]
        lines.append([row["case"], row["unit"], number(row["paceline"]),
                      *(number(row["peers"].get(name)) for name in peers),
                      *("-" if ratio is None else f"{ratio:.2f}x" for ratio in found_here)])
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    text = ["  ".join(cell.ljust(width) if column < 2 else cell.rjust(width)
                      for column, (cell, width) in enumerate(zip(line, widths))) for line in lines]
    found = result["machine"]
    where = f"{found['cpu']}, {found['cores']} cores, {found['threads']} threads, torch {found['torch']}"
    return "\n".join([where, *text, *(f"{row['case']}: {row['note']}" for row in result["rows"] if row.get("note"))])


def percentile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


def say(message: str) -> None:
    """Progress goes to stderr: stdout is for the result."""
    print(message, file=sys.stderr, flush=True)


def emit(result: dict[str, Any], target: str | None) -> None:
    """`target` None: print the table; "-": print JSON; otherwise also write JSON to that file."""
    if target == "-":
        print(json.dumps(result, indent=2))
        return
    print(table(result))
    if target is not None:
        Path(target).write_text(json.dumps(result, indent=2) + "\n")


def json_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", default=None, metavar="FILE", help="write JSON to FILE, or - for stdout only")


def number(value: float | None) -> str:
    if value is None:
        return "-"
    whole = value >= 1000 or float(value).is_integer()
    return f"{value:.0f}" if whole else f"{value:.1f}" if value >= 10 else f"{value:.3g}"
