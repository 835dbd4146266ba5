"""The checkpoint directory: whether rank 0 can write there, how fast, and how much."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from lightning_bucketddp.checkpoint.atomic_file import atomic_file, find_temporary_files
from lightning_bucketddp.commands.doctor.finding import Finding, Observation, counted, error, note, ok, warning
from lightning_bucketddp.commands.doctor.host import GIB
from lightning_bucketddp.config import MIB
from lightning_bucketddp.wording import list_some_ranks

_TRIAL_BYTES = 64 * MIB
_BLOCK_BYTES = 4 * MIB
_SLOW_BYTES_PER_S = 50e6
_LITTLE_SPACE = 10 * GIB
# By type of file system: what its files do not survive.
_LOST_WHEN = dict.fromkeys(("tmpfs", "ramfs"), "the machine stops")
_LOST_WHEN |= dict.fromkeys(("overlay", "aufs"), "the container is removed")


def observe(directory: Path, *, rank: int) -> dict[str, Any]:
    """Look for the directory, and write a trial file on rank 0: it writes checkpoints, the others only read them."""
    seen: dict[str, Any] = {"directory": str(directory.absolute()), "exists": os.path.isdir(directory)}
    if rank > 0 or not seen["exists"]:
        return seen
    try:
        leftovers = find_temporary_files(str(directory))
        seen |= {"num_leftovers": len(leftovers), "leftover_bytes": sum(_size(path) for path in leftovers)}
        seen |= {"file_system": _file_system(directory), "free": shutil.disk_usage(directory).free}
        return seen | _write_trial(directory)
    except OSError as failed:
        return seen | {"error": failed.strerror or str(failed)}


def judge(ranks: Sequence[Observation]) -> Iterator[Finding]:
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
    if speed < _SLOW_BYTES_PER_S:
        waits = f"A checkpoint of 1 GiB holds training up for {GIB / speed:.0f} s"
        return warning(f"{text}. {waits}.", "Pass `async_checkpoints=True` to the strategy, or use a local disk.")
    return ok(f"{text}.")


def _judge_place(seen: Observation) -> Iterator[Finding]:
    kind, free = seen["file_system"], f"{seen['free'] / GIB:.1f} GiB are free in {seen['directory']}"
    if (end := _LOST_WHEN.get(kind)) is not None:
        yield warning(f"The file system is {kind}: checkpoints are lost when {end}.", "Use a disk that stays.")
    if seen["free"] < _LITTLE_SPACE:
        yield warning(f"Only {free}.", "Make room, or keep fewer checkpoints (`save_top_k`).")
    else:
        yield ok(f"{free} ({kind or 'unknown file system'}).")
    if seen["num_leftovers"]:
        yield note(
            f"{counted(seen['num_leftovers'], 'temporary file')} of saves, {seen['leftover_bytes'] / MIB:,.1f} MiB: of"
            " saves that are under way, or that were killed.",
            "Nothing to do: the next save removes those whose writers are gone.",
        )


def _write_trial(directory: Path) -> dict[str, Any]:
    path = directory / f".bucketddp-doctor-{os.getpid()}"
    block = os.urandom(_BLOCK_BYTES)  # which no file system can compress
    start = time.perf_counter()
    try:
        with atomic_file(str(path)) as file:
            for _ in range(_TRIAL_BYTES // _BLOCK_BYTES):
                file.write(block)
        seconds = time.perf_counter() - start
    finally:
        with suppress(OSError):
            path.unlink()
    return {"error": None, "num_bytes": _TRIAL_BYTES, "seconds": seconds}


def _file_system(directory: Path) -> str | None:
    found: dict[str, str] = {}
    with suppress(OSError):
        for line in Path("/proc/self/mountinfo").read_text().splitlines():
            before, _, after = line.partition(" - ")
            found[before.split()[4].replace("\\040", " ")] = after.split()[0]
    path = directory.resolve()
    return next((found[str(place)] for place in (path, *path.parents) if str(place) in found), None)


def _size(path: Path) -> int:
    with suppress(OSError):  # it may be gone by now
        return path.stat().st_size
    return 0
