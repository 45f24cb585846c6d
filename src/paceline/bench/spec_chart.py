"""The picture of `bench spec`: speed-up by category, a group of bars each, one bar per method."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from paceline.bench.picture import COLOURS, picture


def draw(result: dict[str, Any], target: str | Path) -> None:
    rows = {(row["method"], row["category"]): row for row in result["rows"]}
    methods = list(dict.fromkeys(row["method"] for row in result["rows"]))
    categories = sorted(dict.fromkeys(row["category"] for row in result["rows"]), key=lambda name: name == "overall")
    width = 0.84 / len(methods)
    size = (max(8.0, 1.1 * len(categories) * max(2.0, 0.45 * len(methods))), 4.8)
    with picture(target, size) as (_, (axes,)):
        _bars(axes, rows, methods, categories, width)
        settings, machine = result["settings"], result["machine"]
        axes.set_title(f"{settings['model']}, {settings['kernels']} kernels, {machine['cpu']}, "
                       f"{machine['threads']} threads", fontsize=10)


def _bars(axes: Any, rows: dict[tuple[str, str], dict[str, Any]], methods: list[str], categories: list[str],
          width: float) -> None:
    for number, method in enumerate(methods):
        places = [group - 0.42 + (number + 0.5) * width for group in range(len(categories))]
        heights = [rows[method, name]["ratio"] or 0.0 for name in categories]
        accepted = rows[method, "overall"]["tokens_per_step"]
        bars = axes.bar(places, heights, 0.92 * width, color=COLOURS[number % len(COLOURS)],
                        label=f"{method} ({accepted:.2f} tokens a step)")
        if width > 0.09:
            axes.bar_label(bars, fmt="%.2f", fontsize=7, padding=1)
    axes.axhline(1.0, color="black", linewidth=1.0, linestyle="--", label="plain decoding")
    axes.set_xticks(range(len(categories)), [name.replace("_", " ") for name in categories])
    axes.set_ylabel("speed-up over plain decoding")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8, ncols=min(4, len(methods) + 1), loc="upper center",
                bbox_to_anchor=(0.5, -0.09))
