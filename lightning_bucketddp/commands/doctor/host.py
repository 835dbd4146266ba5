"""Checks of one host: software, GPUs, limits, and the directory for checkpoints."""

from __future__ import annotations

import os
import platform
import re
import resource
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lightning_bucketddp import __version__
from lightning_bucketddp.checkpoint.atomic_file import atomic_file, find_temporary_files
from lightning_bucketddp.commands.doctor.finding import (
    Finding,
    Observation,
    differences,
    error,
    note,
    ok,
    one_per_host,
    warning,
)
from lightning_bucketddp.config import MIB
from lightning_bucketddp.wording import list_some_ranks, pluralize

_LIGHTNING = ("lightning", "pytorch-lightning")
# Ranks must have the same versions of these, which define the messages between them.
_MUST_BE_EQUAL = ("torch", "NCCL", "lightning-bucketddp", *_LIGHTNING)
# Of one lane in each direction, after encoding, by generation of PCI Express (from its specifications).
_PCIE_LANE_BYTES_PER_S = {1: 0.25e9, 2: 0.5e9, 3: 0.985e9, 4: 1.969e9, 5: 3.938e9, 6: 7.563e9}
_SHARED_MEMORY = "/dev/shm"
GIB = 1024 * MIB


def observe_software() -> dict[str, Any]:
    versions = {"Python": platform.python_version(), "torch": torch.__version__, "lightning-bucketddp": __version__}
    for name in _LIGHTNING:
        with suppress(PackageNotFoundError):
            versions[name] = version(name)
    has_nccl = dist.is_available() and dist.is_nccl_available()
    if has_nccl and torch.cuda.is_available():
        versions["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    return {
        "versions": versions,
        "cuda": torch.version.cuda,
        "backends": [name for name, there in (("gloo", dist.is_gloo_available()), ("nccl", has_nccl)) if there],
    }


def judge_software(ranks: Sequence[Observation]) -> Iterator[Finding]:
    """List the versions of rank 0, and check that all ranks have the same."""
    first = ranks[0]["software"]
    yield ok(", ".join(f"{name} {number}" for name, number in first["versions"].items()) + ".")
    if "gloo" in first["backends"]:
        built_for = f"CUDA {first['cuda']}" if first["cuda"] else "CPUs only"
        yield ok(f"Backends: {', '.join(first['backends'])}; torch is built for {built_for}.")
    else:
        yield error("This torch has no gloo, which ranks need to start.", "Install torch from pytorch.org.")
    if not any(name in first["versions"] for name in _LIGHTNING):
        yield error("Neither `lightning` nor `pytorch_lightning` is installed.", "Run `pip install lightning`.")
    versions = {observed["rank"]: observed["software"]["versions"] for observed in ranks}
    different = differences(versions, absent="none")
    for name, what in different.items():
        make = error if name in _MUST_BE_EQUAL else warning
        yield make(f"Ranks have different versions of {name}: {what}.", "Install the same environment on every host.")
    if len(ranks) > 1 and not different:
        yield ok(f"All {len(ranks)} ranks have the same versions.")


