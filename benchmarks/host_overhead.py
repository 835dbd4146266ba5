"""Host time per parameter that data-parallel training adds to `zero_grad` + backward, at world size 1.

    python benchmarks/host_overhead.py [--repetitions 60] [--json FILE]

500 parameters of 8 elements: nothing but overhead. Variants take turns within one run, so that a busy machine slows
all of them; medians are compared, never times of different runs. CPU time of the thread is measured: what other
programs do does not count.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from models import tiny_layers
from step_time import ALONE, WARM_UP_STEPS, ddp_variants
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_bucketddp.core.collectives import Collectives
from lightning_bucketddp.core.config import ReducerConfig
from lightning_bucketddp.core.reducer import Reducer
from lightning_bucketddp.core.replicas import Replicas

OURS = "bucketddp"
CPU = torch.device("cpu")


def build_step(wrap: Callable[[nn.Module], nn.Module]) -> Callable[[], int]:
    """A function that runs `zero_grad`, forward and backward and returns the thread's nanoseconds without forward."""
    workload = tiny_layers(CPU)
    model = wrap(workload.model)

    def step() -> int:
        loss = workload.loss(model)
        start = time.thread_time_ns()
        model.zero_grad()
        loss.backward()
        return time.thread_time_ns() - start

    return step


def with_our_reducer(model: nn.Module) -> nn.Module:
    Reducer(Replicas(model, Collectives(CPU)), ReducerConfig())
    return model


def measure(repetitions: int) -> dict[str, float]:
    """Microseconds per parameter over the step without communication, by variant."""
    steps = {ALONE: build_step(lambda model: model), OURS: build_step(with_our_reducer)}
    for name, flags in ddp_variants().items():
        steps[name] = build_step(lambda model, flags=flags: DistributedDataParallel(model, **flags))
    measured: dict[str, list[int]] = {name: [] for name in steps}
    for _ in range(WARM_UP_STEPS + repetitions):
        for name, step in steps.items():
            measured[name].append(step())
    num_parameters = len(list(tiny_layers(CPU).model.parameters()))
    medians = {
        name: statistics.median(values[WARM_UP_STEPS:]) / 1000 / num_parameters for name, values in measured.items()
    }
    return {name: median - medians[ALONE] for name, median in medians.items() if name != ALONE}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repetitions", type=int, default=60, help="steps measured per variant (default: 60)")
    parser.add_argument("--json", type=Path, help="write the numbers to this file")
    args = parser.parse_args()
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29501")
    dist.init_process_group("gloo", rank=0, world_size=1)
    torch.set_num_threads(1)
    overheads = measure(args.repetitions)
    best = min(value for name, value in overheads.items() if name != OURS)
    print(f"torch {torch.__version__}, {platform.machine()}, 500 parameters of 8 elements, world size 1\n")
    print(f"{'variant':<60}{'us per parameter':>18}{'x best ddp':>12}")
    for name, value in overheads.items():
        print(f"{name:<60}{value:>18.2f}{value / best:>12.2f}")
    if args.json is not None:
        args.json.write_text(json.dumps({"torch": torch.__version__, "us_per_parameter": overheads}, indent=2))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
