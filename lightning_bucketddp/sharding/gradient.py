"""The gradient of a parameter whose optimizer state is divided among the ranks.

Note: a divided gradient
    Once such a bucket is reduced, this rank has the mean of its own shard only. `param.grad` still has the parameter's
    shape: changes element by element are right for the shard, and a norm is completed with the other ranks. All other
    reading would give a wrong number on some rank without an error, so it is refused. Before the reduction, and in
    `no_sync`, it is a gradient like any other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn, TypeGuard

import torch
from torch import Tensor

from lightning_bucketddp.comm.collectives import Collectives

# Attributes and functions of a tensor that do not depend on its numbers.
_OF_NO_NUMBERS = {
    *("shape", "dtype", "device", "layout", "is_sparse", "is_cuda", "is_cpu", "is_leaf", "is_meta", "is_quantized"),
    *("requires_grad", "grad", "grad_fn", "ndim", "nbytes", "itemsize", "_version", "_backward_hooks", "data"),
    *("size", "stride", "dim", "numel", "nelement", "element_size", "storage_offset", "is_contiguous"),
    *("requires_grad_", "type", "detach"),
    *("is_floating_point", "is_complex", "get_device", "data_ptr", "untyped_storage", "register_hook", "__len__"),
    *("__hash__", "is_same_size", "is_coalesced", "has_names", "is_inference", "is_pinned"),
    "_has_compatible_shallow_copy_type",
    *("empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like"),
    *("new_empty", "new_zeros", "new_ones", "new_full", "new_tensor"),
}
# They read nothing if there is nothing to convert, as `module.to` the device where it is.
_CONVERSIONS = {"to", "cpu", "cuda", "float", "double", "half", "bfloat16", "contiguous"}
# In-place functions that compute each element from itself, numbers, and the same element of other tensors.
_ELEMENTWISE = {
    *("add_", "sub_", "subtract_", "mul_", "multiply_", "div_", "divide_", "true_divide_", "neg_", "negative_"),
    *("abs_", "absolute_", "square_", "sqrt_", "rsqrt_", "reciprocal_", "pow_", "exp_", "log_", "sign_", "sgn_"),
    *("tanh_", "sigmoid_", "relu_", "round_", "floor_", "ceil_", "trunc_", "clamp_", "clamp_min_", "clamp_max_"),
    *("clip_", "minimum_", "maximum_", "nan_to_num_", "zero_", "fill_", "masked_fill_", "index_fill_", "copy_"),
    *("lerp_", "addcmul_", "addcdiv_"),
    *("__iadd__", "__isub__", "__imul__", "__itruediv__", "__ipow__", "__setitem__"),
}


class ShardedGradientError(RuntimeError):
    """A gradient that is divided among the ranks was read as if this rank had all of it."""


@dataclass(eq=False)
class GlobalNorms:
    """The norms of all divided gradients, computed in one exchange: torch asks for one after the other.

    `divided_gradients` returns the gradients, on all ranks the same ones in the same order.
    """

    collectives: Collectives
    divided_gradients: Callable[[], Sequence[ShardedGradient]]
    _known: dict[tuple[float, ShardingState, str], Tensor] = field(default_factory=dict)

    def forget(self) -> None:
        """Compute all norms anew next time: a gradient has changed."""
        self._known.clear()

    def of(self, gradient: ShardedGradient, order: float) -> Tensor:
        """Return the norm of all of `gradient`. All ranks must call this."""
        key = (order, gradient.state, gradient.param_name)
        if key not in self._known:
            divided = list(self.divided_gradients())
            if all(one.state is not gradient.state for one in divided):
                refuse(gradient, "norm")  # it is one of an earlier backward
            for one, norm in zip(divided, self._compute(divided, order), strict=True):
                self._known[order, one.state, one.param_name] = norm
        return self._known[key]

    def _compute(self, divided: Sequence[ShardedGradient], order: float) -> Tensor:
        # `_foreach_norm(inf)` rejects empty tensors.
        shards = [one.own if len(one.own) else one.own.new_zeros(1) for one in divided]
        shards = [shard.float() if shard.dtype.itemsize < 4 else shard for shard in shards]
        norms = torch.stack([norm.double() for norm in torch._foreach_norm(shards, order)])
        if math.isinf(order):
            self.collectives.maximum(norms)
            return norms
        powers = norms if order == 0 else norms**order
        self.collectives.sum(powers)
        return powers if order == 0 else powers ** (1 / order)


@dataclass(slots=True, eq=False)
class ShardingState:
    """Whether the gradients that a bucket has collected in one backward are divided by now."""

    norms: GlobalNorms
    is_divided: bool = False


class ShardedGradient(Tensor):
    """A gradient in a bucket of which each rank keeps a shard (Note: a divided gradient)."""

    state: ShardingState
    own: Tensor  # this rank's shard, in memory order: an ordinary tensor over the same memory, which may be empty
    param_name: str

    @staticmethod
    def over(gradient: Tensor, *, own: Tensor, state: ShardingState, name: str) -> ShardedGradient:
        """Return `gradient`, over the same memory, as one that is divided when `state` is."""
        sharded: ShardedGradient = gradient.as_subclass(ShardedGradient)
        sharded.own, sharded.state, sharded.param_name = own, state, name
        return sharded

    def plain(self) -> Tensor:
        with torch._C.DisableTorchFunctionSubclass():
            return self.as_subclass(Tensor)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        divided = _divided_in((*args, *given.values()))
        name = _name_of(func)
        if divided and (complete := _COMPLETED_WITH_OTHERS.get(name)) is not None:
            with torch._C.DisableTorchFunctionSubclass():
                return complete(*args, **given)
        if divided and name in _CONVERSIONS:
            with torch._C.DisableTorchFunctionSubclass():
                if func(*args, **given) is args[0]:
                    return args[0]
        if name == "detach_":
            return args[0]  # it has no graph; autograd would refuse it, because it is a view
        if divided and name == "data = ..." and args[1].data_ptr() == args[0].data_ptr():
            return None
        if divided and name not in _OF_NO_NUMBERS:
            # As an operand, even of itself, it is read.
            if _divided_in((*args[1:], *given.values())) or name.removeprefix("_foreach_") not in _ELEMENTWISE:
                refuse(divided[0], name)
            divided[0].state.norms.forget()
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **given)
        if name in ("data", "detach") and isinstance(result, Tensor) and isinstance(args[0], ShardedGradient):
            return cls.over(result, own=args[0].own, state=args[0].state, name=args[0].param_name)
        return result

    def __repr__(self, *, tensor_contents: Any = None) -> Any:  # type: ignore[override]
        return f"<gradient of `{self.param_name}`, {_describe_shard(self)}>"

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if is_divided(self):
            refuse(self, "deepcopy")
        return self.plain().__deepcopy__(memo)  # type: ignore[no-untyped-call]

    def __reduce_ex__(self, protocol: Any) -> Any:
        if is_divided(self):
            refuse(self, "pickle")
        return self.plain().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]


def copy_of(gradient: Tensor) -> Tensor:
    """Return a copy of a gradient, which is divided if the gradient is."""
    if not isinstance(gradient, ShardedGradient):
        return gradient.clone()
    whole, own = gradient.plain().clone(), gradient.own
    start = (own.data_ptr() - gradient.data_ptr()) // gradient.itemsize if len(own) else 0
    own = whole.as_strided(own.shape, (1,), start)
    return ShardedGradient.over(whole, own=own, state=gradient.state, name=gradient.param_name)


def own_shard(gradient: Tensor) -> Tensor:
    """Return this rank's shard of a divided gradient, and all of any other."""
    return gradient.own if is_divided(gradient) else gradient


