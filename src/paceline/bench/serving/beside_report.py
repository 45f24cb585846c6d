"""What two servers beside each other have to show: the table, and a page with every turn."""

from __future__ import annotations

from html import escape
from typing import Any

from paceline.bench.report import number
from paceline.bench.serving.html_report import TITLES, charts_under, framed, table
from paceline.bench.serving.svg import Line, chart
from paceline.bench.serving.tables import Cells, aligned


def cells(result: dict[str, Any]) -> Cells:
    """The header first."""
    return [["", "", "A", "B", "A / B", "range", "90 %"], *([
        row["case"], row["unit"], _figure(row["a"]), _figure(row["b"]), *_ratio(row["ratio"])]
        for row in result["rows"])]


def _figure(found: dict[str, Any] | None) -> str:
    if found is None:
        return "-"
    low, high = found["range"]
    return number(found["median"]) + ("" if low == high else f" ({number(low)} to {number(high)})")


def _ratio(found: dict[str, Any] | None) -> list[str]:
    if found is None:
        return ["-", "-", "-"]
    ends = (None if bounds is None else f"{bounds[0]:.3f} to {bounds[1]:.3f}"
            for bounds in (found["range"], found["interval"]))
    return [f"{found['value']:.3f}", *(end or "-" for end in ends)]


def notes(result: dict[str, Any]) -> list[str]:
    """Who they are, what the columns mean, what they have written, and what failed."""
    texts, servers = result["texts"], result["servers"]
    found = [f"A: {servers['a']}, B: {servers['b']}. Medians over {result['settings']['turns']} turns, with their "
             "range; A / B is the middle of the turns' ratios, both orders weighing the same, 90 %: its interval by "
             "resampling turns (three of each order at least).", f"{texts['equal']} of {texts['of']} texts equal"
             + (f", {texts['unanswered']} not answered by both" if texts["unanswered"] else "")]
    if first := texts["first_difference"]:
        found.append(f"first difference ({first['level']}, turn {first['turn']}, from character {first['at']}) after "
                     f"{first['prompt']!r}: A {first['a']!r}, B {first['b']!r}")
    uncounted = {side: sum(turn["uncounted"][side] for turn in result["turns"]) for side in servers}
    found += [f"{side.upper()}: {count} answers without a count of their tokens (no usage in the stream): the figures "
              "of tokens of their turns are left out" for side, count in uncounted.items() if count]
    return found + [f"{turn['level']}, turn {turn['turn']}, {side.upper()}: {kind}: {message}"
                    for turn in result["turns"] for side, faults in turn["faults"].items()
                    for kind, message in faults.items()]


def plain(result: dict[str, Any]) -> str:
    return "\n".join([*aligned(cells(result)), *notes(result)])


def page(result: dict[str, Any]) -> str:
    header, *lines = cells(result)
    said = "".join(f"<li>{escape(one)}</li>" for one in notes(result))
    levels = dict.fromkeys(turn["level"] for turn in result["turns"])
    return framed(f"Two servers of {result['settings']['server_model']} beside each other", result, [
        f"<ul>{said}</ul>", table(header, lines),
        *(charts_under(f"Turn by turn: {level}", _over_turns(result, level)) for level in levels)])


def _over_turns(result: dict[str, Any], level: str) -> list[str]:
    """Rates and latencies of both, and the ratio of their rates."""
    by_case = {row["case"]: row for row in result["rows"]}

    def line(name: str, figure: str, side: str) -> Line:
        values = (by_case[figure][side] or {"turns": []})["turns"]
        return Line(name, [(place, value) for place, value in enumerate(values, 1) if value is not None])

    shown = {f"{level}_output_rate": "Output", f"{level}_goodput": "Goodput"} | {
        case: f"{title}, {case.rpartition('_')[2]}" for name, title in TITLES.items() for case in by_case
        if case.startswith(f"{level}_{name}_p")}
    charts = [chart(title, "turn", by_case[case]["unit"], [line(side.upper(), case, side) for side in ("a", "b")])
              for case, title in shown.items() if case in by_case]
    rate = f"{level}_output_rate"
    return [*([chart("Output, A / B", "turn", "ratio", [line("A / B", rate, "ratio")])] if rate in by_case else []),
            *charts]
