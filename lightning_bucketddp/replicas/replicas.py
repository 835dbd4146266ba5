"""Replicas: the same module on every rank, with rank 0's parameters and buffers."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lightning_bucketddp.comm.collectives import Collectives
from lightning_bucketddp.trainer_internals import WRAPPER_OF_FABRIC
from lightning_bucketddp.wording import list_names, list_ranks

# Classes that exchange gradients or weights by themselves: wrappers of modules, and classes into which a call turns a
# module or its parameters. By name and package, because importing them takes seconds.
_WRAPPERS = {
    *("DataParallel", "DeepSpeedEngine", "DistributedDataParallel", "FullyShardedDataParallel", "ShardedDataParallel"),
    WRAPPER_OF_FABRIC,
}
_CALLS = {
    "DDP": "`replicate`",
    "DTensor": "`fully_shard` or `parallelize_module`",
    "FSDPModule": "`fully_shard`",
    "ReplicateModule": "`replicate`",
}
_PACKAGES = {"apex", "deepspeed", "fairscale", "lightning", "lightning_fabric", "pytorch_lightning", "torch"}

# Shape, dtype and other aspects of each tensor of a rank, by its name.
Description = dict[str, dict[str, Any]]


class ReplicaMismatchError(RuntimeError):
    """The ranks do not hold the same module."""


class Replicas:
    """The state of `module` that all ranks share.

    Names in `module._ddp_params_and_buffers_to_ignore` are left out, as torch DDP does. Tied parameters count once.
    """

    def __init__(self, module: nn.Module, collectives: Collectives) -> None:
        self._ignored = _ignored_names(module)
        self.collectives = collectives
        self._module_type = type(module).__name__
        self.parameters = parameters_of(module)
        check_parameters(module, self.parameters)
        self._parallel_already = find_parallel_submodule(module, self.parameters)
        self.sparse_names = sparse_names_of(module, self.parameters)
        embeddings = (
            (name, it) for name, it in module.named_modules() if isinstance(it, nn.Embedding | nn.EmbeddingBag)
        )
        self._renormalized = [name or type(it).__name__ for name, it in embeddings if it.max_norm is not None]
        # As torch DDP: buffers may be added, replaced and dropped, unless there are none at the start.
        has_buffers = any(name not in self._ignored for name, _ in module.named_buffers())
        self._owners = list(module.named_modules()) if has_buffers else []

    def are_outdated(self, module: nn.Module) -> bool:
        """Return whether parameters were added to `module`, taken from it or replaced since this was made."""
        now = parameters_of(module)
        return list(now) != list(self.parameters) or any(now[name] is not self.parameters[name] for name in now)

    def check_trainable(self) -> None:
        """Raise if there is nothing to train, or if forwards change weights on each rank in another way."""
        if self._renormalized and self.collectives.world_size > 1:
            raise ValueError(
                f"The forward of `{self._renormalized[0]}` scales the weights that its batch uses to `max_norm`, on"
                " each rank other ones, so that the ranks' weights drift apart (also with torch DDP). Leave `max_norm`"
                " out, and scale all weights after each step, for example in `on_train_batch_end`: `with"
                " torch.no_grad(): embedding.weight.renorm_(2, 0, max_norm)`."
            )
        if not any(param.requires_grad for param in self.parameters.values()):
            raise ValueError(
                f"`{self._module_type}` has no parameter that requires a gradient, so there is nothing to train."
                " Unfreeze a parameter, or run `validate`, `test` or `predict`."
            )

    def agree(self) -> None:
        """Raise on every rank, naming the first difference, unless all ranks have the same parameters and buffers.

        Raise also if a submodule is made parallel by something else, on any rank.
        """
        mine = {
            name: {
                "shape": list(tensor.shape),
                "dtype": str(tensor.dtype),
                "stride": list(tensor.stride()),
                "requires_grad": tensor.requires_grad,
            }
            for name, tensor in {**self.parameters, **self.buffers()}.items()
        }
        digest = hashlib.sha256(json.dumps(mine).encode()).hexdigest()
        digests, refusals = zip(*self.collectives.gather_json([digest, self._parallel_already]), strict=True)
        if ranks := [rank for rank, refusal in enumerate(refusals) if refusal is not None]:
            name, kind = refusals[ranks[0]]
            found, remedy = f"was made parallel by {_CALLS.get(kind)}", "Leave that call out"
            if kind in _WRAPPERS:
                found, remedy = f"is wrapped in `{kind}`", "Leave the wrapper out: put its `.module` in its place"
            where = "" if len(ranks) == self.collectives.world_size else f" on {list_ranks(ranks)}"
            raise ValueError(
                f"`{name}` {found}{where}, but this strategy averages the gradients of all submodules by itself."
                f" {remedy}, or name its parameters in `_ddp_params_and_buffers_to_ignore`."
            )
        if len(set(digests)) > 1:
            raise ReplicaMismatchError(explain_difference(self._by_rank(self.collectives, mine)))

    def refuse_trainable(self, trainable: Sequence[bool]) -> NoReturn:
        """Raise on every rank, naming a parameter that only some of them train. All ranks must call this."""
        mine = {name: {"requires_grad": is_on} for name, is_on in zip(self.parameters, trainable, strict=True)}
        # By the host group: buckets may be in flight in the other groups.
        raise ReplicaMismatchError(explain_difference(self._by_rank(self.collectives.host_group(), mine)))

    @staticmethod
    def _by_rank(collectives: Collectives, mine: Description) -> dict[int, Description]:
        return dict(zip(collectives.global_ranks, collectives.gather_json(mine), strict=True))

    def broadcast(self, *, buffers: bool = True) -> None:
        """Overwrite parameters, and `buffers`, with those of rank 0."""
        self.collectives.broadcast_tensors([param.detach() for param in self.parameters.values()])
        if buffers:
            self.broadcast_buffers()

    def broadcast_buffers(self) -> None:
        """Give every rank rank 0's buffers."""
        self.collectives.broadcast_tensors(list(self.buffers().values()))

    def buffers(self) -> dict[str, Tensor]:
        """Return the buffers that ranks share now, by name."""
        return {
            name: buffer
            for prefix, owner in self._owners
            for key, buffer in owner._buffers.items()
            if buffer is not None and (name := f"{prefix}.{key}" if prefix else key) not in self._ignored
        }


