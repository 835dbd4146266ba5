"""`bucketddp doctor`: is this machine, or this cluster, ready for a long run?"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from pathlib import Path

import torch

from lightning_bucketddp.commands.doctor.crew import Crew
from lightning_bucketddp.commands.doctor.examination import Examination, examine
from lightning_bucketddp.commands.doctor.finding import Verdict
from lightning_bucketddp.commands.usage import UsageError

HELP = """Check this machine, or this cluster, before a long run.

Alone it starts processes of its own on this host. To check several hosts, launch it as you launch training:

    torchrun --nnodes 2 --nproc-per-node 8 ... --no-python bucketddp doctor

Exit status: 0 nothing is wrong, 1 something is, 2 the command was used wrongly."""


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
    crew = Crew.of_environment()
    if crew is not None:
        if arguments.processes is not None:
            raise UsageError("--processes is for a start without a launcher, but RANK and WORLD_SIZE are set.")
        return _examine(crew, arguments)
    num_processes = arguments.processes if arguments.processes is not None else torch.cuda.device_count() or 2
    if num_processes < 1:
        raise UsageError(f"--processes must be at least 1, got {num_processes}.")
    passed_on = ["--timeout", str(arguments.timeout)]
    if arguments.checkpoints is not None:
        passed_on += ["--checkpoints", str(arguments.checkpoints)]
    with Crew.of_our_own(num_processes, arguments=passed_on) as own:
        return _examine(own, arguments)


def _examine(crew: Crew, arguments: argparse.Namespace) -> int:
    shows_progress = crew.point.rank == 0 and sys.stderr.isatty() and not arguments.json
    seen = examine(
        crew,
        directory=arguments.checkpoints,
        timeout_s=arguments.timeout,
        progress=_show if shows_progress else lambda _text: None,
    )
    if crew.point.rank == 0:
        _report(seen, as_json=arguments.json)
    else:
        for finding in seen.trouble:
            print(f"rank {crew.point.rank}: {finding.text}", file=sys.stderr)
    worst = seen.verdict if crew.point.rank == 0 else max((f.verdict for f in seen.trouble), default=Verdict.OK)
    status = int(worst >= (Verdict.WARNING if arguments.strict else Verdict.ERROR))
    if seen.is_stuck:
        for child in crew.children:
            child.kill()
        sys.stdout.flush()
        os._exit(status)
    return status


def _report(seen: Examination, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(seen.to_json(), indent=1))
        return
    from lightning_bucketddp.commands.doctor.printing import print_findings

    print_findings(seen)


def _show(text: str) -> None:
    """In the place of what was shown before."""
    print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)
