"""The table of `bench spec`: one column per method; speed-up by category, then what explains it."""

from __future__ import annotations

from typing import Any

from paceline.bench.report import table

POSITIONS = 8
"""Depths whose acceptance is shown."""


def cells(result: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Header and lines."""
    rows = {(row["method"], row["category"]): row for row in result["rows"]}
    methods = list(dict.fromkeys(row["method"] for row in result["rows"]))
    categories = list(dict.fromkeys(row["category"] for row in result["rows"]))
    categories.sort(key=lambda name: name == "overall")
    lines = [[f"speed-up, {category}", "1.00x", *(_ratio(rows[name, category]["ratio"]) for name in methods)]
             for category in categories]
    totals = [rows[name, "overall"] for name in methods]
    lines.append(["tok/s", f"{totals[0]['peers']['plain']:.1f}", *(f"{total['paceline']:.1f}" for total in totals)])
    lines += [[title, "1.00", *(f"{total[key]:.2f}" for total in totals)]
              for title, key in (("tokens a draft", "mean_accepted_tokens"), ("tokens a step", "tokens_per_step"))]
    reached = [total["acceptance_by_position"] for total in totals]
    lines += [[f"accepted at {depth + 1}", "", *(f"{one[depth]:.2f}" if depth < len(one) else "-" for one in reached)]
              for depth in range(min(POSITIONS, max(map(len, reached))))]
    return ["", "plain", *methods], lines


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}x"


def beside(header: list[str], width: int) -> list[list[int]]:
    """The columns of each table, where one would be too wide: titles and plain decoding stand in all of them."""
    def room(index: int) -> int:
        return max(len(header[index]), 6) + 3

    tables: list[list[int]] = []
    left = 0
    for index in range(2, len(header)):
        if not tables or room(index) > left:
            tables.append([0, 1])
            left = width - 28 - room(1)
        tables[-1].append(index)
        left -= room(index)
    return tables


def show(result: dict[str, Any]) -> None:
    """On stdout: with rich where it is there, else in plain text."""
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        print(table(result))
        return
    header, lines = cells(result)
    found, settings = result["machine"], result["settings"]
    title = (f"{settings['model']} ({settings['kernels']}), {settings['questions']} questions of up to "
             f"{settings['max_tokens']} tokens, temperature {settings['temperature']:g}\n"
             f"{found['cpu']}, {found['threads']} threads")
    console = Console(highlight=False)
    for columns in beside(header, console.width):
        out = Table(title=title)
        for index in columns:
            out.add_column(header[index], justify="right" if index else "left", no_wrap=True)
        for line in lines:
            ends = line[0] in ("speed-up, overall", "tokens a step")
            out.add_row(*(line[index] for index in columns), end_section=ends)
        console.print(out)
    for name, reason in settings["left_out"].items():
        print(f"{name} was left out: {reason}")