def is_divided(gradient: object) -> TypeGuard[ShardedGradient]:
    return isinstance(gradient, ShardedGradient) and gradient.state.is_divided


def _divided_in(values: Iterable[Any]) -> list[ShardedGradient]:
    """Return the divided gradients among `values`, and in the lists among them."""
    divided = []
    for value in values:
        if isinstance(value, list | tuple):
            divided += _divided_in(value)
        elif is_divided(value):
            divided.append(value)
    return divided


def _name_of(func: Any) -> str:
    """Return the name of the function, method or attribute that torch dispatches."""
    name: str = func.__name__
    if name not in ("__get__", "__set__"):
        return name
    attribute = str(func.__self__.__name__)
    # Setting `data` moves the gradient out of the bucket, whose numbers are stepped.
    return "data = ..." if (name, attribute) == ("__set__", "data") else attribute


def _describe_shard(gradient: ShardedGradient) -> str:
    ranks, numel = gradient.state.norms.collectives, math.prod(gradient.shape)
    return f"of which rank {ranks.rank} of {ranks.world_size} has {len(gradient.own)} of {numel} elements"


def refuse(gradient: ShardedGradient, name: str) -> NoReturn:
    """Raise because `name` would read this rank's shard as all of `gradient`."""
    raise ShardedGradientError(
        f"`{name}` reads the gradient of `{gradient.param_name}`, {_describe_shard(gradient)}: `shard_optimizer`"
        " divides gradients among the ranks once they are averaged. Clipping, norms and changes element by element work"
        " as usual. For all of it call `strategy.full_gradient(param)` on every rank, or set `shard_optimizer=False`."
    )


def _foreach_norm(gradients: Sequence[Tensor], ord: float = 2, dtype: torch.dtype | None = None) -> list[Tensor]:
    """Return the norm of each gradient, those that are divided completed with the other ranks."""
    order = float(ord)
    norms = []
    for gradient in gradients:
        if not is_divided(gradient):
            norms.append(torch.linalg.vector_norm(gradient, order))
            continue
        if order < 0:
            refuse(gradient, f"norm {order}")
        norms.append(gradient.state.norms.of(gradient, order).to(gradient.dtype.to_real()))
    return norms if dtype is None else [norm.to(dtype) for norm in norms]


def _norm(
    gradient: Tensor,
    p: Any = 2,
    dim: Any = None,
    keepdim: bool = False,
    out: None = None,
    dtype: torch.dtype | None = None,
    *,
    ord: Any = None,
) -> Tensor:
    """Stand for `torch.norm`, whose order is `p`, and for `torch.linalg.norm` and `vector_norm`, where it is `ord`."""
    order = p if ord is None else ord
    order = 2.0 if order in (None, "fro") else order
    if dim is not None or keepdim or out is not None or isinstance(order, str):
        assert isinstance(gradient, ShardedGradient)
        refuse(gradient, "norm")
    return _foreach_norm([gradient], order, dtype)[0]


def _unscale(gradients: Sequence[Tensor], found_inf: Tensor, inv_scale: Tensor) -> None:
    """Unscale this rank's shards for a GradScaler; an infinity on one rank counts on all."""
    torch._amp_foreach_non_finite_check_and_unscale_(list(map(own_shard, gradients)), found_inf, inv_scale)
    norms = _divided_in(gradients)[0].state.norms
    norms.collectives.maximum(found_inf)
    norms.forget()


_COMPLETED_WITH_OTHERS: dict[str, Callable[..., Any]] = {
    "_foreach_norm": _foreach_norm,
    "norm": _norm,
    "linalg_norm": _norm,
    "linalg_vector_norm": _norm,
    "_amp_foreach_non_finite_check_and_unscale_": _unscale,
}
