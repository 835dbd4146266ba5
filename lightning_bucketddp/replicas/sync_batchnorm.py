"""Synchronized BatchNorm, over the batches of all ranks: converts a model's layers in place, and back."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.lazy import LazyModuleMixin
from torch.overrides import TorchFunctionMode

from lightning_bucketddp.comm.collectives import Collectives


def convert_sync_batchnorm(module: nn.Module, collectives: Collectives) -> None:
    """Make every BatchNorm in `module` normalise over the batches of all ranks; layers stay the same objects."""
    layers = {name: layer for name, layer in module.named_modules() if isinstance(layer, _BatchNorm)}
    if not layers or collectives.world_size == 1:
        return
    # Also lazy layers that have parameters already: their first forward sets their class.
    if lazy := [f"`{name}` ({type(m).__name__})" for name, m in layers.items() if isinstance(m, LazyModuleMixin)]:
        raise ValueError(
            f"Cannot synchronize BatchNorm layers that are still lazy: {', '.join(lazy)}. Run one batch through the"
            " model before training, for example in `setup`, or use classes that are not lazy."
        )
    # A group of its own: gradient buckets are launched in between, at moments that differ from rank to rank.
    own_collectives = collectives.further_group("side")
    originals = {layer: getattr(layer, "_sync_original", type(layer)) for layer in layers.values()}
    synced_classes: dict[type[_BatchNorm], type[Any]] = {}
    for layer, original in originals.items():
        if original not in synced_classes:
            members = {"_sync_original": original, "_sync_collectives": own_collectives}
            # By torch's module name, tools that trace a model take the layer for a leaf, as they do the original.
            members["__module__"] = original.__module__
            synced_classes[original] = type(f"Synced{original.__name__}", (_SyncedBatchNorm, original), members)
        layer.__class__ = synced_classes[original]


def revert_sync_batchnorm(module: nn.Module) -> None:
    """Undo `convert_sync_batchnorm`; parameters and running statistics stay as training left them."""
    for layer in module.modules():
        if isinstance(layer, _SyncedBatchNorm):
            # For copies made during training, which are not in this tree: ranks that have finished do not answer.
            type(layer)._sync_collectives = None
            layer.__class__ = layer._sync_original  # type: ignore[assignment]


def set_idle(module: nn.Module, is_idle: bool) -> None:
    """Set whether this rank is idle: it then takes part in the collectives, with a batch of no values."""
    for layer in module.modules():
        if isinstance(layer, _SyncedBatchNorm):
            type(layer)._sync_is_idle = is_idle


class _SyncedBatchNorm(_BatchNorm):
    """First base of the class that a converted layer gets.

    The process group is an attribute of that class, which each conversion makes anew: copies and pickles have none.
    """

    _sync_original: ClassVar[type[_BatchNorm]]
    _sync_collectives: ClassVar[Collectives | None]
    _sync_is_idle: ClassVar[bool] = False

    def forward(self, input: Tensor) -> Tensor:
        # Not in evaluation, even with batch statistics (`track_running_stats=False`): ranks may have different numbers
        # of evaluation batches.
        if self.training and self._sync_collectives is not None and self._sync_collectives.is_open:
            output: Tensor = self._forward_over_ranks(input, self._sync_collectives)
            return output
        return super().forward(input)

    # The dynamo of older versions ignores the mode and would trace an ordinary `F.batch_norm`.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _forward_over_ranks(self, input: Tensor, collectives: Collectives) -> Tensor:
        with _BatchNormOverRanks(self, collectives):
            if self._sync_original.forward is nn.SyncBatchNorm.forward:
                # That one refuses CPU tensors, and its collectives would use the group of the gradients.
                return _BatchNorm.forward(self, input)
            return super().forward(input)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """Pickle as the original class, which loads in any process, with or without this package."""
        reduced = super().__reduce_ex__(0)  # the constructors of later protocols need the object's own class
        assert isinstance(reduced, tuple)  # a string would name a global
        construct, args, *state = reduced
        return construct, tuple(self._sync_original if arg is type(self) else arg for arg in args), *state

    def __deepcopy__(self, memo: dict[int, Any]) -> _SyncedBatchNorm:
        """Return a copy that trains as this layer does; `__reduce_ex__` would make it an ordinary one."""
        copied = memo[id(self)] = type(self).__new__(type(self))
        copied.__setstate__(copy.deepcopy(self.__dict__, memo))  # type: ignore[no-untyped-call]
        return copied


class _BatchNormOverRanks(TorchFunctionMode):
    """Makes `F.batch_norm`, in training, normalise over the batches of all ranks in the block.

    Only this function is replaced: `forward` of torch still updates momentum and the number of batches, and `forward`
    of a subclass may do more.
    """

    def __init__(self, layer: _SyncedBatchNorm, collectives: Collectives) -> None:
        super().__init__()
        self._layer = layer
        self._collectives = collectives

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.batch_norm and kwargs["training"]:
            return self._batch_norm(*args, **kwargs)
        return func(*args, **kwargs)

    def _batch_norm(
        self, x: Tensor, running_mean: Tensor | None, running_var: Tensor | None, *, momentum: float, **options: Any
    ) -> Tensor:
        collectives, is_idle = self._collectives, self._layer._sync_is_idle
        batch = _statistics_over_ranks(x.detach()[:0] if is_idle else x.detach(), collectives)
        # Reading the count makes the host wait, so it is read only where this rank has at most one value.
        if x.numel() <= x.shape[1]:
            count = int(batch.count)
            if count == 1:
                raise ValueError(
                    f"Expected more than 1 value per channel when training, got input size {x.shape} on rank"
                    f" {collectives.global_rank} and 1 value per channel on all {collectives.world_size} ranks together"
                    f" in {self._layer}. Use larger batches, or leave out the last incomplete one (`drop_last=True`)."
                )
            if count == 0:
                return F.batch_norm(x, running_mean, running_var, momentum=momentum, **options)
        unbiased = batch.var * (batch.count / (batch.count - 1))
        for running, value in ((running_mean, batch.mean), (running_var, unbiased)):
            if running is not None:
                running.copy_(running.to(value.dtype).lerp(value, momentum))
        normalize: Callable[..., Tensor] = _Normalize.apply
        return normalize(x, options["weight"], options["bias"], batch, options["eps"], collectives, is_idle)


@dataclass(frozen=True, slots=True)
class _Statistics:
    """Mean, variance and number of values of each channel, over the batches of all ranks."""

    mean: Tensor
    var: Tensor
    count: Tensor


def _statistics_over_ranks(x: Tensor, collectives: Collectives) -> _Statistics:
    num_channels = x.shape[1]
    dtype = torch.promote_types(x.dtype, torch.float32)
    # The mean of each channel, its biased variance, and the number of values per channel.
    if x.numel() == 0:
        local = torch.zeros(2 * num_channels + 1, dtype=dtype, device=x.device)
    else:
        # The CPU's kernel would round the statistics of half-precision values to half precision.
        mean, var = torch.batch_norm_update_stats(x if x.is_cuda else x.to(dtype), None, None, 0.0)
        local = torch.cat([mean, var, mean.new_full((1,), x.numel() // num_channels)])
    by_rank = torch.stack(collectives.gather(local))
    mean_by_rank, var_by_rank = by_rank[:, :num_channels], by_rank[:, num_channels:-1]
    count_by_rank = by_rank[:, -1:]
    count = count_by_rank.sum()
    share_by_rank = count_by_rank / count
    mean = (share_by_rank * mean_by_rank).sum(0)
    # Chan's formula. A difference of squares would cancel where the mean is much larger than the deviation.
    var = (share_by_rank * (var_by_rank + (mean_by_rank - mean).square())).sum(0)
    return _Statistics(mean, var, count)


class _Normalize(torch.autograd.Function):
    """`F.batch_norm` with given statistics, and the gradient through those statistics on every rank."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        batch: _Statistics,
        eps: float,
        collectives: Collectives,
        is_idle: bool,
    ) -> Tensor:
        dtype = batch.mean.dtype
        weight = torch.ones_like(batch.mean) if weight is None else weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
        ctx.save_for_backward(x, weight, batch.mean, (batch.var + eps).rsqrt(), batch.count)
        ctx.collectives = collectives
        ctx.is_idle = is_idle
        return F.batch_norm(x, batch.mean, batch.var, weight, bias, eps=eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, inv_std, count = ctx.saved_tensors
        needs_dx, needs_dweight, needs_dbias, *_ = ctx.needs_input_grad
        # This rank's sums: the reducer averages the two parameters' gradients over the ranks like all others.
        dweight, dbias = torch.zeros_like(mean), torch.zeros_like(mean)
        if x.numel() > 0:
            _, dweight, dbias = torch.ops.aten.native_batch_norm_backward(
                dy, x, weight, None, None, mean, inv_std, True, 0.0, [False, True, True]
            )
        dx = None
        if needs_dx:
            sums = torch.stack([dbias, dweight])
            ctx.collectives.sum(sums)
            if ctx.is_idle:
                # The statistics do not depend on this rank's values.
                dx = torch.zeros_like(x)
            elif x.is_cuda and x.numel() > 0:
                # One kernel, with a quarter of the memory traffic of the formula below.
                sum_dy, sum_dy_xhat = sums
                dx = torch.batch_norm_backward_elemt(
                    dy, x, mean, inv_std, weight, sum_dy, sum_dy_xhat / inv_std, count.int().view(1)
                )
            else:
                column = (-1, *[1] * (x.dim() - 2))
                mean_dy, mean_dy_xhat = (sums / count).view(2, *column)
                xhat = (x - mean.view(column)) * inv_std.view(column)
                dx = (dy - mean_dy - xhat * mean_dy_xhat) * (weight * inv_std).view(column)
        return dx, dweight if needs_dweight else None, dbias if needs_dbias else None, None, None, None, None
