"""Hooks that tell when a gradient has arrived.

A hook runs for each parameter in each step, so it only counts. What is acted on is the gradient that completes a
bucket, and each one as long as there is no plan: both in a backward that the reducer was told of. Other backwards,
which users start for pictures, adversarial examples or losses of their own, only change a count.

Note: last hooks
    What users' hooks on a parameter make of a gradient is what is to be reduced, whenever they were registered. So when
    a backward begins, ours is moved behind all others. A hook on the node that adds up gradients runs last by itself,
    but may be there for a while only (docs/design/unwrapped-module.md).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.autograd.graph import Node, get_gradient_edge
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

from lightning_bucketddp.reducer.bucket import UNKNOWN, Arrivals
from lightning_bucketddp.reducer.bucket_set import BucketSet

# Whose hooks a parameter has; a weak reference, because they hold the parameter.
_owners: Any = WeakIdKeyDictionary()


@dataclass(eq=False)
class GradientHooks:
    """Counts gradients as they arrive."""

    params: Sequence[Tensor]  # all of the module; they get hooks, trainable or not
    act: Callable[[int], None]  # called with the index of a parameter whose gradient is to be acted on
    close: Callable[[], None]  # has this closed by its owner

    def __post_init__(self) -> None:
        self.param_ids = {id(param) for param in self.params}
        self._bucket_set: BucketSet | None = None
        # Of parameters that have no bucket.
        self._unplanned = Arrivals(expected=0, pending=UNKNOWN)
        # By parameter; changed in place, because the hooks hold it.
        self._arrivals = [self._unplanned] * len(self.params)
        self._handles: dict[int, RemovableHandle] = {}
        # The hooks of each parameter that has one of ours, and the key of ours.
        self._hooks_of: list[tuple[dict[int, Any], int]] = []
        for index, param in enumerate(self.params):
            _owners[param] = weakref.ref(self)
            if param.is_floating_point() or param.is_complex():
                with _trainable(param):
                    handle = param.register_post_accumulate_grad_hook(self._hook_for(index))  # type: ignore[no-untyped-call]
                self._handles[index] = handle
                self._hooks_of.append((param._post_accumulate_grad_hooks, handle.id))

    def begin(self, bucket_set: BucketSet | None) -> None:
        """Begin to expect the gradients of a backward, in the buckets they belong to; None: there is no plan yet."""
        if bucket_set is not self._bucket_set:
            self._bucket_set = bucket_set
            self._arrivals[:] = [self._unplanned] * len(self._arrivals)
            if bucket_set is not None:
                for param_index, bucket_index in bucket_set.index_of_bucket.items():
                    self._arrivals[param_index] = bucket_set.buckets[bucket_index].arrivals
        for hooks, key in [each for each in self._hooks_of if len(each[0]) > 1]:  # (Note: last hooks)
            hooks[key] = hooks.pop(key)  # not `move_to_end`, of which torch's loop in C sees nothing
        for arrivals in self._all_arrivals():
            arrivals.pending = arrivals.expected
            arrivals.launched = False

    def expect_first(self) -> None:
        """Have the next gradient acted on, whichever it is: it begins a backward."""
        for arrivals in self._all_arrivals():
            arrivals.pending = 0

    def reset(self) -> None:
        """Have no gradient acted on: no backward runs that the reducer was told of."""
        for arrivals in self._all_arrivals():
            arrivals.pending = UNKNOWN

    def counts(self, param_index: int) -> bool:
        """Count a gradient once more, of a backward that it has begun; return whether it is to be acted on."""
        arrivals = self._arrivals[param_index]
        arrivals.pending -= 1
        return arrivals.pending <= 0

    @property
    def have_arrived(self) -> bool:
        """Whether gradients have arrived in the backward that runs."""
        return any(arrivals.pending != arrivals.expected for arrivals in self._all_arrivals())

    @property
    def have_counted(self) -> bool:
        """Whether gradients have arrived at rest, of a backward that the reducer was not told of."""
        return any(arrivals.pending != UNKNOWN for arrivals in self._all_arrivals())

    def has_counted(self, param_index: int) -> bool:
        """Return whether this gradient may be one of those, or another in its bucket is."""
        return param_index in self._handles and self._arrivals[param_index].pending != UNKNOWN

    def remove(self) -> None:
        for handle in self._handles.values():
            handle.remove()
        self._handles.clear()
        self._hooks_of.clear()
        self._bucket_set = None
        self._arrivals[:] = [self._unplanned] * len(self._arrivals)
        for param in self.params:
            _owners.pop(param, None)

    def _all_arrivals(self) -> list[Arrivals]:
        planned = [] if self._bucket_set is None else [bucket.arrivals for bucket in self._bucket_set.buckets]
        return [self._unplanned, *planned]

    def _hook_for(self, index: int) -> Callable[..., None]:
        by_param, act = self._arrivals, self.act

        def on_gradient(*_: object) -> None:
            # `counts`, written out: this runs more often than anything else.
            arrivals = by_param[index]
            arrivals.pending -= 1
            if arrivals.pending <= 0:
                act(index)

        return on_gradient


def take_over(parameters: Mapping[str, Tensor]) -> None:
    """Close whoever averages the gradients of exactly these parameters already: they must not be averaged twice."""
    param_ids = {id(param) for param in parameters.values()}
    owners: dict[GradientHooks, str] = {}
    for name, param in parameters.items():
        owner = _owners[param]() if param in _owners else None
        if owner is not None:
            owners.setdefault(owner, name)
    for owner, name in owners.items():
        if owner.param_ids != param_ids:
            raise ValueError(
                f"`{name}` belongs to another module, too, that was set up before: its gradient would be averaged"
                " twice. Set up one module that holds all parameters."
            )
    for owner in owners:
        owner.close()


def hook_on_node(param: Tensor, on_gradient: Callable[..., None]) -> tuple[Node, RemovableHandle]:
    """Have `on_gradient` called by the node that adds up the gradient of `param`, until `param` is moved.

    The caller must hold the node, because its parameter does not (Note: last hooks).
    """
    with _trainable(param):
        node = get_gradient_edge(param).node
    return node, node.register_hook(on_gradient)


@contextmanager
def _trainable(param: Tensor) -> Iterator[None]:
    # torch hooks only a tensor that requires a gradient, but keeps the hook when it is frozen and unfrozen later.
    was_trainable = param.requires_grad
    param.requires_grad_(True)
    try:
        yield
    finally:
        param.requires_grad_(was_trainable)
