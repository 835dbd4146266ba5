"""Predict how a module scales over networks and numbers of ranks, as numbers and as a chart."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

from lightning_bucketddp.commands import UsageError
from lightning_bucketddp.commands.plan.named_module import BackwardTimes
from lightning_bucketddp.planning.cost import AllReduceCost, Codecs, Network, Profile, Timeline, Wire, measured_between
from lightning_bucketddp.planning.optimal_plan import NETWORKS, StateByRank, WireOptions, state_by_rank
from lightning_bucketddp.planning.plan import BucketSpec
from lightning_bucketddp.recording.typical_step import NO_COST
from lightning_bucketddp.wording import load_printable_json

MEASURED = "measured"


@dataclass(frozen=True, slots=True)
class Scaling:
    """The predictions for one network, by number of ranks; `origin` explains where the network's numbers come from."""

    network: Network
    origin: str
    by_ranks: dict[int, Timeline]
    wire_options: WireOptions | None  # for `--ranks`; None if that is 1
    is_judged: bool = True  # False: on CPUs, without measurements of encoding by ranks that share the cores

    @property
    def advice(self) -> str:
        """Explain which option to choose, or how to find out."""
        assert self.wire_options is not None
        if self.is_judged:
            return self.wire_options.advice(self.network.name)
        return (
            "Which of them pays on CPUs is known when ranks that share the cores have measured it: run `bucketddp"
            " doctor --json > FILE.json` and pass `--network FILE.json`."
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ModulePlan:
    """The result of `bucketddp plan`; `module` and `device` are names, `origin` explains how the plan was made."""

    module: str
    device: str
    times: BackwardTimes
    buckets: Sequence[BucketSpec]  # by position in the profile
    origin: str
    num_ranks: int
    scalings: Sequence[Scaling]  # empty if no times are known
    codec_origin: str = ""  # completes "encoding counts as"
    state_tensors: int | None = None  # of an optimizer, for each parameter; None: its state is not divided

    @property
    def profile(self) -> Profile:
        return self.times.profile

    def bytes_of(self, bucket: BucketSpec) -> int:
        return sum(self.profile.specs[i].num_bytes for i in bucket.members)

    def names_in(self, bucket: BucketSpec) -> list[str]:
        return [self.profile.specs[i].name for i in bucket.members]

    def state_of(self, buckets: Sequence[BucketSpec], num_ranks: int) -> StateByRank:
        tensors = self.state_tensors or 0
        return state_by_rank(self.profile.specs, buckets, num_ranks=num_ranks, tensors_per_parameter=tensors)

    @property
    def state(self) -> StateByRank | None:
        """Return how optimizer state is divided by the plan that is shown; None: it is not."""
        return None if self.state_tensors is None else self.state_of(self.buckets, self.num_ranks)

    def to_json(self) -> dict[str, Any]:
        profile, state, times = self.profile, self.state, self.times
        content: dict[str, Any] = {
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
                **{name: getattr(times, name) for name in ("origin", "is_of_cpu", "without_and_with_graph_s")},
                **{name: getattr(profile, name) for name in ("forward_s", "backward_s", "optimizer_s")},
            },
            "networks": [_network_json(scaling) for scaling in self.scalings],
        }
        if state is not None:
            content["state"] = {
                "tensors_per_parameter": self.state_tensors,
                "bytes_per_rank": state.most_bytes,
                "bytes_without_sharding": state.unsharded_bytes,
                "undivided_bytes": state.whole_bytes,
                "undivided": [name for b in self.buckets if b.sharded is None for name in self.names_in(b)],
            }
        return content

    def to_svg(self) -> str:
        of_cpu = " of a CPU, not of a GPU" if self.times.is_of_cpu else ""
        title = f"{self.module}: predicted scaling efficiency, from {self.times.kind} times{of_cpu}"
        lines = [(s.network.name, {n: t.scaling_efficiency for n, t in s.by_ranks.items()}) for s in self.scalings]
        return draw_chart(title, lines)


def find_network(text: str, profile: Profile, codecs: Codecs) -> tuple[Network, str, Codecs]:
    """Return the network with this name or these figures (GBIT,LATENCY_US), or a measured one, and its origin.

    If `text` is a file of `bucketddp doctor`, `codecs` are returned with the measurements in it.
    """
    if text in NETWORKS:
        return NETWORKS[text], f"nominal figures of {text}", codecs
    if text == MEASURED:
        if profile.num_ranks < 2:
            raise UsageError(f"--network {MEASURED} needs a --profile that was recorded with two ranks or more.")
        if profile.cost is None:
            raise UsageError(
                f"--network {MEASURED} needs a --profile that tells what an all-reduce costs: {NO_COST}. Name a"
                ' network, or record a run with `bucket_cap_mb="auto"`, which measures it.'
            )
        wire = Wire.of(profile.reduce_dtype, profile.specs, codecs)
        network = Network.measured(wire.own_cost(profile.cost), num_ranks=profile.num_ranks)
        return network, f"measured between {profile.num_ranks} ranks when the profile was recorded", codecs
    if text.endswith(".json"):
        return _network_of_doctor(Path(text), codecs)
    try:
        gbit, latency_us = (float(number) for number in text.split(","))
        if not (gbit > 0 and latency_us >= 0):
            raise ValueError
    except ValueError:
        raise UsageError(
            f"--network {text!r} is not known: pass {', '.join([*NETWORKS, MEASURED])}, the .json that"
            " `bucketddp doctor --json` has printed, or GBIT,LATENCY_US, such as 25,10."
        ) from None
    return Network(f"{gbit:g} Gbit", gbit * 1e9 / 8, latency_us * 1e-6), "as you gave it", codecs


