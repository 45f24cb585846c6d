"""The pictures of a plan: roofline, speed-up over K, time per token over batch; as SVG, HTML or PNG."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import ConfigError
from paceline.plan.planner import DEPTHS, Plan
from paceline.plan.roofline import Roofline, mlp_intensity
from paceline.plan.shape import BITS

COLOURS = ("#4269d0", "#efb118", "#ff725c", "#6cc5b0", "#3ca951", "#ff8ab7", "#a463f2", "#97bbf5", "#9c6b4e")
KINDS = (".html", ".svg", ".png")
_STYLE = ("<style>.back{fill:#fff}text{fill:#222}.grid{stroke:#e4e4e4}@media (prefers-color-scheme: dark){"
          ".back{fill:#16181c}text{fill:#ddd}.grid{stroke:#383c44}}</style>")
"""Readable in light and dark."""
_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP, _RIGHT = 720, 400, 70, 50, 36, 230


@dataclass(frozen=True)
class Line:
    name: str
    points: Sequence[tuple[float, float]]
    dots: bool = False
    """Points that are marked, not joined."""


@dataclass(frozen=True)
class Chart:
    title: str
    x: str
    y: str
    lines: Sequence[Line]
    log_x: bool = False
    log_y: bool = False


def charts(plan: Plan) -> list[Chart]:
    return [_roofline(plan), _depths(plan), _batches(plan)]


def _roofline(plan: Plan) -> Chart:
    """What can be computed a second by FLOP/byte, and where matrices and attention lie."""
    hardware, most = plan.hardware, plan.hardware.arithmetic(plan.dtype)
    ridge = hardware.ridge(plan.dtype)
    xs = [2.0**power for power in range(-1, max(4, math.ceil(math.log2(ridge * 8))) + 1)]
    roof = sorted({*xs, ridge})
    parts = [Line(f"matrices at {row.batch}", [(at, min(most, at * hardware.bandwidth) / 1e12)], True)
             for row in plan.rows if (at := mlp_intensity(row.batch, BITS[plan.dtype] / 8))]
    if plan.attention_decode:
        parts.append(Line("attention, decode", [(plan.attention_decode, min(most, plan.attention_decode
                                                 * hardware.bandwidth) / 1e12)], True))
    return Chart(f"Roofline of {hardware.name}", "FLOP/byte", "TFLOP/s",
                 [Line("roof", [(x, min(most, x * hardware.bandwidth) / 1e12) for x in roof]), *parts], True, True)


def _depths(plan: Plan) -> Chart:
    """Each drafter at the smallest batch, and the first of them at the others."""
    lines = []
    for place, drafter in enumerate(plan.drafters):
        a = next(row.acceptance for row in plan.drafts if row.drafter == drafter.name)
        for batch in plan.workload.batches if place == 0 else plan.workload.batches[:1]:
            points = [(float(row.k), row.speed_up) for row in plan.by_k if row.k in DEPTHS and (
                row.drafter, row.batch, row.acceptance) == (drafter.name, batch, a)]
            lines.append(Line(f"{drafter.name} {a:.2f}, batch {batch}", points))
    return Chart("Speed-up by draft length", "K", "x plain decoding",
                 [Line("plain decoding", [(1.0, 1.0), (float(DEPTHS[-1]), 1.0)]), *lines])


def _batches(plan: Plan) -> Chart:
    most = max(*plan.workload.batches, 2)
    batches = sorted({*(1 << power for power in range(most.bit_length())), *plan.workload.batches})
    floor = Roofline(plan.shape, plan.hardware, plan.dtype, plan.kv_dtype)
    both = (("expected", plan.roofline), ("floor by data sheet", floor))
    return Chart("Time per token by batch", "sequences at once", "ms", [
        Line(name, [(float(batch), 1e3 * one.decode(batch, plan.workload.context)) for batch in batches])
        for name, one in both], True)


def ready(target: str | Path) -> Path:
    """Refuse what could not be drawn, before anything is computed or measured."""
    path = Path(target)
    if path.suffix.lower() not in KINDS:
        raise ConfigError(f"--chart {target}: the file's ending says what it becomes; use {', '.join(KINDS)}.")
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"Cannot write {target}: its folder does not exist; choose another file.")
    if path.suffix.lower() == ".png":
        try:
            import matplotlib  # noqa: F401
        except ImportError:
            raise ConfigError("--chart with a .png needs matplotlib: pip install 'paceline[bench]' brings it, or write "
                              ".html or .svg.") from None
    return path


def draw(found: Sequence[Chart], target: str | Path, title: str = "", words: str = "") -> None:
    """`words`: text that an .html has below the pictures."""
    path = ready(target)
    try:
        if path.suffix.lower() == ".png":
            _png(found, path)
        elif path.suffix.lower() == ".svg":
            path.write_text(stacked(found), encoding="utf-8")
        else:
            path.write_text(page(found, title, words), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"Cannot write {target} ({error.strerror}): choose another file.") from None


def page(found: Sequence[Chart], title: str, words: str) -> str:
    pictures = "\n".join(svg(one) for one in found)
    return (f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>'
            "<style>:root{color-scheme:light dark}body{font-family:sans-serif;margin:2em;max-width:1500px}"
            f"pre{{padding:1em;border:1px solid gray;overflow:auto}}</style></head>\n"
            f"<body><h1>{html.escape(title)}</h1>\n{pictures}\n<pre>{html.escape(words)}</pre></body></html>\n")


def stacked(found: Sequence[Chart]) -> str:
    """All of them in one picture, one below the other."""
    inner = "\n".join(f'<g transform="translate(0 {place * _HEIGHT})">{_drawn(one)}</g>'
                      for place, one in enumerate(found))
    return _framed(inner, _HEIGHT * len(found), found)


def svg(chart: Chart) -> str:
    return _framed(_drawn(chart), _HEIGHT, [chart])


def _framed(inner: str, height: int, found: Sequence[Chart]) -> str:
    """With words for those who cannot see it."""
    title = "; ".join(one.title for one in found)
    words = "; ".join(f"{one.y} over {one.x}: {', '.join(line.name for line in one.lines)}" for one in found)
    return (f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" viewBox="0 0 {_WIDTH} '
            f'{height}" font-family="sans-serif" font-size="11"><title>{html.escape(title)}'
            f'</title><desc>{html.escape(words)}</desc>{_STYLE}<rect class="back" width="100%" '
            f'height="100%"/>{inner}</svg>')


def _drawn(chart: Chart) -> str:
    xs = [x for line in chart.lines for x, _ in line.points]
    ys = [y for line in chart.lines for _, y in line.points]
    across, up = _Axis(xs, chart.log_x), _Axis(ys if chart.log_y else [0.0, *ys], chart.log_y)
    wide, high = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM

    def at(x: float, y: float) -> tuple[float, float]:
        return _LEFT + wide * across.place(x), _TOP + high * (1.0 - up.place(y))

    parts = [f'<text x="{_LEFT}" y="20" font-size="14">{html.escape(chart.title)}</text>',
             f'<text x="{_LEFT + wide / 2:.0f}" y="{_HEIGHT - 10}" text-anchor="middle">{html.escape(chart.x)}</text>',
             f'<text transform="translate(14 {_TOP + high / 2:.0f}) rotate(-90)" text-anchor="middle">'
             f"{html.escape(chart.y)}</text>"]
    for value in across.ticks():
        x, _ = at(value, up.low)
        parts.append(f'<path d="M{x:.1f} {_TOP}V{_TOP + high}" class="grid"/><text x="{x:.1f}" '
                     f'y="{_TOP + high + 16}" text-anchor="middle">{value:g}</text>')
    for value in up.ticks():
        _, y = at(across.low, value)
        parts.append(f'<path d="M{_LEFT} {y:.1f}H{_LEFT + wide}" class="grid"/><text x="{_LEFT - 6}" '
                     f'y="{y + 4:.1f}" text-anchor="end">{value:.4g}</text>')
    for place, line in enumerate(chart.lines):
        colour = COLOURS[place % len(COLOURS)]
        points = [at(x, y) for x, y in line.points]
        if line.dots:
            parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{colour}"/>' for x, y in points]
        else:
            joined = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
            parts.append(f'<polyline points="{joined}" fill="none" stroke="{colour}" stroke-width="2"/>')
        y = _TOP + 12 + 15 * place
        parts.append(f'<rect x="{_WIDTH - _RIGHT + 8}" y="{y - 8}" width="9" height="9" fill="{colour}"/>'
                     f'<text x="{_WIDTH - _RIGHT + 22}" y="{y}" font-size="10">{html.escape(line.name)}</text>')
    return "".join(parts)


class _Axis:
    """From the least to the largest value, straight or by logarithm."""

    def __init__(self, values: Sequence[float], log: bool) -> None:
        self._log = log
        self.low, self.high = min(values), max(values)
        if self.high <= self.low:
            self.high = self.low * 2 if self.low > 0 else self.low + 1

    def place(self, value: float) -> float:
        if self._log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)

    def ticks(self) -> list[float]:
        if self._log:
            base = 10.0 if self.high / self.low > 300 else 2.0
            first, last = (math.log(end, base) for end in (self.low, self.high))
            return [base**power for power in range(math.ceil(first - 1e-9), math.floor(last + 1e-9) + 1)]
        step = 10 ** math.floor(math.log10(self.high - self.low))
        step = next(step * factor for factor in (0.2, 0.5, 1.0, 2.0) if (self.high - self.low) / (step * factor) <= 8)
        return [step * count for count in range(math.ceil(self.low / step), math.floor(self.high / step) + 1)]


def _png(found: Sequence[Chart], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(found), figsize=(6.4 * len(found), 4.4), layout="constrained", squeeze=False)
    for chart, one in zip(found, axes[0]):
        for line in chart.lines:
            one.plot(*zip(*line.points), "o" if line.dots else "-", label=line.name)
        one.set(title=chart.title, xlabel=chart.x, ylabel=chart.y, xscale="log" if chart.log_x else "linear",
                yscale="log" if chart.log_y else "linear")
        one.legend(frameon=False, fontsize=8)
    try:
        figure.savefig(path, dpi=140)
    finally:
        pyplot.close(figure)
