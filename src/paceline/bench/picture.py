"""Pictures of results, by matplotlib: what all of them share, and the bars of any benchmark's rows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from paceline.errors import ConfigError

COLOURS = ("#4269d0", "#efb118", "#ff725c", "#6cc5b0", "#3ca951", "#ff8ab7", "#a463f2", "#97bbf5", "#9c6b4e", "#9498a0")


def ready(target: str | Path) -> None:
    """Refuse before anything is measured what could not be drawn after it."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ConfigError("--chart needs matplotlib: pip install 'paceline[bench]' brings it, or leave --chart out."
                          ) from None
    if not Path(target).absolute().parent.is_dir():
        raise ConfigError(f"Cannot write {target}: its folder does not exist; choose another file.")


@contextmanager
def picture(target: str | Path, size: tuple[float, float], across: int = 1, down: int = 1
            ) -> Iterator[tuple[Any, list[Any]]]:
    """A figure and its axes, row by row; written when the body is done."""
    ready(target)
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(down, across, figsize=size, layout="constrained", squeeze=False)
    try:
        yield figure, [one for row in axes for one in row]
        figure.savefig(target, dpi=160)
    except (OSError, ValueError) as error:
        raise ConfigError(f"Cannot write {target} ({error}): choose another file, .png or .svg.") from None
    finally:
        pyplot.close(figure)


def draw_rows(result: dict[str, Any], target: str | Path) -> None:
    """Bars of the rows of a result, Paceline beside its peers, units apart."""
    units = list(dict.fromkeys(row["unit"] for row in result["rows"]))
    widths = [max(1.0, sum(row["unit"] == unit for row in result["rows"])) for unit in units]
    with picture(target, (max(6.0, 1.4 * max(widths) * len(units)), 4.2), len(units)) as (figure, axes):
        for unit, own in zip(units, axes):
            rows = [row for row in result["rows"] if row["unit"] == unit]
            names = ["paceline", *sorted({name for row in rows for name in row["peers"]})]
            width = 0.8 / len(names)
            for number, name in enumerate(names):
                heights = [row["paceline"] if name == "paceline" else row["peers"].get(name, 0.0) for row in rows]
                places = [place - 0.4 + (number + 0.5) * width for place in range(len(rows))]
                bars = own.bar(places, heights, 0.92 * width, color=COLOURS[number % len(COLOURS)], label=name)
                own.bar_label(bars, fmt="%.3g", fontsize=8, padding=1)
            own.set_xticks(range(len(rows)), [row["case"].replace("_", " ") for row in rows], fontsize=8)
            own.set_ylabel(unit)
            own.spines[["top", "right"]].set_visible(False)
            if len(names) > 1:
                own.legend(frameon=False, fontsize=8)
        machine = result["machine"]
        figure.suptitle(f"{result.get('settings', {}).get('model', 'paceline')}, {machine['cpu']}, "
                        f"{machine['threads']} threads", fontsize=10)
