"""Gradients that travel together, and the parameters they belong to.

Note: memory between steps
    Gradients that are set to None free no memory as long as buckets hold it. So on a GPU a buffer without gradients
    gives its memory back to torch's allocator when a forward or a backward begins, and takes memory when its gradients
    have arrived; in steady state this does not reach the driver. On a CPU new memory costs more than it saves, and each
    gradient has a storage of its own in the buffer.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_bucketddp.config import MIB
from lightning_bucketddp.planning.plan import Sharding

# Fused kernels read whole cache lines; a view that starts on one is as fast as a tensor of its own.
_ALIGN_BYTES = 64
# A smaller buffer is not worth the time.
_GIVE_BACK_FROM_BYTES = 1 * MIB
# Sentinel: more gradients than ever arrive, so nothing is acted on.
UNKNOWN = sys.maxsize


class LateGradientError(RuntimeError):
    """A gradient arrived after its bucket had left."""


@dataclass(slots=True)
class Arrivals:
    """How many gradients a bucket expects in a backward, how many are pending, and whether it was launched.

    One gradient per member, more for a parameter whose hook fires several times (reentrant checkpointing).
    """

    expected: int = 0
    pending: int = UNKNOWN
    launched: bool = False


@dataclass(frozen=True, slots=True)
class BufferLayout:
    """Where gradients lie in a buffer, and how many elements it has."""

    offsets: Sequence[int]
    numel: int

    @classmethod
    def of(cls, params: Sequence[Tensor], sharding: Sharding | None = None, *, alignment: int = 1) -> BufferLayout:
        """Place `params`, all of one dtype, one behind the other, each at a multiple of `alignment` elements."""
        align = max(_ALIGN_BYTES // params[0].dtype.itemsize, alignment) if params else alignment
        offsets: list[int] = []
        numel = 0
        for param in params:
            offsets.append(numel)
            numel += -(-param.numel() // align) * align
        return cls(offsets, numel if sharding is None else sharding.padded(numel, align=align))


class UseCounts:
    """Counts who uses `gradients`, besides `.grad` of `params`: references of Python, and tensors over their memory."""

    def __init__(self, params: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
        self._params, self._gradients = params, gradients
        self._storages = [gradient.untyped_storage() for gradient in gradients]
        self._addresses = [storage._cdata for storage in self._storages]

    def largest(self, places: Sequence[int] | None = None) -> tuple[int, int]:
        """Return the largest of both counts; `places`: of these, which no parameter has as its `.grad`."""
        references = list(map(sys.getrefcount, self._gradients))
        uses = list(map(torch._C._storage_Use_Count, self._addresses))
        if places is not None and len(places) < len(uses):
            references, uses = [references[place] for place in places], [uses[place] for place in places]
        elif places is None and _REFERENCES_OF_GRAD:
            pairs = zip(self._params, self._gradients, strict=True)
            held = [_REFERENCES_OF_GRAD * (param.grad is gradient) for param, gradient in pairs]
            references = [number - of_grad for number, of_grad in zip(references, held, strict=True)]
        return max(references, default=0), max(uses, default=0)


def _count_references() -> tuple[int, int]:
    """Return Python's references to a tensor in a list, and how many more there are if it is a `.grad`, too."""
    param, gradients = torch.zeros(1, requires_grad=True, device="cpu"), [torch.zeros(1, device="cpu")]
    [in_list] = map(sys.getrefcount, gradients)
    param.grad = gradients[0]
    return in_list, max(map(sys.getrefcount, gradients)) - in_list


_REFERENCES_IN_LIST, _REFERENCES_OF_GRAD = _count_references()


def kept_by_others(gradients: Sequence[Any], places: Sequence[int]) -> list[int]:
    """Return those `places` of `gradients` that somebody else has, too, or has in a tensor over their memory."""
    references, of_ours = list(map(sys.getrefcount, gradients)), _REFERENCES_IN_LIST + _REFERENCES_OF_GRAD
    return [place for place in places if references[place] > of_ours or _is_part_of_other(gradients[place])]


def _is_part_of_other(gradient: Tensor) -> bool:
    # What autograd has just made is neither written nor a view, and asking the storage costs more.
    is_new = not (gradient._version or gradient._is_view())
    # The gradient has a use of it, and the object that is asked another.
    return not is_new and torch._C._storage_Use_Count(gradient.untyped_storage()._cdata) > 2


