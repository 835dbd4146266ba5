"""Time of a training step in a bare loop: bucketddp beside torch DDP with each of its flags.

    python benchmarks/step_time.py --model gpt2 --ranks 2 --device cuda [--bucket-cap-mb 25 100] [--json FILE]

Variants take turns within one run and medians are compared, never times of different runs. Several ranks on one GPU
share it: each gets a host of its own so that NCCL agrees, which then talks over sockets as between machines (start
NVIDIA's MPS first, else their kernels take turns).
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import socket
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing
from models import WORKLOADS, Workload
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_bucketddp.core.collectives import Collectives
from lightning_bucketddp.core.config import ReducerConfig
from lightning_bucketddp.core.reducer import Reducer
from lightning_bucketddp.core.replicas import Replicas

ALONE = "no communication"
WARM_UP_STEPS = 5


def ddp_variants() -> dict[str, dict[str, bool]]:
    """torch DDP with its defaults and with its best flags, as far as this version has them."""
    known = inspect.signature(DistributedDataParallel.__init__).parameters
    best = {flag: True for flag in ("gradient_as_bucket_view", "batched_grad_copy") if flag in known}
    return {
        "ddp": {},
        f"ddp {'+'.join(best)}": best,
        f"ddp {'+'.join(best)}+static_graph": {**best, "static_graph": True},
    }


def build_step(workload: Workload, model: nn.Module, device: torch.device) -> Callable[[], float]:
    """A function that makes one training step and returns its seconds."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, foreach=True)

    def step() -> float:
        _synchronize(device)
        start = time.perf_counter()
        optimizer.zero_grad()
        workload.loss(model).backward()
        optimizer.step()
        _synchronize(device)
        return time.perf_counter() - start

    return step


def build_variants(args: argparse.Namespace, device: torch.device) -> dict[str, Callable[[], float]]:
    """One step function per variant, each with a model of its own."""

    def workload() -> Workload:
        torch.manual_seed(0)
        return WORKLOADS[args.model](device)

    alone = workload()
    variants = {ALONE: build_step(alone, alone.model, device)}
    for cap in args.bucket_cap_mb:
        ours = workload()
        Reducer(Replicas(ours.model, Collectives(device)), ReducerConfig(bucket_cap_mb=cap))
        variants[f"bucketddp {cap:g} MiB"] = build_step(ours, ours.model, device)
    for name, flags in ddp_variants().items():
        theirs = workload()
        device_ids = [device] if device.type == "cuda" else None
        wrapped = DistributedDataParallel(theirs.model, device_ids=device_ids, **flags)
        variants[name] = build_step(theirs, wrapped, device)
    return variants


def run_rank(rank: int, args: argparse.Namespace, port: int) -> None:
    """Measure on one rank; rank 0 reports."""
    device = torch.device("cuda:0" if args.device == "cuda" else "cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
        if args.ranks > 1:
            os.environ.update(NCCL_HOSTID=f"host{rank}", NCCL_SOCKET_IFNAME="lo")
    else:
        torch.set_num_threads(1)
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=args.ranks)
    variants = build_variants(args, device)
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for repetition in range(WARM_UP_STEPS + args.repetitions):
        for name, step in variants.items():
            dist.barrier()
            elapsed = step()
            if repetition >= WARM_UP_STEPS:
                seconds[name].append(elapsed)
    if rank == 0:
        report(seconds, args)
    dist.destroy_process_group()


def report(seconds: dict[str, list[float]], args: argparse.Namespace) -> None:
    """Print medians, and speed-ups over torch DDP's best variant."""
    medians = {name: statistics.median(values) * 1000 for name, values in seconds.items()}
    best = min(median for name, median in medians.items() if name.startswith("ddp"))
    print(
        f"{args.model}, {args.ranks} ranks, {args.device}, torch {torch.__version__}, {args.repetitions} repetitions\n"
    )
    print(f"{'variant':<60}{'ms':>10}{'speed-up over best ddp':>24}")
    for name, median in medians.items():
        print(f"{name:<60}{median:>10.2f}{best / median:>24.2f}")
    print(flush=True)
    if args.json is not None:
        args.json.write_text(json.dumps({"torch": torch.__version__, "model": args.model, "ms": medians}, indent=2))


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", choices=WORKLOADS, default="mlp", help="what to train (default: mlp)")
    parser.add_argument("--ranks", type=int, default=2, help="number of processes (default: 2)")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="default: cpu")
    parser.add_argument("--repetitions", type=int, default=20, help="steps measured per variant (default: 20)")
    parser.add_argument("--bucket-cap-mb", type=float, nargs="+", default=[25.0], help="one variant each (default: 25)")
    parser.add_argument("--json", type=Path, help="write the medians to this file")
    args = parser.parse_args()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    torch.multiprocessing.spawn(run_rank, args=(args, port), nprocs=args.ranks)


if __name__ == "__main__":
    main()