def _network_of_doctor(path: Path, codecs: Codecs) -> tuple[Network, str, Codecs]:
    try:
        content = load_printable_json(path.read_text(encoding="utf-8"))
        measured, num_ranks = content["all_reduce"], len(content["ranks"])
        network = Network(MEASURED, float(measured["link_bytes_per_s"]), float(measured["hop_seconds"]))
        if not (network.bytes_per_s > 0 and network.hop_s >= 0):
            raise ValueError("it has no speed")
        wires = {name: AllReduceCost(**cost) for name, cost in content["wires"].items()}
        between = measured_between(wires, codecs)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise UsageError(f"{path} holds no all-reduce that `bucketddp doctor --json` has measured: {error}") from error
    return network, f"measured between {num_ranks} ranks by `bucketddp doctor`", between


def _network_json(scaling: Scaling) -> dict[str, Any]:
    is_sharded = any(timeline.weights_s for timeline in scaling.by_ranks.values())
    shown = ("communication_s", "exposed_s", *(["weights_s"] if is_sharded else []), "step_s", "overlap")
    content: dict[str, Any] = {**asdict(scaling.network), "origin": scaling.origin, "by_ranks": []}
    for num_ranks, timeline in scaling.by_ranks.items():
        row = {"ranks": num_ranks, "buckets": len(timeline.plan)} | {name: getattr(timeline, name) for name in shown}
        content["by_ranks"].append(row | {"efficiency": timeline.scaling_efficiency})
    options = scaling.wire_options
    if options is not None:
        shown = ("option", "sent_bytes", "exposed_s", "step_s")
        content["options"] = [{name: getattr(option, name) for name in shown} for option in options.all]
        content |= {"take": options.best.option if scaling.is_judged else None, "advice": scaling.advice}
    return content


# --- The chart as SVG, without a library and without external links

_WIDTH, _PLOT_HEIGHT = 760, 318
_LEFT, _RIGHT, _TOP = 74, 730, 46
_LEGEND_LINE = 18
# The colours of Okabe and Ito, which colour-blind people can distinguish, as far as they are readable on both white and
# black. Dashes distinguish the lines as well.
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


def draw_chart(title: str, lines: Sequence[tuple[str, Mapping[int, float]]]) -> str:
    """Return a chart as one SVG element; each line has a name and efficiencies, from 0 to 1, by number of ranks."""
    most_ranks = max(num_ranks for _, efficiencies in lines for num_ranks in efficiencies)
    top = _TOP + _LEGEND_LINE * len(lines)
    bottom = top + _PLOT_HEIGHT
    title = escape(title, {'"': "&quot;"})
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" class="chart" viewBox="0 0 {_WIDTH} {bottom + 56}" role="img"'
        f' aria-label="{title}">',
        f"<title>{title}</title><style>{_STYLE}</style>",
        f'<text class="title" x="{_LEFT}" y="24">{title}</text>',
    ]

    def place(num_ranks: int, efficiency: float) -> tuple[str, str]:
        right = math.log(num_ranks) / math.log(most_ranks) * (_RIGHT - _LEFT)
        return f"{_LEFT + right:.1f}", f"{bottom - efficiency * _PLOT_HEIGHT:.1f}"

    largest_power = most_ranks.bit_length() - 1
    for power in range(0, largest_power + 1, math.ceil(largest_power / 12)):
        x, _ = place(2**power, 0)
        parts.append(f'<line class="grid" x1="{x}" x2="{x}" y1="{top}" y2="{bottom}"/>')
        parts.append(f'<text x="{x}" y="{bottom + 18}" text-anchor="middle">{2**power:,}</text>')
    for percent in range(0, 101, 20):
        _, y = place(1, percent / 100)
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{_RIGHT}" y1="{y}" y2="{y}"/>')
        parts.append(f'<text x="{_LEFT - 8}" y="{y}" dy="0.35em" text-anchor="end">{percent}</text>')
    turned = f"translate(18 {(top + bottom) / 2}) rotate(-90)"
    parts.append(f'<path class="frame" d="M{_LEFT} {top}V{bottom}H{_RIGHT}"/>')
    parts.append(f'<text x="{(_LEFT + _RIGHT) / 2}" y="{bottom + 42}" text-anchor="middle">ranks</text>')
    parts.append(f'<text transform="{turned}" text-anchor="middle">efficiency, %</text>')
    for index, (name, efficiencies) in enumerate(lines):
        points = {num_ranks: place(num_ranks, efficiency) for num_ranks, efficiency in efficiencies.items()}
        parts += _draw_line(index, escape(name), efficiencies, points)
    return "\n".join([*parts, "</svg>"])


def _draw_line(
    index: int, name: str, efficiencies: Mapping[int, float], points: Mapping[int, tuple[str, str]]
) -> Iterator[str]:
    """Draw a line, a mark with a tooltip at each of its points, and its entry in the legend."""
    colour = _COLOURS[index % len(_COLOURS)]
    line = f'class="line" stroke="{colour}" stroke-dasharray="{_DASHES[index % len(_DASHES)]}"'
    yield f'<polyline {line} points="{" ".join(map(",".join, points.values()))}"/>'
    for num_ranks, (x, y) in points.items():
        tip = f"{name}: {num_ranks:,}, {100 * efficiencies[num_ranks]:.4g}"
        yield f'<circle cx="{x}" cy="{y}" r="3.5" fill="{colour}"><title>{tip}</title></circle>'
    down = _TOP + _LEGEND_LINE * index
    yield f'<path {line} d="M{_LEFT} {down}h30"/>'
    yield f'<text x="{_LEFT + 38}" y="{down}" dy="0.35em">{name}</text>'
