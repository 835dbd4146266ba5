"""How far the clocks of hosts are apart."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence

import torch

from lightning_bucketddp.comm.collectives import Collectives
from lightning_bucketddp.commands.doctor.finding import Finding, Observation, Theme, one_per_host

_THEME = Theme("Clocks")
_NUM_ROUNDS = 5
_FAR_S = 1.0


def measure(hosts: Collectives) -> list[float]:
    """By how many seconds the clock of each rank is ahead of rank 0's, as well as messages can tell."""
    times = []
    for _ in range(_NUM_ROUNDS):
        hosts.sum(torch.zeros(1))  # ends on all ranks at nearly the same moment
        times.append(time.time())
    by_rank = hosts.gather_json(times)
    return [statistics.median(t - t0 for t, t0 in zip(own, by_rank[0], strict=True)) for own in by_rank]


def judge(ranks: Sequence[Observation], ahead_s: Sequence[float]) -> Iterator[Finding]:
    """Whether files and logs of different hosts can be put in order."""
    hosts = one_per_host(ranks)
    if len(hosts) == 1:
        return
    worst = max(hosts, key=lambda observed: abs(ahead_s[observed["rank"]]))
    difference = ahead_s[worst["rank"]]
    name = worst["hostname"]
    if abs(difference) < _FAR_S:
        yield _THEME.ok(f"The clocks of {len(hosts)} hosts are at most {abs(difference) * 1e3:.0f} ms from rank 0's.")
    else:
        way = "ahead of" if difference > 0 else "behind"
        yield _THEME.warning(
            f"The clock of {name} is {abs(difference):.1f} s {way} rank 0's: logs and files get times that mislead.",
            "Let a time service run on every host (`timedatectl set-ntp true`).",
        )
