"""Writing on rank zero, with an outcome that every rank learns."""

from __future__ import annotations

import os
from collections.abc import Callable

from lightning_bucketddp.checkpoint.errors import CheckpointWriteError
from lightning_bucketddp.comm.collectives import Collectives


def write_on_rank_zero(
    write: Callable[[], None], collectives: Collectives | None, *, path: str | os.PathLike[str] | None = None
) -> None:
    """Call `write` on rank zero; if it raises an `Exception`, raise on every rank. All ranks must call this.

    Without it the other ranks would wait for ever for a rank zero that has failed. Once the process group is gone,
    after a failure of some rank, rank zero writes alone and the others do nothing.

    Args:
        write: writes the checkpoint.
        collectives: None when there are no other ranks to tell.
        path: what is written, for the error; None if not known.
    """
    if collectives is None or not collectives.is_open:
        if collectives is None or collectives.rank == 0:
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
