"""Replicas that stop being equal, in bare loops: no Lightning, so that they run on a GPU too."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_bucketddp.comm.collectives import Collectives
from lightning_bucketddp.comm.step_exchange import StepExchange
from lightning_bucketddp.config import OnDivergence, ReducerConfig, ReplicaChecks
from lightning_bucketddp.reducer.reducer import Reducer
from lightning_bucketddp.reducer.weighting import Weighting
from lightning_bucketddp.replicas.consistency import (
    Checksums,
    ReplicaComparison,
    ReplicaDivergedError,
    TrainingState,
    training_state,
    units_of,
)
from lightning_bucketddp.replicas.replicas import ReplicaMismatchError, Replicas
from tests.support.jobs.models import batch, mlp
from tests.support.jobs.parity import assert_equal_on_all_ranks
from tests.support.ranks import device

DTYPES = [
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128),
    *(torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.float8_e4m3fn),
]
# Less than a word and more, and several times round the factors.
NUM_ELEMENTS = [0, 1, 3, 125, 65_521, 8 * 65_521 + 3]


def flip_bit(tensor: Tensor, bit: int) -> None:
    """Flip one bit of a dense tensor in place."""
    with torch.no_grad():
        raw = tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)
        raw[bit // 8] = raw[bit // 8] ^ (1 << bit % 8)


def every_bit_counts(dtype: torch.dtype) -> None:
    """Any single bit, at the ends and anywhere between; and equal bits have equal checksums on every device."""
    generator = torch.Generator().manual_seed(1)
    checksums = Checksums()

    def checksum(tensor: Tensor) -> int:
        [value] = checksums.start([[tensor]])()
        return value

    for num_elements in NUM_ELEMENTS:
        num_bytes = num_elements * dtype.itemsize
        raw = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, generator=generator)
        tensor = raw.view(dtype).to(device())
        expected = checksum(raw.view(dtype))
        assert checksum(tensor) == expected
        assert checksums.start(units_of([tensor]))() == [expected]
        if num_bytes > 0:
            anywhere = torch.randint(0, 8 * num_bytes, (5,), generator=generator).tolist()
            for bit in {0, 7, 8 * num_bytes - 1, *anywhere}:
                flip_bit(tensor, bit)
                assert checksum(tensor) != expected, (num_bytes, bit)
                flip_bit(tensor, bit)
            assert checksum(tensor) == expected


@contextmanager
def own_group() -> Iterator[dist.ProcessGroup]:
    """All ranks in a group that may be left with collectives that nobody ends."""
    group = dist.new_group(timeout=timedelta(seconds=30))
    assert group is not None
    yield group


def freeze_on_one_rank_in_mid_training(*, is_known: bool, overlap: bool) -> str:
    """Two sets are trained. Then rank 1 trains another one than rank 0, and all ranks have a plan for it or none."""
    torch.manual_seed(3)
    model = mlp().to(device())
    with own_group() as group:
        collectives = Collectives(device(), group=group)
        weighting = Weighting(StepExchange(collectives), by_weight=False)
        config = ReducerConfig(bucket_cap_mb=1e-6, overlap=overlap)
        reducer = Reducer(Replicas(model, collectives), config, weighting=weighting)
        on_this_rank: set[int] = {0} if dist.get_rank() == 1 else set()
        frozen: list[set[int]] = [set(), {0} if is_known else {2}, set(), set(), on_this_rank]
        try:
            for step, layers in enumerate(frozen):
                for layer in (0, 2):
                    model[layer].requires_grad_(layer not in layers)  # type: ignore[index]
                model.zero_grad()
                with reducer.backward():
                    model(batch(dist.get_rank(), step)).square().mean().backward()
        except ReplicaMismatchError as error:
            return f"step {step}: {error}"
        finally:
            reducer.close()
    return "no error"


class Training:
    """A loop with everything that the strategies have around one."""

    def __init__(self, config: ReplicaChecks) -> None:
        torch.manual_seed(3)
        self.model = nn.Sequential(nn.Linear(8, 300), nn.Tanh(), nn.Linear(300, 4)).to(device())
        collectives = Collectives(device())
        exchange = StepExchange(collectives)
        self.replicas = Replicas(self.model, collectives)
        self.replicas.broadcast()
        weighting = Weighting(exchange, by_weight=False)
        self.reducer = Reducer(self.replicas, ReducerConfig(), weighting=weighting)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.checks = ReplicaComparison(collectives, config, exchange=exchange, has_messages=True)

    def state(self) -> TrainingState:
        return training_state(self.replicas.parameters, [self.optimizer])

    def step(self, inputs: Tensor) -> None:
        self.checks.between_steps(self.state, num_backwards=self.reducer.stats.num_backwards)
        self.optimizer.zero_grad()
        with self.reducer.backward():
            self.model(inputs).square().mean().backward()
        self.optimizer.step()


def flip_in_a_loop(*, on_divergence: OnDivergence, on_rank: int) -> str:
    """One bit of the second moment of a weight flips after three steps; what ten steps with a check every other say."""
    training = Training(ReplicaChecks(2, on_divergence))
    try:
        for number in range(10):
            training.step(batch(dist.get_rank(), number))
            if number == 2 and dist.get_rank() == on_rank:
                weight: Any = training.model[0].weight
                flip_bit(training.optimizer.state[weight]["exp_avg_sq"], 8 * 100 + 4)
    except ReplicaDivergedError as error:
        return str(error)
    finally:
        training.reducer.close()
    if on_divergence == "heal":
        assert_equal_on_all_ranks(training.model)
        for state in training.optimizer.state.values():
            for value in state.values():
                mine = value.to(device())
                first = mine.clone()
                dist.broadcast(first, src=0)
                assert torch.equal(mine, first)
    return "no error"
