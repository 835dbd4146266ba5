"""What `shard_optimizer` would save and cost on networks and numbers of ranks that are not at hand.

    python -m benchmarks.simulated_sharding PROFILE.json [...] [--ranks 8 16 64 256 1024] [--json FILE]

The profiles and networks are those of `benchmarks.simulated_networks`, and so is the model, with what sharding adds to
it (Note: halves and Note: timeline, in `planning/cost.py`).
State is that of AdamW, two tensors like each parameter; of the ranks the one that has most counts. Without sharding the
plan is the one that `bucket_cap_mb="auto"` computes for the network; with it the first one stays, with buckets of up to
25 MiB.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from lightning_bucketddp.config import MIB, ReducerConfig
from lightning_bucketddp.planning.cost import Network, Profile
from lightning_bucketddp.planning.optimal_plan import NETWORKS, predict, state_by_rank

RANKS = [8, 16, 64, 256, 1024]


@dataclass(frozen=True)
class Row:
    """One model on one network: state on each rank and exposed time, without and with sharding.

    `weights_ms` is the part of the latter in which the step waits for weights.
    """

    model: str
    network: str
    num_ranks: int
    state_whole_mib: float
    state_sharded_mib: float
    exposed_whole_ms: float
    exposed_sharded_ms: float
    weights_ms: float
    step_whole_ms: float
    step_sharded_ms: float


def compare(model: str, profile: Profile, network: Network, num_ranks: int) -> Row:
    """Predict a step without and with sharding."""
    cost, config = network.all_reduce(num_ranks), ReducerConfig()
    whole = predict(profile, config, cost)
    sharded = predict(profile, config, cost, num_shards=num_ranks)
    state = state_by_rank(profile.specs, sharded.plan, num_ranks=num_ranks)
    return Row(
        model,
        network.name,
        num_ranks,
        state_whole_mib=state.unsharded_bytes / MIB,
        state_sharded_mib=state.most_bytes / MIB,
        exposed_whole_ms=whole.exposed_s * 1e3,
        exposed_sharded_ms=sharded.exposed_s * 1e3,
        weights_ms=sharded.weights_s * 1e3,
        step_whole_ms=whole.step_s * 1e3,
        step_sharded_ms=sharded.step_s * 1e3,
    )


def print_table(rows: Sequence[Row]) -> None:
    print(f"{'':<44}{'state per rank, MiB':^24}{'exposed ms':^36}{'step ms':^24}")
    print(f"{'model':<24}{'network':<12}{'ranks':>8}{'whole':>12}{'sharded':>12}", end="")
    print(f"{'whole':>12}{'sharded':>12}{'(weights)':>12}{'whole':>12}{'sharded':>12}")
    for row in rows:
        print(f"{row.model:<24}{row.network:<12}{row.num_ranks:>8}", end="")
        print(f"{row.state_whole_mib:>12.1f}{row.state_sharded_mib:>12.2f}", end="")
        print(f"{row.exposed_whole_ms:>12.2f}{row.exposed_sharded_ms:>12.2f}{f'({row.weights_ms:.2f})':>12}", end="")
        print(f"{row.step_whole_ms:>12.2f}{row.step_sharded_ms:>12.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("profiles", type=Path, nargs="+", help="profiles as JSON files")
    parser.add_argument("--ranks", type=int, nargs="+", default=RANKS, help="numbers of ranks (default: 8 to 1,024)")
    parser.add_argument("--json", type=Path, help="write the numbers to this file")
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


if __name__ == "__main__":
    main()
