"""The table of `bench spec`: a column a method; speed-up by category, then what explains it."""

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
    out = Table(title=f"{settings['model']} ({settings['kernels']}), {settings['questions']} questions of up to "
                      f"{settings['max_tokens']} tokens, temperature {settings['temperature']:g}\n"
                      f"{found['cpu']}, {found['threads']} threads")
    for index, name in enumerate(header):
        out.add_column(name, justify="right" if index else "left", no_wrap=not index)
    for line in lines:
        out.add_row(*line, end_section=line[0] in ("speed-up, overall", "tokens a step"))
    Console(highlight=False).print(out)
    for name, reason in settings["left_out"].items():
        print(f"{name} was left out: {reason}")
