"""Charts as inline SVG. Colours are the page's variables, so that one drawing serves light and dark.

A chart is as wide as a phone in its own units and grows with the page: its letters are then never too small to read.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH = 360
SERIES = 6
"""colours and marks; a further series begins anew"""
_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 14, 28, 44


@dataclass(frozen=True)
class Dot:
    """A point of a series: its place and its label."""

    x: float
    y: float
    label: str


@dataclass(frozen=True)
class Span:
    """A row of quantiles: a bar from p20 to p80, a dot at p50, a tick at p99."""

    label: str
    series: int
    p20: float
    p50: float
    p80: float
    p99: float


@dataclass(frozen=True)
class Bar:
    """A row with a share from 0 to 1."""

    label: str
    series: int
    share: float


def scatter(title: str, x_title: str, y_title: str, series: Sequence[Sequence[Dot]]) -> str:
    """Points joined in their order, each series with its own mark.

    Args:
        title: what the chart shows, for those who do not see it.
        x_title, y_title: of the axes, with the unit.
        series: at least one point in all.
    """
    height = 270
    dots = [dot for one in series for dot in one]
    x_ticks, y_ticks = ticks(max(dot.x for dot in dots)), ticks(max(dot.y for dot in dots))

    def place(dot: Dot) -> tuple[float, float]:
        x = _LEFT + dot.x / x_ticks[-1] * (WIDTH - _LEFT - _RIGHT)
        y = height - _BOTTOM - dot.y / y_ticks[-1] * (height - _TOP - _BOTTOM)
        return x, y

    parts = [*_axes(height, x_ticks, y_ticks, x_title, y_title)]
    for number, one in enumerate(series):
        places = [place(dot) for dot in one]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        parts.append(f'<polyline class="line s{number % SERIES}" points="{path}"/>')
    for number, one in enumerate(series):
        for dot in one:
            x, y = place(dot)
            end = x > WIDTH - 60
            anchor = f'x="{x - 7:.1f}" text-anchor="end"' if end else f'x="{x + 7:.1f}"'
            parts.append(mark(number, x, y))
            parts.append(f'<text class="label" {anchor} y="{y - 6:.1f}">{escape(dot.label)}</text>')
    return _svg(title, height, parts)


def spans(title: str, x_title: str, rows: Sequence[Span]) -> str:
    """Quantiles of latencies, one load a row, on a logarithmic axis.

    Args:
        title: what the chart shows, for those who do not see it.
        x_title: of the axis, with the unit.
        rows: at least one; all values above 0.
    """
    height = 24 + 22 * len(rows) + _BOTTOM
    marks = _logarithmic(min(row.p20 for row in rows), max(row.p99 for row in rows))

    def place(value: float) -> float:
        part = math.log(value / marks[0]) / math.log(marks[-1] / marks[0])
        return _LEFT + 24 + part * (WIDTH - _LEFT - 24 - _RIGHT)

    parts = []
    for value in marks:
        x = place(value)
        parts.append(_line("grid", x, x, 8, height - _BOTTOM))
        parts.append(_tick(x, height, number(value)))
    for index, row in enumerate(rows):
        y = 22 + 22 * index
        colour = f"s{row.series % SERIES}"
        parts += [
            f'<text class="row" x="{_LEFT + 16}" y="{y + 4}" text-anchor="end">{escape(row.label)}</text>',
            _line(f"whisker {colour}", place(row.p20), place(row.p99), y, y),
            _line(f"bar {colour}", place(row.p20), place(row.p80), y, y),
            _line(f"whisker {colour}", place(row.p99), place(row.p99), y - 5, y + 5),
            mark(row.series, place(row.p50), y),
        ]
    parts.append(_x_title(height, x_title))
    return _svg(title, height, parts)


def bars(title: str, x_title: str, rows: Sequence[Bar]) -> str:
    """Shares of one, one load a row.

    Args:
        title: what the chart shows, for those who do not see it.
        x_title: of the axis.
        rows: at least one.
    """
    height = 24 + 22 * len(rows) + _BOTTOM
    start, width = _LEFT + 24, WIDTH - _LEFT - 24 - _RIGHT - 34
    parts = []
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        x = start + share * width
        parts.append(_line("grid", x, x, 8, height - _BOTTOM))
        parts.append(_tick(x, height, f"{share:.0%}"))
    for index, row in enumerate(rows):
        y = 22 + 22 * index
        share, colour = min(1.0, max(0.0, row.share)), f"s{row.series % SERIES}"
        parts += [
            f'<text class="row" x="{_LEFT + 16}" y="{y + 4}" text-anchor="end">{escape(row.label)}</text>',
            f'<rect class="fill {colour}" x="{start}" y="{y - 6}" width="{share * width:.1f}" height="12"/>',
            f'<text class="label" x="{start + share * width + 5:.1f}" y="{y + 4}">{share:.1%}</text>',
        ]
    parts.append(_x_title(height, x_title))
    return _svg(title, height, parts)


def mark(series: int, x: float, y: float) -> str:
    """The mark of a series: its colour is told by its shape too."""
    colour = f"mark s{series % SERIES}"
    shapes = (
        f'<circle class="{colour}" cx="{x:.1f}" cy="{y:.1f}" r="4.5"/>',
        f'<rect class="{colour}" x="{x - 4:.1f}" y="{y - 4:.1f}" width="8" height="8"/>',
        f'<path class="{colour}" d="M{x:.1f},{y - 5.5:.1f} l5.5,9.5 h-11 z"/>',
        f'<path class="{colour}" d="M{x:.1f},{y - 6:.1f} l6,6 l-6,6 l-6,-6 z"/>',
        f'<path class="{colour}" d="M{x:.1f},{y + 5.5:.1f} l5.5,-9.5 h-11 z"/>',
        f'<path class="{colour}" d="M{x - 5:.1f},{y - 2:.1f} h10 v4 h-10 z"/>',
    )
    return shapes[series % SERIES]


def ticks(highest: float) -> list[float]:
    """Round numbers from 0 to the first that is not below `highest`, five or so."""
    if highest <= 0:
        return [0.0, 1.0]
    step = 10.0 ** math.floor(math.log10(highest / 4))
    step *= next(times for times in (1, 2, 2.5, 5, 10) if highest / (step * times) <= 5)
    return [step * place for place in range(math.ceil(highest / step - 1e-9) + 1)]


def number(value: float) -> str:
    """A number of an axis: no more digits than it needs."""
    return f"{value:,.0f}" if value >= 10 or value == int(value) else f"{value:.6f}".rstrip("0").rstrip(".")


def _axes(height: int, x_ticks: list[float], y_ticks: list[float], x_title: str, y_title: str) -> list[str]:
    parts = []
    bottom = height - _BOTTOM
    for value in y_ticks:
        y = bottom - value / y_ticks[-1] * (bottom - _TOP)
        parts.append(_line("grid", _LEFT, WIDTH - _RIGHT, y, y))
        parts.append(f'<text class="tick" x="{_LEFT - 5}" y="{y + 4:.1f}" text-anchor="end">{number(value)}</text>')
    for value in x_ticks:
        x = _LEFT + value / x_ticks[-1] * (WIDTH - _LEFT - _RIGHT)
        parts.append(_tick(x, height, number(value)))
    parts.append(f'<text class="axis" x="4" y="12">{escape(y_title)}</text>')
    parts.append(_x_title(height, x_title))
    return parts


def _logarithmic(low: float, high: float) -> list[float]:
    """Numbers 1, 2 and 5 times a power of ten, from the last below `low` to the first above `high`; 1 alone of many."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 2)
    found = [times * 10.0**power for power in powers for times in (1, 2, 5)]
    first = max(place for place, value in enumerate(found) if value <= low)
    last = min(place for place, value in enumerate(found) if value >= high and place > first)
    if last - first < 8:
        return found[first : last + 1]
    return [10.0**power for power in range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)]


def _tick(x: float, height: int, text: str) -> str:
    return f'<text class="tick" x="{x:.1f}" y="{height - _BOTTOM + 16}" text-anchor="middle">{text}</text>'


def _line(kind: str, x1: float, x2: float, y1: float, y2: float) -> str:
    return f'<line class="{kind}" x1="{x1:.1f}" x2="{x2:.1f}" y1="{y1:.1f}" y2="{y2:.1f}"/>'


def _x_title(height: int, text: str) -> str:
    return f'<text class="axis" x="{WIDTH - _RIGHT}" y="{height - 8}" text-anchor="end">{escape(text)}</text>'


def _svg(title: str, height: int, parts: Sequence[str]) -> str:
    body = "\n".join(parts)
    return (
        f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(title)}">\n'
        f"<title>{escape(title)}</title>\n{body}\n</svg>"
    )
