"""Hooks on parameters, which tell when a gradient has arrived.

Note: cheap hooks
    A hook runs for each parameter in each step, so it does nothing but count. Only the gradient that completes a bucket
    is acted on. Between backwards all counts are at zero, so that the first gradient of a backward is acted on, too:
    it may be the first word of it (see the note in `backward_pass`). So is each gradient as long as there is no plan.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor
from torch.utils.hooks import RemovableHandle

from lightning_bucketddp.reducer.bucket import Arrivals
from lightning_bucketddp.reducer.bucket_set import BucketSet


class GradientHooks:
    """Counts gradients as they arrive (Note: cheap hooks).

    Args:
        params: all parameters of the module; they get hooks, trainable or not.
        act: called with the index of a parameter whose gradient is to be acted on.
        close: has this closed by its owner.
    """

    def __init__(self, params: Sequence[Tensor], act: Callable[[int], None], close: Callable[[], None]) -> None:
        self.close = close
        self.param_ids = {id(param) for param in params}
        self._act = act
        self._bucket_set: BucketSet | None = None
        self._unplanned = Arrivals(expected=0)
        # By parameter; changed in place, because the hooks hold it.
        self._arrivals = [self._unplanned] * len(params)
        self._handles = [
            hook(param, self._hook_for(index))
            for index, param in enumerate(params)
            if param.is_floating_point() or param.is_complex()
        ]

    def begin(self, bucket_set: BucketSet | None) -> None:
        """Begin to count for a backward, by the buckets of `bucket_set`; None: there is no plan yet."""
        if bucket_set is not self._bucket_set:
            self._bucket_set = bucket_set
            self._arrivals[:] = [self._unplanned] * len(self._arrivals)
            if bucket_set is not None:
                for param_index, bucket_index in bucket_set.index_of_bucket.items():
                    self._arrivals[param_index] = bucket_set.buckets[bucket_index].arrivals
        if bucket_set is not None:
            for bucket in bucket_set.buckets:
                bucket.arrivals.begin()

    def rest(self) -> None:
        """Have the next gradient acted on: no backward runs, so it begins one."""
        if self._bucket_set is not None:
            for bucket in self._bucket_set.buckets:
                bucket.arrivals.rest()

    def completes(self, param_index: int) -> bool:
        """Count a gradient; return whether it is one to act on."""
        arrivals = self._arrivals[param_index]
        arrivals.pending -= 1
        return arrivals.pending <= 0

    def remove(self) -> None:
        """Take the hooks off the parameters."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._bucket_set = None
        self._arrivals[:] = [self._unplanned] * len(self._arrivals)

    def _hook_for(self, index: int) -> Callable[[Tensor], None]:
        by_param, act = self._arrivals, self._act

        def on_gradient(_param: Tensor) -> None:
            # `completes`, written out: this runs more often than anything else.
            arrivals = by_param[index]
            arrivals.pending -= 1
            if arrivals.pending <= 0:
                act(index)

        on_gradient.owner = self  # type: ignore[attr-defined]
        return on_gradient


def take_over(parameters: Mapping[str, Tensor]) -> None:
    """Close whoever averages the gradients of these parameters already, so that they are not averaged twice.

    Raises:
        ValueError: if those are not the same parameters, but some of them, or others too.
    """
    param_ids = {id(param) for param in parameters.values()}
    owners: dict[GradientHooks, str] = {}
    for name, param in parameters.items():
        for function in (param._post_accumulate_grad_hooks or {}).values():
            if (owner := getattr(function, "owner", None)) is not None:
                owners.setdefault(owner, name)
    for owner, name in owners.items():
        if owner.param_ids != param_ids:
            raise ValueError(
                f"`{name}` belongs to another module, too, that was set up before: its gradient would be averaged"
                " twice. Set up one module that holds all parameters."
            )
    for owner in owners:
        owner.close()


def hook(param: Tensor, on_gradient: Callable[[Tensor], None]) -> RemovableHandle:
    """Have `on_gradient` called whenever the gradient of `param` has arrived."""
    # torch hooks only a tensor that requires a gradient, but keeps the hook when it is frozen and unfrozen later.
    was_trainable = param.requires_grad
    param.requires_grad_(True)
    try:
        handle: RemovableHandle = param.register_post_accumulate_grad_hook(on_gradient)  # type: ignore[no-untyped-call]
        return handle
    finally:
        param.requires_grad_(was_trainable)
