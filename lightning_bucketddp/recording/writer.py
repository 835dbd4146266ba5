"""Turn recorded steps into lines and metrics, and write the file of a rank."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from statistics import fmean
from typing import TextIO

from lightning_bucketddp.config import MIB
from lightning_bucketddp.planning.plan import BucketSpec, ParameterSpec
from lightning_bucketddp.recording.schema import (
    ALL_REDUCE,
    BucketTimes,
    GatherTimes,
    Line,
    RecordedBucket,
    RecordedPlan,
    Span,
    Step,
    bandwidth_of,
    path_of,
    write,
)
from lightning_bucketddp.recording.step_recorder import MarkedStep
from lightning_bucketddp.reducer.observer import Axis

log = logging.getLogger(__name__)

# After this many recorded batches every second step is written, after as many more every fourth, and so on, so that a
# file grows with the logarithm of a run's length. Batches are counted, not bytes: all ranks must write the same steps.
BATCHES_PER_PORTION = 1000


def step_of(marked: MarkedStep, axis: Axis, *, memory_bytes: int) -> Step | None:
    """Convert a marked step to seconds, waiting for marks still pending; None if a backward of it did not end."""
    if not marked.spans or any(bucket.launched is None or not bucket.ends for bucket in marked.buckets.values()):
        return None
    gathers = [gather for gather in marked.gathers.values() if gather.ends]
    axis.move_to(marked.spans[0].start)
    buckets: list[BucketTimes] = []
    for _, bucket in sorted(marked.buckets.items()):
        ready_s, launched_s = axis.seconds(bucket.ready), axis.seconds(bucket.launched)
        buckets.append(BucketTimes(ready_s, launched_s, max(min(map(axis.seconds, bucket.ends)), launched_s)))
    return Step(
        step=marked.step,
        plan=marked.plan,
        spans=[Span(span.name, axis.seconds(span.start), axis.seconds(span.end)) for span in marked.spans],
        buckets=buckets,
        bytes_on_wire=marked.bytes_on_wire + sum(gather.num_bytes for gather in gathers) // 2,
        num_unused=marked.num_unused,
        num_skipped=marked.num_skipped,
        memory_bytes=memory_bytes,
        gathers=[
            GatherTimes(gather.bucket, axis.seconds(gather.launched), min(map(axis.seconds, gather.ends)))
            for gather in gathers
        ],
    )


def plan_of(
    version: int, buckets: Sequence[BucketSpec], specs: Sequence[ParameterSpec], *, scatters: bool = False
) -> RecordedPlan:
    """Return the line for a plan; with `scatters` each rank gets the gradients of its share of sharded buckets only."""
    recorded = []
    for bucket in buckets:
        names, sizes = [specs[i].name for i in bucket.members], [specs[i].num_bytes for i in bucket.members]
        collective = ALL_REDUCE
        if bucket.sharded is not None and scatters:
            collective = "reduce-scatter" if bucket.sharded.owner is None else "reduce"
        is_sharded = bucket.sharded is not None
        recorded.append(RecordedBucket(names, sizes, bucket.sparse, sharded=is_sharded, collective=collective))
    return RecordedPlan(version, recorded)


def metrics_of(steps: Sequence[Step], *, num_ranks: int) -> dict[str, float]:
    """Return the metrics to log: means over `steps`."""
    bandwidths = (bandwidth_of(step.bytes_on_wire, step.communication_s, num_ranks=num_ranks) for step in steps)
    return {
        "step_ms": 1e3 * fmean(step.step_s for step in steps),
        "communication_ms": 1e3 * fmean(step.communication_s for step in steps),
        "exposed_ms": 1e3 * fmean(step.exposed_s for step in steps),
        "overlap_pct": 100 * fmean(step.overlap for step in steps),
        "mb_on_wire": fmean(step.bytes_on_wire for step in steps) / MIB,
        "bandwidth_gbit_s": 8e-9 * fmean(bandwidths),
        "buckets": fmean(len(step.buckets) for step in steps),
        "unused_parameters": fmean(step.num_unused for step in steps),
        "skipped_ranks": fmean(step.num_skipped for step in steps),
        "plan_version": float(steps[-1].plan),
    }


class Sampling:
    """Decides which recorded rounds are written; a round is the batches up to a step of one or several optimizers."""

    def __init__(self, batches_per_portion: int = BATCHES_PER_PORTION) -> None:
        self._batches_per_portion = batches_per_portion
        self._num_rounds = 0
        self._num_batches = 0
        self._every = 1

    def takes_next(self) -> bool:
        """Count a round, and return whether to write it."""
        self._num_rounds += 1
        return self._num_rounds % self._every == 0

    def add(self, num_batches: int) -> None:
        """Count the batches of a round that was written."""
        self._num_batches += num_batches
        if self._num_batches >= self._batches_per_portion:
            self._num_batches, self._every = 0, 2 * self._every


class RecordFile:
    """The file of one rank in one fit, in the folder of all ranks, or none; files of an earlier fit are replaced.

    If it cannot be written, warn once and let training go on.
    """

    def __init__(self, folder: Path | None, *, rank: int) -> None:
        self._file: TextIO | None = None
        if folder is None:
            return
        self._path = path_of(folder, rank)
        self._rank = rank
        with self._giving_up_on_errors():
            folder.mkdir(parents=True, exist_ok=True)
            self._file = self._path.open("w")

    def write(self, line: Line) -> None:
        if self._file is not None:
            with self._giving_up_on_errors():
                write(line, self._file)

    def close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            with self._giving_up_on_errors():
                file.close()

    @contextmanager
    def _giving_up_on_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            log.warning(
                "bucketddp: rank %d cannot record its steps in `%s` (%s). Training goes on, without a record from here."
                " Pass another `dirpath` to `BucketDDPMonitor`.",
                self._rank,
                self._path,
                error,
            )
            file, self._file = self._file, None
            if file is not None:
                with suppress(OSError):  # closing flushes, which may fail again
                    file.close()
