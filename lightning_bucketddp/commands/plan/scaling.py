"""Predict how a module scales over networks and numbers of ranks, as numbers and as a chart."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from xml.sax.saxutils import escape

from lightning_bucketddp.commands import UsageError
from lightning_bucketddp.commands.plan.backward_times import BackwardTimes
from lightning_bucketddp.config import ReducerConfig
from lightning_bucketddp.planning.all_reduce_cost import Network
from lightning_bucketddp.planning.backward_profile import Profile
from lightning_bucketddp.planning.optimal_plan import NETWORKS, Prediction, predict
from lightning_bucketddp.planning.plan import BucketSpec
from lightning_bucketddp.recording.typical_step import NO_COST

_LARGEST = 1024
MEASURED = "measured"


@dataclass(frozen=True, slots=True)
class Assumed:
    """A network, and a phrase on where its numbers come from."""

    network: Network
    origin: str

    def __str__(self) -> str:
        network = self.network
        return (
            f"{network.name}: {network.bytes_per_s / 1e9:.4g} GB/s from each rank, {network.hop_s * 1e6:.3g} us per hop"
            f" ({self.origin})"
        )


@dataclass(frozen=True, slots=True)
class Scaling:
    """The predictions for one network, by number of ranks."""

    assumed: Assumed
    by_ranks: dict[int, Prediction]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModulePlan:
    """The result of `bucketddp plan`; `module` and `device` are names, `origin` says how the plan was made."""

    module: str
    device: str
    times: BackwardTimes
    buckets: Sequence[BucketSpec]  # by position in the profile
    origin: str
    num_ranks: int
    scalings: Sequence[Scaling]  # empty if no times are known

    @property
    def profile(self) -> Profile:
        return self.times.profile

    def bytes_of(self, bucket: BucketSpec) -> int:
        return sum(self.profile.specs[i].num_bytes for i in bucket.members)

    def names_in(self, bucket: BucketSpec) -> list[str]:
        return [self.profile.specs[i].name for i in bucket.members]

    def to_json(self) -> dict[str, Any]:
        profile = self.profile
        return {
            "module": self.module,
            "device": self.device,
            "num_parameter_tensors": len(profile.specs),
            "gradient_bytes": sum(spec.num_bytes for spec in profile.specs),
            "ranks": self.num_ranks,
            "plan": self.origin,
            "buckets": [
                {"bytes": self.bytes_of(b), "alone": b.alone, "sparse": b.sparse, "parameters": self.names_in(b)}
                for b in self.buckets
            ],
            "times": {
                "origin": self.times.origin,
                "is_of_cpu": self.times.is_of_cpu,
                "forward_s": profile.forward_s,
                "backward_s": profile.backward_s,
                "optimizer_s": profile.optimizer_s,
            },
            "networks": [_network_json(scaling) for scaling in self.scalings],
        }

    def to_svg(self) -> str:
        """Plot scaling efficiency by number of ranks."""
        series = [
            Series(
                scaling.assumed.network.name,
                [(n, 100 * predicted.timeline.scaling_efficiency) for n, predicted in scaling.by_ranks.items()],
            )
            for scaling in self.scalings
        ]
        return draw(
            series,
            title=f"{self.module}: predicted scaling efficiency, from {self.times.kind} times"
            + (" of a CPU, not of a GPU" if self.times.is_of_cpu else ""),
            x=Axis(label="ranks", log_base=2),
            y=Axis(label="efficiency, %", low=0, high=100),
        )


def scale(times: BackwardTimes, config: ReducerConfig, assumed: Assumed, *, num_ranks: int) -> Scaling:
    """Predict steps on 1, 2, 4 ... 1,024 ranks, and on `num_ranks`."""
    powers = [2**n for n in range(_LARGEST.bit_length())]
    return Scaling(
        assumed,
        {n: predict(times.profile, config, assumed.network.all_reduce(n)) for n in sorted({*powers, num_ranks})},
    )


def find_network(text: str, profile: Profile) -> Assumed:
    """Return the network with this name or these figures (GBIT,LATENCY_US), or the one of the profile."""
    if text in NETWORKS:
        return Assumed(NETWORKS[text], f"nominal figures of {text}")
    if text == MEASURED:
        if profile.num_ranks < 2:
            raise UsageError(f"--network {MEASURED} needs a --profile that was recorded with two ranks or more.")
        if profile.cost is None:
            raise UsageError(
                f"--network {MEASURED} needs a --profile that tells what an all-reduce costs: {NO_COST}. Name a"
                ' network, or record a run with `bucket_cap_mb="auto"`, which measures it.'
            )
        network = Network.measured(profile.cost, num_ranks=profile.num_ranks)
        return Assumed(network, f"measured between {profile.num_ranks} ranks when the profile was recorded")
    try:
        gbit, latency_us = (float(number) for number in text.split(","))
        if not (gbit > 0 and latency_us >= 0):
            raise ValueError
    except ValueError:
        raise UsageError(
            f"--network {text!r} is not known: pass {', '.join([*NETWORKS, MEASURED])}, or GBIT,LATENCY_US, such as"
            " 25,10."
        ) from None
    return Assumed(Network(f"{gbit:g} Gbit", gbit * 1e9 / 8, latency_us * 1e-6), "as you gave it")


def _network_json(scaling: Scaling) -> dict[str, Any]:
    network = scaling.assumed.network
    shown = ("communication_s", "exposed_s", "step_s", "overlap")
    return {
        "name": network.name,
        "bytes_per_s": network.bytes_per_s,
        "hop_s": network.hop_s,
        "origin": scaling.assumed.origin,
        "by_ranks": [
            {
                "ranks": num_ranks,
                "buckets": len(predicted.plan),
                **{name: getattr(predicted.timeline, name) for name in shown},
                "efficiency": predicted.timeline.scaling_efficiency,
            }
            for num_ranks, predicted in scaling.by_ranks.items()
        ],
    }


# --- Line charts as SVG, without a library and without links to anything outside

_WIDTH, _HEIGHT = 760, 420
_LEFT, _RIGHT, _TOP, _BOTTOM = 74, 30, 46, 56
_LEGEND_LINE = 18
_NUM_TICKS = 6
# The colours of Okabe and Ito, which colour-blind people can tell apart, as far as they are readable on both white and
# black. Dashes and marks distinguish the series as well.
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
    """The points of one line, from left to right; a single point is a mark without a line."""

    name: str
    points: Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """One axis of a chart.

    Attributes:
        label: the quantity, with its unit.
        log_base: the base of a logarithmic axis, with ticks at its powers; None: linear.
        low: where the axis begins; None: at the lowest point. Linear axes begin at a tick.
        high: where it ends; None: at the highest point. Linear axes end at a tick.
    """

    label: str
    log_base: int | None = None
    low: float | None = None
    high: float | None = None


def draw(series: Sequence[Series], *, title: str, x: Axis, y: Axis) -> str:
    """Return a chart of all `series` as one SVG element."""
    points = [point for one in series for point in one.points if all(map(math.isfinite, point))]
    if not points:
        raise ValueError(f"The chart {title!r} has no points.")
    top = _TOP + _LEGEND_LINE * len(series)
    height = _HEIGHT + _LEGEND_LINE * len(series)
    across = _AxisScale.of(x, [at for at, _ in points], start=_LEFT, stop=_WIDTH - _RIGHT)
    up = _AxisScale.of(y, [value for _, value in points], start=height - _BOTTOM, stop=top)
    quoted = escape(title, {'"': "&quot;"})
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" class="chart" viewBox="0 0 {_WIDTH} {height}" role="img"'
        f' aria-label="{quoted}">',
        f"<title>{escape(title)}</title><style>{_STYLE}</style>",
        f'<text class="title" x="{_LEFT}" y="24">{escape(title)}</text>',
        *_draw_axes(across, up, x=x, y=y),
    ]
    for index, one in enumerate(series):
        parts += _draw_series(one, index, across, up)
    return "\n".join([*parts, "</svg>"])


@dataclass(frozen=True, slots=True)
class _AxisScale:
    """Maps the values of an axis to coordinates."""

    low: float
    high: float
    ticks: Sequence[float]
    log_base: int | None
    start: float
    stop: float

    @classmethod
    def of(cls, axis: Axis, values: Sequence[float], *, start: float, stop: float) -> _AxisScale:
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
    """Return ticks that are 1, 2 or 5 times a power of ten apart and enclose both ends."""
    rough = (high - low) / _NUM_TICKS
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [number * step for number in range(first, last + 1)]


def _draw_axes(across: _AxisScale, up: _AxisScale, *, x: Axis, y: Axis) -> Iterator[str]:
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


def _draw_series(series: Series, index: int, across: _AxisScale, up: _AxisScale) -> Iterator[str]:
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
    down = _TOP + _LEGEND_LINE * index
    yield (
        f'<path class="line" stroke="{colour}" stroke-dasharray="{dash}" d="M{_LEFT} {down}h30"/>'
        if len(series.points) > 1
        else f'<rect fill="{colour}" x="{_LEFT + 10}" y="{down - 5}" width="10" height="10" rx="5"/>'
    )
    yield f'<text x="{_LEFT + 38}" y="{down}" dy="0.35em">{escape(series.name)}</text>'


def _number(value: float) -> str:
    return f"{round(value, 10):,.4g}" if abs(value) < 1e4 else f"{value:,.0f}"