def observe_gpus() -> dict[str, Any]:
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return {
        "devices": [
            {"name": torch.cuda.get_device_name(index), "free_mib": free // MIB, "total_mib": total // MIB}
            for index, (free, total) in enumerate(map(torch.cuda.mem_get_info, range(count)))
        ],
        "seen_by_driver": [line for line in _ask("--query-gpu=name", "--format=csv,noheader").splitlines() if line],
        "without_peer_access": [
            [a, b] for a in range(count) for b in range(a) if not torch.cuda.can_device_access_peer(a, b)
        ],
        "topology": _ask("topo", "-m") if count > 1 else "",
        "link_bytes_per_s": _link_speed() if count > 1 else None,
    }


def judge_gpus(ranks: Sequence[Observation]) -> Iterator[Finding]:
    hosts = one_per_host(ranks)
    for observed in hosts:
        yield from _judge_gpus_of_host(observed["gpus"], observed["where"])
    if len({device["name"] for observed in hosts for device in observed["gpus"]["devices"]}) > 1:
        yield warning("GPUs differ, and every step waits for the slowest.", "Use one kind of GPU for a run.")


def _judge_gpus_of_host(seen: Observation, where: str) -> Iterator[Finding]:
    names = [device["name"] for device in seen["devices"]]
    if names:
        yield ok(f"{', '.join(f'{names.count(name)} x {name}' for name in dict.fromkeys(names))}{where}.")
    elif seen["seen_by_driver"]:
        yield error(
            f"The driver sees {len(seen['seen_by_driver'])} GPUs{where}, but torch cannot use them.",
            "Install a torch that is built for CUDA and for this driver; look at `CUDA_VISIBLE_DEVICES`.",
        )
    else:
        yield note(f"There is no GPU{where}: ranks train on CPUs and talk through gloo.")
    for index, device in enumerate(seen["devices"]):
        if device["free_mib"] < 0.8 * device["total_mib"]:
            yield warning(
                f"Of GPU {index}{where} only {device['free_mib'] / 1024:.1f} of {device['total_mib'] / 1024:.1f} GiB"
                " are free.",
                "See in `nvidia-smi` which other process computes there.",
            )
    if len(names) > 1 and seen["without_peer_access"]:
        pairs = ", ".join(f"{b}-{a}" for a, b in seen["without_peer_access"])
        yield warning(
            f"GPUs{where} do not reach each other directly (pairs {pairs}): what they exchange goes through the host.",
            "Look at `nvidia-smi topo -m`; in virtual machines and with some BIOS settings (ACS) it is switched off.",
        )
    elif len(names) > 1:
        yield ok(f"All GPUs{where} reach each other directly.")


def _link_speed() -> dict[str, Any] | None:
    """Return the bytes per second of a GPU's links in each direction, and where that figure comes from."""
    status = _ask("nvlink", "--status", "-i", "0")
    links = [float(speed) for speed in re.findall(r"Link \d+: ([\d.]+) GB/s", status)]
    if links:
        origin = f"{len(links)} NVLinks of GPU 0, says `nvidia-smi nvlink --status`"
        return {"value": sum(links) * 1e9, "origin": origin}
    fields = _ask("--query-gpu=pcie.link.gen.max,pcie.link.width.max", "--format=csv,noheader", "-i", "0")
    with suppress(ValueError, KeyError):
        generation, width = (int(field) for field in fields.split(","))
        origin = f"PCI Express {generation} x{width} of GPU 0, says `nvidia-smi`"
        return {"value": width * _PCIE_LANE_BYTES_PER_S[generation], "origin": origin}
    return None


def _ask(*arguments: str) -> str:
    """Return the output of `nvidia-smi`; empty if it is not there or fails."""
    with suppress(OSError, subprocess.SubprocessError):
        return subprocess.check_output(["nvidia-smi", *arguments], stderr=subprocess.DEVNULL, text=True, timeout=15)
    return ""


def observe_limits() -> dict[str, Any]:
    shared_memory = None
    with suppress(OSError):
        disk = shutil.disk_usage(_SHARED_MEMORY)
        shared_memory = {"total": disk.total, "free": disk.free}
    return {
        "open_files": _limit(resource.RLIMIT_NOFILE),
        "processes": _limit(resource.RLIMIT_NPROC),
        "locked_memory": _limit(resource.RLIMIT_MEMLOCK),
        "shared_memory": shared_memory,
        "cores": _num_cores(),
        "omp_num_threads": os.environ.get("OMP_NUM_THREADS"),
        "memory_available": _memory_available(),
    }


def judge_limits(ranks: Sequence[Observation]) -> Iterator[Finding]:
    for observed in one_per_host(ranks):
        seen, where = observed["resources"], observed["where"]
        num_local = sum(other["host"] == observed["host"] for other in ranks)
        yield _judge_open_files(seen["open_files"], where, num_ranks=len(ranks))
        if seen["processes"] is not None and seen["processes"] < 4096:
            yield warning(
                f"This user may start only {seen['processes']:,} processes and threads{where}.",
                "Raise it: `ulimit -u 16384`, or in /etc/security/limits.conf.",
            )
        locked = seen["locked_memory"]
        if observed["network"]["infiniband_gbit"] and locked is not None:
            yield error(
                f"Locked memory is limited to {locked / MIB:g} MiB{where}, and InfiniBand needs as much as it can get.",
                "Run `ulimit -l unlimited`, or start the container with `--ulimit memlock=-1`.",
            )
        else:
            size = "no limit" if locked is None else f"{locked / MIB:g} MiB, which is enough without InfiniBand"
            yield ok(f"Locked memory{where}: {size}.")
        yield _judge_shared_memory(seen["shared_memory"], where)
        yield _judge_cores(seen["cores"], seen["omp_num_threads"], where, num_local=num_local)
        if (free := seen["memory_available"]) is None:
            yield note(f"How much memory is free{where} cannot be told.")
            continue
        text = f"Memory{where}: {free / GIB:.1f} GiB are free for {pluralize(num_local, 'rank')}."
        if free < GIB * num_local:
            yield warning(text, "End what else runs there, or start fewer processes or data workers.")
        else:
            yield ok(text)


def _judge_open_files(limit: int | None, where: str, *, num_ranks: int) -> Finding:
    # torch, loggers and a few data workers need 256. A rank has up to three process groups with a connection to every
    # other rank, whose two ends may be on one host. Each tensor on its way from a data worker is an open file, too.
    needed = 256 + 6 * num_ranks
    if limit is None or limit >= needed + 4096:
        return ok(f"Open files{where}: {'no limit' if limit is None else f'{limit:,}'}.")
    remedy = "Raise it before the start: `ulimit -n 65536`, or `LimitNOFILE=65536` of the service."
    if limit < needed:
        needs = f"with {pluralize(num_ranks, 'rank')} each needs about {needed:,}"
        return error(f"A process may open only {limit:,} files{where}; {needs}.", remedy)
    return warning(
        f"A process may open only {limit:,} files{where}: with many data workers that may not be enough.", remedy
    )


def _judge_shared_memory(size: Observation | None, where: str) -> Finding:
    remedy = "Start the container with `--shm-size=8g` or `--ipc=host`; else use `num_workers=0`."
    if size is None:
        return error(f"There is no {_SHARED_MEMORY}{where}, which data workers hand batches through.", remedy)
    text = f"{_SHARED_MEMORY}{where}: {size['free'] / GIB:.2f} of {size['total'] / GIB:.2f} GiB are free"
    if size["free"] < 64 * MIB:
        return error(f"{text}. Data workers hand batches through it and will die.", remedy)
    if size["free"] < GIB:
        return warning(f"{text}. Data workers hand batches through it.", remedy)
    return ok(f"{text}.")


def _judge_cores(cores: int, threads: str | None, where: str, *, num_local: int) -> Finding:
    if num_local > cores:
        return warning(
            f"{num_local} ranks share {pluralize(cores, 'core')}{where}.",
            "Start fewer processes, or ask for more cores (`--cpus-per-task` with SLURM).",
        )
    if threads is not None and threads.isdigit() and int(threads) * num_local > cores:
        return warning(
            f"OMP_NUM_THREADS={threads} for each of {num_local} ranks{where}, with {cores} cores for all.",
            f"Set `OMP_NUM_THREADS={max(cores // num_local, 1)}`.",
        )
    chosen = f"OMP_NUM_THREADS={threads}" if threads else "OMP_NUM_THREADS is not set, so the launcher decides"
    return ok(f"{pluralize(cores, 'core')}{where} for {pluralize(num_local, 'rank')}; {chosen}.")


def _limit(kind: int) -> int | None:
    soft, _ = resource.getrlimit(kind)
    return None if soft == resource.RLIM_INFINITY else soft


def _num_cores() -> int:
    """Return how many cores this process may use, by its affinity and by the quota of its container."""
    cores = len(os.sched_getaffinity(0))
    with suppress(OSError, ValueError):
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        cores = min(cores, max(int(quota) // int(period), 1))
    return cores


def _memory_available() -> int | None:
    """Return the free memory of the host, or of the container if that is less; None if unknown."""
    found = []
    with suppress(OSError, ValueError, IndexError):
        line = next(line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemAvailable"))
        found.append(int(line.split()[1]) * 1024)
    with suppress(OSError, ValueError):  # the container's limit
        limit, used = (int(Path("/sys/fs/cgroup", name).read_text()) for name in ("memory.max", "memory.current"))
        found.append(max(limit - used, 0))
    return min(found, default=None)


# By type of file system: when its files are lost.
_LOST_WHEN = {
    **dict.fromkeys(("tmpfs", "ramfs"), "the machine stops"),
    **dict.fromkeys(("overlay", "aufs"), "the container is removed"),
}


def observe_directory(directory: Path, *, rank: int) -> dict[str, Any]:
    """Look for the directory, and write a trial file on rank 0: it writes checkpoints, the others only read them."""
    seen: dict[str, Any] = {"directory": str(directory.absolute()), "exists": os.path.isdir(directory)}
    if rank > 0 or not seen["exists"]:
        return seen
    try:
        leftovers = find_temporary_files(str(directory))
        num_bytes = 0
        for path in leftovers:
            with suppress(OSError):  # it may be gone by now
                num_bytes += path.stat().st_size
        seen |= {"num_leftovers": len(leftovers), "leftover_bytes": num_bytes}
        seen |= {"file_system": _file_system(directory), "free": shutil.disk_usage(directory).free}
        return seen | _write_trial(directory)
    except OSError as failed:
        return seen | {"error": failed.strerror or str(failed)}


def judge_directory(ranks: Sequence[Observation]) -> Iterator[Finding]:
    seen = ranks[0]["checkpoints"]
    if seen is None:
        yield note("No directory was looked at.", "Pass `--checkpoints DIR` with the one that checkpoints go to.")
        return
    if not seen["exists"]:
        yield error(
            f"There is no directory {seen['directory']}.", "Check the name, and that its disk is mounted; or make it."
        )
        return
    yield _judge_writing(seen)
    if "free" in seen:
        yield from _judge_place(seen)
    without = [rank["rank"] for rank in ranks if not (rank["checkpoints"] and rank["checkpoints"]["exists"])]
    if without:
        yield warning(
            f"There is no directory {seen['directory']} on {list_some_ranks(without)}: resuming reads it on all.",
            "Put checkpoints on a file system that all hosts share.",
        )


def _judge_writing(seen: Observation) -> Finding:
    directory = seen["directory"]
    if seen["error"] is not None:
        return error(
            f"A checkpoint cannot be written to {directory}: {seen['error']}.",
            "Make room there, get the right to write there, or choose another directory.",
        )
    speed = seen["num_bytes"] / max(seen["seconds"], 1e-9)
    text = (
        f"A file of {seen['num_bytes'] / MIB:.1f} MiB was written to {directory}, flushed and renamed in"
        f" {seen['seconds']:.2f} s: {speed / MIB:,.0f} MiB/s"
    )
    if speed < 50e6:
        waits = f"A checkpoint of 1 GiB holds training up for {GIB / speed:.0f} s"
        return warning(f"{text}. {waits}.", "Pass `async_checkpoints=True` to the strategy, or use a local disk.")
    return ok(f"{text}.")


def _judge_place(seen: Observation) -> Iterator[Finding]:
    kind, free = seen["file_system"], f"{seen['free'] / GIB:.1f} GiB are free in {seen['directory']}"
    if (end := _LOST_WHEN.get(kind)) is not None:
        yield warning(f"The file system is {kind}: checkpoints are lost when {end}.", "Use a disk that stays.")
    if seen["free"] < 10 * GIB:
        yield warning(f"Only {free}.", "Make room, or keep fewer checkpoints (`save_top_k`).")
    else:
        yield ok(f"{free} ({kind or 'unknown file system'}).")
    if seen["num_leftovers"]:
        yield note(
            f"{pluralize(seen['num_leftovers'], 'temporary file')} of saves, {seen['leftover_bytes'] / MIB:,.1f} MiB:"
            " of saves that are under way, or that were killed.",
            "Nothing to do: the next save removes those whose writers are gone.",
        )


def _write_trial(directory: Path) -> dict[str, Any]:
    path = directory / f".bucketddp-doctor-{os.getpid()}"
    block = os.urandom(4 * MIB)  # no file system can compress it
    start = time.perf_counter()
    try:
        with atomic_file(str(path)) as file:
            for _ in range(16):
                file.write(block)
        seconds = time.perf_counter() - start
    finally:
        with suppress(OSError):
            path.unlink()
    return {"error": None, "num_bytes": 16 * len(block), "seconds": seconds}


def _file_system(directory: Path) -> str | None:
    found: dict[str, str] = {}
    with suppress(OSError):
        for line in Path("/proc/self/mountinfo").read_text().splitlines():
            before, _, after = line.partition(" - ")
            found[before.split()[4].replace("\\040", " ")] = after.split()[0]
    path = directory.resolve()
    return next((found[str(place)] for place in (path, *path.parents) if str(place) in found), None)
