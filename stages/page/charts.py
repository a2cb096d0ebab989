"""Line charts and histograms as inline SVG, coloured by the page's style sheet.

A chart takes plain numbers and returns markup, the same bytes for the same numbers. Undefined
values (None, NaN) are left out. Text that goes in is escaped.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

WIDTH, HEIGHT = 300, 190
LEFT, RIGHT, TOP, BOTTOM = 44, 12, 26, 32
MOST_POINTS, MOST_LABELS = 240, 8

Point = tuple[float | None, float | None]


@dataclass(frozen=True)
class Line:
    """A named series of one or more chains of points; `look` is a class of the style sheet.

    dots    a dot a point, with its value as a tooltip
    labels  names of the points, by chain, for the tooltips and beside the dots
    """

    name: str
    chains: Sequence[Sequence[Point]]
    look: str = "s1"
    dots: bool = False
    labels: Sequence[Sequence[str]] | None = None


def line_chart(
    lines: Sequence[Line], x_label: str, y_label: str, whole: bool = False, zero: bool = False
) -> Markup | None:
    """Lines over common axes; None without a single known point.

    `whole`: the x axis counts (rounds, steps), so that its ticks are whole. `zero`: the y axis
    starts at 0.
    """
    lines = [
        Line(x.name, [_thin(_known(c)) for c in x.chains], x.look, x.dots, x.labels) for x in lines
    ]
    points = [point for line in lines for chain in line.chains for point in chain]
    if not points:
        return None
    xs, ys = ticks([x for x, _ in points], whole), ticks([y for _, y in points] + [0.0] * zero)
    drawn = [_axes(xs, ys, x_label, y_label)]
    for line in lines:
        for number, chain in enumerate(line.chains):
            placed = [(_across(x, xs), _up(y, ys)) for x, y in chain]
            path = " ".join(f"{x:.1f},{y:.1f}" for x, y in placed)
            drawn.append(Markup('<polyline class="{}" points="{}"/>').format(line.look, path))
            if line.dots:
                drawn += _dots(line, number, chain, placed)
    return _svg(f"{y_label} by {x_label}", drawn)


def _dots(line: Line, number: int, chain: Sequence[Point], placed: Sequence[Point]) -> list[Markup]:
    names = line.labels[number] if line.labels else []
    names = names if len(names) == len(chain) else [""] * len(chain)
    every, drawn = math.ceil(len(chain) / MOST_LABELS), []
    dot = Markup('<circle class="{}" cx="{:.1f}" cy="{:.1f}" r="3"><title>{}</title></circle>')
    text = Markup('<text class="tick" x="{:.1f}" y="{:.1f}" text-anchor="middle">{}</text>')
    for index, (name, (x, y)) in enumerate(zip(names, chain, strict=True)):
        across, up = placed[index]
        title = f"{line.name} {name}".strip() + f": {short(y)} at {short(x)}"
        drawn.append(dot.format(line.look, across, up, title))
        if name and index % every == 0:
            drawn.append(text.format(across, up - 6, name))
    return drawn


def histogram(
    edges: Sequence[float], counts: Sequence[int], x_label: str, y_label: str
) -> Markup | None:
    """Bars between `edges` (one more than `counts`), those left of 0 in another colour.

    None without any count.
    """
    if not sum(counts):
        return None
    xs, ys = ticks(edges), ticks([0, *counts])
    drawn = [_axes(xs, ys, x_label, y_label)]
    for low, high, count in zip(edges, edges[1:], counts, strict=False):
        left, right, top = _across(low, xs), _across(high, xs), _up(count, ys)
        place = ' x="{:.1f}" y="{:.1f}" width="{:.1f}" height="{:.1f}"'
        bar = Markup('<rect class="{}"' + place + "><title>{}</title></rect>")
        title = f"{short(low)} to {short(high)}: {count}"
        look = "bar below" if high <= 0 else "bar"
        size = (max(0.5, right - left - 1), HEIGHT - BOTTOM - top)
        drawn.append(bar.format(look, left, top, *size, title))
    return _svg(f"{y_label} by {x_label}", drawn)


def ticks(values: Sequence[float], whole: bool = False) -> list[float]:
    """Two to seven round numbers (1, 2 or 5 times a power of ten apart) that enclose all values."""
    low, high = min(values), max(values)
    if low == high:
        margin = abs(low) / 2 or 1.0
        low, high = low - (margin if low else 0.0), high + margin
    if not math.isfinite(high - low):
        return [low, high]
    size = 10.0 ** math.floor(math.log10((high - low) / 5))
    step = next(size * factor for factor in (1, 2, 5, 10) if (high - low) / (size * factor) <= 5)
    step = max(1.0, step) if whole else step
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [number * step for number in range(first, last + 1)]


def short(value: float | None) -> str:
    """A number for people: three significant digits, thousands apart; a dash if undefined."""
    if value is None or not math.isfinite(value):
        return "–"
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def _known(chain: Sequence[Point]) -> list[Point]:
    return [point for point in chain if all(v is not None and math.isfinite(v) for v in point)]


def _thin(chain: list[Point]) -> list[Point]:
    """At most MOST_POINTS points: longer chains become means of equal parts."""
    size = math.ceil(len(chain) / MOST_POINTS) or 1
    parts = [chain[start : start + size] for start in range(0, len(chain), size)]
    return [tuple(math.fsum(v) / len(part) for v in zip(*part, strict=True)) for part in parts]


def _axes(xs: Sequence[float], ys: Sequence[float], x_label: str, y_label: str) -> Markup:
    drawn, right, bottom = [], WIDTH - RIGHT, HEIGHT - BOTTOM
    text = Markup('<text class="{}" x="{:.1f}" y="{:.1f}" text-anchor="{}">{}</text>')
    for value in ys:
        height = _up(value, ys)
        line = '<line class="grid" x1="{}" y1="{:.1f}" x2="{}" y2="{:.1f}"/>'
        drawn.append(Markup(line).format(LEFT, height, right, height))
        drawn.append(text.format("tick", LEFT - 6, height + 3.5, "end", _tick(value, ys)))
    for value in xs:
        label = _tick(value, xs)
        drawn.append(text.format("tick", _across(value, xs), bottom + 13, "middle", label))
    drawn.append(text.format("axis", right, HEIGHT - 6, "end", x_label))
    drawn.append(text.format("axis", 2, 11, "start", y_label))
    return Markup("").join(drawn)


def _tick(value: float, axis: Sequence[float]) -> str:
    """A tick with as many decimals as tell it from its neighbours."""
    decimals = max(0, math.ceil(-math.log10(axis[1] - axis[0]) - 1e-9))
    return f"{value:,.{decimals}f}" if decimals < 5 else short(value)


def _across(x: float, xs: Sequence[float]) -> float:
    return LEFT + (x - xs[0]) / (xs[-1] - xs[0]) * (WIDTH - LEFT - RIGHT)


def _up(y: float, ys: Sequence[float]) -> float:
    return HEIGHT - BOTTOM - (y - ys[0]) / (ys[-1] - ys[0]) * (HEIGHT - TOP - BOTTOM)


def _svg(label: str, drawn: Sequence[Markup]) -> Markup:
    head = Markup('<svg viewBox="0 0 {} {}" role="img" aria-label="{}">')
    return head.format(WIDTH, HEIGHT, label) + Markup("").join(drawn) + Markup("</svg>")