class SharedBuffers(nn.Module):
    """Calls `module` with rank 0's buffers on every rank, as torch DDP does: after each forward that has a gradient.

    Unlike there, a rank may leave out a forward if its backward has no gradient for the module either: it receives the
    buffers in that backward.
    """

    def __init__(self, module: nn.Module, replicas: Replicas, is_synchronised: Callable[[], bool]) -> None:
        super().__init__()
        self.module = module
        self._replicas = replicas
        self._is_synchronised = is_synchronised
        self._is_due = True
        self._was_called = False
        self._begin = torch.compiler.disable(self._begin)  # type: ignore[method-assign, no-untyped-call]
        self._end = torch.compiler.disable(self._end)  # type: ignore[method-assign, no-untyped-call]

    def __deepcopy__(self, memo: dict[int, Any]) -> SharedBuffers:
        module = deepcopy(self.module, memo)
        copied = SharedBuffers(module, Replicas(module, self._replicas.collectives), lambda: True)
        copied._is_due, copied.training = self._is_due, self.training
        return copied

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self._begin()
        output = self.module(*args, **kwargs)
        self._end(has_gradient=torch.is_grad_enabled())
        return output

    def _begin(self) -> None:
        if self._is_due:
            self._replicas.broadcast_buffers()
        self._was_called = True

    def _end(self, *, has_gradient: bool) -> None:
        self._is_due = has_gradient and self._is_synchronised()

    def end_backward(self, *, has_gradients: bool) -> None:
        """Receive the buffers where the forward was left out; called before gradients are exchanged."""
        if self._is_due and not self._was_called and not has_gradients and self._is_synchronised():
            self._replicas.broadcast_buffers()
        self._was_called = False


