"""Buckets of one parameter: its gradient is reduced where it is, or is sparse."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_bucketddp.planning.shares import Shares
from lightning_bucketddp.reducer.bucket import Arrivals, BufferedBucket, gradient_strides


class InPlaceBucket:
    """The large gradient of one parameter, reduced where autograd has put it: not copied, and in memory only once."""

    shares: Shares | None = None

    def __init__(self, param: Tensor, *, arrivals: Arrivals) -> None:
        self.params = [param]
        self.arrivals = arrivals
        self.num_bytes = param.nbytes
        self._strides = gradient_strides(param)
        self._gradient: Tensor | None = None

    @property
    def wire(self) -> Tensor:
        assert self._gradient is not None  # collected, and not released yet
        gradient = self._gradient.detach()
        flat = gradient.as_strided((gradient.numel(),), (1,))
        return torch.view_as_real(flat).view(-1) if flat.is_complex() else flat

    @property
    def numbers(self) -> Tensor:
        return self.wire

    @property
    def gradients(self) -> list[Tensor]:
        grad = self.params[0].grad
        return [] if grad is None else [grad]

    def collect(self) -> list[int]:
        param = self.params[0]
        if param.grad is None:
            return [0]
        if param.grad.stride() != self._strides:  # autograd itself sees to that, but not all users do
            param.grad = self._new().copy_(param.grad)
        self._gradient = param.grad
        return []

    def zero(self, positions: Sequence[int]) -> None:
        if positions:
            self._gradient = self._new().zero_()

    def attach(self, position: int) -> None:
        self.params[position].grad = self._gradient

    def release(self) -> None:
        self._gradient = None  # it is the parameter's

    def clear(self) -> None:
        for gradient in self.gradients:
            gradient.zero_()

    def _new(self) -> Tensor:
        param = self.params[0]
        return torch.empty_strided(param.shape, self._strides, dtype=param.dtype, device=param.device)


class SparseBucket:
    """The sparse gradient of one parameter. Nothing is kept between backwards: its size changes each time."""

    def __init__(self, param: Tensor, *, arrivals: Arrivals) -> None:
        self.params = [param]
        self.arrivals = arrivals
        self.gradient = _empty_sparse(param)

    @property
    def num_bytes(self) -> int:
        return self.gradient._indices().nbytes + self.gradient._values().nbytes

    @property
    def numbers(self) -> Tensor:
        values = self.gradient.values()
        return torch.view_as_real(values) if values.is_complex() else values

    @property
    def gradients(self) -> list[Tensor]:
        return [self.gradient.values()]

    def collect(self) -> list[int]:
        grad = self.params[0].grad
        if grad is None:
            return [0]
        self.gradient = grad.coalesce()
        return []

    def zero(self, positions: Sequence[int]) -> None:
        if positions:
            self.gradient = _empty_sparse(self.params[0])

    def attach(self, position: int) -> None:
        self.params[position].grad = self.gradient

    def release(self) -> None:
        if self.params[0].grad is not None:
            self.attach(0)

    def clear(self) -> None:
        self.gradient = _empty_sparse(self.params[0])
        self.release()


def _empty_sparse(param: Tensor) -> Tensor:
    # An embedding's gradient is sparse in its rows only: one sparse dimension, whole rows as values.
    indices = torch.empty((1, 0), dtype=torch.long, device=param.device)
    values = torch.empty((0, *param.shape[1:]), dtype=param.dtype, device=param.device)
    return torch.sparse_coo_tensor(indices, values, param.shape, is_coalesced=True)


# What all of them have: `params`, `arrivals`, `num_bytes` (of the gradients, in their own dtype), `numbers` (all
# gradients in one tensor, as real numbers), `gradients` (by member), and the methods that `BufferedBucket` documents.
Bucket = BufferedBucket | InPlaceBucket | SparseBucket
# These have a `wire`, too, which travels (the `numbers`, and flags behind them), and `shares`: how they are divided
# among the ranks; None: all of them keep all of it.
DenseBucket = BufferedBucket | InPlaceBucket
