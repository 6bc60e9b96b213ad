"""Line charts as SVG, without a library: panels beside each other, each with its legend below."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from math import ceil
from pathlib import Path

WIDTH, HEIGHT = 460, 270  # of a panel's plot
LEFT, TOP, RIGHT, AXIS, LEGEND_LINE = 46, 30, 16, 44, 17
COLOURS = (
    "#0072b2",
    "#d55e00",
    "#009e73",
    "#cc79a7",
    "#b8860b",
    "#56b4e9",
    "#000000",
    "#7a3fb8",
    "#8c564b",
    "#17becf",
    "#7f7f00",
)


@dataclass(frozen=True)
class Line:
    """A curve with a band from `low` to `high`. A `dashed` one is grey: what the others are compared with."""

    label: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float]
    high: Sequence[float]
    dashed: bool = False


@dataclass(frozen=True)
class Panel:
    """Lines over the same axes, `y` = (from, to, distance of ticks). At most one solid line for each of `COLOURS`."""

    title: str
    lines: Sequence[Line]
    y: tuple[float, float, float]


def write_chart(path: Path, panels: Sequence[Panel], x_label: str, y_label: str) -> None:
    """Draw `panels` in a row."""
    each = LEFT + WIDTH + RIGHT
    rows = max(ceil(len(panel.lines) / 2) for panel in panels)
    size = f"{each * len(panels)} {TOP + HEIGHT + AXIS + LEGEND_LINE * rows + 6}"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size}" width="{each * len(panels)}" '
        'font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="#ffffff"/>',
    ]
    for place, panel in enumerate(panels):
        parts += [f'<g transform="translate({each * place + LEFT} {TOP})">', *_panel(panel, x_label, y_label), "</g>"]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join([*parts, "</svg>"]) + "\n")


def _panel(panel: Panel, x_label: str, y_label: str) -> list[str]:
    low, high, distance = panel.y
    longest = max(line.x[-1] for line in panel.lines)

    def point(x: float, y: float) -> str:
        return f"{x / longest * WIDTH:.1f},{(high - y) / (high - low) * HEIGHT:.1f}"

    parts = [f'<text x="{WIDTH / 2}" y="-12" text-anchor="middle" font-weight="bold">{escape(panel.title)}</text>']
    for number in range(round((high - low) / distance) + 1):
        value = low + number * distance
        across = (high - value) / (high - low) * HEIGHT
        parts.append(f'<path d="M0 {across:.1f}H{WIDTH}" stroke="#dddddd"/>')
        parts.append(f'<text x="-6" y="{across + 4:.1f}" text-anchor="end">{value:.1f}</text>')
    for number in range(5):
        x = WIDTH * number / 4
        parts.append(f'<text x="{x}" y="{HEIGHT + 16}" text-anchor="middle">{longest * number / 4:g}</text>')
    parts.append(f'<path d="M0 0V{HEIGHT}H{WIDTH}" fill="none" stroke="#333333"/>')
    parts.append(f'<text x="{WIDTH / 2}" y="{HEIGHT + 32}" text-anchor="middle">{escape(x_label)}</text>')
    middle = f'transform="translate(-34 {HEIGHT / 2}) rotate(-90)" text-anchor="middle"'
    parts.append(f"<text {middle}>{escape(y_label)}</text>")
    colours = iter(COLOURS)
    for number, line in enumerate(panel.lines):
        colour = "#777777" if line.dashed else next(colours)
        parts += _line(line, colour, point, number)
    return parts


def _line(line: Line, colour: str, point: Callable[[float, float], str], number: int) -> list[str]:
    """Band, curve and legend."""
    around = [*zip(line.x, line.high, strict=True), *reversed([*zip(line.x, line.low, strict=True)])]
    curve = [*zip(line.x, line.y, strict=True)]
    dash = ' stroke-dasharray="5 4"' if line.dashed else ""
    x, y = WIDTH / 2 * (number % 2), HEIGHT + AXIS + LEGEND_LINE * (number // 2) + 6
    return [
        f'<polygon points="{" ".join(point(*one) for one in around)}" fill="{colour}" fill-opacity="0.1"/>',
        f'<polyline points="{" ".join(point(*one) for one in curve)}" fill="none" stroke="{colour}" '
        f'stroke-width="1.8"{dash}/>',
        f'<path d="M{x} {y - 4}h24" stroke="{colour}" stroke-width="2.5"{dash}/>',
        f'<text x="{x + 30}" y="{y}">{escape(line.label)}</text>',
    ]
