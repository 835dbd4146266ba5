"""What plans would cost on networks and numbers of ranks that are not at hand.

    python -m benchmarks.simulated_networks PROFILE.json [...] [--ranks 2 8 64 1024] [--json FILE] [--png FILE]

A profile says when each gradient of a model is ready; `Reducer.profile` has that of a run, once `bucket_cap_mb="auto"`
has measured it. The simulation is the model that the planner works with (Note: cost of an all-reduce, and Note:
timeline, in `core`): no contention, no stragglers, a link of its own for each rank. It compares plans; it promises
no step times. NVLink domains end at 72 ranks: what the table says beyond is arithmetic.

Overlap efficiency is (forward + max(backward, communication) + optimizer) / step, where communication is one all-reduce
of all bytes. Scaling efficiency is the step without communication / step.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from lightning_bucketddp.config import AUTO, ReducerConfig
from lightning_bucketddp.planning.cost import Network, Profile, Timeline
from lightning_bucketddp.planning.optimal_plan import NETWORKS, predict

RANKS = [2, 4, 8, 16, 32, 64, 128, 256, 512, 1024]


@dataclass(frozen=True)
class Row:
    """One model on one network."""

    model: str
    network: str
    num_ranks: int
    exposed_25_mb_ms: float
    exposed_auto_ms: float
    num_buckets_25_mb: int
    num_buckets_auto: int
    step_25_mb_ms: float
    step_auto_ms: float
    overlap_efficiency: float
    scaling_efficiency: float


def compare(model: str, profile: Profile, network: Network, num_ranks: int) -> Row:
    """The plan of 25 MiB beside the one computed for this network."""
    cost = network.all_reduce(num_ranks)
    fixed = predict(profile, ReducerConfig(bucket_cap_mb=25), cost)
    auto = predict(profile, ReducerConfig(bucket_cap_mb=AUTO), cost)
    return Row(
        model,
        network.name,
        num_ranks,
        exposed_25_mb_ms=fixed.exposed_s * 1e3,
        exposed_auto_ms=auto.exposed_s * 1e3,
        num_buckets_25_mb=len(fixed.buckets),
        num_buckets_auto=len(auto.buckets),
        step_25_mb_ms=fixed.step_s * 1e3,
        step_auto_ms=auto.step_s * 1e3,
        overlap_efficiency=_overlap_efficiency(auto, cost.seconds(profile.dense_bytes)),
        scaling_efficiency=auto.scaling_efficiency,
    )


def _overlap_efficiency(timeline: Timeline, communication_s: float) -> float:
    hidden = max(timeline.backward_s, communication_s)
    return (timeline.forward_s + hidden + timeline.optimizer_s) / timeline.step_s


def print_table(rows: Sequence[Row]) -> None:
    print(f"{'':<44}{'exposed ms (buckets)':^30}{'step ms':^20}{'auto: efficiency':^20}")
    print(f"{'model':<24}{'network':<12}{'ranks':>8}{'25 MiB':>15}{'auto':>15}", end="")
    print(f"{'25 MiB':>10}{'auto':>10}{'overlap':>10}{'scaling':>10}")
    for row in rows:
        fixed = f"{row.exposed_25_mb_ms:.2f} ({row.num_buckets_25_mb})"
        auto = f"{row.exposed_auto_ms:.2f} ({row.num_buckets_auto})"
        print(f"{row.model:<24}{row.network:<12}{row.num_ranks:>8}{fixed:>15}{auto:>15}", end="")
        print(f"{row.step_25_mb_ms:>10.2f}{row.step_auto_ms:>10.2f}", end="")
        print(f"{row.overlap_efficiency:>10.3f}{row.scaling_efficiency:>10.3f}")


def plot(rows: Sequence[Row], path: Path) -> None:
    """Exposed time against ranks: a panel per model, a colour per network, dashed for 25 MiB."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise SystemExit("--png needs matplotlib: pip install matplotlib") from None
    models = list(dict.fromkeys(row.model for row in rows))
    figure = Figure(figsize=(6 * len(models), 4.5), layout="constrained")
    for column, model in enumerate(models):
        axes = figure.add_subplot(1, len(models), column + 1)
        for colour, network in enumerate(dict.fromkeys(row.network for row in rows)):
            chosen = [row for row in rows if (row.model, row.network) == (model, network)]
            ranks = [row.num_ranks for row in chosen]
            style = {"color": f"C{colour}", "marker": ".", "linewidth": 1}
            axes.plot(ranks, [row.exposed_25_mb_ms for row in chosen], "--", **style)
            axes.plot(ranks, [row.exposed_auto_ms for row in chosen], label=network, **style)
        axes.set(title=f"{model}: 25 MiB (dashed) and auto", xlabel="ranks", ylabel="exposed ms", xscale="log")
        axes.set_yscale("log")
        axes.legend()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("profiles", type=Path, nargs="+", help="profiles as JSON files")
    parser.add_argument("--ranks", type=int, nargs="+", default=RANKS, help="numbers of ranks (default: 2 to 1,024)")
    parser.add_argument("--json", type=Path, help="write the numbers to this file")
    parser.add_argument("--png", type=Path, help="plot exposed times to this file")
    args = parser.parse_args()
    rows: list[Row] = []
    for path in args.profiles:
        profile = Profile.from_json(path.read_text())
        here = Network.measured(profile.cost, num_ranks=profile.num_ranks)
        for network in (here, *NETWORKS.values()):
            rows += [compare(path.stem, profile, network, num_ranks) for num_ranks in args.ranks]
    print_table(rows)
    if args.json is not None:
        args.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))
    if args.png is not None:
        plot(rows, args.png)


if __name__ == "__main__":
    main()
