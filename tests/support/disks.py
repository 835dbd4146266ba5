"""Disks for tests that are as small or as closed as wanted: in memory, mounted where only we see them.

They live as long as the process that holds their namespace, and need no more rights than a user namespace gives.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.hosts import PACKAGE_OF, held

_NOBODY = 65534


@dataclass(frozen=True)
class Disk:
    """A disk of its own; what `within` is put in front of sees it at `/mnt`."""

    path: Path
    within: tuple[str, ...]

    def make_read_only(self) -> None:
        self.mount("-o", "remount,ro", "/mnt")

    def mount(self, *arguments: str) -> None:
        process = subprocess.run([*self.within, "mount", *arguments], capture_output=True, text=True, check=False)
        if process.returncode != 0:
            pytest.skip(f"this machine does not permit `mount {' '.join(arguments)}`: {process.stderr.strip()}")


@contextmanager
def small_disk(*, num_bytes: int) -> Iterator[Disk]:
    """An empty disk with room for `num_bytes`; skips where that is impossible."""
    for tool in ("unshare", "nsenter"):
        if shutil.which(tool) is None:
            pytest.skip(f"`{tool}` is not installed (package {PACKAGE_OF[tool]})")
    with held("unshare", "--user", "--map-root-user", "--mount") as pid:
        within = ("nsenter", "--target", str(pid), "--user", "--mount", "--preserve-credentials")
        # Other processes of ours reach it through the one that holds it.
        disk = Disk(Path("/proc", str(pid), "root", "mnt"), within)
        disk.mount("-t", "tmpfs", "-o", f"size={num_bytes}", "none", "/mnt")
        yield disk


@contextmanager
def forbidden_directory() -> Iterator[Path]:
    """A directory that all may read and nobody but root may write to."""
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o555)
        yield Path(name)


@contextmanager
def not_as_root() -> Iterator[None]:
    """Have no more rights to files than anyone else."""
    is_root = os.geteuid() == 0
    if is_root:
        # Needed for names of hosts, and Python would remember for ever that it could not read it.
        "host".encode("idna")
        os.seteuid(_NOBODY)
    try:
        yield
    finally:
        if is_root:
            os.seteuid(0)
