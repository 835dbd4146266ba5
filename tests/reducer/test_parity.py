"""Our gradients and weights are torch DDP's, bit for bit where the arithmetic is the same.

With 2 ranks a mean has one rounding whatever the order, so equality is exact. With 4 ranks the order of the additions
depends on where in its bucket an element lies, so a tolerance of a few units in the last place is allowed; the ranks
among themselves are exactly equal all the same.
"""

from __future__ import annotations

import pytest

from tests.support.cases import for_each
from tests.support.jobs.models import CASES
from tests.support.jobs.parity import Training, parity_with_mean, parity_with_torch_ddp, torch_ddp_can
from tests.support.ranks import run_on_ranks

FOUR_RANKS_TOLERANCE = 1e-6


@pytest.mark.parametrize("case", CASES)
def test_equals_torch_ddp_or_the_mean_where_that_cannot(case: str) -> None:
    run_on_ranks(parity_with_torch_ddp if torch_ddp_can(case) else parity_with_mean, case=case, training=Training())


@for_each(("case", "micro_batches"), [("mlp", 3), ("channels_last", 4), ("tied_transformer", 2)])
def test_accumulation_equals_torch_ddp(case: str, micro_batches: int) -> None:
    run_on_ranks(parity_with_torch_ddp, case=case, training=Training(micro_batches=micro_batches))


@for_each("case", ["complex", "unused_in_turns", "checkpoint_reentrant_shared", "freeze_and_unfreeze"])
def test_accumulation_equals_the_mean(case: str) -> None:
    # Also where a parameter is used only in an earlier micro-batch, which torch DDP never synchronises.
    run_on_ranks(parity_with_mean, case=case, training=Training(micro_batches=3))


@for_each(
    ("case", "bucket_cap_mb"),
    [
        *(("mlp", cap) for cap in (1e-6, 0.0005, [0.001, 0.0001, 0.002])),
        ("tied_transformer", 1e-6),
        ("unused_in_turns", [0.001, 0.0001, 0.002]),
        ("many_dtypes", 0.0005),
        ("sparse_embedding", 1e-6),
    ],
)
def test_bucket_sizes_do_not_matter(case: str, bucket_cap_mb: float | list[float]) -> None:
    ranks = run_on_ranks(parity_with_torch_ddp, case=case, training=Training(bucket_cap_mb=bucket_cap_mb))
    assert all(rank.num_buckets > 1 for rank in ranks)


@for_each("case", ["mlp", "channels_last", "complex", "unused_in_turns", "checkpoint_reentrant_shared"])
def test_gradients_that_are_reduced_where_they_are_equal_the_mean(case: str) -> None:
    run_on_ranks(parity_with_mean, case=case, training=Training(micro_batches=3, all_alone=True))
    run_on_ranks(parity_with_mean, case=case, training=Training(all_alone=True, steps=2))


@for_each(
    ("case", "optimizer", "clip"),
    [
        ("mlp", "momentum", "norm"),
        ("mlp", "adamw_foreach", "value"),
        ("channels_last", "adamw_fused", "norm"),
    ],
)
def test_optimizers_and_clipping_equal_torch_ddp(case: str, optimizer: str, clip: str) -> None:
    training = Training(optimizer=optimizer, clip=clip, micro_batches=2, bucket_cap_mb=0.001)
    run_on_ranks(parity_with_torch_ddp, case=case, training=training)


def test_lbfgs_equals_torch_ddp() -> None:
    run_on_ranks(parity_with_torch_ddp, case="mlp", training=Training(optimizer="lbfgs"))


@for_each("case", ["conv_batchnorm", "tied_transformer", "sparse_embedding", "unused_in_turns", "partly_frozen"])
def test_four_ranks(case: str) -> None:
    training = Training(bucket_cap_mb=0.001, steps=3, tolerance=FOUR_RANKS_TOLERANCE)
    run_on_ranks(parity_with_torch_ddp, world_size=4, case=case, training=training)


@for_each("micro_batches", [1, 3])
@for_each("case", ["mlp", "unused_in_turns", "everything_unused_on_one_rank", "many_dtypes"])
def test_each_bucket_is_reduced_once_per_step(case: str, micro_batches: int) -> None:
    training = Training(micro_batches=micro_batches, bucket_cap_mb=0.001)
    for rank in run_on_ranks(parity_with_mean, case=case, training=training):
        assert rank.num_all_reduces == rank.stats.num_reductions == training.steps * rank.num_buckets
        assert rank.stats.num_backwards == training.steps
