"""Host time per parameter that data-parallel training adds to `zero_grad` + backward, at world size 1.

    python benchmarks/host_overhead.py [--parameters 500] [--repetitions 60] [--json FILE]

Variants take turns within one run, so that a busy machine slows all of them; medians are compared, never times of
different runs. CPU time of the thread is measured: what other programs do does not count.
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_bucketddp.core.collectives import Collectives
from lightning_bucketddp.core.config import ReducerConfig
from lightning_bucketddp.core.reducer import Reducer
from lightning_bucketddp.core.replicas import Replicas

OURS = "bucketddp"
ALONE = "no communication"


class TinyLayers(nn.Module):
    """Many parameters of 8 elements, all used, in a graph as shallow as possible."""

    def __init__(self, num_parameters: int) -> None:
        super().__init__()
        self.scales = nn.ParameterList(nn.Parameter(torch.ones(8)) for _ in range(num_parameters))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([x * scale for scale in self.scales]).sum()


def ddp_variants() -> dict[str, dict[str, bool]]:
    """torch DDP with its defaults and with its best flags, as far as this version has them."""
    known = inspect.signature(DistributedDataParallel.__init__).parameters
    views = {"gradient_as_bucket_view": True}
    best = {name: True for name in ("gradient_as_bucket_view", "batched_grad_copy") if name in known}
    variants = {"ddp": {}, "ddp views": views, "ddp best": best, "ddp best, static": {**best, "static_graph": True}}
    return variants if "batched_grad_copy" in known else {k: v for k, v in variants.items() if k != "ddp best"}


def build_steps(num_parameters: int) -> dict[str, Callable[[], None]]:
    """One step of each variant, each on a model of its own."""
    x = torch.randn(8)

    def step_of(model: nn.Module) -> Callable[[], None]:
        def step() -> None:
            model.zero_grad(set_to_none=True)
            loss = model(x)
            start = time.thread_time_ns()
            loss.backward()
            times.append(time.thread_time_ns() - start)

        return step

    steps = {ALONE: step_of(TinyLayers(num_parameters))}
    ours = TinyLayers(num_parameters)
    Reducer(Replicas(ours, Collectives(torch.device("cpu"))), ReducerConfig())
    steps[OURS] = step_of(ours)
    for name, flags in ddp_variants().items():
        steps[name] = step_of(DistributedDataParallel(TinyLayers(num_parameters), **flags))
    return steps


times: list[int] = []


def measure(num_parameters: int, repetitions: int) -> dict[str, float]:
    """Microseconds per parameter over the step without communication, by variant."""
    steps = build_steps(num_parameters)
    measured: dict[str, list[int]] = {name: [] for name in steps}
    for repetition in range(repetitions + 5):
        for name, step in steps.items():
            times.clear()
            step()
            if repetition >= 5:
                measured[name].append(times[-1])
    medians = {name: statistics.median(values) / 1000 / num_parameters for name, values in measured.items()}
    return {name: median - medians[ALONE] for name, median in medians.items() if name != ALONE}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parameters", type=int, default=500, help="parameters of the model (default: 500)")
    parser.add_argument("--repetitions", type=int, default=60, help="steps measured per variant (default: 60)")
    parser.add_argument("--json", type=Path, help="write the numbers to this file")
    args = parser.parse_args()
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29501")
    dist.init_process_group("gloo", rank=0, world_size=1)
    torch.set_num_threads(1)
    overheads = measure(args.parameters, args.repetitions)
    best = min(value for name, value in overheads.items() if name != OURS)
    print(
        f"torch {torch.__version__}, {platform.machine()}, {args.parameters} parameters of 8 elements, world size 1\n"
    )
    print(f"{'variant':<20}{'us per parameter':>18}{'x best ddp':>12}")
    for name, value in overheads.items():
        print(f"{name:<20}{value:>18.2f}{value / best:>12.2f}")
    if args.json is not None:
        args.json.write_text(json.dumps({"torch": torch.__version__, "us_per_parameter": overheads}, indent=2))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
