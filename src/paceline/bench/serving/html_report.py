"""A load test as one HTML page: its table, its charts, its settings. Needs no network and no other file."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from paceline.bench.serving.figures import LATENCIES
from paceline.bench.serving.svg import Line, chart
from paceline.bench.serving.tables import cells

TITLES = {"ttft": "Time to first token", "tpot": "Time per output token", "itl": "Inter-token latency",
          "e2e": "Whole answer"}
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1040px; margin: 2rem auto; padding: 0 1rem; color: #1b1e23; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; margin: 1rem 0; display: block;
  overflow-x: auto; }
td, th { padding: .2rem .7rem; border-bottom: 1px solid #e3e5e8; text-align: right; white-space: nowrap; }
td:first-child, td:nth-child(2), th:first-child { text-align: left; }
section { display: grid; grid-template-columns: repeat(auto-fit, minmax(420px, 1fr)); gap: 1rem; }
figure { margin: 0; } figcaption span { margin-right: 1rem; font-size: 13px; white-space: nowrap; }
figcaption i { display: inline-block; width: .8em; height: .8em; margin-right: .35em; border-radius: 2px; }
svg text { font-size: 11px; fill: #555b66; } svg .title { font-size: 13px; font-weight: 600; fill: #1b1e23; }
svg .up { text-anchor: end; } svg .across { text-anchor: middle; } svg .grid { stroke: #e3e5e8; }
"""


def page(result: dict[str, Any]) -> str:
    settings = result["settings"]
    header, *lines = cells(result)
    sections = [("Latency, share of requests", _distributions(result["levels"]))]
    if len(result["levels"]) > 1:
        sections.insert(0, ("Over the load", _over_load(result)))
    sections.append(("Over time (first run of each level)", _over_time(result["levels"])))
    return framed(f"Load test of {settings.get('server_model', 'a server')}", result, [
        "<p>In brackets: 95 % intervals by resampling requests.</p>", table(header, lines), _faults(result["levels"]),
        *(charts_under(name, charts) for name, charts in sections)])


def framed(title: str, result: dict[str, Any], parts: Sequence[str]) -> str:
    """A whole page: what was measured where, the parts, the settings."""
    machine = ", ".join(f"{name}: {value}" for name, value in result["machine"].items())
    settings = table(["", ""], [[name, str(value)] for name, value in result["settings"].items()])
    parts = [f"<h1>{escape(title)}</h1>", f"<p>Load generator on: {escape(machine)}</p>", *parts,
             f"<h2>Settings</h2>{settings}"]
    return (f'<!doctype html><html lang="en"><head><meta charset="utf-8"/><title>{escape(title)}</title>'
            f"<style>{STYLE}</style></head><body>{''.join(parts)}</body></html>\n")


def charts_under(name: str, charts: Sequence[str]) -> str:
    return f"<h2>{escape(name)}</h2><section>{''.join(charts)}</section>"


def table(header: list[str], lines: list[list[str]]) -> str:
    head = "".join(f"<th>{escape(cell)}</th>" for cell in header)
    return f"<table><tr>{head}</tr>" + "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in line) + "</tr>" for line in lines) + "</table>"


def _faults(levels: list[dict[str, Any]]) -> str:
    said = [f"<li>{escape(level['name'])}: {count} {escape(kind)} ({escape(level['messages'].get(kind, ''))})</li>"
            for level in levels for kind, count in level["faults"].items()]
    return f"<h2>Faults</h2><ul>{''.join(said)}</ul>" if said else ""


def _distributions(levels: list[dict[str, Any]]) -> list[str]:
    return [chart(TITLES[name], "ms", "% of requests" if name != "itl" else "% of gaps", [
        Line(level["name"], [(value, float(share)) for share, value in enumerate(level["quantiles_ms"][name])])
        for level in levels]) for name in LATENCIES]


def _over_load(result: dict[str, Any]) -> list[str]:
    """Figures by what was offered: a rate, or clients."""
    levels = result["levels"]
    closed = levels[0]["clients"] is not None
    across = "clients" if closed else "requests offered, a second"
    by_case = {row["case"]: row for row in result["rows"]}

    def line(figure: str) -> Line:
        found = [(level["clients"] if closed else level["rate"], by_case.get(f"{level['name']}_{figure}"))
                 for level in levels]
        known = sorted(((load, row["paceline"], row.get("interval")) for load, row in found if row),
                       key=lambda one: one[0])
        return Line(figure, [(load, value) for load, value, _ in known],
                    [None if bounds is None else (bounds[0], bounds[1]) for _, _, bounds in known])

    shares = [name for name in by_case if name.startswith(f"{levels[0]['name']}_ttft_p")]
    ends = [name.rpartition("_")[2] for name in shares]
    charts = [chart(TITLES[name], across, "ms", [line(f"{name}_{end}") for end in ends]) for name in LATENCIES]
    charts.append(chart("Output", across, "tokens a second", [line("output_rate")]))
    charts.append(chart("Requests", across, "requests a second", [line("request_rate"), line("goodput")]))
    return charts


def _over_time(levels: list[dict[str, Any]]) -> list[str]:
    def lines(figure: str) -> list[Line]:
        return [Line(level["name"], [(place * level["timeline"]["step_s"], value)
                                     for place, value in enumerate(level["timeline"][figure])]) for level in levels]

    return [chart("Requests under way", "seconds", "requests", lines("running")),
            chart("Text that came", "seconds", "pieces a second", lines("pieces_per_s"))]
