"""Jobs that train with synchronised BatchNorm and compare with one process that has the batches of all ranks."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_bucketddp.comm.collectives import Collectives
from lightning_bucketddp.replicas.sync_batchnorm import convert_sync_batchnorm
from tests.support.ranks import device

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
    """What a model is trained on: the rows of each rank, and what they look like."""

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


class CountingCollectives(Collectives):
    """Counts what the layers ask of the other ranks."""

    num_gathers = 0
    num_sums = 0

    def further_group(self, name: str, *, in_host_memory: bool = False) -> Collectives:
        return self

    def gather(self, tensor: Tensor) -> list[Tensor]:
        self.num_gathers += 1
        return super().gather(tensor)

    def sum(self, tensor: Tensor) -> None:
        self.num_sums += 1
        super().sum(tensor)


class NoHostReads(TorchDispatchMode):
    """Refuses operations whose result the host has to wait for."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func not in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default), func
        return func(*args, **(kwargs or {}))


def train(*, model: nn.Module, batches: Batches) -> None:
    """Train a model that the test made."""
    model = _own(model)
    one_process = convert_and_copy(model)
    assert_same_training(model, one_process, batches=batches)


def train_compiled(*, model: nn.Module) -> None:
    """Train a model that dynamo compiles."""
    model = _own(model)
    one_process = convert_and_copy(model)
    model.compile(backend="aot_eager")
    assert_same_training(model, one_process)


def train_far_from_zero() -> None:
    """Train in single precision where the mean is a thousand times the deviation, and differs between ranks."""
    layer = nn.BatchNorm2d(NUM_CHANNELS).to(device())
    one_process = convert_and_copy(layer)
    inputs = torch.randn(64, NUM_CHANNELS, 4, 5).to(device()) + 1000
    inputs[:32] += 2
    layer(inputs[Batches(split=(32, 32)).mine])
    one_process(inputs.double())
    assert layer.running_var is not None
    assert_close(layer.running_var.double(), one_process.running_var, rtol=1e-4, atol=0)


def count_collectives(*, input_needs_grad: bool, parameters_need_grad: bool) -> tuple[int, int]:
    """The gathers and sums of one training step."""
    collectives = CountingCollectives(device())
    layer = nn.BatchNorm2d(NUM_CHANNELS).to(device()).requires_grad_(parameters_need_grad)
    convert_sync_batchnorm(layer, collectives)
    inputs = random_rows().requires_grad_(input_needs_grad)
    layer(inputs).square().sum().backward()
    assert (inputs.grad is not None) == input_needs_grad
    assert (layer.weight.grad is not None) == (layer.bias.grad is not None) == parameters_need_grad
    return collectives.num_gathers, collectives.num_sums


def evaluate_different_numbers_of_batches(*, track_running_stats: bool) -> None:
    """Evaluate one batch on rank 0 and two on rank 1."""
    layer = nn.BatchNorm2d(NUM_CHANNELS, track_running_stats=track_running_stats).to(device(), torch.float64).eval()
    ordinary = convert_and_copy(layer)
    for _ in range(1 + dist.get_rank()):
        inputs = random_rows().double() + dist.get_rank()
        assert torch.equal(layer(inputs), ordinary(inputs))


def train_without_host_reads() -> None:
    """Train one step in which nothing makes the host wait for the device."""
    layer = nn.BatchNorm2d(NUM_CHANNELS).to(device())
    convert_sync_batchnorm(layer, Collectives(device()))
    inputs, output_grads = random_rows().requires_grad_(), random_rows()
    if device().type == "cuda":
        torch.cuda.set_sync_debug_mode("error")
    with NoHostReads():
        layer(inputs).backward(output_grads)
    if device().type == "cuda":
        torch.cuda.set_sync_debug_mode("default")


def train_one_value_per_channel() -> str | None:
    """Train on one row on rank 0 and none on rank 1; return the error."""
    layer = nn.BatchNorm1d(NUM_CHANNELS, device=device())
    convert_sync_batchnorm(layer, Collectives(device()))
    try:
        layer(torch.zeros(1 - dist.get_rank(), NUM_CHANNELS, device=device()))
    except ValueError as error:
        return str(error)
    return None


def train_beside_gradient_bucket() -> None:
    """Let a gradient bucket leave before the layer's collective on rank 0, after it on rank 1."""
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


def _own(model: nn.Module) -> nn.Module:
    """A copy: the tensors that a test sends to the ranks lie in memory that they share."""
    return copy.deepcopy(model).to(device())


def _step(model: nn.Module, inputs: Tensor, output_grads: Tensor) -> tuple[Tensor, Tensor]:
    model.zero_grad()
    inputs = inputs.detach().requires_grad_()
    output = model(inputs)
    output.backward(output_grads)
    assert inputs.grad is not None
    return output.detach(), inputs.grad


def _assert_close(actual: Tensor, expected: Tensor) -> None:
    assert_close(actual.double(), expected.double(), **TOLERANCES.get(actual.dtype, {"rtol": 0, "atol": 0}))
