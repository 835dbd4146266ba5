"""Buckets that hold the gradient of one parameter, and no buffer for it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_bucketddp.reducer.arrivals import Arrivals
from lightning_bucketddp.reducer.bucket import gradient_strides


class _SingleBucket:
    def __init__(self, param: Tensor, *, arrivals: Arrivals) -> None:
        self.params = [param]
        self.arrivals = arrivals


class LoneBucket(_SingleBucket):
    """The large gradient of one parameter, reduced where autograd has put it: not copied, and in memory only once."""

    def __init__(self, param: Tensor, *, arrivals: Arrivals) -> None:
        super().__init__(param, arrivals=arrivals)
        self._strides = gradient_strides(param)
        self._gradient: Tensor | None = None

    @property
    def num_bytes(self) -> int:
        return self.params[0].nbytes

    @property
    def wire(self) -> Tensor:
        """The gradient as it lies in memory, as real numbers."""
        assert self._gradient is not None  # collected, and not released yet
        gradient = self._gradient.detach()
        flat = gradient.as_strided((gradient.numel(),), (1,))
        return torch.view_as_real(flat).view(-1) if flat.is_complex() else flat

    @property
    def numbers(self) -> Tensor:
        """The gradient in one, as real numbers."""
        return self.wire

    @property
    def gradients(self) -> list[Tensor]:
        """The gradient, if there is one."""
        grad = self.params[0].grad
        return [] if grad is None else [grad]

    def collect(self) -> list[int]:
        """Take the gradient, and return `[0]` if there is none."""
        param = self.params[0]
        if param.grad is None:
            return [0]
        if param.grad.stride() != self._strides:  # autograd itself sees to that, but not all users do
            param.grad = self._new().copy_(param.grad)
        self._gradient = param.grad
        return []

    def zero(self, positions: Sequence[int]) -> None:
        """Contribute nothing."""
        if positions:
            self._gradient = self._new().zero_()

    def attach(self, position: int) -> None:
        """Give the parameter the gradient that is here."""
        self.params[position].grad = self._gradient

    def release(self) -> None:
        """Hold on to nothing: the gradient is the parameter's."""
        self._gradient = None

    def _new(self) -> Tensor:
        param = self.params[0]
        return torch.empty_strided(param.shape, self._strides, dtype=param.dtype, device=param.device)


class SparseBucket(_SingleBucket):
    """The sparse gradient of one parameter. Nothing is kept between backwards: its size changes each time."""

    def __init__(self, param: Tensor, *, arrivals: Arrivals) -> None:
        super().__init__(param, arrivals=arrivals)
        self.gradient = _empty_sparse(param)

    @property
    def num_bytes(self) -> int:
        return self.gradient._indices().nbytes + self.gradient._values().nbytes

    @property
    def numbers(self) -> Tensor:
        """The gradient's values, as real numbers."""
        values = self.gradient.values()
        return torch.view_as_real(values) if values.is_complex() else values

    @property
    def gradients(self) -> list[Tensor]:
        """The gradient's values."""
        return [self.gradient.values()]

    def collect(self) -> list[int]:
        """Take the gradient, and return `[0]` if there is none."""
        grad = self.params[0].grad
        if grad is None:
            return [0]
        self.gradient = grad.coalesce()
        return []

    def zero(self, positions: Sequence[int]) -> None:
        """Contribute nothing for these members."""
        if positions:
            self.gradient = _empty_sparse(self.params[0])

    def attach(self, position: int) -> None:
        """Give the parameter the gradient that is here."""
        self.params[position].grad = self.gradient


def _empty_sparse(param: Tensor) -> Tensor:
    # An embedding's gradient is sparse in its rows only: one sparse dimension, whole rows as values.
    indices = torch.empty((1, 0), dtype=torch.long, device=param.device)
    values = torch.empty((0, *param.shape[1:]), dtype=param.dtype, device=param.device)
    return torch.sparse_coo_tensor(indices, values, param.shape, is_coalesced=True)
