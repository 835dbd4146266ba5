"""Jobs that record steps of a bare loop."""

from __future__ import annotations

import time
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from lightning_bucketddp.recording.schema import Step
from lightning_bucketddp.recording.writer import StepRecorder, step_of
from lightning_bucketddp.reducer.reducer import Reducer
from tests.support.jobs.models import CASES, WIDTH, batch
from tests.support.jobs.parity import build_reducer
from tests.support.ranks import device

# Buckets of the small models are smaller than this, but for the last.
_CAP_MB = 40 / 2**20

CONFIGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bf16": {"reduce_dtype": "bf16"},
    "int8": {"reduce_dtype": "int8"},
    "hook": {"comm_hook": default_hooks.allreduce_hook},
    "compressing hook": {"comm_hook": default_hooks.bf16_compress_hook},
    "no overlap": {"overlap": False},
    "each alone": {"all_alone": True},
}


@dataclass(frozen=True)
class Recorded:
    """A step, what its buckets hold, and how many gradients the reducer has missed in it."""

    step: Step
    bucket_bytes: list[int]
    num_unused: int


def assert_in_order(step: Step, *, tolerance_s: float = 0.0) -> None:
    """Spans do not overlap, a bucket is ready before it leaves, and the step waits until the last has ended."""

    def assert_not_later(one: float, other: float) -> None:
        assert one <= other + tolerance_s

    for span in step.spans:
        assert_not_later(span.start_s, span.end_s)
    for one, next_one in pairwise(step.spans):
        assert_not_later(one.end_s, next_one.start_s)
    for bucket in step.buckets:
        assert_not_later(bucket.ready_s, bucket.launched_s)
        assert_not_later(bucket.launched_s, bucket.ended_s)
    for one_bucket, next_bucket in pairwise(step.buckets):
        assert_not_later(one_bucket.launched_s, next_bucket.launched_s)
    exposed = [span for span in step.spans if span.name == "exposed"]
    if step.buckets:
        assert_not_later(max(bucket.ended_s for bucket in step.buckets), exposed[-1].end_s)


def assert_weights_are_recorded(step: Step, *, num_buckets: int) -> None:
    """Each is waited for once, at the end of the step, which is not the optimizer's time."""
    assert [gather.bucket for gather in step.gathers] == list(range(num_buckets))
    names = [span.name for span in step.spans]
    assert names.count("weights") == num_buckets
    assert set(names[: names.index("optimizer")]) == {"forward", "backward", "exposed"}
    assert set(names[names.index("optimizer") :]) == {"optimizer", "weights"}
    assert step.seconds("weights") > 0
    assert abs(step.exposed_s - step.seconds("weights") - step.seconds("exposed")) < 1e-9


def record(case: str, config: str, *, num_micro_batches: int = 2) -> Recorded:
    """The last of three steps, on a machine on which rank 1 is late."""
    known = CASES[case]
    torch.manual_seed(3)
    model = known.build().to(device())
    reducer = build_reducer(model, bucket_cap_mb=_CAP_MB, **CONFIGS[config])
    recorder = StepRecorder(device())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    num_unused = 0
    for number in range(3):
        num_unused = reducer.stats.num_unused
        if number == 2:
            recorder.begin(reducer.stats)
            reducer.observer = recorder
        for micro_batch in range(num_micro_batches):
            with recorder.during("forward"):
                time.sleep(0.02 * dist.get_rank())
                loss = known.loss(model, dist.get_rank(), number)
            is_last = micro_batch == num_micro_batches - 1
            with recorder.during("backward"), nullcontext() if is_last else reducer.no_sync(), reducer.backward():
                loss.backward()
        with recorder.during("optimizer"):
            optimizer.step()
            optimizer.zero_grad()
    return _finish(reducer, recorder, num_unused)


class _Pause(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        time.sleep(0.4)
        return gradient


class _PausesInBackward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(_Pause.apply(self.first(x)))


def record_a_long_backward() -> Recorded:
    """A reduction ends long before the next one can begin."""
    torch.manual_seed(3)
    model = _PausesInBackward().to(device())
    reducer = build_reducer(model, bucket_cap_mb=WIDTH * (WIDTH + 1) * 4 / 2**20)
    recorder = StepRecorder(device())
    for number in range(2):
        if number == 1:
            recorder.begin(reducer.stats)
            reducer.observer = recorder
        with recorder.during("backward"), reducer.backward():
            model(batch(dist.get_rank(), number)).square().mean().backward()
    return _finish(reducer, recorder, num_unused=0)


def _finish(reducer: Reducer, recorder: StepRecorder, num_unused: int) -> Recorded:
    bucket_set = reducer.bucket_set
    assert bucket_set is not None
    marked = recorder.complete(reducer.stats, step=2, plan=bucket_set.version)
    step = step_of(marked, recorder.axis, memory_bytes=0)
    recorder.close()
    assert step is not None
    bucket_bytes = [bucket.num_bytes for bucket in bucket_set.buckets]
    reducer.close()
    return Recorded(step, bucket_bytes, reducer.stats.num_unused - num_unused)
