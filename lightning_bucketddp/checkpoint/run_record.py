"""Which checkpoints a run has written: a small file, for the start that follows."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from typing import Any

from fsspec.core import url_to_fs  # type: ignore[import-untyped]

from lightning_bucketddp.checkpoint.atomic_file import atomic_file
from lightning_bucketddp.checkpoint.checkpoint_io import damage_at, fingerprint

log = logging.getLogger(__name__)

_DIRECTORY = ".bucketddp/runs"
# Files that are removed by hand stay in the record.
_MAX_CHECKPOINTS = 100

# The class and the version of each.
Loggers = Sequence[tuple[str, int | str | None]]


@dataclass(frozen=True)
class SavedCheckpoint:
    """A checkpoint as it was written."""

    path: str
    number: int
    fingerprint: str
    step: int
    epoch: int

    def describe(self) -> str:
        """Return path and step, for a message."""
        return f"`{self.path}` (step {self.step}, epoch {self.epoch})"

    def is_there(self) -> bool:
        """Return whether the file at the path is the one that was written."""
        try:
            return fingerprint(self.path) == self.fingerprint
        except Exception:  # of the file system, or of zipfile for a damaged index
            return False

    def damage(self) -> str | None:
        """Return what is wrong with the file at the path, in words; None: nothing, or it is not there any more."""
        filesystem, target = url_to_fs(self.path)
        if not filesystem.exists(target):
            return None
        return damage_at(target, filesystem) or (None if self.is_there() else "another file has taken its place")


@dataclass(frozen=True)
class RunEnd:
    """Where a run has ended by itself."""

    step: int
    num_epochs: int  # that were complete
    seconds: float  # that a `Timer` has counted; 0: there was none
    was_stopped: bool  # by a callback other than a `Timer`


class RunRecord:
    """The checkpoints of the run `name`, in a file under `root`, a directory or the address of one."""

    def __init__(self, root: str, name: str) -> None:
        self._root = root.rstrip("/")
        self._address = f"{self._root}/{_DIRECTORY}/{name}.json"
        self._filesystem, path = url_to_fs(self._address)
        self._path: str = path
        # What the run begins with, until there is another checkpoint.
        self.start_path = f"{self._root}/{_DIRECTORY}/{name}.ckpt"

    @property
    def end(self) -> RunEnd | None:
        """Where the run has ended; None: it has not ended."""
        end: dict[str, Any] | None = self._read().get("end")
        return None if end is None else RunEnd(**end)

    @property
    def loggers(self) -> Loggers:
        """The loggers that it had when it last saved."""
        return [(kind, version) for kind, version in self._read().get("loggers", [])]

    @property
    def restarts(self) -> list[dict[str, Any]]:
        """When the run went on after a failure, at which step, and why."""
        return list(self._read().get("restarts", []))

    def newest_first(self) -> list[SavedCheckpoint]:
        """Return the checkpoints by their numbers, because clocks jump. The files may have changed since."""
        saved = []
        for entry in self._read().get("checkpoints", []):
            is_relative = "://" not in entry["path"] and not os.path.isabs(entry["path"])
            path = f"{self._root}/{entry['path']}" if is_relative else entry["path"]
            saved.append(SavedCheckpoint(**{**entry, "path": path}))
        return sorted(saved, key=lambda one: one.number, reverse=True)

    def num_other_runs(self) -> int:
        """Return how many other runs have a record under the same root."""
        directory, own_name = os.path.split(self._path)
        if not self._filesystem.isdir(directory):
            return 0
        names = {os.path.basename(name) for name in self._filesystem.ls(directory, detail=False)}
        return len([name for name in names if name.endswith(".json") and name != own_name])

    def add(self, path: str, *, step: int, epoch: int, loggers: Loggers | None = None, is_over: bool = False) -> None:
        """Note that the newest checkpoint is at `path`, saved after the end of the run if that `is_over`.

        `loggers` are those of now; None: they are not known here.
        """
        if (content := fingerprint(path)) is None:
            log.warning("bucketddp: `auto_resume` will not find `%s`, because it is not a file.", path)
            return
        record = self._without(path)
        number = record.get("last", 0) + 1
        saved = SavedCheckpoint(self._shortened(path), number, content, step, epoch)
        record["checkpoints"] = [*record["checkpoints"], asdict(saved)][-_MAX_CHECKPOINTS:]
        if loggers is not None:
            record["loggers"] = list(loggers)
        self._write({**record, "last": number, "end": record.get("end") if is_over else None})
        if path != self.start_path:
            self.remove_start()

    def remove(self, path: str) -> None:
        """Note that the checkpoint at `path` is removed."""
        record = self._without(path)
        if record["checkpoints"] != self._read().get("checkpoints", []):
            self._write(record)

    def remove_start(self) -> None:
        """Remove what the run has begun with, if it is there."""
        filesystem, path = url_to_fs(self.start_path)
        if filesystem.exists(path):
            filesystem.rm_file(path)  # `rm` takes brackets in a name for a pattern
            self.remove(self.start_path)

    def add_restart(self, why: str, *, step: int) -> None:
        """Note that the run goes on after a failure at `step`."""
        now = datetime.now(timezone.utc).isoformat(timespec="seconds")
        self._write({**self._read(), "restarts": [*self.restarts, {"at": now, "step": step, "why": why}]})

    def set_end(self, end: RunEnd) -> None:
        """Note that the run has ended."""
        self._write({**self._read(), "end": asdict(end)})

    def _without(self, path: str) -> dict[str, Any]:
        record, name = self._read(), self._shortened(path)
        return {**record, "checkpoints": [it for it in record.get("checkpoints", []) if it["path"] != name]}

    def _shortened(self, path: str) -> str:
        """Return `path` from the root on, if it is below: the root may be moved."""
        return path.removeprefix(f"{self._root}/")

    def _read(self) -> dict[str, Any]:
        if not self._filesystem.isfile(self._path):
            return {}
        try:
            record: dict[str, Any] = json.loads(self._filesystem.cat_file(self._path))
        except ValueError as error:
            log.warning("bucketddp: `%s` is left out, because it is damaged: %s", self._path, error)
            return {}
        return record

    def _write(self, record: dict[str, Any]) -> None:
        """Write the record; a failure is a warning, because the checkpoints are there and training can go on."""
        try:
            with atomic_file(self._address) as file:
                file.write(json.dumps(record, indent=1).encode())
        except Exception as error:
            log.warning("bucketddp: `auto_resume` will not find the newest checkpoint: `%s`: %s", self._path, error)