class BufferedBucket:
    """Dense gradients of some parameters, side by side in one buffer.

    Args:
        params: the members, in order of arrival; all of one dtype and on one device.
        num_flags: spare elements at the end of the buffer that travel with the gradients.
        may_be_resized: a communication hook gets the buffer and may resize it.
        gives_back: the buffer has memory only as long as gradients are in it (Note: memory between steps). Then, and if
            it may be resized, the storage of a gradient is the whole buffer, so that it moves with it. Otherwise each
            has a storage of its own, so that `torch.save` and `copy.deepcopy` of one gradient do not copy all others.
        layout: where each gradient lies; None: one behind the other.
    """

    sharding: Sharding | None = None

    def __init__(
        self,
        params: Sequence[Tensor],
        *,
        num_flags: int,
        device: torch.device,
        may_be_resized: bool = False,
        gives_back: bool = False,
        layout: BufferLayout | None = None,
    ) -> None:
        self.params = list(params)
        self.arrivals = Arrivals()
        self._dtype = params[0].dtype if params else torch.float32
        self._device = device
        layout = layout or BufferLayout.of(params)
        self._offsets = layout.offsets
        # Members whose gradients somebody else has, too: those stay where they are, and get the mean there.
        self._kept: list[int] = []
        self._empty = [position for position, param in enumerate(params) if not param.numel()]
        self._num_reals = layout.numel * (2 if self._dtype.is_complex else 1)
        self._num_flags = num_flags
        self.num_bytes = (self._num_reals + num_flags) * self._dtype.to_real().itemsize
        self._gives_back = gives_back and self.num_bytes >= _GIVE_BACK_FROM_BYTES
        self._has_whole_storage = may_be_resized or self._gives_back
        self.graphs: weakref.WeakSet[Any] = weakref.WeakSet()  # which write to this memory in each replay
        self._has_padding = sum(param.numel() for param in params) < layout.numel
        self._allocate()
        self.count_uses()

    def _allocate(self) -> None:
        """Take new memory, and leave the old to whoever uses it."""
        # Zeros, because the padding is summed too and must never hold a NaN.
        self.wire = torch.zeros(self._num_reals + self._num_flags, dtype=self._dtype.to_real(), device=self._device)
        self.flags = self.wire[self._num_reals :]
        self.numbers = numbers = self.wire[: self._num_reals]
        self.buffer = torch.view_as_complex(numbers.view(-1, 2)) if self._dtype.is_complex else numbers
        self._storage = self.wire.untyped_storage()
        self.views = self.views_of(self.buffer)
        self._uses = UseCounts(self.params, self.views)

    @property
    def gradients(self) -> list[Tensor]:
        """The gradients, by member; none if they are gone."""
        return self.views if self._storage.nbytes() else []

    def views_of(self, buffer: Tensor) -> list[Tensor]:
        """Return the members' gradients in a buffer with the layout of this bucket's."""
        return [self._view(buffer, position) for position in range(len(self.params))]

    def collect(self) -> list[int]:
        """Copy the gradients into the buffer and point `.grad` at it; return the positions of members without one."""
        self._take_memory()
        params, views = self.params, self.views
        grads: list[Any] = [param.grad for param in params]
        addresses = self._addresses()
        outside = [
            place
            for place, (grad, view) in enumerate(zip(grads, views, strict=True))
            if grad is not view
            and (grad is None or grad.data_ptr() != addresses[place] or grad.stride() != view.stride())
        ]
        # Torch moves gradients with their module, and the user may have kept some of an earlier backward.
        if [view.data_ptr() for view in views] != addresses or (outside and self.is_used(outside)):
            self._allocate()
            views, outside = self.views, list(range(len(params)))
        missing = [place for place in outside if grads[place] is None]
        if missing:
            outside = [place for place in outside if grads[place] is not None]
        if outside:
            torch._foreach_copy_([views[place] for place in outside], [grads[place] for place in outside])
        # Those that are divided among the ranks are nobody's.
        self._kept = [] if self.sharding is not None else kept_by_others(grads, outside)
        for place, (param, grad, view) in enumerate(zip(params, grads, views, strict=True)):
            if grad is not view and grad is not None and place not in self._kept:
                param.grad = view
        return missing

    def _addresses(self) -> list[int]:
        start, itemsize = self.buffer.data_ptr(), self.buffer.itemsize
        addresses = [start + offset * itemsize for offset in self._offsets]
        for place in self._empty:
            addresses[place] = 0  # as torch gives it
        return addresses

    def is_used(self, places: Sequence[int] | None = None) -> bool:
        """Return whether somebody else has one of these views, or another tensor over its memory (`grad.detach()`)."""
        references, uses = self._uses.largest(places)
        return references > self._uses_of_ours[0] or uses > self._uses_of_ours[1]

    def _view(self, buffer: Tensor, position: int) -> Tensor:
        param = self.params[position]
        offset = buffer.storage_offset() + self._offsets[position]
        strides = gradient_strides(param)
        # A view of autograd's could not be detached in place.
        view = buffer.detach()
        if self._has_whole_storage:
            view.data = buffer.as_strided(param.shape, strides, offset)
        else:
            start = offset * buffer.itemsize
            storage = buffer.untyped_storage()[start : start + param.numel() * buffer.itemsize]
            view.data = buffer.new_empty(0).set_(storage, 0, param.shape, strides)
        return view

    def _take_memory(self) -> None:
        if self._gives_back and self._storage.nbytes() == 0:
            self._storage.resize_(self.num_bytes)
            if self._has_padding:
                self.wire.zero_()

    def count_uses(self) -> None:
        """Count the tensors that use the memory before the user has one of them."""
        self._uses_of_ours = self._uses.largest()

    def give_back(self) -> None:
        """Free the memory if no gradient is in it."""
        if not (self._gives_back and self.params and self._storage.nbytes()) or self.params[0].grad is not None:
            return
        is_empty = all(param.grad is None for param in self.params)
        if is_empty and not self.graphs and not self.is_used():
            self._storage.resize_(0)

    def zero(self, positions: Sequence[int]) -> None:
        """Contribute zeros for these members."""
        self._take_memory()
        torch._foreach_zero_([self.views[position] for position in positions])

    def attach(self, position: int) -> None:
        """Set the gradient of a member to the one in this bucket."""
        self.params[position].grad = self.views[position]

    def release(self) -> None:
        """End a backward: parameters get the reduced gradients, and no others are kept."""
        for place in self._kept:
            if self.params[place].grad is None:
                self.attach(place)  # a hook has dropped it
            self.params[place].grad.copy_(self.views[place])  # type: ignore[union-attr]

    def clear(self) -> None:
        """Zero all gradients that the parameters have from this bucket."""
        # With the padding: some communication hooks would add up what is left there.
        self.wire.zero_()
        for gradient in [self.params[place].grad for place in self._kept]:
            if gradient is not None:
                gradient.zero_()


