"""The file that a rank writes, so that it neither fills the disk nor ends a run."""

from __future__ import annotations

import logging
from contextlib import suppress
from pathlib import Path
from typing import TextIO

from lightning_bucketddp.recording.record import Line, path_of, write

log = logging.getLogger(__name__)

# After so many recorded batches, every second step is written, after as many more every fourth, and so on: ten times as
# long a run takes a few such portions more. Counted, and not weighed, so that all ranks write the same steps.
BATCHES_PER_PORTION = 1000


class Thinning:
    """Which of the recorded rounds are written; a round is the batches of one step, or of several optimizers' steps."""

    def __init__(self, batches_per_portion: int = BATCHES_PER_PORTION) -> None:
        self._batches_per_portion = batches_per_portion
        self._num_rounds = 0
        self._num_batches = 0
        self._every = 1

    def takes_next(self) -> bool:
        """Whether the next round is written."""
        self._num_rounds += 1
        return self._num_rounds % self._every == 0

    def add(self, num_batches: int) -> None:
        """A round of so many batches was written."""
        self._num_batches += num_batches
        if self._num_batches >= self._batches_per_portion:
            self._num_batches, self._every = 0, 2 * self._every


class RecordFile:
    """What one rank writes in one fit. What cannot be written is warned of once, and training goes on.

    Args:
        folder: where all ranks write; what an earlier fit has left there is replaced.
        rank: who writes.
    """

    def __init__(self, folder: Path, *, rank: int) -> None:
        self._path = path_of(folder, rank)
        self._rank = rank
        self._file: TextIO | None = None
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = self._path.open("w")
        except OSError as error:
            self._give_up(error)

    def write(self, line: Line) -> None:
        """Append `line`."""
        if self._file is None:
            return
        try:
            write(line, self._file)
        except OSError as error:
            self._give_up(error)

    def close(self) -> None:
        """Write no more."""
        file, self._file = self._file, None
        if file is not None:
            try:
                file.close()
            except OSError as error:
                self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        log.warning(
            "bucketddp: rank %d cannot record its steps in `%s` (%s). Training goes on, without a record from here."
            " Pass another `dirpath` to `BucketDDPMonitor`.",
            self._rank,
            self._path,
            error,
        )
        file, self._file = self._file, None
        if file is not None:
            # What is still in its buffer cannot be written either.
            with suppress(OSError):
                file.close()
