"""Synchronised BatchNorm trains as ordinary BatchNorm does in one process that has the batches of all ranks."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.cases import for_each
from tests.support.jobs import sync_batchnorm as jobs
from tests.support.jobs import sync_batchnorm_layers as layer_jobs
from tests.support.jobs.sync_batchnorm import NUM_CHANNELS, Batches
from tests.support.ranks import RankPool, run_on_ranks

HALF_TYPES = [torch.bfloat16, torch.float16]
KINDS = [(nn.BatchNorm1d, ()), (nn.BatchNorm1d, (5,)), (nn.BatchNorm2d, (4, 5)), (nn.BatchNorm3d, (2, 3, 4))]


@for_each("split", [(4, 4), (5, 3), (7, 1), (8, 0), (0, 0)])
@for_each(("layer_class", "spatial_size"), KINDS)
def test_trains_like_one_process_however_the_batch_is_split(
    layer_class: type[nn.Module], spatial_size: tuple[int, ...], split: tuple[int, int]
) -> None:
    batches = Batches(split=split, spatial_size=spatial_size)
    run_on_ranks(jobs.train, model=layer_class(NUM_CHANNELS).double(), batches=batches)


@pytest.mark.parametrize("split", [(2, 2, 2, 2), (4, 0, 1, 3)], ids=str)
def test_trains_like_one_process_on_four_ranks(split: tuple[int, ...]) -> None:
    model = nn.BatchNorm2d(NUM_CHANNELS).double()
    run_on_ranks(jobs.train, world_size=4, model=model, batches=Batches(split=split))


@for_each(
    "options",
    [
        {"momentum": None},
        {"momentum": 0.7, "eps": 0.1},
        {"affine": False},
        {"track_running_stats": False},
        {"affine": False, "momentum": None, "track_running_stats": False},
    ],
)
def test_trains_like_one_process_with_every_option(options: dict[str, Any]) -> None:
    run_on_ranks(jobs.train, model=nn.BatchNorm2d(NUM_CHANNELS, **options).double(), batches=Batches())


def test_trains_like_one_process_without_bias() -> None:
    model = nn.BatchNorm2d(NUM_CHANNELS).double()
    model.register_parameter("bias", None)
    run_on_ranks(jobs.train, model=model, batches=Batches())


@for_each("split", [(5, 3), (8, 0)])
@for_each("autocast", [False, True])
@for_each("half_parameters", [False, True])
@for_each("dtype", HALF_TYPES)
def test_trains_like_one_process_in_half_precision(
    dtype: torch.dtype, half_parameters: bool, autocast: bool, split: tuple[int, int]
) -> None:
    model = nn.BatchNorm2d(NUM_CHANNELS, dtype=dtype if half_parameters else torch.float32)
    run_on_ranks(jobs.train, model=model, batches=Batches(split=split, dtype=dtype, autocast=autocast))


@for_each("dtype", [torch.float32, torch.bfloat16])
@for_each(("layer_class", "spatial_size"), KINDS[2:])
def test_keeps_channels_last(layer_class: type[nn.Module], spatial_size: tuple[int, ...], dtype: torch.dtype) -> None:
    batches = Batches(spatial_size=spatial_size, dtype=dtype, layout="channels_last")
    run_on_ranks(jobs.train, model=layer_class(NUM_CHANNELS), batches=batches)


@for_each("dtype", [torch.float64, torch.bfloat16])
def test_takes_inputs_and_gradients_of_any_strides(dtype: torch.dtype) -> None:
    model = nn.BatchNorm2d(NUM_CHANNELS, dtype=torch.promote_types(dtype, torch.float32))
    run_on_ranks(jobs.train, model=model, batches=Batches(dtype=dtype, layout="strided"))


def test_variance_is_precise_where_the_mean_is_large() -> None:
    run_on_ranks(jobs.train_far_from_zero)


def test_layer_that_is_used_twice_trains_like_one_process() -> None:
    run_on_ranks(jobs.train, model=jobs.TwiceNormalized().double(), batches=Batches())


@for_each("layer_class", [jobs.BatchNormRelu, jobs.FunctionalBatchNormRelu])
def test_subclass_keeps_its_own_forward(layer_class: type[nn.Module]) -> None:
    run_on_ranks(jobs.train, model=layer_class(NUM_CHANNELS).double(), batches=Batches())


def test_compiled_model_trains_like_one_process() -> None:
    model = nn.Sequential(nn.Conv2d(NUM_CHANNELS, NUM_CHANNELS, 1), nn.BatchNorm2d(NUM_CHANNELS), nn.ReLU())
    run_on_ranks(jobs.train_compiled, model=model.double())


@for_each(
    ("input_needs_grad", "parameters_need_grad", "expected"),
    [(True, True, (1, 1)), (False, True, (1, 0)), (True, False, (1, 1))],
)
def test_each_pass_costs_at_most_one_collective(
    input_needs_grad: bool, parameters_need_grad: bool, expected: tuple[int, int]
) -> None:
    counted = run_on_ranks(
        jobs.count_collectives, input_needs_grad=input_needs_grad, parameters_need_grad=parameters_need_grad
    )
    assert counted == [expected, expected]


@for_each("track_running_stats", [True, False])
def test_evaluation_asks_no_other_rank(track_running_stats: bool) -> None:
    run_on_ranks(jobs.evaluate_different_numbers_of_batches, track_running_stats=track_running_stats)


def test_host_does_not_wait_for_the_device() -> None:
    run_on_ranks(jobs.train_without_host_reads)


def test_gradient_buckets_may_leave_in_between() -> None:
    run_on_ranks(jobs.train_beside_gradient_bucket)


def test_one_value_per_channel_on_all_ranks_together_is_refused_on_each() -> None:
    errors = run_on_ranks(jobs.train_one_value_per_channel)
    for rank, error in enumerate(errors):
        assert error.startswith(
            "Expected more than 1 value per channel when training, got input size"
            f" torch.Size([{1 - rank}, 3]) on rank {rank} and 1 value per channel on all 2 ranks together in"
            " SyncedBatchNorm1d(3, eps=1e-05"
        )
        assert error.endswith("Use larger batches, or leave out the last incomplete one (`drop_last=True`).")


def test_every_batchnorm_is_converted_and_nothing_else() -> None:
    model = nn.Sequential(
        nn.BatchNorm1d(2),
        nn.Sequential(nn.BatchNorm2d(2), nn.ModuleDict({"deep": nn.BatchNorm3d(2)})),
        jobs.BatchNormRelu(2),
        nn.InstanceNorm2d(2),
    )
    names, _ = run_on_ranks(layer_jobs.class_names_after_conversion, model=model)
    assert names == [
        "Sequential",
        "SyncedBatchNorm1d",
        "Sequential",
        "SyncedBatchNorm2d",
        "ModuleDict",
        "SyncedBatchNorm3d",
        "SyncedBatchNormRelu",
        "InstanceNorm2d",
    ]


def test_one_rank_alone_keeps_ordinary_layers() -> None:
    model = nn.Sequential(nn.BatchNorm2d(2), nn.LazyBatchNorm2d())
    (names,) = run_on_ranks(layer_jobs.class_names_after_conversion, world_size=1, model=model)
    assert names == ["Sequential", "BatchNorm2d", "LazyBatchNorm2d"]


def test_revert_keeps_every_object_and_the_statistics() -> None:
    run_on_ranks(layer_jobs.convert_train_and_revert)


def test_converting_twice_is_harmless() -> None:
    run_on_ranks(layer_jobs.convert_twice_and_revert_once)


def test_torch_sync_batchnorm_is_converted_too() -> None:
    run_on_ranks(layer_jobs.train_torch_sync_batchnorm)


def test_deep_copy_is_synchronized_until_the_revert() -> None:
    run_on_ranks(layer_jobs.train_deep_copy)


@pytest.mark.parametrize("protocol", [0, pickle.HIGHEST_PROTOCOL])
def test_pickle_is_an_ordinary_layer_that_needs_no_group_and_not_this_package(protocol: int) -> None:
    pickled, running_mean = run_on_ranks(layer_jobs.pickle_trained_layer, protocol=protocol)[0]
    assert b"lightning_bucketddp" not in pickled
    layer = pickle.loads(pickled)
    assert type(layer) is nn.BatchNorm2d
    assert layer.running_mean is not None
    assert torch.equal(layer.running_mean, running_mean)
    layer(torch.randn(2, NUM_CHANNELS, 4, 5))


def test_lazy_layers_are_refused_before_anything_is_converted() -> None:
    for error, names in run_on_ranks(layer_jobs.convert_lazy_layers):
        assert error == (
            "Cannot synchronize BatchNorm layers that are still lazy: `1.norm` (LazyBatchNorm2d), `2`"
            " (LazyBatchNorm1d). Run one batch through the model before training, for example in `setup`, or use"
            " classes that are not lazy."
        )
        assert names == ["Sequential", "BatchNorm2d", "ModuleDict", "LazyBatchNorm2d", "LazyBatchNorm1d"]


def test_lazy_layer_that_has_seen_a_batch_is_converted() -> None:
    run_on_ranks(layer_jobs.train_lazy_layer_after_a_batch)


def test_a_layer_that_outlives_the_process_group_is_an_ordinary_one() -> None:
    pool = RankPool(2, "gloo")
    try:
        pool.run(layer_jobs.train_after_the_group_is_gone, timeout_s=60, kwargs={})
    finally:
        pool.close()
