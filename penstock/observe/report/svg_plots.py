"""Plots as SVG text, without a library: curves, stacked bars, histograms. Labels are escaped."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from penstock.observe.plain_text import plain_line

WIDTH, HEIGHT = 420, 180
LEFT, RIGHT, TOP, BOTTOM = 60, 10, 10, 24
COLOURS = (
    *("#2a6fb0", "#d9822b", "#3a9a5b", "#b0413e", "#7a5ba8", "#8a8d91"),
    *("#c2a83e", "#4bacb8", "#9c6b4a", "#d16ba5", "#5b7f2b", "#39424e"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """Points by x. With `low` and `high` a band is drawn around them."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] = ()
    high: Sequence[float] = ()
    dots: bool = False


def curves(title: str, lines: Sequence[Curve], *, x_label: str = "step") -> str:
    """One plot of several curves; "" where none has a point."""
    lines = [line for line in lines if len(line.x)]
    if not lines:
        return ""
    xs = [value for line in lines for value in line.x]
    ys = [value for line in lines for value in (*line.y, *line.low, *line.high)]
    frame = _Frame(min(xs), max(xs), *_padded(min(ys), max(ys)))
    parts = [frame.axes(x_label)]
    for number, line in enumerate(lines):
        colour = COLOURS[number % len(COLOURS)]
        if line.low:
            there = [frame.point(x, y) for x, y in zip(line.x, line.high, strict=True)]
            back = [frame.point(x, y) for x, y in zip(line.x, line.low, strict=True)][::-1]
            parts.append(f'<polygon points="{" ".join(there + back)}" fill="{colour}" opacity="0.18"/>')
        points = [frame.point(x, y) for x, y in zip(line.x, line.y, strict=True)]
        parts.append(
            f'<polyline points="{" ".join(points)}" fill="none" stroke="{colour}" stroke-width="1.6"/>'
        )
        if line.dots:
            parts += [
                f'<circle cx="{x}" cy="{y}" r="2.6" fill="{colour}"/>'
                for x, y in (point.split(",") for point in points)
            ]
    return _figure(title, "".join(parts), [line.name for line in lines] if len(lines) > 1 else [])


def bars(
    title: str, names: Sequence[str], stacks: Mapping[str, Sequence[float]], *, x_label: str = ""
) -> str:
    """Stacked bars, one for each name; `stacks` are the heights of each part."""
    if not names:
        return ""
    totals = [sum(stack[place] for stack in stacks.values()) for place in range(len(names))]
    frame = _Frame(0, len(names), 0, max(totals) or 1.0)
    parts = [frame.axes(x_label, ticks=False)]
    gap = 0.12
    for place, name in enumerate(names):
        base = 0.0
        for number, stack in enumerate(stacks.values()):
            top = base + stack[place]
            left, right = frame.x(place + gap), frame.x(place + 1 - gap)
            parts.append(
                f'<rect x="{left:.1f}" y="{frame.y(top):.1f}" width="{max(0.5, right - left):.1f}" '
                f'height="{max(0.0, frame.y(base) - frame.y(top)):.1f}" fill="{COLOURS[number % len(COLOURS)]}"/>'
            )
            base = top
        if len(names) <= 24 or place % (len(names) // 12) == 0:
            middle = frame.x(place + 0.5)
            parts.append(
                f'<text x="{middle:.1f}" y="{HEIGHT - 11}" text-anchor="middle">{_text(name)}</text>'
            )
    return _figure(title, "".join(parts), list(stacks) if len(stacks) > 1 else [])


def shares(title: str, rows: Sequence[tuple[str, Mapping[str, float]]]) -> str:
    """One bar of full width for each row, in parts that add up to 1."""
    names = list(dict.fromkeys(name for _, parts in rows for name in parts))
    colour = {name: COLOURS[place % len(COLOURS)] for place, name in enumerate(names)}
    height, out = 26, []
    for place, (row, parts) in enumerate(rows):
        left, y = 80.0, 4 + place * height
        out.append(f'<text x="74" y="{y + 13}" text-anchor="end">{_text(row)}</text>')
        for name, share in parts.items():
            width = share * (2 * WIDTH - 90)
            label = f"{share:.0%}" if width > 28 else ""
            out.append(
                f'<rect x="{left:.1f}" y="{y}" width="{width:.1f}" height="18" fill="{colour[name]}">'
                f"<title>{_text(name)} {share:.1%}</title></rect>"
                f'<text x="{left + width / 2:.1f}" y="{y + 13}" text-anchor="middle" class="on">{label}</text>'
            )
            left += width
    legend = _legend(names, [colour[name] for name in names])
    size = f'viewBox="0 0 {2 * WIDTH} {len(rows) * height + 6}"'
    caption = f"<figcaption>{_text(title)}</figcaption>"
    return f'<figure class="wide">{caption}<svg {size}>{"".join(out)}</svg>{legend}</figure>'


class _Frame:
    """From values to places in the picture."""

    def __init__(self, x_low: float, x_high: float, y_low: float, y_high: float) -> None:
        self._x, self._y = (x_low, (x_high - x_low) or 1.0), (y_low, (y_high - y_low) or 1.0)

    def x(self, value: float) -> float:
        return LEFT + (value - self._x[0]) / self._x[1] * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        return HEIGHT - BOTTOM - (value - self._y[0]) / self._y[1] * (HEIGHT - TOP - BOTTOM)

    def point(self, x: float, y: float) -> str:
        return f"{self.x(x):.1f},{self.y(y):.1f}"

    def axes(self, label: str, *, ticks: bool = True) -> str:
        low, size = self._y
        lines = []
        for value in (low, low + size / 2, low + size):
            y = self.y(value)
            lines.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" class="grid"/>')
            lines.append(f'<text x="{LEFT - 5}" y="{y + 3:.1f}" text-anchor="end">{number(value)}</text>')
        if ticks:
            first, length = self._x
            for value, anchor in ((first, "start"), (first + length, "end")):
                lines.append(
                    f'<text x="{self.x(value):.1f}" y="{HEIGHT - 11}" text-anchor="{anchor}">{number(value)}</text>'
                )
        lines.append(f'<text x="{WIDTH / 2}" y="{HEIGHT - 1}" text-anchor="middle">{_text(label)}</text>')
        return "".join(lines)


def number(value: float) -> str:
    """Short, as on an axis."""
    if value == 0:
        return "0"
    if abs(value) >= 1e6 or abs(value) < 1e-3:
        return f"{value:.1e}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _padded(low: float, high: float) -> tuple[float, float]:
    if not math.isfinite(low) or not math.isfinite(high):
        return 0.0, 1.0
    room = (high - low) * 0.05 or max(abs(high), 1.0) * 0.05
    return max(0.0, low - room) if low >= 0 else low - room, high + room


def _figure(title: str, content: str, names: Sequence[str]) -> str:
    svg = f'<svg viewBox="0 0 {WIDTH} {HEIGHT}">{content}</svg>'
    return f"<figure><figcaption>{_text(title)}</figcaption>{svg}{_legend(names, COLOURS)}</figure>"


def _legend(names: Sequence[str], colours: Sequence[str]) -> str:
    if not names:
        return ""
    keys = (
        f'<rect width="10" height="10" fill="{colours[place % len(colours)]}"/>'
        for place in range(len(names))
    )
    entries = (
        f'<span><svg class="key" viewBox="0 0 10 10">{key}</svg>{_text(name)}</span>'
        for key, name in zip(keys, names, strict=True)
    )
    return f'<p class="legend">{"".join(entries)}</p>'


def _text(text: str) -> str:
    return escape(plain_line(text, 200))
