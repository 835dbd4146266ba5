"""`bucketddp doctor`: is this machine, or this cluster, ready for a long run?

Each rank observes its host, joins the others and measures with them; rank 0 judges what all ranks have observed.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import socket
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from rich.padding import Padding
from rich.table import Column, Table
from rich.text import Text

from lightning_bucketddp.comm.collectives import Collectives
from lightning_bucketddp.comm.connections import host_of, nccl_settings
from lightning_bucketddp.commands import UsageError, trimmed_console
from lightning_bucketddp.commands.doctor import host, network
from lightning_bucketddp.commands.doctor.finding import (
    Finding,
    NeverEnded,
    Observation,
    ProbeGroup,
    Severity,
    error,
    ok,
    one_per_host,
    within,
)
from lightning_bucketddp.planning.cost import AllReduceCost
from lightning_bucketddp.reducer.plan_cache import measure_wires
from lightning_bucketddp.startup.store import StartError
from lightning_bucketddp.wording import pluralize

HELP = """Check this machine, or this cluster, before a long run.

Alone it starts processes of its own on this host. To check several hosts, launch it as you launch training:

    torchrun --nnodes 2 --nproc-per-node 8 ... --no-python bucketddp doctor

Exit status: 0 nothing is wrong, 1 something is, 2 the command was used wrongly."""

_STYLES = {Severity.OK: "green", Severity.NOTE: "cyan", Severity.WARNING: "yellow", Severity.ERROR: "bold red"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--processes", type=int, metavar="N", help="how many to start here (default: one per GPU; without GPUs 2)"
    )
    parser.add_argument("--checkpoints", type=Path, metavar="DIR", help="the directory that checkpoints go to")
    parser.add_argument(
        "--timeout", type=float, default=60.0, metavar="S", help="how long ranks wait for each other (default: 60 s)"
    )
    parser.add_argument("--strict", action="store_true", help="count warnings as errors")
    parser.add_argument("--json", action="store_true", help="print everything as one JSON object")


def run(arguments: argparse.Namespace) -> int:
    if not math.isfinite(arguments.timeout) or arguments.timeout <= 0:
        raise UsageError(f"--timeout must be a positive number of seconds, got {arguments.timeout:g}.")
    launched = ProbeGroup.from_environment()
    if launched is not None:
        if arguments.processes is not None:
            raise UsageError("--processes is for a start without a launcher, but RANK and WORLD_SIZE are set.")
        return _run_rank(launched, arguments)
    num_processes = arguments.processes if arguments.processes is not None else torch.cuda.device_count() or 2
    if num_processes < 1:
        raise UsageError(f"--processes must be at least 1, got {num_processes}.")
    passed_on = ["--timeout", str(arguments.timeout)]
    if arguments.checkpoints is not None:
        passed_on += ["--checkpoints", str(arguments.checkpoints)]
    with ProbeGroup.spawn(num_processes, arguments=passed_on) as spawned:
        return _run_rank(spawned, arguments)


def _run_rank(group: ProbeGroup, arguments: argparse.Namespace) -> int:
    rank = group.store.rank
    shows_progress = rank == 0 and sys.stderr.isatty() and not arguments.json

    def progress(text: str) -> None:
        if shows_progress:
            print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)

    with stdout_on_stderr():
        diagnosis = diagnose(group, directory=arguments.checkpoints, timeout_s=arguments.timeout, progress=progress)
    findings = diagnosis.findings() if rank == 0 else diagnosis.trouble
    if rank > 0:
        for finding in findings:
            print(f"rank {rank}: {finding.text}", file=sys.stderr)
    elif arguments.json:
        print(json.dumps(diagnosis.to_json(), indent=1))
    else:
        print_diagnosis(diagnosis)
    worst = max((finding.severity for finding in findings), default=Severity.OK)
    status = int(worst >= (Severity.WARNING if arguments.strict else Severity.ERROR))
    if diagnosis.is_stuck:
        for child in group.children:
            child.kill()
        sys.stdout.flush()
        os._exit(status)
    return status


@contextmanager
def stdout_on_stderr() -> Iterator[None]:
    """Redirect stdout to stderr meanwhile, also for C++: some versions of gloo print there."""
    sys.stdout.flush()
    stdout = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        os.dup2(stdout, 1)
        os.close(stdout)


@dataclass(slots=True)
class Diagnosis:
    """The observations and measurements of the ranks, and the findings that follow from them."""

    ranks: list[dict[str, Any]]  # the observations of each rank; of this rank alone if they did not meet
    trouble: list[Finding] = field(default_factory=list)  # why they did not meet, or could not talk to each other
    clocks_s: list[float] = field(default_factory=list)  # how far each rank's clock is ahead of rank 0's
    all_reduce: Observation | None = None  # as measured; None if there was one rank, or it failed
    wires: dict[str, AllReduceCost] = field(default_factory=dict)  # the cost of a reduction, by dtype
    backend: str = ""  # the measured one
    is_stuck: bool = False  # a thread hangs, and the process must end without waiting for it

    def findings(self) -> list[Finding]:
        met = ok(f"{len(self.ranks)} ranks on {pluralize(len(one_per_host(self.ranks)), 'host')} met.")
        speed: list[Finding] = []
        if self.all_reduce is not None or not self.trouble:
            speed += network.judge_all_reduce(self.ranks, self.all_reduce, backend=self.backend)
        if self.wires:
            speed += network.judge_wires(self.wires)
        by_theme: dict[str, Iterable[Finding]] = {
            "Ranks": self.trouble or ([met] if len(self.ranks) > 1 else []),
            "Software": host.judge_software(self.ranks),
            "GPUs": host.judge_gpus(self.ranks),
            "Network": network.judge_network(self.ranks),
            "Ports": network.judge_ports(self.ranks),
            "Limits": host.judge_limits(self.ranks),
            "Clocks": network.judge_clocks(self.ranks, self.clocks_s) if self.clocks_s else [],
            "All-reduce": speed,
            "Checkpoints": host.judge_directory(self.ranks),
        }
        return [replace(finding, theme=theme) for theme, findings in by_theme.items() for finding in findings]

    def to_json(self) -> dict[str, Any]:
        findings = self.findings()
        all_reduce = None
        if self.all_reduce is not None:
            expected = network.expect_all_reduce(self.ranks, self.all_reduce, backend=self.backend)
            shown = {name: expected[name] for name in ("bytes_per_s", "origin")}
            all_reduce = {**self.all_reduce, "backend": self.backend, "expected": shown}
        return {
            "verdict": str(max(finding.severity for finding in findings)),
            "findings": [finding.to_json() for finding in findings],
            "all_reduce": all_reduce,
            "wires": {name: asdict(cost) for name, cost in self.wires.items()},
            "clocks_ahead_seconds": self.clocks_s,
            "ranks": self.ranks,
        }


def diagnose(
    group: ProbeGroup, *, directory: Path | None, timeout_s: float, progress: Callable[[str], None]
) -> Diagnosis:
    """Observe this host, and measure with the other ranks if they come; no step takes much longer than `timeout_s`."""
    rank = group.store.rank
    progress("looking at this host ...")
    diagnosis = Diagnosis([observe(group)])
    if rank > 0:  # before joining, and soon, because the others wait
        _check_directory(diagnosis, directory, rank=rank, timeout_s=timeout_s / 2)
    try:
        progress(f"waiting for {group.store.world_size} ranks ...")
        with group.join(timeout_s=timeout_s) as (hosts, gradients):
            limit_s = timeout_s + network.LONGEST_S
            within(limit_s, lambda: _measure(diagnosis, hosts, gradients, progress), what="talking to the others")
    except StartError as failed:
        what, _, remedy = str(failed).partition(". ")
        diagnosis.trouble.append(error(f"{what}.", remedy))
    except (RuntimeError, NeverEnded) as failed:
        diagnosis.is_stuck |= isinstance(failed, NeverEnded)
        diagnosis.trouble.append(
            error(
                f"Ranks met, but cannot talk to each other: {' '.join(str(failed).split())[:300]}.",
                "Check that firewalls let ranks connect at any port; set `GLOO_SOCKET_IFNAME` and `NCCL_SOCKET_IFNAME`"
                " to the interface that connects the hosts.",
            )
        )
    if rank == 0:
        progress("writing a trial checkpoint ...")
        # After the measurements: no rank waits for rank 0 any more.
        _check_directory(diagnosis, directory, rank=rank, timeout_s=timeout_s)
    progress("")
    return diagnosis


def observe(group: ProbeGroup) -> dict[str, Any]:
    store = group.store
    return {
        "rank": store.rank,
        "hostname": socket.gethostname(),
        "host": host_of(nccl_settings(os.environ)),
        "software": host.observe_software(),
        "gpus": host.observe_gpus(),
        "network": network.observe_network(main_address=store.address),
        "ports": network.observe_ports(checks_main_port=group.is_spawned and store.rank == 0),
        "resources": host.observe_limits(),
        "checkpoints": None,
    }


def _measure(diagnosis: Diagnosis, hosts: Collectives, gradients: Collectives, progress: Callable[[str], None]) -> None:
    """Gather all observations and measure between ranks. Collective: every rank does the same, in the same order."""
    diagnosis.ranks = hosts.gather_json(diagnosis.ranks[0])
    if len(diagnosis.ranks) == 1:
        return
    diagnosis.clocks_s = network.measure_clocks(hosts)
    diagnosis.backend = "gloo" if gradients is hosts else "NCCL"
    diagnosis.all_reduce = network.measure_all_reduce(gradients, progress=progress)
    diagnosis.wires = measure_wires(gradients, module_bytes=network.LARGEST_BYTES, progress=progress)


def _check_directory(diagnosis: Diagnosis, directory: Path | None, *, rank: int, timeout_s: float) -> None:
    """Observe the checkpoint directory on this rank, which is the first in `diagnosis`."""
    if directory is None:
        return
    try:
        found = within(timeout_s, lambda: host.observe_directory(directory, rank=rank), what="a look at a directory")
    except NeverEnded:
        diagnosis.is_stuck = True
        silence = f"it did not answer within {timeout_s:g} s"
        found = {"directory": str(directory.absolute()), "exists": rank == 0, "error": silence}
    diagnosis.ranks[0]["checkpoints"] = found


def print_diagnosis(diagnosis: Diagnosis) -> None:
    """Print a table of all findings, the measured all-reduces, and a conclusion."""
    findings = diagnosis.findings()
    numbers = Counter(finding.severity for finding in findings)
    parts = [pluralize(numbers[bad], str(bad)) for bad in (Severity.ERROR, Severity.WARNING) if numbers[bad]]
    what = " and ".join(parts) or "Nothing is wrong"
    end = ": do not start a long run like this." if numbers[Severity.ERROR] else "."
    with trimmed_console() as console:
        console.print(_finding_table(_merge_alike(findings, diagnosis)))
        console.print()
        if diagnosis.all_reduce is not None:
            console.print(_all_reduce_table(diagnosis.all_reduce))
            console.print()
        console.print(Text(f"{what}{end}", style=_STYLES[max(numbers) if parts else Severity.OK]))


def _merge_alike(findings: Sequence[Finding], diagnosis: Diagnosis) -> list[Finding]:
    """Merge good findings of several hosts that differ in numbers only."""
    hosts = {observed["hostname"] for observed in diagnosis.ranks} if len(one_per_host(diagnosis.ranks)) > 1 else set()
    alike: dict[tuple[str, Severity, str], list[Finding]] = {}
    for index, finding in enumerate(findings):
        pattern = str(index)
        if hosts and finding.severity <= Severity.NOTE:
            pattern = re.sub("|".join(map(re.escape, hosts)) + r"|[\d.,]+", "", finding.text)
        alike.setdefault((finding.theme, finding.severity, pattern), []).append(finding)
    return [
        first if not others else replace(first, text=f"{first.text} ({pluralize(len(others), 'more host')} alike.)")
        for first, *others in alike.values()
    ]


def _finding_table(findings: Sequence[Finding]) -> Table:
    columns = Column(no_wrap=True), Column(overflow="fold")
    table = Table(*columns, box=None, show_header=False, padding=(0, 1), pad_edge=False)
    for theme, of_theme in groupby(findings, key=lambda finding: finding.theme):
        table.add_row(Text(theme, style="bold"), "")
        for finding in of_theme:
            text = Text(finding.text)
            if finding.remedy:
                text.append(f"\n-> {finding.remedy}", style="italic")
            severity = Text(str(finding.severity), style=_STYLES[finding.severity])
            table.add_row(Padding(severity, (0, 0, 0, 2)), text)
    return table


def _all_reduce_table(measured: Observation) -> Table:
    columns = [Column(name, justify="right") for name in ("all-reduce", "time", "each rank sends")]
    table = Table(*columns, box=None, padding=(0, 2), pad_edge=False)
    for size in measured["by_size"]:
        speed = f"{size['link_bytes_per_s'] / 1e9:.3f} GB/s"
        table.add_row(network.size_in_words(size["bytes"]), f"{size['seconds'] * 1e3:,.3f} ms", speed)
    return table
