"""Hooks on parameters, which tell when a gradient has arrived.

Note: counted gradients
    A hook runs for each parameter in each step, so it does nothing but count. Only the gradient that completes a bucket
    is acted on. Between backwards all counts are at zero, so that the first gradient of a backward is acted on, too:
    it may be the first word of it (see the note in `backward_pass`). So is each gradient as long as there is no plan.

Note: watched gradients
    A hook costs more than all else that is done for a small parameter: the autograd engine takes the interpreter's lock
    for it. But gradients come in the order of the backward before, as a rule. So of each bucket only that one is
    watched that came last. When it comes, the others are there: parameters that had no gradients have some, or the
    version of the buffer says that as many were added to those they had. If not, the bucket leaves when the backward
    ends, and in the next ones all gradients are counted again.

    A gradient that comes after its bucket has left, which a hook would tell, has changed the version of the buffer, and
    is found when the backward ends.

    All backwards must be marked from outside (Note: scope of a backward): another one might touch no parameter that is
    watched, and its gradients would be averaged by nobody.

Note: hooks that can be taken off
    torch keeps asking a parameter for its hooks when the last one is gone, which costs half as much as a hook. A hook
    on the node of the graph that adds up the gradient is gone for good, because the next graph has another node, unless
    somebody keeps it. But such a node is replaced when a module is moved, and its hook is lost, so only backwards that
    are marked from outside can do with it: they are complete when they end, in any case.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor
from torch.autograd.graph import Node, get_gradient_edge
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

from lightning_bucketddp.reducer.bucket import UNKNOWN, Arrivals
from lightning_bucketddp.reducer.bucket_set import BucketSet

# After so many backwards gradients are watched.
_FIRST_COUNTED = 20
# When that was given up, after so many; the next time after so many times as many.
_PATIENCE = 1000
_IMPATIENCE = 8

# Whose hooks a parameter has.
_owners: Any = WeakIdKeyDictionary()


class GradientHooks:
    """Counts gradients as they arrive (Note: counted gradients), or watches some (Note: watched gradients).

    Args:
        params: all parameters of the module; they get hooks, trainable or not.
        act: called with the index of a parameter whose gradient is to be acted on.
        close: has this closed by its owner.
        may_watch: all backwards are marked from outside.
    """

    def __init__(
        self, params: Sequence[Tensor], act: Callable[[int], None], close: Callable[[], None], *, may_watch: bool
    ) -> None:
        self.close = close
        self.param_ids = {id(param) for param in params}
        self.is_watching = False
        self._params = params
        self._act = act
        self._hook_on = hook_on_node if may_watch else hook_on_parameter
        self._bucket_set: BucketSet | None = None
        self._unplanned = Arrivals(expected=0)
        # By parameter; changed in place, because the hooks hold it.
        self._arrivals = [self._unplanned] * len(params)
        self._handles: dict[int, Removable] = {}
        self._num_to_count: float = _FIRST_COUNTED if may_watch else math.inf
        self._patience: float = _PATIENCE
        self._hook_all()
        for param in params:
            _owners[param] = self

    def begin(self, bucket_set: BucketSet | None, *, may_watch: bool, is_marked: bool) -> None:
        """Begin to expect the gradients of a backward.

        Args:
            bucket_set: the buckets they belong to; None: there is no plan yet.
            may_watch: the plan will stay.
            is_marked: it is marked from outside; if one is not, others will not be, either.
        """
        is_new = bucket_set is not self._bucket_set
        if is_new:
            self._bucket_set = bucket_set
            self._arrivals[:] = [self._unplanned] * len(self._arrivals)
            if bucket_set is not None:
                for param_index, bucket_index in bucket_set.index_of_bucket.items():
                    self._arrivals[param_index] = bucket_set.buckets[bucket_index].arrivals
        if not is_marked:
            self._num_to_count = self._patience = math.inf
        may_watch = may_watch and is_marked and not is_new and self._may_watch_now()
        if may_watch and self._watch():
            return
        has_begun = self.is_watching and not is_marked
        if self.is_watching:
            self.stop_watching()
        if not has_begun:  # else nobody knows which gradients have arrived already
            for arrivals in self._all_arrivals():
                arrivals.begin()

    def stop_watching(self) -> None:
        """Count all gradients again, from the next backward on; buckets that wait for one leave when this one ends."""
        self.is_watching = False
        self._num_to_count = self._patience
        self._patience *= _IMPATIENCE
        self._hook_all()
        for arrivals in self._all_arrivals():
            arrivals.pending = UNKNOWN

    def rest(self) -> None:
        """Have the next gradient acted on: no backward runs, so it begins one."""
        for arrivals in self._all_arrivals():
            arrivals.rest()

    def completes(self, param_index: int) -> bool:
        """Count a gradient; return whether it is one to act on."""
        arrivals = self._arrivals[param_index]
        arrivals.pending -= 1
        return arrivals.pending <= 0

    def remove(self) -> None:
        """Take the hooks off the parameters."""
        self._unhook(list(self._handles))
        self._bucket_set = None
        self.is_watching = False
        self._arrivals[:] = [self._unplanned] * len(self._arrivals)
        for param in self._params:
            _owners.pop(param, None)

    @property
    def nodes(self) -> dict[int, Node]:
        """The nodes that add up gradients, by parameter, of those that have hooks on them."""
        return {index: handle.node for index, handle in self._handles.items() if isinstance(handle, _NodeHook)}

    def _all_arrivals(self) -> list[Arrivals]:
        return [] if self._bucket_set is None else [bucket.arrivals for bucket in self._bucket_set.buckets]

    def _may_watch_now(self) -> bool:
        if self.is_watching:
            return True
        self._num_to_count -= 1
        if self._num_to_count >= 0 or self._bucket_set is None or not self._bucket_set.can_be_watched:
            return False
        # What never came is in the last one, which then leaves when a backward ends.
        *others, _ = self._all_arrivals()
        if any(arrivals.last is None for arrivals in others):
            return False
        # Other hooks may change gradients, and with them the versions.
        return not any(param._post_accumulate_grad_hooks for param in self._params)

    def _watch(self) -> bool:
        """Expect the watched gradient of each bucket; return False if that would not tell that the others are there."""
        assert self._bucket_set is not None  # `_may_watch_now`
        for bucket in self._bucket_set.buckets:
            version = bucket.version_when_complete()
            if version is None:
                return False
            bucket.arrivals.watch(version)
        if not self.is_watching:
            self.is_watching = True
            watched = {arrivals.last for arrivals in self._all_arrivals()}
            self._unhook([index for index in self._handles if index not in watched])
        return True

    def _hook_all(self) -> None:
        for index, param in enumerate(self._params):
            if index not in self._handles and (param.is_floating_point() or param.is_complex()):
                self._handles[index] = self._hook_on(param, self._hook_for(index))

    def _unhook(self, indices: Sequence[int]) -> None:
        for index in indices:
            self._handles.pop(index).remove()

    def _hook_for(self, index: int) -> Callable[..., None]:
        by_param, act = self._arrivals, self._act

        def on_gradient(*_: object) -> None:
            # `completes`, written out: this runs more often than anything else.
            arrivals = by_param[index]
            arrivals.pending -= 1
            if arrivals.pending <= 0:
                act(index)

        return on_gradient


def take_over(parameters: Mapping[str, Tensor]) -> None:
    """Close whoever averages the gradients of these parameters already, so that they are not averaged twice.

    Raises:
        ValueError: if those are not the same parameters, but some of them, or others too.
    """
    param_ids = {id(param) for param in parameters.values()}
    owners: dict[GradientHooks, str] = {}
    for name, param in parameters.items():
        if param in _owners:
            owners.setdefault(_owners[param], name)
    for owner, name in owners.items():
        if owner.param_ids != param_ids:
            raise ValueError(
                f"`{name}` belongs to another module, too, that was set up before: its gradient would be averaged"
                " twice. Set up one module that holds all parameters."
            )
    for owner in owners:
        owner.close()


class Removable(Protocol):
    """A hook."""

    def remove(self) -> None:
        """Take it off."""


@dataclass(frozen=True, slots=True)
class _NodeHook:
    node: Node  # held, because its parameter does not hold it
    handle: RemovableHandle

    def remove(self) -> None:
        self.handle.remove()


def hook_on_parameter(param: Tensor, on_gradient: Callable[..., None]) -> RemovableHandle:
    """Have `on_gradient` called whenever the gradient of `param` has arrived."""
    with _trainable(param):
        handle: RemovableHandle = param.register_post_accumulate_grad_hook(on_gradient)  # type: ignore[no-untyped-call]
    return handle


def hook_on_node(param: Tensor, on_gradient: Callable[..., None]) -> Removable:
    """Do the same until `param` is moved (Note: hooks that can be taken off)."""
    with _trainable(param):
        node = get_gradient_edge(param).node
    return _NodeHook(node, node.register_hook(on_gradient))


@contextmanager
def _trainable(param: Tensor) -> Iterator[None]:
    # torch hooks only a tensor that requires a gradient, but keeps the hook when it is frozen and unfrozen later.
    was_trainable = param.requires_grad
    param.requires_grad_(True)
    try:
        yield
    finally:
        param.requires_grad_(was_trainable)
