"""Line charts as SVG. Pure: no library, and nothing is loaded by what is drawn."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

_WIDTH, _HEIGHT = 760, 420
_LEFT, _RIGHT, _TOP, _BOTTOM = 74, 30, 46, 56
_LEGEND_LINE = 18
_NUM_TICKS = 6
# Those of Okabe and Ito, which colour-blind people can tell apart, as far as they are readable on white and on black.
# Dashes and marks tell the series apart as well.
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
_DASHES = ("none", "7 3", "2 3", "9 3 2 3")
_STYLE = """
.chart { color: #1b1f24; background: #ffffff; font: 13px system-ui, sans-serif; }
.chart text { fill: currentColor; }
.chart .title { font-size: 15px; font-weight: 600; }
.chart .grid { stroke: currentColor; stroke-opacity: 0.15; }
.chart .frame { stroke: currentColor; stroke-opacity: 0.6; fill: none; }
.chart .line { fill: none; stroke-width: 2; }
@media (prefers-color-scheme: dark) { .chart { color: #e6e6e6; background: #16191d; } }
"""


@dataclass(frozen=True, slots=True)
class Series:
    """Points that belong together, from left to right; a single one is a mark without a line."""

    name: str
    points: Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """What is along one side.

    Attributes:
        label: what is measured, with the unit.
        log_base: ticks at powers of it, equally far apart; None: linear.
        low: where the axis begins; None: at the lowest point. Linear axes begin at a tick.
        high: where it ends; None: at the highest point. Linear axes end at a tick.
    """

    label: str
    log_base: int | None = None
    low: float | None = None
    high: float | None = None


def draw(series: Sequence[Series], *, title: str, x: Axis, y: Axis) -> str:
    """A chart of all `series` as one SVG element."""
    points = [point for one in series for point in one.points if all(map(math.isfinite, point))]
    if not points:
        raise ValueError(f"The chart {title!r} has no points.")
    top = _TOP + _LEGEND_LINE * len(series)
    height = _HEIGHT + _LEGEND_LINE * len(series)
    across = _Scale.of(x, [at for at, _ in points], start=_LEFT, stop=_WIDTH - _RIGHT)
    up = _Scale.of(y, [value for _, value in points], start=height - _BOTTOM, stop=top)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" class="chart" viewBox="0 0 {_WIDTH} {height}" role="img"'
        f' aria-label="{_attribute(title)}">',
        f"<title>{escape(title)}</title><style>{_STYLE}</style>",
        f'<text class="title" x="{_LEFT}" y="24">{escape(title)}</text>',
        *_axes(across, up, x=x, y=y),
    ]
    for index, one in enumerate(series):
        parts += _line(one, index, across, up)
        parts += _legend(one, index)
    return "\n".join([*parts, "</svg>"])


@dataclass(frozen=True, slots=True)
class _Scale:
    """From values to places."""

    low: float
    high: float
    ticks: Sequence[float]
    log_base: int | None
    start: float
    stop: float

    @classmethod
    def of(cls, axis: Axis, values: Sequence[float], *, start: float, stop: float) -> _Scale:
        low = min(values) if axis.low is None else axis.low
        high = max(values) if axis.high is None else axis.high
        if axis.log_base is not None:
            if low <= 0:
                raise ValueError(f"The axis {axis.label!r} is logarithmic and cannot show {low:g}.")
            high = high if high > low else low * axis.log_base
            ticks = _powers(low, high, axis.log_base)
        else:
            ticks = _round_numbers(low, high if high > low else low + (abs(low) or 1.0))
            low, high = ticks[0], ticks[-1]
        return cls(low, high, ticks, axis.log_base, start, stop)

    def place(self, value: float) -> float:
        if self.log_base is not None:
            share = math.log(value / self.low) / math.log(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return self.start + share * (self.stop - self.start)


def _powers(low: float, high: float, base: int) -> list[float]:
    first = math.ceil(math.log(low, base) - 1e-9)
    last = math.floor(math.log(high, base) + 1e-9)
    step = max(1, math.ceil((last - first) / (2 * _NUM_TICKS)))
    return [float(base) ** power for power in range(first, last + 1, step)] or [low, high]


def _round_numbers(low: float, high: float) -> list[float]:
    """1, 2 or 5 times a power of ten apart, and reaching beyond both ends."""
    rough = (high - low) / _NUM_TICKS
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [number * step for number in range(first, last + 1)]


def _axes(across: _Scale, up: _Scale, *, x: Axis, y: Axis) -> Iterator[str]:
    left, right, bottom, top = across.start, across.stop, up.start, up.stop
    for value in across.ticks:
        place = f"{across.place(value):.1f}"
        yield f'<line class="grid" x1="{place}" x2="{place}" y1="{top}" y2="{bottom}"/>'
        yield f'<text x="{place}" y="{bottom + 18}" text-anchor="middle">{_number(value)}</text>'
    for value in up.ticks:
        place = f"{up.place(value):.1f}"
        yield f'<line class="grid" x1="{left}" x2="{right}" y1="{place}" y2="{place}"/>'
        yield f'<text x="{left - 8}" y="{place}" dy="0.35em" text-anchor="end">{_number(value)}</text>'
    yield f'<path class="frame" d="M{left} {top}V{bottom}H{right}"/>'
    yield f'<text x="{(left + right) / 2}" y="{bottom + 42}" text-anchor="middle">{escape(x.label)}</text>'
    middle = (top + bottom) / 2
    yield f'<text transform="translate(18 {middle}) rotate(-90)" text-anchor="middle">{escape(y.label)}</text>'


def _line(series: Series, index: int, across: _Scale, up: _Scale) -> Iterator[str]:
    colour, dash = _COLOURS[index % len(_COLOURS)], _DASHES[index % len(_DASHES)]
    places = [
        (across.place(at), up.place(value), f"{series.name}: {_number(at)}, {_number(value)}")
        for at, value in series.points
        if math.isfinite(at) and math.isfinite(value)
    ]
    if len(places) > 1:
        corners = " ".join(f"{right:.1f},{down:.1f}" for right, down, _ in places)
        yield f'<polyline class="line" stroke="{colour}" stroke-dasharray="{dash}" points="{corners}"/>'
    radius = 3.5 if len(places) > 1 else 6
    for right, down, text in places:
        yield f'<circle cx="{right:.1f}" cy="{down:.1f}" r="{radius}" fill="{colour}">'
        yield f"<title>{escape(text)}</title></circle>"


def _legend(series: Series, index: int) -> Iterator[str]:
    colour, dash = _COLOURS[index % len(_COLOURS)], _DASHES[index % len(_DASHES)]
    down = _TOP + _LEGEND_LINE * index
    yield (
        f'<path class="line" stroke="{colour}" stroke-dasharray="{dash}" d="M{_LEFT} {down}h30"/>'
        if len(series.points) > 1
        else f'<rect fill="{colour}" x="{_LEFT + 10}" y="{down - 5}" width="10" height="10" rx="5"/>'
    )
    yield f'<text x="{_LEFT + 38}" y="{down}" dy="0.35em">{escape(series.name)}</text>'


def _number(value: float) -> str:
    return f"{round(value, 10):,.4g}" if abs(value) < 1e4 else f"{value:,.0f}"


def _attribute(text: str) -> str:
    return escape(text, {'"': "&quot;"})
