"""Replicas that are not equal: noticed within so many steps and before each checkpoint, named, and raised or healed."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_bucketddp.bindings.fabric_lightning import BucketDDPStrategy as FabricStrategy
from lightning_bucketddp.bindings.trainer_lightning import BucketDDPStrategy
from lightning_bucketddp.comm.collectives import Collectives
from lightning_bucketddp.comm.step_exchange import StepExchange, Weighting
from lightning_bucketddp.config import OnDivergence, ReducerConfig, ReplicaChecks
from lightning_bucketddp.reducer.reducer import Reducer
from lightning_bucketddp.replicas.consistency import (
    Checksums,
    ReplicaComparison,
    ReplicaDivergedError,
    TrainingState,
    find_divergence,
    training_state,
    units_of,
)
from lightning_bucketddp.replicas.replicas import ReplicaMismatchError, Replicas
from tests.support.cases import for_each
from tests.support.jobs.models import batch, mlp
from tests.support.jobs.parity import assert_equal_on_all_ranks
from tests.support.ranks import device, run_on_ranks

DTYPES = [
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128),
    *(torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.float8_e4m3fn),
]


def flip_bit(tensor: Tensor, bit: int) -> None:
    """Flip one bit of a dense tensor in place."""
    with torch.no_grad():
        raw = tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)
        raw[bit // 8] = raw[bit // 8] ^ (1 << bit % 8)


def checksum(tensor: Tensor) -> int:
    [value] = Checksums().start([[tensor]])()
    return value


def every_bit_counts(dtype: torch.dtype) -> None:
    """Any single bit, at the ends and anywhere between; and equal bits have equal checksums on every device."""
    generator = torch.Generator().manual_seed(1)
    # Less than a word and more, and twice round the factors.
    for num_elements in (0, 1, 3, 125, 65_521, 16 * 65_521 // dtype.itemsize + 3):
        num_bytes = num_elements * dtype.itemsize
        raw = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, generator=generator)
        tensor = raw.view(dtype).to(device())
        expected = checksum(raw.view(dtype))
        assert checksum(tensor) == expected
        assert Checksums().start(units_of([tensor]))() == [expected]
        if num_bytes > 0:
            anywhere = torch.randint(0, 8 * num_bytes, (5,), generator=generator).tolist()
            for bit in {0, 7, 8 * num_bytes - 1, *anywhere}:
                flip_bit(tensor, bit)
                assert checksum(tensor) != expected, (num_bytes, bit)
                flip_bit(tensor, bit)
            assert checksum(tensor) == expected


def freeze_on_one_rank_in_mid_training(*, is_known: bool, overlap: bool) -> str:
    """Two sets are trained. Then rank 1 trains another one than rank 0, and all ranks have a plan for it or none."""
    torch.manual_seed(3)
    model = mlp().to(device())
    # A group of its own, because its collectives may never end.
    collectives = Collectives(device(), group=dist.new_group(timeout=timedelta(seconds=30)))
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
    """Flip one bit of a second moment after three of ten steps, with a check every other step; return the error."""
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


@for_each("dtype", DTYPES)
def test_every_bit_counts(dtype: torch.dtype) -> None:
    every_bit_counts(dtype)


def test_truth_values_nothing_and_numbers_that_are_none_have_checksums() -> None:
    assert checksum(torch.tensor([True, False])) != checksum(torch.tensor([True, True]))
    assert checksum(torch.empty(0, 3)) == checksum(torch.empty(0))
    not_numbers = torch.tensor([float("nan"), float("-inf")])
    assert checksum(not_numbers) == checksum(not_numbers.clone())
    assert checksum(torch.tensor(0.0)) != checksum(torch.tensor(-0.0))


def test_layouts_that_are_not_contiguous_have_checksums() -> None:
    images = torch.randn(2, 3, 4, 5)
    in_other_order = images.to(memory_format=torch.channels_last)
    assert checksum(in_other_order) == checksum(in_other_order.clone()) != checksum(images)
    assert checksum(torch.ones(1).expand(6)) == checksum(torch.ones(6))
    numbers = torch.randn(9)
    assert checksum(numbers[1:6]) == checksum(numbers[1:6].clone())
    assert checksum(numbers[::2]) == checksum(numbers[::2].clone())
    conjugate = torch.randn(4, dtype=torch.complex64).conj()
    assert checksum(conjugate) == checksum(conjugate.resolve_conj())


@for_each(
    ("values", "source", "text"),
    [
        ([{"w": 1}, {"w": 2}], 0, "`w` differs between rank 0 and rank 1."),
        ([{"w": 1}, {"w": 1}, {"w": 2}], 0, "`w` on rank 2 differs from that on the other ranks."),
        ([{"w": 1}, {"w": 2}, {"w": 2}, {"w": 1}], 0, "`w` differs between ranks 0, 3 and ranks 1, 2."),
        (
            [{"w": 2, "v": 1}, {"w": 1, "v": 2}, {"w": 1, "v": 1}, {"w": 1, "v": 1}],
            2,
            "`w` on rank 0 differs from that on the other ranks; `v` on rank 1 differs from that on the other ranks.",
        ),
        ([{"lr": 0.1}, {"lr": 0.2}, {"lr": 0.1}], 0, "`lr` is 0.1 on ranks 0, 2 but 0.2 on rank 1."),
        ([{"w": 1}, {}, {"w": 1}], 0, "`w` exists on ranks 0, 2 but not on rank 1."),
        (
            [dict.fromkeys("abcde", 1), dict.fromkeys("abcde", 2)],
            0,
            "`a` differs between rank 0 and rank 1; `b` differs between rank 0 and rank 1; `c` differs between rank 0"
            " and rank 1; and 2 more.",
        ),
    ],
)
def test_most_ranks_are_right(values: list[dict[str, Any]], source: int, text: str) -> None:
    divergence = find_divergence(dict(enumerate(values)), numbers={"lr"})
    assert divergence is not None
    assert divergence.source == source
    assert str(divergence).startswith(f"{text} Hardware that flips bits, or code")
    assert find_divergence(dict.fromkeys(range(3), values[0]), numbers={"lr"}) is None


@for_each("on_divergence", ["raise", "heal", "log"])
def test_drift_in_a_bare_loop(on_divergence: str) -> None:
    expected = "after 6 synchronised backwards: `optimizer 0: exp_avg_sq of 0.weight` differs between rank 0 and rank"
    for error in run_on_ranks(flip_in_a_loop, on_divergence=on_divergence, on_rank=1):
        assert expected in error if on_divergence == "raise" else error == "no error"


@for_each("is_known", [True, False])
@for_each("overlap", [True, False])
def test_a_layer_that_one_rank_freezes_is_named(is_known: bool, overlap: bool) -> None:
    errors = run_on_ranks(freeze_on_one_rank_in_mid_training, is_known=is_known, overlap=overlap)
    text = "step 4: `0.weight` has requires_grad True on rank 0 but False on rank 1."
    assert all(error.startswith(text) for error in errors), errors


@for_each("strategy", [BucketDDPStrategy, FabricStrategy])
def test_options_are_checked(strategy: Any) -> None:
    for number in (-1, 1.5, True, "often"):
        with pytest.raises(ValueError, match="`replica_checks` must be a number of steps, or None"):
            strategy(replica_checks=number)
    assert strategy(replica_checks=5).options.replica_checks == ReplicaChecks(5)
    with pytest.raises(ValueError, match="`on_divergence` must be one of `raise`, `heal`, `log`, got 'ignore'"):
        ReplicaChecks(on_divergence="ignore")  # type: ignore[arg-type]
