"""How long a run on two CPU processes takes to end after a fault, until the last of them is gone.

    python -m benchmarks.faults [--hosts] [--repetitions 5] [--json FILE]

With --hosts: on two or three hosts, each with a network of its own, one rank on each.

The faults take turns. A time is from the fault on rank 1 to the end of the last process, interpreter included; for a
rank that is stuck, from the group's time-out (8 s).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
import tempfile
from pathlib import Path

import torch

from tests.support.doomed_ranks import doomed_ranks
from tests.support.host_faults import HOST_FAULTS, let_happen
from tests.support.scripts.faults import Fault, fit

TIMEOUT_S = 8
FAULTS = {
    "raises in training_step": Fault("raise"),
    "raises in a callback": Fault("raise", "on_train_batch_end"),
    "raises in setup": Fault("raise", "setup"),
    "killed (SIGKILL)": Fault("SIGKILL"),
    "rank 0 killed (SIGKILL)": Fault("SIGKILL", rank=0),
    "ends by os._exit": Fault("exit"),
    "SIGTERM": Fault("SIGTERM"),
    "SIGINT": Fault("SIGINT"),
    "SIGTERM in a step of a minute": Fault("SIGTERM"),
    "endless loop": Fault("loop"),
    "stopped (SIGSTOP)": Fault("SIGSTOP"),
}
STUCK = {"loop", "SIGSTOP"}


def seconds_to_end(name: str) -> float:
    """Of one run."""
    fault = FAULTS[name]
    options = {"pause_s": 60, "slow_from": fault.batch} if "minute" in name else {}
    timeout_s = TIMEOUT_S if fault.what in STUCK else 1800
    with (
        tempfile.TemporaryDirectory() as directory,
        doomed_ranks(fit, directory=Path(directory), fault=fault, timeout_s=timeout_s, **options) as ranks,
    ):
        ended = ranks.wait()
    return ended.at - float(ended.results["fault"]["at"]) - (TIMEOUT_S if fault.what in STUCK else 0)


def seconds_to_end_between_hosts(name: str) -> float:
    """Of one run; nan if it goes on."""
    with tempfile.TemporaryDirectory() as directory:
        [end] = let_happen({name: HOST_FAULTS[name]}, Path(directory)).values()
    return end.seconds if any(end.ended.exit_codes) else math.nan


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--hosts", action="store_true", help="faults between hosts")
    parser.add_argument("--json", type=Path, help="also write the times here")
    arguments = parser.parse_args()
    measure = seconds_to_end_between_hosts if arguments.hosts else seconds_to_end
    times: dict[str, list[float]] = {name: [] for name in (HOST_FAULTS if arguments.hosts else FAULTS)}
    for _ in range(arguments.repetitions):
        for name, taken in times.items():
            taken.append(measure(name))
    print(f"torch {torch.__version__}, {platform.machine()}, {os.cpu_count()} cores, {arguments.repetitions} rounds\n")
    print(f"| {'fault' if arguments.hosts else 'fault on rank 1'} | median s | longest s |\n|---|---|---|")
    for name, taken in times.items():
        goes_on = any(map(math.isnan, taken))
        print(
            f"| {name} | goes on | |" if goes_on else f"| {name} | {statistics.median(taken):.1f} | {max(taken):.1f} |"
        )
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(times))


if __name__ == "__main__":
    main()
