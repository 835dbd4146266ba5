"""Gradients that travel as int8: what arrives, what it costs, and what it must never hide.

Two ranks give each other all they have; more exchange parts, and round the mean once more.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch

from lightning_bucketddp.reducer.quantization import Blocks
from tests.reducer.test_nonfinite import RAISED, raised_on_all
from tests.support.cases import for_each
from tests.support.jobs import quantized
from tests.support.jobs.models import CASES
from tests.support.jobs.nonfinite import Bad
from tests.support.jobs.parity import Training, parity_with_quantized_mean
from tests.support.jobs.weighting import weighted_mean
from tests.support.ranks import run_on_ranks

# In one of them buffers depend on who gives them to whom, which is tested elsewhere.
MODELS = [case for case in CASES if case != "buffer_in_forward"]
# The sum of sparse gradients, which travel as they are, depends on its order.
SPARSE = "sparse_embedding"
SHORT = ("mlp", "unused_in_turns")


def in_short(names: Iterable[str], *short: str) -> list[Any]:
    """Return `names`, of which all but `short` are left to the long tests."""
    return [name if name in short else pytest.param(name, marks=pytest.mark.long) for name in names]


@pytest.mark.parametrize("case", in_short(MODELS, *SHORT, "channels_last", "complex", "many_dtypes", SPARSE))
def test_what_arrives_is_the_mean_of_what_was_rounded(case: str) -> None:
    run_on_ranks(parity_with_quantized_mean, case=case, training=Training(reduce_dtype="int8"))


@pytest.mark.parametrize("case", in_short([*SHORT, "channels_last", "complex", "many_dtypes"], *SHORT))
def test_among_more_ranks_it_is_rounded_once_more(case: str) -> None:
    training = Training(reduce_dtype="int8", bucket_cap_mb=0.0005)
    run_on_ranks(parity_with_quantized_mean, world_size=4, case=case, training=training)


@pytest.mark.parametrize(
    ("case", "training"),
    [
        ("unused_in_turns", Training(micro_batches=3, reduce_dtype="int8")),
        ("unused_in_turns", Training(all_alone=True, reduce_dtype="int8")),
        ("unused_in_turns", Training(bucket_cap_mb=0.0005, reduce_dtype="int8")),
        ("channels_last", Training(micro_batches=3, reduce_dtype="int8")),
        ("many_dtypes", Training(all_alone=True, reduce_dtype="int8")),
        ("unused_on_one_rank", Training(bucket_cap_mb=0.0005, reduce_dtype="int8")),
    ],
)
def test_so_it_is_however_gradients_are_collected(case: str, training: Training) -> None:
    run_on_ranks(parity_with_quantized_mean, case=case, training=training)


@pytest.mark.parametrize("world_size", [2, 4])
def test_every_size_arrives(world_size: int) -> None:
    run_on_ranks(quantized.buckets_of_all_sizes, world_size=world_size)


@pytest.mark.parametrize(
    ("case", "shard"), [("channels_last", True), ("channels_last", "parameters"), ("unused_in_turns", "parameters")]
)
def test_with_divided_state_the_mean_is_rounded_once(case: str, shard: bool | str) -> None:
    assert min(run_on_ranks(quantized.train_sharded, case=case, shard=shard)) > 1


@pytest.mark.parametrize("world_size", [2, 4])
def test_bytes_are_a_quarter(world_size: int) -> None:
    [fp32, *_], [int8, *_], [scattered, *_] = (
        run_on_ranks(quantized.bytes_written, world_size=world_size, reduce_dtype=dtype, shard=shard)
        for dtype, shard in ((None, False), ("int8", False), ("int8", True))
    )
    assert 0.25 < int8 / fp32 <= 0.27
    assert 0.125 < scattered / fp32 <= 0.14  # the scatter half alone


def test_weights_of_ranks_count() -> None:
    run_on_ranks(weighted_mean, config="int8_wire", num_micro_batches=2)


@for_each("world_size", [2, 4])
def test_a_nan_stays_one_and_stays_where_it_is(world_size: int) -> None:
    for finite in run_on_ranks(quantized.nan_of_rank_one, world_size=world_size):
        assert finite == {"0.weight": True, "0.bias": False, "1.weight": True, "1.bias": True}


@for_each("value", [float("nan"), float("inf"), -float("inf")])
def test_a_gradient_that_is_not_finite_is_named(value: float) -> None:
    error = raised_on_all(bad=Bad("2.weight", value), reduce_dtype="int8")
    assert error == RAISED.format("the gradient of `2.weight` on rank 1")


def test_in_a_trial_the_ranks_fail_together() -> None:
    outcomes = run_on_ranks(quantized.try_together, world_size=4)
    assert outcomes == [["RuntimeError"], ["KeyError"], ["RuntimeError"], ["RuntimeError"]]


def test_no_thread_is_left() -> None:
    assert run_on_ranks(quantized.threads_left, world_size=4) == [[]] * 4


@for_each("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_blocks_keep_zeros_and_the_largest_number_and_are_spoiled_alone(dtype: torch.dtype) -> None:
    blocks = Blocks(1000, num_rows=2, row_numel=512, device=torch.device("cpu"))
    numbers = torch.zeros(1000, dtype=dtype)
    numbers[10] = torch.finfo(dtype).max if dtype != torch.float64 else torch.finfo(torch.float32).max
    numbers[300] = -1e-7  # less than fp16 can invert
    numbers[600] = float("nan")
    numbers[999] = -float("inf")
    decoded = torch.full_like(numbers, 7)
    blocks.encode(numbers)
    blocks.decode(decoded)
    torch.testing.assert_close(decoded[:512], numbers[:512], rtol=1e-2, atol=0)
    assert not decoded[512:768].isfinite().any()
    assert not decoded[768:].isfinite().any()
    assert blocks.bytes.nbytes == 2 * 2 * (256 + 4)
