"""Synchronised BatchNorm trains as ordinary BatchNorm does in one process that has the batches of all ranks."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_bucketddp.comm.collectives import Collectives
from lightning_bucketddp.replicas.sync_batchnorm import convert_sync_batchnorm, revert_sync_batchnorm
from tests.support.cases import for_each
from tests.support.ranks import RankPool, device, on_ranks, run_on_ranks

NUM_CHANNELS = 3
# The one process computes in double precision on the same values: what differs is the rounding of our results.
TOLERANCES: dict[torch.dtype, dict[str, Any]] = {
    torch.float64: {"rtol": 1e-10, "atol": 1e-12},
    torch.float32: {"rtol": 1e-5, "atol": 1e-6},
    torch.float16: {"rtol": 2e-3, "atol": 2e-4},
    # On CUDA torch's kernel rounds the sums that the gradients are made of to the input's dtype.
    torch.bfloat16: {"rtol": 1e-2, "atol": 4e-3 if device().type == "cuda" else 1e-3},
}


@dataclass(frozen=True)
class Batches:
    """What a model is trained on: how many rows on each rank, their shape, dtype and layout."""

    split: Sequence[int] = (5, 3)
    spatial_size: Sequence[int] = (4, 5)
    dtype: torch.dtype = torch.float64
    layout: str = "contiguous"
    autocast: bool = False

    @property
    def mine(self) -> slice:
        first = sum(self.split[: dist.get_rank()])
        return slice(first, first + self.split[dist.get_rank()])

    def draw(self) -> tuple[Tensor, Tensor]:
        """Inputs and output gradients of all ranks."""
        shape = (sum(self.split), NUM_CHANNELS, *self.spatial_size)
        inputs, output_grads = torch.randn(shape) * 2 + 3, torch.randn(shape) + 1
        if self.layout == "channels_last":
            inputs = inputs.to(memory_format=torch.channels_last if len(shape) == 4 else torch.channels_last_3d)
        if self.layout == "strided":
            inputs = inputs.transpose(1, -1).contiguous().transpose(1, -1)
            output_grads = output_grads[..., :1].expand(shape)
        return inputs.to(device(), self.dtype), output_grads.to(device(), self.dtype)


class BatchNormRelu(nn.BatchNorm2d):
    """Normalises through torch's forward, then does more."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input).relu()


class FunctionalBatchNormRelu(nn.BatchNorm2d):
    """Normalises by itself, then does more."""

    def forward(self, input: Tensor) -> Tensor:
        statistics = self.running_mean, self.running_var
        return F.batch_norm(input, *statistics, self.weight, self.bias, self.training, 0.3, self.eps).relu()


class TwiceNormalized(nn.Module):
    """One BatchNorm that is used twice and has two names."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(NUM_CHANNELS)
        self.block = nn.Sequential(nn.Conv2d(NUM_CHANNELS, NUM_CHANNELS, 1), nn.Sequential(self.norm))

    def forward(self, x: Tensor) -> Tensor:
        return self.block(self.norm(x))


class NoHostReads(TorchDispatchMode):
    """Refuses operations whose result the host has to wait for."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func not in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default), func
        return func(*args, **(kwargs or {}))


def train(model: nn.Module, batches: Batches = Batches()) -> None:  # noqa: B008
    assert_same_training(model, convert_and_copy(model.to(device())), batches=batches)


def convert_and_copy(model: nn.Module) -> nn.Module:
    """Give a model random parameters and convert it; return the ordinary model for one process."""
    for parameter in model.parameters():
        nn.init.uniform_(parameter, 0.5, 1.5)
    one_process = copy.deepcopy(model).double()
    convert_sync_batchnorm(model, Collectives(device()))
    return one_process


