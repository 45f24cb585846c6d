"""The table of `bench spec`: a line a method, a column a category."""

from __future__ import annotations

from typing import Any

from paceline.bench.report import table


def cells(result: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Header and lines: speed-up by category, then what explains it."""
    rows = {(row["method"], row["category"]): row for row in result["rows"]}
    methods = list(dict.fromkeys(row["method"] for row in result["rows"]))
    categories = list(dict.fromkeys(row["category"] for row in result["rows"]))
    categories.sort(key=lambda name: name == "overall")
    lines = []
    for method in methods:
        own = {name: rows[method, name] for name in categories}
        total = own["overall"]
        positions = " ".join(f"{share:.2f}" for share in total["acceptance_by_position"][:6])
        lines.append([method, *(_ratio(own[name]["ratio"]) for name in categories), f"{total['paceline']:.1f}",
                      f"{total['mean_accepted_tokens']:.2f}", f"{total['tokens_per_step']:.2f}", positions])
    base = rows[methods[0], "overall"]["peers"]["plain"]
    lines.append(["plain", *("1.00x" for _ in categories), f"{base:.1f}", "1.00", "1.00", ""])
    return ["method", *categories, "tok/s", "accepted", "tokens/step", "acceptance by position"], lines


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
    out = Table(title=f"{settings['model']} ({settings['kernels']}), {settings['questions']} questions, "
                      f"{settings['max_tokens']} tokens, temperature {settings['temperature']:g}; {found['cpu']}, "
                      f"{found['threads']} threads", caption="speed-up over plain decoding by category; accepted: "
                      "tokens a verification, bonus counted; tokens/step: over all steps")
    for index, name in enumerate(header):
        out.add_column(name, justify="left" if index == 0 else "right", no_wrap=index == 0)
    for line in lines:
        out.add_row(*line)
    Console(highlight=False, width=max(120, Console().width)).print(out)
    for name, reason in settings["left_out"].items():
        print(f"{name} was left out: {reason}")
