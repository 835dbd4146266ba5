"""Writing a checkpoint on rank zero and reading it on every rank, with an outcome that every rank learns."""

from __future__ import annotations

import hashlib
import os
import zipfile
import zlib
from collections.abc import Callable
from typing import Any, TypeVar

from fsspec.core import url_to_fs  # type: ignore[import-untyped]
from fsspec.implementations.local import LocalFileSystem  # type: ignore[import-untyped]

from lightning_bucketddp.checkpoint.checkpoint_io import CheckpointReadError, CheckpointWriteError
from lightning_bucketddp.comm.collectives import Collectives
from lightning_bucketddp.wording import list_some_ranks

_Checkpoint = TypeVar("_Checkpoint")
_CHUNK_BYTES = 2**20


def write_on_rank_zero(
    write: Callable[[], None],
    collectives: Collectives | None,
    *,
    path: str | os.PathLike[str] | None = None,
    is_saver: bool | None = None,
) -> None:
    """Call `write` on rank zero; if it raises an `Exception`, raise on every rank. All ranks must call this.

    Once the process group is gone, after a failure of some rank, one rank writes and the others do nothing: the one
    where `is_saver`, else rank zero. `collectives` is None when there are no other ranks.
    """
    if collectives is None or not collectives.is_open:
        if collectives is None or (collectives.rank == 0 if is_saver is None else is_saver):
            write()
        return
    if collectives.rank == 0:
        try:
            write()
        except Exception as error:
            failure = CheckpointWriteError.because(error, path=path)
            collectives.broadcast_json({"message": str(failure), "errno": failure.errno})
            raise
    if (on_rank_zero := collectives.broadcast_json(None)) is not None:
        raise CheckpointWriteError(f"{on_rank_zero['message']} (on rank 0)", errno=on_rank_zero["errno"])


def read_on_every_rank(
    read: Callable[[], _Checkpoint], collectives: Collectives, *, path: str | os.PathLike[str]
) -> _Checkpoint:
    """Call `read`; raise on every rank if it raises on any, or if they differ in files. All ranks must call this."""
    try:
        checkpoint = read()
        content = fingerprint(str(path), reads_remote=False)
    except Exception as error:
        is_ours = isinstance(error, CheckpointReadError)
        text = str(error) if is_ours else f"Cannot read checkpoint `{path}`: {type(error).__name__}: {error}"
        collectives.gather_json({"path": str(path), "error": text})
        raise
    _raise_difference(collectives.gather_json({"path": str(path), "content": content}))
    return checkpoint


def read_nowhere(collectives: Collectives) -> None:
    """Tell the ranks that may be in `read_on_every_rank` now that this one has nothing to read."""
    _raise_difference(collectives.gather_json({"path": None}))


def _raise_difference(outcomes: list[dict[str, Any]]) -> None:
    """Raise if the `outcomes`, by rank, are errors on some ranks or different files."""
    if failed := [rank for rank, outcome in enumerate(outcomes) if "error" in outcome]:
        raise CheckpointReadError(f"{outcomes[failed[0]]['error']} (on {list_some_ranks(failed)})")
    without = [rank for rank, outcome in enumerate(outcomes) if outcome["path"] is None]
    if 0 < len(without) < len(outcomes):
        path = next(outcome["path"] for outcome in outcomes if outcome["path"] is not None)
        raise CheckpointReadError(
            f"There is a checkpoint `{path}` to resume from, but not on {list_some_ranks(without)}. Save where"
            " all hosts can read, or copy it to every host."
        )
    other = [rank for rank, outcome in enumerate(outcomes) if outcome.get("content") != outcomes[0].get("content")]
    if other:
        raise CheckpointReadError(
            f"The checkpoint `{outcomes[0]['path']}` of rank 0 is another one than `{outcomes[other[0]]['path']}` of"
            f" {list_some_ranks(other)}: the files differ. Save where all hosts can read, or copy one file to every"
            " host."
        )


def fingerprint(path: str, *, reads_remote: bool = True) -> str | None:
    """Return a fingerprint that differs for files that differ; None for what is not a file.

    Archives are not read: they hold checksums. Unless `reads_remote`, what is not a local file has none.
    """
    filesystem, target = url_to_fs(path)
    if not (reads_remote or isinstance(filesystem, LocalFileSystem)) or not filesystem.isfile(target):
        return None
    with filesystem.open(target, "rb") as file:
        try:
            with zipfile.ZipFile(file) as archive:
                entries = [(entry.filename, entry.file_size, entry.CRC) for entry in archive.infolist()]
            return hashlib.sha256(repr(entries).encode()).hexdigest()
        except zipfile.BadZipFile:  # an older file, or one of a user's own plugin
            checksum = 0
            file.seek(0)
            while chunk := file.read(_CHUNK_BYTES):
                checksum = zlib.crc32(chunk, checksum)
            return f"{checksum:08x}"
