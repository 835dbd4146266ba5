"""What one rank does: look around, meet the others, measure with them, and, on rank 0, judge what all have seen."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lightning_bucketddp.comm.nccl_sockets import host_of, nccl_settings
from lightning_bucketddp.commands.doctor import checkpoints, clocks, gpus, interfaces, ports, resources, software, speed
from lightning_bucketddp.commands.doctor.crew import Colleagues, Crew
from lightning_bucketddp.commands.doctor.deadline import NeverEnded, within
from lightning_bucketddp.commands.doctor.finding import Finding, Observation, Theme, Verdict, counted
from lightning_bucketddp.startup.store import StartError

_THEME = Theme("Ranks")
_PARTS = (software, gpus, interfaces, ports, resources)


@dataclass(slots=True)
class Examination:
    """What was seen.

    Attributes:
        ranks: what each rank has observed; this one's alone if they did not meet.
        trouble: why they did not, or could not talk.
        clocks_s: by how much each rank's clock is ahead of rank 0's.
        speed: what all-reduces take; None: there was nothing to measure, or no way.
        backend: what they went through.
        is_stuck: a thread hangs, and the process must end without waiting for it.
    """

    ranks: list[dict[str, Any]]
    trouble: list[Finding] = field(default_factory=list)
    clocks_s: list[float] = field(default_factory=list)
    speed: Observation | None = None
    backend: str = ""
    is_stuck: bool = False

    def findings(self) -> Iterator[Finding]:
        """All that is to be said, theme by theme."""
        yield from self.trouble
        if not self.trouble and len(self.ranks) > 1:
            yield _THEME.ok(f"{len(self.ranks)} ranks on {counted(self.num_hosts, 'host')} met.")
        for part in _PARTS:
            yield from part.judge(self.ranks)
        if self.clocks_s:
            yield from clocks.judge(self.ranks, self.clocks_s)
        if self.speed is not None:
            yield from speed.judge(self.ranks, self.speed, backend=self.backend)
        elif not self.trouble:
            yield speed.judge_absence()
        yield from checkpoints.judge(self.ranks)

    @property
    def num_hosts(self) -> int:
        return len({observed["host"] for observed in self.ranks})

    def to_json(self) -> dict[str, Any]:
        findings = list(self.findings())
        return {
            "verdict": str(max(finding.verdict for finding in findings)),
            "findings": [finding.to_json() for finding in findings],
            "all_reduce": self.speed and {**self.speed, "backend": self.backend, "expected": self._expected()},
            "clocks_ahead_seconds": self.clocks_s,
            "ranks": self.ranks,
        }

    def _expected(self) -> dict[str, Any]:
        assert self.speed is not None  # asked for where it was measured
        expected = speed.expectation(self.ranks, self.speed, backend=self.backend)
        return {"bytes_per_s": expected["bytes_per_s"], "origin": expected["origin"]}

    @property
    def verdict(self) -> Verdict:
        return max(finding.verdict for finding in self.findings())


def examine(crew: Crew, *, directory: Path | None, timeout_s: float, progress: Callable[[str], None]) -> Examination:
    """What this rank finds, with the others if they come; nothing takes much longer than `timeout_s`."""
    rank = crew.point.rank
    progress("looking at this host ...")
    mine = _observe(crew)
    seen = Examination([mine])
    if rank > 0:  # and soon, because the others wait
        _look_at_directory(seen, directory, rank=rank, timeout_s=timeout_s / 2)
    try:
        progress(f"waiting for {crew.point.world_size} ranks ...")
        with crew.meet(timeout_s=timeout_s) as colleagues:
            limit_s = timeout_s + speed.LONGEST_S
            within(limit_s, lambda: _talk(seen, mine, colleagues, progress), what="talking to the others")
    except StartError as error:
        what, _, remedy = str(error).partition(". ")
        seen.trouble.append(_THEME.error(f"{what}.", remedy))
    except (RuntimeError, NeverEnded) as error:
        seen.is_stuck |= isinstance(error, NeverEnded)
        seen.trouble.append(
            _THEME.error(
                f"Ranks met, but cannot talk to each other: {' '.join(str(error).split())[:300]}.",
                "Check that firewalls let ranks connect at any port; set `GLOO_SOCKET_IFNAME` and `NCCL_SOCKET_IFNAME`"
                " to the interface that connects the hosts.",
            )
        )
    if rank == 0:
        progress("writing a trial checkpoint ...")
        # Alone, when nobody waits for rank 0 any more.
        _look_at_directory(seen, directory, rank=rank, timeout_s=timeout_s)
    progress("")
    return seen


def _talk(seen: Examination, mine: Observation, colleagues: Colleagues, progress: Callable[[str], None]) -> None:
    """Every rank does the same, in the same order."""
    seen.ranks = colleagues.hosts.gather_json(mine)
    if len(seen.ranks) == 1:
        return
    seen.clocks_s = clocks.measure(colleagues.hosts)
    seen.backend = colleagues.backend
    seen.speed = speed.measure(colleagues.gradients, progress=progress)


def _observe(crew: Crew) -> dict[str, Any]:
    point = crew.point
    return {
        "rank": point.rank,
        "hostname": socket.gethostname(),
        "host": host_of(nccl_settings(os.environ)),
        "software": software.observe(),
        "gpus": gpus.observe(),
        "network": interfaces.observe(main_address=point.address),
        "ports": ports.observe(checks_main_port=crew.is_our_own and point.rank == 0),
        "resources": resources.observe(),
        "checkpoints": None,
    }


def _look_at_directory(seen: Examination, directory: Path | None, *, rank: int, timeout_s: float) -> None:
    """Of this rank, which is the first in `seen`."""
    if directory is None:
        return
    try:
        found = within(timeout_s, lambda: checkpoints.observe(directory, rank=rank), what="a look at a directory")
    except NeverEnded:
        seen.is_stuck = True
        found = checkpoints.never_ended(directory, rank=rank, timeout_s=timeout_s)
    seen.ranks[0]["checkpoints"] = found
