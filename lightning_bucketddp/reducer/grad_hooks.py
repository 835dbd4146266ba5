"""Hooks that count gradients as they arrive.

A hook runs for each parameter in each step, so it only counts. The reducer acts on the gradient that completes a
bucket, and on each gradient as long as there is no plan, in backwards that it has begun. Other backwards, which users
start for pictures, adversarial examples or losses of their own, only change a count.

Note: last hooks
    Gradients are reduced as users' hooks on a parameter leave them, whenever those were registered. So when a backward
    begins, ours is moved behind all others. A hook on the node that adds up gradients runs last by itself, but can be
    used only for a while (docs/design/unwrapped-module.md).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn, zeros_like
from torch.autograd.graph import Node, get_gradient_edge
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

from lightning_bucketddp.reducer.bucket import UNKNOWN, Arrivals
from lightning_bucketddp.reducer.bucket_set import BucketSet

# The `GradientHooks` of each parameter: a weak reference, because they hold the parameter.
_owners: Any = WeakIdKeyDictionary()


@dataclass(eq=False)
class GradientHooks:
    """Counts gradients as they arrive."""

    params: Sequence[Tensor]  # all of the module; they get hooks, trainable or not
    act: Callable[[int], None]  # called with the index of a parameter whose gradient is to be acted on
    close: Callable[[], None]  # closes the reducer that has made this

    def __post_init__(self) -> None:
        self.param_ids = {id(param) for param in self.params}
        self._bucket_set: BucketSet | None = None
        self._unplanned = Arrivals()  # of parameters without a bucket
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
        """Begin to count the gradients of a backward, by bucket; None: there is no plan yet."""
        if bucket_set is not self._bucket_set:
            self._bucket_set = bucket_set
            self._arrivals[:] = [self._unplanned] * len(self._arrivals)
            if bucket_set is not None:
                for param_index, bucket_index in bucket_set.index_of_bucket.items():
                    self._arrivals[param_index] = bucket_set.buckets[bucket_index].arrivals
        for hooks, key in [each for each in self._hooks_of if len(each[0]) > 1]:  # (Note: last hooks)
            hooks[key] = hooks.pop(key)  # torch's loop in C ignores `move_to_end`
        for arrivals in self._all_arrivals():
            arrivals.pending = arrivals.expected
            arrivals.launched = False

    def expect_first(self) -> None:
        """Act on the next gradient, whichever it is: it begins a backward."""
        for arrivals in self._all_arrivals():
            arrivals.pending = 0

    def reset(self) -> None:
        """Act on no gradient: the reducer has begun no backward."""
        for arrivals in self._all_arrivals():
            arrivals.pending = UNKNOWN

    def counts(self, param_index: int) -> bool:
        """Count the gradient that has begun a backward once more; return whether to act on it."""
        arrivals = self._arrivals[param_index]
        arrivals.pending -= 1
        return arrivals.pending <= 0

    @property
    def have_arrived(self) -> bool:
        """Whether gradients have arrived in the backward that runs."""
        return any(arrivals.pending != arrivals.expected for arrivals in self._all_arrivals())

    @property
    def have_counted(self) -> bool:
        """Whether gradients have arrived since `reset`, from a backward that the reducer has not begun."""
        return any(arrivals.pending != UNKNOWN for arrivals in self._all_arrivals())

    def has_counted(self, param_index: int) -> bool:
        """Return whether this gradient, or another in its bucket, may be one of those."""
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
    """Close the reducer of exactly these parameters, if there is one: they must not be averaged twice."""
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


def refuse_gradients(parameters: Iterable[nn.Parameter], text: str) -> None:
    """Raise in backwards with a gradient for one of `parameters`, until a reducer takes these over."""

    def refuse(param: Tensor) -> None:
        if param not in _owners:
            raise RuntimeError(text)

    for param in parameters:
        if param.is_floating_point() or param.is_complex():
            with _trainable(param):
                param.register_post_accumulate_grad_hook(refuse)  # type: ignore[no-untyped-call]


@contextmanager
def adding_zeros(parameters: Iterable[Tensor]) -> Iterator[None]:
    """Have a backward inside, of a loss without weight, add zeros: zero times an infinite gradient is nan."""
    handles = [param.register_hook(zeros_like) for param in parameters if param.requires_grad]  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def hook_on_node(param: Tensor, on_gradient: Callable[..., None]) -> tuple[Node, RemovableHandle]:
    """Call `on_gradient` from the node that adds up the gradient of `param`, until `param` is moved.

    The caller must hold the node, because the parameter does not (Note: last hooks).
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