def unwrapped(module: nn.Module) -> nn.Module:
    """Return `module` without `SharedBuffers` and not compiled: what Fabric names it by."""
    inner = module.module if isinstance(module, SharedBuffers) else module
    compiled: nn.Module = getattr(inner, "_orig_mod", inner)
    return compiled


def _ignored_names(module: nn.Module) -> set[str]:
    return set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))


def parameters_of(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that ranks share, by name."""
    ignored = _ignored_names(module)
    return {name: param for name, param in module.named_parameters() if name not in ignored}


def find_parallel_submodule(module: nn.Module, parameters: Mapping[str, nn.Parameter]) -> tuple[str, str] | None:
    """Return the first submodule with some of `parameters` that something else makes parallel, and by which class."""
    # By identity: a module and its wrapper may both be submodules.
    ours = {id(param) for param in parameters.values()}
    for name, submodule in module.named_modules():
        tensors = [type(param) for param in submodule.parameters(recurse=False) if id(param) in ours]
        for base in dict.fromkeys(base for kind in (type(submodule), *tensors) for base in kind.__mro__):
            is_known = base.__name__ in _WRAPPERS | _CALLS.keys() and base.__module__.partition(".")[0] in _PACKAGES
            if is_known and any(id(param) in ours for param in submodule.parameters()):
                return name or type(module).__name__, base.__name__
    return None


def explain_difference(by_rank: Mapping[int, Description]) -> str:
    """Return the first difference between the first rank's description and another rank's, in words."""
    remedy = (
        " Data-parallel training needs the same module on every rank: build it from the same configuration and freeze"
        " the same parameters everywhere."
    )
    first, reference = next(iter(by_rank.items()))
    for name in dict.fromkeys(name for description in by_rank.values() for name in description):
        if (without := [rank for rank, d in by_rank.items() if name not in d]) and len(without) < len(by_rank):
            having = [rank for rank, d in by_rank.items() if name in d]
            return f"`{name}` exists on {list_ranks(having)} but not on {list_ranks(without)}.{remedy}"
        for aspect, expected in reference[name].items():
            if differing := [rank for rank, d in by_rank.items() if d[name][aspect] != expected]:
                actual = by_rank[differing[0]][name][aspect]
                return (
                    f"`{name}` has {aspect} {expected} on rank {first} but {actual} on {list_ranks(differing)}.{remedy}"
                )
    orders = [list(description) for description in by_rank.values()]
    place, names = next((i, names) for i, names in enumerate(zip(*orders, strict=True)) if len(set(names)) > 1)
    others = {rank: name for rank, name in zip(by_rank, names, strict=True) if name != names[0]}
    return (
        f"The ranks register their parameters or buffers in different order: number {place} is `{names[0]}` on rank"
        f" {first} but `{next(iter(others.values()))}` on {list_ranks(list(others))}.{remedy}"
    )


def sparse_names_of(module: nn.Module, parameters: dict[str, nn.Parameter]) -> set[str]:
    """Return the names of those `parameters` whose gradients are sparse."""
    embeddings = [m for m in module.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag)]
    sparse_weights = {id(embedding.weight) for embedding in embeddings if embedding.sparse}
    return {name for name, param in parameters.items() if id(param) in sparse_weights}


def check_parameters(module: nn.Module, parameters: dict[str, nn.Parameter]) -> None:
    """Raise if ranks cannot share `parameters` of `module`."""
    kind = type(module).__name__
    if lazy := [name for name, param in parameters.items() if is_lazy(param)]:
        raise ValueError(
            f"`{kind}` has parameters without a shape yet: {list_names(lazy)}. Run one batch through the module before"
            " training, for example in `configure_model` or `setup`."
        )
    names_by_device: dict[torch.device, list[str]] = {}
    for name, param in parameters.items():
        names_by_device.setdefault(param.device, []).append(name)
    if len(names_by_device) > 1:
        places = "; ".join(f"{list_names(names)} on {device}" for device, names in names_by_device.items())
        raise ValueError(
            f"`{kind}` has parameters on several devices: {places}. Each process trains on one device: move the whole"
            " module there, or leave that to Lightning."
        )
