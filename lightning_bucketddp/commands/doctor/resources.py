"""What the system lets a rank have: open files, processes, shared memory, cores, memory."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from lightning_bucketddp.commands.doctor.finding import Finding, Observation, Theme, counted, on, one_per_host
from lightning_bucketddp.config import MIB

_THEME = Theme("Limits")
_SHARED_MEMORY = "/dev/shm"
GIB = 1024 * MIB

# What torch, the loggers and a few data workers keep open; each tensor on its way from a worker is an open file, too.
_FILES_OF_A_RANK = 256
_FILES_FOR_DATA_WORKERS = 4096
# A rank has up to three groups with a connection to every other rank, and each has two ends on one host.
_FILES_PER_RANK = 6
_PROCESSES = 4096
_SMALL_SHARED_MEMORY = GIB
_TOO_SMALL_SHARED_MEMORY = 64 * MIB
_SMALL_MEMORY_PER_RANK = GIB


def observe() -> dict[str, Any]:
    """Limits of this process, and what its host has."""
    return {
        "open_files": _limit(resource.RLIMIT_NOFILE),
        "processes": _limit(resource.RLIMIT_NPROC),
        "locked_memory": _limit(resource.RLIMIT_MEMLOCK),
        "shared_memory": _size_of(_SHARED_MEMORY),
        "cores": _num_cores(),
        "omp_num_threads": os.environ.get("OMP_NUM_THREADS"),
        "memory_available": _memory_available(),
    }


def judge(ranks: Sequence[Observation]) -> Iterator[Finding]:
    """On each host: is it enough for the ranks that are there."""
    for observed in one_per_host(ranks):
        where = on(observed, ranks)
        num_local = sum(other["host"] == observed["host"] for other in ranks)
        seen = observed["resources"]
        yield _judge_open_files(seen["open_files"], where, num_ranks=len(ranks))
        if seen["processes"] is not None and seen["processes"] < _PROCESSES:
            yield _THEME.warning(
                f"This user may start only {seen['processes']:,} processes and threads{where}.",
                f"Raise it: `ulimit -u {_PROCESSES * 4}`, or in /etc/security/limits.conf.",
            )
        yield _judge_locked_memory(seen["locked_memory"], where, infiniband=observed["network"]["infiniband_gbit"])
        yield _judge_shared_memory(seen["shared_memory"], where)
        yield from _judge_cores(seen, where, num_local=num_local)
        yield _judge_memory(seen["memory_available"], where, num_local=num_local)


def _judge_open_files(limit: int | None, where: str, *, num_ranks: int) -> Finding:
    needed = _FILES_OF_A_RANK + _FILES_PER_RANK * num_ranks
    if limit is None or limit >= needed + _FILES_FOR_DATA_WORKERS:
        return _THEME.ok(f"Open files{where}: {'no limit' if limit is None else f'{limit:,}'}.")
    wanted = 65536
    remedy = f"Raise it before the start: `ulimit -n {wanted}`, or `LimitNOFILE={wanted}` of the service."
    if limit < needed:
        needs = f"with {counted(num_ranks, 'rank')} each needs about {needed:,}"
        return _THEME.error(f"A process may open only {limit:,} files{where}; {needs}.", remedy)
    return _THEME.warning(
        f"A process may open only {limit:,} files{where}: with many data workers that may not be enough.", remedy
    )


def _judge_locked_memory(limit: int | None, where: str, *, infiniband: float | None) -> Finding:
    if infiniband and limit is not None:
        return _THEME.error(
            f"Locked memory is limited to {limit / MIB:g} MiB{where}, and InfiniBand needs as much as it can get.",
            "Run `ulimit -l unlimited`, or start the container with `--ulimit memlock=-1`.",
        )
    text = "no limit" if limit is None else f"{limit / MIB:g} MiB, which is enough without InfiniBand"
    return _THEME.ok(f"Locked memory{where}: {text}.")


def _judge_shared_memory(size: Observation | None, where: str) -> Finding:
    remedy = "Start the container with `--shm-size=8g` or `--ipc=host`; else use `num_workers=0`."
    if size is None:
        return _THEME.error(f"There is no {_SHARED_MEMORY}{where}, which data workers hand batches through.", remedy)
    text = f"{_SHARED_MEMORY}{where}: {size['free'] / GIB:.2f} of {size['total'] / GIB:.2f} GiB are free"
    if size["free"] < _TOO_SMALL_SHARED_MEMORY:
        return _THEME.error(f"{text}. Data workers hand batches through it and will die.", remedy)
    if size["free"] < _SMALL_SHARED_MEMORY:
        return _THEME.warning(f"{text}. Data workers hand batches through it.", remedy)
    return _THEME.ok(f"{text}.")


def _judge_cores(seen: Observation, where: str, *, num_local: int) -> Iterator[Finding]:
    cores, threads = seen["cores"], seen["omp_num_threads"]
    if num_local > cores:
        yield _THEME.warning(
            f"{num_local} ranks share {counted(cores, 'core')}{where}.",
            "Start fewer processes, or ask for more cores (`--cpus-per-task` with SLURM).",
        )
    elif threads is not None and threads.isdigit() and int(threads) * num_local > cores:
        yield _THEME.warning(
            f"OMP_NUM_THREADS={threads} for each of {num_local} ranks{where}, with {cores} cores for all.",
            f"Set `OMP_NUM_THREADS={max(cores // num_local, 1)}`.",
        )
    else:
        chosen = f"OMP_NUM_THREADS={threads}" if threads else "OMP_NUM_THREADS is not set, so whoever launches chooses"
        yield _THEME.ok(f"{counted(cores, 'core')}{where} for {counted(num_local, 'rank')}; {chosen}.")


def _judge_memory(available: int | None, where: str, *, num_local: int) -> Finding:
    if available is None:
        return _THEME.note(f"How much memory is free{where} cannot be told.")
    text = f"Memory{where}: {available / GIB:.1f} GiB are free for {counted(num_local, 'rank')}."
    if available < _SMALL_MEMORY_PER_RANK * num_local:
        return _THEME.warning(text, "End what else runs there, or start fewer processes or data workers.")
    return _THEME.ok(text)


def _limit(kind: int) -> int | None:
    soft, _ = resource.getrlimit(kind)
    return None if soft == resource.RLIM_INFINITY else soft


def _size_of(path: str) -> dict[str, int] | None:
    with suppress(OSError):
        disk = os.statvfs(path)
        return {"total": disk.f_blocks * disk.f_frsize, "free": disk.f_bavail * disk.f_frsize}
    return None


def _num_cores() -> int:
    """Those that this process may use, by its affinity and by the quota of its container."""
    cores = len(os.sched_getaffinity(0))
    with suppress(OSError, ValueError):
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        cores = min(cores, max(int(quota) // int(period), 1))
    return cores


def _memory_available() -> int | None:
    found = []
    with suppress(OSError, ValueError, IndexError):
        line = next(line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemAvailable"))
        found.append(int(line.split()[1]) * 1024)
    with suppress(OSError, ValueError):  # the container's limit
        limit, used = (int(Path("/sys/fs/cgroup", name).read_text()) for name in ("memory.max", "memory.current"))
        found.append(max(limit - used, 0))
    return min(found, default=None)