def gradient_strides(param: Tensor) -> tuple[int, ...]:
    """Return the parameter's own strides if it is dense, as with channels_last: fused optimizers demand them."""
    expected = 1
    for stride, size in sorted(zip(param.stride(), param.shape, strict=True)):
        if size > 1:
            if stride != expected:
                return torch.empty(param.shape, device="meta").stride()
            expected *= size
    return param.stride()


class InPlaceBucket:
    """The large gradient of one parameter, reduced where autograd has put it: neither copied nor kept."""

    sharding: Sharding | None = None

    def __init__(self, param: Tensor) -> None:
        self.params = [param]
        self.arrivals = Arrivals()
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
        if param.grad.stride() != self._strides:  # a user has set it
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
    """The sparse gradient of one parameter. It is not kept between backwards: its size changes each time."""

    def __init__(self, param: Tensor) -> None:
        self.params = [param]
        self.arrivals = Arrivals()
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
        if not grad.is_sparse:
            raise ValueError(
                f"The weight of an `Embedding(..., sparse=True)`, of shape {tuple(grad.shape)}, has a dense gradient,"
                " because something else uses it, too. Pass `sparse=False`."
            )
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


# All of them have `params`, `arrivals`, `num_bytes` (of the gradients, in their own dtype), `numbers` (all gradients in
# one tensor, as real numbers), `gradients` (by member), and the methods that `BufferedBucket` documents.
Bucket = BufferedBucket | InPlaceBucket | SparseBucket
# These also have `wire`, which travels (the `numbers`, and flags behind them), and `sharding` (None: ranks keep all).
DenseBucket = BufferedBucket | InPlaceBucket
