"""A line chart as SVG text, without a library.

In:  named curves over positive x, the name and height of one horizontal line.
Out: an SVG document.
Law: x is logarithmic, y starts at 0; every point is drawn inside the frame.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from math import log2

WIDTH, HEIGHT = 760, 460
LEFT, RIGHT, TOP, BOTTOM = 60, 190, 40, 50
COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#8c564b", "#17becf", "#7f7f7f")


@dataclass(frozen=True, slots=True)
class Curve:
    """Points by ascending x."""

    name: str
    points: tuple[tuple[float, float], ...]


@dataclass(frozen=True, slots=True)
class _Frame:
    low: float
    high: float
    top: float

    def x(self, value: float) -> float:
        span = log2(self.high / self.low) or 1.0
        return LEFT + log2(value / self.low) / span * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        return HEIGHT - BOTTOM - value / self.top * (HEIGHT - TOP - BOTTOM)


def chart(title: str, x_name: str, y_name: str, curves: Sequence[Curve], line: tuple[str, float]) -> str:
    """The picture of `curves` and of a horizontal `line`."""
    xs = [x for curve in curves for x, _ in curve.points] or [1.0]
    ys = [y for curve in curves for _, y in curve.points] + [line[1]]
    frame = _Frame(min(xs), max(xs), 1.08 * max(ys) or 1.0)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" font-family="sans-serif">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        _text(LEFT, 24, title, size=15),
        _text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 12, x_name, anchor="middle"),
        _text(14, TOP - 14, y_name),
        *_axes(frame, sorted(set(xs))),
        *_level(frame, line),
    ]
    for number, curve in enumerate(curves):
        parts += _curve(frame, curve, COLOURS[number % len(COLOURS)], number)
    return "\n".join([*parts, "</svg>", ""])


def _axes(frame: _Frame, xs: Sequence[float]) -> list[str]:
    step = next(size for size in (1, 2, 5, 10, 20, 50, 100) if frame.top / size <= 8 or size == 100)
    parts = []
    for value in range(0, int(frame.top) + 1, step):
        y = frame.y(value)
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>')
        parts.append(_text(LEFT - 8, y + 4, str(value), anchor="end"))
    names = [_text(frame.x(x), HEIGHT - BOTTOM + 18, f"{x:g}", anchor="middle") for x in xs]
    return parts + names


def _level(frame: _Frame, line: tuple[str, float]) -> list[str]:
    y = frame.y(line[1])
    stroke = 'stroke="black" stroke-dasharray="6 4"'
    return [
        f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" {stroke}/>',
        _text(WIDTH - RIGHT + 8, y + 4, f"{line[0]}: {line[1]:.1f}"),
    ]


def _curve(frame: _Frame, curve: Curve, colour: str, number: int) -> list[str]:
    points = [(frame.x(x), frame.y(y)) for x, y in curve.points]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    dots = [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in points]
    label_y = HEIGHT - BOTTOM - 18 * (number + 1)
    key = f'<rect x="{WIDTH - RIGHT + 8}" y="{label_y - 9}" width="12" height="10" fill="{colour}"/>'
    label = _text(WIDTH - RIGHT + 26, label_y, curve.name)
    return [f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>', *dots, key, label]


def _text(x: float, y: float, text: str, *, anchor: str = "start", size: int = 12) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}">{escape(text)}</text>'
