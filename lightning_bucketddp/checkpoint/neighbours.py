"""Other checkpoints in the directory of one that cannot be read."""

from __future__ import annotations

import os

from fsspec import AbstractFileSystem  # type: ignore[import-untyped]

from lightning_bucketddp.checkpoint.damage import damage_in

# Each may be gigabytes to read.
_MAX_TRIED = 10


def newest_intact_beside(path: str, filesystem: AbstractFileSystem) -> str | None:
    """The name of the file that was written last, among those beside `path` with its suffix and without damage.

    Args:
        path: as `filesystem` calls it.
        filesystem: where it is.
    """
    try:
        names = filesystem.ls(os.path.dirname(path), detail=False)
        others = [name for name in names if _is_candidate(name, path) and filesystem.isfile(name)]
        for name in sorted(others, key=filesystem.modified, reverse=True)[:_MAX_TRIED]:
            with filesystem.open(name) as file:
                if damage_in(file) is None:
                    return os.path.basename(str(name))
    except (OSError, NotImplementedError):
        pass  # a server that lists nothing, or does not know when: all that is missing then is advice
    return None


def _is_candidate(name: str, path: str) -> bool:
    base = os.path.basename(name)
    is_same = os.path.basename(path) == base
    return not is_same and not base.startswith(".") and os.path.splitext(base)[1] == os.path.splitext(path)[1]
