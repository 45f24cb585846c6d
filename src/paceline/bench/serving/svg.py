"""Line charts as SVG, by hand: a report is one file that needs nothing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

COLOURS = ("#4269d0", "#efb118", "#ff725c", "#3ca951", "#a463f2", "#9c6b4e", "#6cc5b0", "#ff8ab7", "#97bbf5", "#9498a0")
WIDTH, HEIGHT = 480, 280
LEFT, RIGHT, TOP, BOTTOM = 58, 12, 30, 44


@dataclass(frozen=True)
class Line:
    """`bounds`: how far up and down each point may lie, drawn as a band."""

    name: str
    points: Sequence[tuple[float, float]]
    bounds: Sequence[tuple[float, float] | None] = ()


def chart(title: str, across: str, up: str, lines: Sequence[Line]) -> str:
    """`across` and `up`: what the axes are. Both begin at 0."""
    lines = [line for line in lines if line.points]
    ends = [pair for line in lines for pair in line.points]
    highs = [bound[1] for line in lines for bound in line.bounds if bound]
    widest, highest = max((x for x, _ in ends), default=0.0), max([*(y for _, y in ends), *highs], default=0.0)
    marks_x, marks_y = ticks(widest), ticks(highest)
    scale_x = (WIDTH - LEFT - RIGHT) / max(marks_x[-1], widest)
    scale_y = (HEIGHT - TOP - BOTTOM) / marks_y[-1]

    def place(x: float, y: float) -> str:
        return f"{LEFT + x * scale_x:.1f},{HEIGHT - BOTTOM - y * scale_y:.1f}"

    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
             f'aria-label="{escape(title)}">', f'<text x="{LEFT}" y="16" class="title">{escape(title)}</text>']
    for mark in marks_y:
        x, y = place(0.0, mark).split(",")
        parts.append(f'<line x1="{x}" y1="{y}" x2="{WIDTH - RIGHT}" y2="{y}" class="grid"/>'
                     f'<text x="{LEFT - 6}" y="{float(y) + 4:.1f}" class="up">{mark:g}</text>')
    for mark in marks_x:
        x = place(mark, 0.0).split(",")[0]
        parts.append(f'<text x="{x}" y="{HEIGHT - BOTTOM + 15}" class="across">{mark:g}</text>')
    parts.append(f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 8}" class="across">{escape(across)}</text>'
                 f'<text transform="translate(12 {(TOP + HEIGHT - BOTTOM) / 2}) rotate(-90)" class="across">'
                 f'{escape(up)}</text>')
    for number, line in enumerate(lines):
        colour = COLOURS[number % len(COLOURS)]
        known = [(x, bound) for (x, _), bound in zip(line.points, line.bounds) if bound]
        if len(known) > 1:
            band = [place(x, low) for x, (low, _) in known] + [place(x, high) for x, (_, high) in reversed(known)]
            parts.append(f'<polygon points="{" ".join(band)}" fill="{colour}" opacity="0.15"/>')
        parts.append(f'<polyline points="{" ".join(place(*point) for point in line.points)}" fill="none" '
                     f'stroke="{colour}" stroke-width="1.8"/>')
        if len(line.points) <= 20:
            parts += [f'<circle cx="{x}" cy="{y}" r="2.6" fill="{colour}"/>'
                      for x, y in (place(*point).split(",") for point in line.points)]
    parts.append("</svg>")
    names = "".join(f'<span><i style="background:{COLOURS[number % len(COLOURS)]}"></i>{escape(line.name)}</span>'
                    for number, line in enumerate(lines))
    return f'<figure>{"".join(parts)}<figcaption>{names}</figcaption></figure>'


def ticks(most: float) -> list[float]:
    """From 0 to at least `most`, four to six round steps."""
    if not most > 0 or not math.isfinite(most):
        return [0.0, 1.0]
    power = 10.0 ** math.floor(math.log10(most / 4))
    step = next(step * power for step in (1, 2, 2.5, 5, 10) if most / (step * power) <= 5)
    return [place * step for place in range(math.ceil(most / step - 1e-9) + 1)]