def assert_same_training(model: nn.Module, one_process: nn.Module, *, batches: Batches = Batches()) -> None:  # noqa: B008
    """Train three steps; compare outputs, gradients and running statistics after each."""
    for _ in range(3):
        inputs, output_grads = batches.draw()
        expected, expected_input_grads = _step(one_process, inputs.double(), output_grads.double())
        with torch.autocast(device().type, dtype=batches.dtype) if batches.autocast else nullcontext():
            output, input_grads = _step(model, inputs[batches.mine], output_grads[batches.mine])
        if batches.layout == "channels_last" and output.numel() > 0:
            assert output.stride() == inputs[batches.mine].stride()
        assert output.dtype == input_grads.dtype == batches.dtype
        _assert_close(output, expected[batches.mine])
        _assert_close(input_grads, expected_input_grads[batches.mine])
        for ours, theirs in zip(model.parameters(), one_process.parameters(), strict=True):
            assert ours.grad is not None
            assert theirs.grad is not None
            summed = ours.grad.clone()
            dist.all_reduce(summed)
            # As means, and to the inputs' precision: torch's kernels round sums of half-precision values to it.
            num_values = max(1, inputs.numel() // NUM_CHANNELS)
            _assert_close((summed / num_values).to(batches.dtype), theirs.grad / num_values)
        for our_buffer, their_buffer in zip(model.buffers(), one_process.buffers(), strict=True):
            _assert_close(our_buffer, their_buffer)


def random_rows() -> Tensor:
    """Four rows for this rank."""
    return torch.randn(4, NUM_CHANNELS, 4, 5).to(device())


def _step(model: nn.Module, inputs: Tensor, output_grads: Tensor) -> tuple[Tensor, Tensor]:
    model.zero_grad()
    inputs = inputs.detach().requires_grad_()
    output = model(inputs)
    output.backward(output_grads)
    assert inputs.grad is not None
    return output.detach(), inputs.grad


def _assert_close(actual: Tensor, expected: Tensor) -> None:
    assert_close(actual.double(), expected.double(), **TOLERANCES.get(actual.dtype, {"rtol": 0, "atol": 0}))


def _layer_and_copy() -> tuple[nn.BatchNorm2d, nn.Module]:
    layer = nn.BatchNorm2d(NUM_CHANNELS).to(device(), torch.float64)
    return layer, convert_and_copy(layer)


def _assert_trains_alone(layer: Any) -> None:
    """Train on one rank only, which ends in time only if it asks no other."""
    inputs = random_rows().to(layer.weight.dtype)
    if dist.get_rank() > 0:
        return
    mean = inputs.mean((0, 2, 3), keepdim=True)
    var = inputs.var((0, 2, 3), keepdim=True, correction=0)
    weight, bias = (parameter.view(-1, 1, 1) for parameter in (layer.weight, layer.bias))
    torch.testing.assert_close(layer(inputs), (inputs - mean) / (var + layer.eps).sqrt() * weight + bias)


KINDS = [(nn.BatchNorm1d, ()), (nn.BatchNorm1d, (5,)), (nn.BatchNorm2d, (4, 5)), (nn.BatchNorm3d, (2, 3, 4))]


@for_each("split", [(4, 4), (5, 3), (7, 1), (8, 0), (0, 0)])
@for_each(("layer_class", "spatial_size"), KINDS)
@on_ranks()
def test_trains_like_one_process_however_the_batch_is_split(
    layer_class: type[nn.Module], spatial_size: tuple[int, ...], split: tuple[int, int]
) -> None:
    train(layer_class(NUM_CHANNELS).double(), Batches(split=split, spatial_size=spatial_size))


@on_ranks(4)
def test_trains_like_one_process_on_four_ranks() -> None:
    for split in ((2, 2, 2, 2), (4, 0, 1, 3)):
        train(nn.BatchNorm2d(NUM_CHANNELS).double(), Batches(split=split))


def without_bias() -> nn.Module:
    model = nn.BatchNorm2d(NUM_CHANNELS)
    model.register_parameter("bias", None)
    return model


def lazy() -> nn.Module:
    layer = nn.LazyBatchNorm2d().to(device())
    layer(random_rows())  # after which it is an ordinary one
    return layer


MODELS: dict[str, Callable[[], nn.Module]] = {
    "cumulative": lambda: nn.BatchNorm2d(NUM_CHANNELS, momentum=None),
    "fast": lambda: nn.BatchNorm2d(NUM_CHANNELS, momentum=0.7, eps=0.1),
    "not affine": lambda: nn.BatchNorm2d(NUM_CHANNELS, affine=False),
    "without statistics": lambda: nn.BatchNorm2d(NUM_CHANNELS, track_running_stats=False),
    "bare": lambda: nn.BatchNorm2d(NUM_CHANNELS, affine=False, momentum=None, track_running_stats=False),
    "without bias": without_bias,
    "used twice": TwiceNormalized,
    "does more": lambda: BatchNormRelu(NUM_CHANNELS),
    "by itself": lambda: FunctionalBatchNormRelu(NUM_CHANNELS),
    "lazy": lazy,
}


@for_each("model", MODELS)
@on_ranks()
def test_trains_like_one_process_with_every_option_and_forward(model: str) -> None:
    train(MODELS[model]().double())


# The class and the dtype of the layer, and what it is trained on.
PRECISIONS_AND_LAYOUTS: list[tuple[type[nn.Module], torch.dtype, Batches]] = [
    (nn.BatchNorm2d, torch.float32, Batches(dtype=torch.bfloat16)),
    (nn.BatchNorm2d, torch.bfloat16, Batches((8, 0), dtype=torch.bfloat16, autocast=True)),
    (nn.BatchNorm2d, torch.float32, Batches(dtype=torch.bfloat16, autocast=True)),
    (nn.BatchNorm2d, torch.float16, Batches(dtype=torch.float16)),
    (nn.BatchNorm2d, torch.float32, Batches((8, 0), dtype=torch.float16)),
    (nn.BatchNorm2d, torch.float32, Batches(dtype=torch.float16, autocast=True)),
    *(
        (layer_class, torch.float32, Batches(spatial_size=size, dtype=dtype, layout="channels_last"))
        for layer_class, size in KINDS[2:]
        for dtype in (torch.float32, torch.bfloat16)
    ),
    (nn.BatchNorm2d, torch.float64, Batches(layout="strided")),
    (nn.BatchNorm2d, torch.float32, Batches(dtype=torch.bfloat16, layout="strided")),
]


@for_each(("layer_class", "dtype", "batches"), PRECISIONS_AND_LAYOUTS)
@on_ranks()
def test_trains_like_one_process_in_every_precision_and_layout(
    layer_class: Callable[..., nn.Module], dtype: torch.dtype, batches: Batches
) -> None:
    train(layer_class(NUM_CHANNELS, dtype=dtype), batches)


@on_ranks()
def test_variance_is_precise_where_the_mean_is_large() -> None:
    """Train in single precision where the mean is a thousand times the deviation, and differs between ranks."""
    layer = nn.BatchNorm2d(NUM_CHANNELS).to(device())
    one_process = convert_and_copy(layer)
    inputs = torch.randn(64, NUM_CHANNELS, 4, 5).to(device()) + 1000
    inputs[:32] += 2
    layer(inputs[Batches(split=(32, 32)).mine])
    one_process(inputs.double())
    assert layer.running_var is not None
    assert_close(layer.running_var.double(), one_process.running_var, rtol=1e-4, atol=0)


@on_ranks()
def test_compiled_model_trains_like_one_process() -> None:
    model = nn.Sequential(nn.Conv2d(NUM_CHANNELS, NUM_CHANNELS, 1), nn.BatchNorm2d(NUM_CHANNELS), nn.ReLU())
    one_process = convert_and_copy(model.to(device()).double())
    model.compile(backend="aot_eager")
    assert_same_training(model, one_process)


@for_each(
    ("input_needs_grad", "parameters_need_grad", "expected"),
    [(True, True, (1, 1)), (False, True, (1, 0)), (True, False, (1, 1))],
)
@on_ranks()
def test_each_pass_costs_at_most_one_collective(
    input_needs_grad: bool, parameters_need_grad: bool, expected: tuple[int, int]
) -> None:
    layer = nn.BatchNorm2d(NUM_CHANNELS).to(device()).requires_grad_(parameters_need_grad)
    convert_sync_batchnorm(layer, Collectives(device()))
    inputs = random_rows().requires_grad_(input_needs_grad)
    with (
        patch.object(Collectives, "gather", autospec=True, side_effect=Collectives.gather) as gather,
        patch.object(Collectives, "sum", autospec=True, side_effect=Collectives.sum) as add_up,
    ):
        layer(inputs).square().sum().backward()
    assert (inputs.grad is not None) == input_needs_grad
    assert (layer.weight.grad is not None) == (layer.bias.grad is not None) == parameters_need_grad
    assert (gather.call_count, add_up.call_count) == expected


@for_each("track_running_stats", [True, False])
@on_ranks()
def test_evaluation_asks_no_other_rank(track_running_stats: bool) -> None:
    """Evaluate one batch on rank 0 and two on rank 1."""
    layer = nn.BatchNorm2d(NUM_CHANNELS, track_running_stats=track_running_stats).to(device(), torch.float64).eval()
    ordinary = convert_and_copy(layer)
    for _ in range(1 + dist.get_rank()):
        inputs = random_rows().double() + dist.get_rank()
        assert torch.equal(layer(inputs), ordinary(inputs))


@on_ranks()
def test_host_does_not_wait_for_the_device() -> None:
    layer = nn.BatchNorm2d(NUM_CHANNELS).to(device())
    convert_sync_batchnorm(layer, Collectives(device()))
    inputs, output_grads = random_rows().requires_grad_(), random_rows()
    if device().type == "cuda":
        torch.cuda.set_sync_debug_mode("error")
    with NoHostReads():
        layer(inputs).backward(output_grads)
    if device().type == "cuda":
        torch.cuda.set_sync_debug_mode("default")


@on_ranks()
def test_gradient_buckets_may_leave_in_between() -> None:
    """Before the layer's collective on rank 0, after it on rank 1."""
    layer = nn.BatchNorm2d(NUM_CHANNELS).to(device(), torch.float64)
    one_process = convert_and_copy(layer)
    bucket = torch.ones(2 * NUM_CHANNELS + 1, dtype=torch.float64, device=device())
    inputs, _ = Batches().draw()
    if dist.get_rank() == 0:
        reduction = dist.all_reduce(bucket, async_op=True)
    output = layer(inputs[Batches().mine])
    if dist.get_rank() == 1:
        reduction = dist.all_reduce(bucket, async_op=True)
    reduction.wait()
    assert bucket.tolist() == [2.0] * bucket.numel()
    _assert_close(output, one_process(inputs)[Batches().mine])


@on_ranks()
def test_one_value_per_channel_on_all_ranks_together_is_refused_on_each() -> None:
    """One row on rank 0 and none on rank 1."""
    layer = nn.BatchNorm1d(NUM_CHANNELS, device=device())
    convert_sync_batchnorm(layer, Collectives(device()))
    rank = dist.get_rank()
    with pytest.raises(ValueError, match="Expected more than 1 value per channel") as refused:
        layer(torch.zeros(1 - rank, NUM_CHANNELS, device=device()))
    assert str(refused.value).startswith(
        "Expected more than 1 value per channel when training, got input size"
        f" torch.Size([{1 - rank}, 3]) on rank {rank} and 1 value per channel on all 2 ranks together in"
        " SyncedBatchNorm1d(3, eps=1e-05"
    )
    assert str(refused.value).endswith("Use larger batches, or leave out the last incomplete one (`drop_last=True`).")


@on_ranks()
def test_every_batchnorm_is_converted_and_nothing_else() -> None:
    layers = nn.BatchNorm1d(2), nn.ModuleDict({"deep": nn.BatchNorm3d(2)}), BatchNormRelu(2), nn.InstanceNorm2d(2)
    model = nn.Sequential(*layers)
    convert_sync_batchnorm(model, Collectives(device()))
    names = ["SyncedBatchNorm1d", "ModuleDict", "SyncedBatchNorm3d", "SyncedBatchNormRelu", "InstanceNorm2d"]
    assert [type(module).__name__ for module in model.modules()] == ["Sequential", *names]


@on_ranks(1)
def test_one_rank_alone_keeps_ordinary_layers() -> None:
    model = nn.Sequential(nn.BatchNorm2d(2), nn.LazyBatchNorm2d())
    convert_sync_batchnorm(model, Collectives(device()))
    assert [type(module) for module in model] == [nn.BatchNorm2d, nn.LazyBatchNorm2d]


@on_ranks()
def test_revert_keeps_every_object_and_the_statistics() -> None:
    model = TwiceNormalized().to(device())
    layer, weight, running_var = model.norm, model.norm.weight, model.norm.running_var
    assert running_var is not None
    noted: Any = layer
    noted.note = "mine"
    called: list[nn.Module] = []
    layer.register_forward_hook(lambda module, *_: called.append(module))
    keys = list(model.state_dict())

    convert_sync_batchnorm(model, Collectives(device()))
    assert type(layer).__name__ == "SyncedBatchNorm2d"
    assert type(layer).__module__ == nn.BatchNorm2d.__module__
    assert isinstance(layer, nn.BatchNorm2d)
    model(random_rows())
    trained_var = running_var.clone()
    revert_sync_batchnorm(model)

    assert type(layer) is nn.BatchNorm2d
    block: Any = model.block
    assert model.norm is block[1][0] is layer
    assert layer.weight is weight
    assert layer.running_var is running_var
    assert torch.equal(running_var, trained_var)
    assert not torch.equal(running_var, torch.ones_like(running_var))
    assert int(layer.num_batches_tracked) == len(called) == 2
    assert layer.note == "mine"
    assert list(model.state_dict()) == keys
    _assert_trains_alone(layer)


@for_each("layer_class", [nn.BatchNorm2d, nn.SyncBatchNorm])
@on_ranks()
def test_layers_that_are_converted_already_by_us_or_torch_may_be_converted(layer_class: type[nn.Module]) -> None:
    layer: Any = layer_class(NUM_CHANNELS).to(device(), torch.float64)
    one_process = nn.BatchNorm2d(NUM_CHANNELS).to(device(), torch.float64)
    for _ in range(2):
        convert_sync_batchnorm(layer, Collectives(device()))
    assert_same_training(layer, one_process)
    revert_sync_batchnorm(layer)
    assert type(layer) is layer_class


@on_ranks()
def test_deep_copy_is_synchronized_until_the_revert() -> None:
    """Train a copy of a converted layer; after the layer's revert use it alone, then convert it as well."""
    layer, one_process = _layer_and_copy()
    referring: Any = layer
    referring.references = [layer]
    copied = copy.deepcopy(layer)
    assert copied.references == [copied]
    assert_same_training(copied, one_process)
    assert layer.num_batches_tracked is not None
    assert int(layer.num_batches_tracked) == 0

    revert_sync_batchnorm(layer)
    _assert_trains_alone(copy.deepcopy(copied))
    convert_sync_batchnorm(copied, Collectives(device()))
    assert_same_training(copied, one_process)


def pickle_trained_layer() -> tuple[list[bytes], Tensor]:
    """A converted layer that has been trained, by two protocols, and its running mean."""
    layer = nn.BatchNorm2d(NUM_CHANNELS).to(device())
    convert_sync_batchnorm(layer, Collectives(device()))
    layer(random_rows())
    pickled = [pickle.dumps(layer.cpu(), protocol=protocol) for protocol in (0, pickle.HIGHEST_PROTOCOL)]
    assert layer.running_mean is not None
    return pickled, layer.running_mean


def test_pickle_is_an_ordinary_layer_that_needs_no_group_and_not_this_package() -> None:
    pickles, running_mean = run_on_ranks(pickle_trained_layer)[0]
    for pickled in pickles:
        assert b"lightning_bucketddp" not in pickled
        layer = pickle.loads(pickled)
        assert type(layer) is nn.BatchNorm2d
        assert torch.equal(layer.running_mean, running_mean)  # type: ignore[arg-type]
        layer(torch.randn(2, NUM_CHANNELS, 4, 5))


@on_ranks()
def test_lazy_layers_are_refused_before_anything_is_converted() -> None:
    """One of them has no parameters."""
    model = nn.Sequential(nn.BatchNorm2d(2), nn.ModuleDict({"norm": nn.LazyBatchNorm2d()}))
    model.append(nn.LazyBatchNorm1d(affine=False, track_running_stats=False))
    with pytest.raises(ValueError, match="still lazy") as refused:
        convert_sync_batchnorm(model, Collectives(device()))
    assert str(refused.value) == (
        "Cannot synchronize BatchNorm layers that are still lazy: `1.norm` (LazyBatchNorm2d), `2`"
        " (LazyBatchNorm1d). Run one batch through the model before training, for example in `setup`, or use"
        " classes that are not lazy."
    )
    names = ["Sequential", "BatchNorm2d", "ModuleDict", "LazyBatchNorm2d", "LazyBatchNorm1d"]
    assert [type(module).__name__ for module in model.modules()] == names


def train_after_the_group_is_gone() -> None:
    layer, ordinary = _layer_and_copy()
    inputs = torch.randn(4 + dist.get_rank(), NUM_CHANNELS, 2, 2, dtype=torch.float64)
    dist.destroy_process_group()
    torch.testing.assert_close(layer(inputs), ordinary(inputs))


def test_a_layer_that_outlives_the_process_group_is_an_ordinary_one() -> None:
    pool = RankPool(2, "gloo")  # of its own: the group is destroyed
    try:
        pool.run(train_after_the_group_is_gone, timeout_s=240, kwargs={})
    finally:
        pool.close()
