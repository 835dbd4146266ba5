"""The keywords of `BucketDDPStrategy`: torch DDP's and Lightning's, so that a project ports by one word."""

from __future__ import annotations

import difflib
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from datetime import timedelta
from typing import Any, Literal, TypedDict, get_args

import torch
import torch.distributed
from torch.distributed.constants import default_pg_timeout

from lightning_bucketddp.config import (
    NAME_OF_DTYPE,
    LocalSteps,
    MaxRestarts,
    ReducerConfig,
    ReplicaChecks,
    Timeouts,
    check_seconds,
    is_count,
)
from lightning_bucketddp.sharding.shards import ShardOption

StartMethod = Literal["popen", "spawn", "fork", "forkserver"]
GradientWeightOption = Callable[[Any], Any] | Literal["batch_size"] | None


class DDPOptions(TypedDict, total=False):
    """Keywords of torch's `DistributedDataParallel`, and what they do here.

    Args:
        broadcast_buffers: Keep all ranks on rank 0's buffers (default: True).
        forward_sync_buffers: As `broadcast_buffers`; but all ranks begin with rank 0's buffers.
        init_sync: Give every rank rank 0's weights at the start (default: True). The modules are compared in any case.
        bucket_cap_mb_list: torch DDP's name for `bucket_cap_mb` where that is a list.
        find_unused_parameters: No effect; unused parameters are always handled.
        static_graph: No effect; how often each parameter is used is learned.
        gradient_as_bucket_view: No effect; gradients always live in their buckets.
        batched_grad_copy: No effect; gradients are always copied by one call per bucket.
        lazy_bucket_allocation: No effect; on a GPU a bucket has memory only while gradients are in it.
        skip_all_reduce_unused_params: No effect; unused parameters need no mode of their own.
        device_ids: No effect; Lightning gives each process its device. Another one is refused.
        output_device: No effect; outputs stay on the device of the process. Another one is refused.
        dim: No effect; batches are not scattered to devices.
        check_reduction: No effect; torch ignores it, too.
        delay_all_reduce_named_params: No effect; each bucket leaves as soon as it is complete.
        param_to_hook_all_reduce: No effect; each bucket leaves as soon as it is complete.
        process_group: No effect; gradients are averaged over all ranks. A group of some of them is refused.
        device_mesh: No effect; gradients are averaged over all ranks. Another mesh is refused.
        mixed_precision: Refused; Lightning does it (`precision` of the Trainer or of Fabric).
    """

    broadcast_buffers: bool
    forward_sync_buffers: bool | None
    init_sync: bool
    bucket_cap_mb_list: list[float] | None
    find_unused_parameters: bool | None
    static_graph: bool | None
    gradient_as_bucket_view: bool | None
    batched_grad_copy: bool | None
    lazy_bucket_allocation: bool | None
    skip_all_reduce_unused_params: bool | None
    device_ids: list[Any] | None
    output_device: Any
    dim: int | None
    check_reduction: bool | None
    delay_all_reduce_named_params: list[Any] | None
    param_to_hook_all_reduce: Any
    process_group: Any
    device_mesh: Any
    mixed_precision: Any


_DDP_DEFAULTS = {**dict.fromkeys(DDPOptions.__annotations__), "broadcast_buffers": True, "init_sync": True}
_DDP_WITH_EFFECT = {"broadcast_buffers", "forward_sync_buffers", "init_sync", "bucket_cap_mb_list", "mixed_precision"}
_DDP_WITHOUT_EFFECT = [name for name in _DDP_DEFAULTS if name not in _DDP_WITH_EFFECT]

_FLAGS = {
    *("overlap", "broadcast_buffers", "init_sync", "rank_seeds"),
    *("uneven_data", "shard_iterable", "exact_evaluation", "gather_predictions", "async_checkpoints", "auto_resume"),
    "cuda_graphs",
}
_NOT_WITH_LOCAL_STEPS = {
    "shard_optimizer": "optimizers whose state is divided need all ranks in each step.",
    "ddp_comm_hook": "a hook says what all ranks exchange in each step.",
    "model_averaging_period": "both average weights between steps.",
    "gradient_weight": "batches are weighed against those of all ranks in each step.",
}


@dataclass(frozen=True, kw_only=True)
class StrategyOptions:
    """The validated options of a strategy; those with a default are the Trainer's alone."""

    given: dict[str, Any] = field(compare=False)  # as they were passed, without those that have their default
    reducer: ReducerConfig  # what concerns buckets, hooks and non-finite numbers
    replica_checks: ReplicaChecks
    torch_devices: tuple[list[Any] | None, Any]  # `device_ids`, `output_device`: they must be what Lightning chooses
    without_effect: tuple[str, ...]  # the names of torch DDP's options that were given and change nothing
    process_group_backend: str | None
    timeout: timedelta | None
    start_method: StartMethod
    broadcast_buffers: bool
    init_sync: bool
    init_sync_buffers: bool
    timeouts: Timeouts
    async_checkpoints: bool
    shard_optimizer: ShardOption
    max_restarts: MaxRestarts
    model_averaging_period: int | None = None
    rank_seeds: bool = False
    gradient_weight: GradientWeightOption = None
    uneven_data: bool = False
    shard_iterable: bool = False
    exact_evaluation: bool = True
    gather_predictions: bool = False
    global_batch_size: int | None = None
    auto_resume: bool = False
    local_steps: LocalSteps | None = None
    cuda_graphs: bool = False

    @classmethod
    def of(cls, arguments: Mapping[str, Any]) -> StrategyOptions:
        """Validate the `arguments` of a strategy's `__init__`, by name.

        Raises:
            TypeError: if there is no such option.
            ValueError: if one of them cannot be what is wanted; the text names it.
        """
        cls_of_init = arguments["__class__"]  # where `__init__` is defined: a subclass may have one of its own
        defaults, ddp_options = option_defaults(cls_of_init.__init__), arguments["ddp_options"]
        for name in ddp_options:
            if name not in defaults:
                nearest = difflib.get_close_matches(name, defaults, n=1)
                hint = f"Did you mean `{nearest[0]}`?" if nearest else f"It takes: {', '.join(defaults)}."
                raise TypeError(f"`{type(arguments['self']).__name__}` has no option `{name}`. {hint}")
        given = {name: ddp_options.get(name, arguments.get(name, default)) for name, default in defaults.items()}
        not_default = {name: value for name, value in given.items() if value != defaults[name]}
        _take_torch_options(given)
        _check_kinds(given)
        hook, wrapper = given["ddp_comm_hook"], given.get("ddp_comm_wrapper")
        if given["shard_optimizer"] and hook is not None:
            raise ValueError(
                "`shard_optimizer` and a communication hook do not go together: a hook gives every rank all gradients,"
                " and with post-localSGD the weights differ between ranks. Pass one of them."
            )
        timeout, checks = _check_timeouts(given["timeout"], given["timeouts"]), given["replica_checks"]
        restarts = given.get("max_restarts", 0)
        # In a notebook or interactive interpreter there is no script to run again.
        forks = given["start_method"] == "popen" and hasattr(sys, "ps1")
        kept = {it.name: given[it.name] for it in fields(cls) if it.name in given}
        kept.update(
            given=not_default,
            reducer=ReducerConfig(
                bucket_cap_mb=given["bucket_cap_mb"],
                overlap=given["overlap"],
                reduce_dtype=NAME_OF_DTYPE.get(given["reduce_dtype"], given["reduce_dtype"]),
                comm_hook=wrapper(hook) if wrapper and hook else hook,
                comm_state=given["ddp_comm_state"],
                on_nonfinite=given["on_nonfinite"],
            ),
            replica_checks=checks if isinstance(checks, ReplicaChecks) else ReplicaChecks(checks),
            torch_devices=(given["device_ids"], given["output_device"]),
            without_effect=tuple(name for name in _DDP_WITHOUT_EFFECT if given[name] is not None),
            timeout=timeout,
            start_method="fork" if forks else given["start_method"],
            local_steps=_check_local_steps(given),
            max_restarts=restarts if isinstance(restarts, MaxRestarts) else MaxRestarts(restarts),
        )
        if kept["max_restarts"].number and not given["auto_resume"]:
            raise ValueError("`max_restarts` goes on from checkpoints of the run: pass `auto_resume=True` as well.")
        return cls(**kept)


def option_defaults(init: Callable[..., None]) -> dict[str, Any]:
    """Return the options that `init`, the `__init__` of a strategy, takes by name; torch DDP's are among them."""
    parameters = list(inspect.signature(init).parameters.values())[1:]
    return {**{it.name: it.default for it in parameters if it.name != "ddp_options"}, **_DDP_DEFAULTS}


def _take_torch_options(given: dict[str, Any]) -> None:
    """Refuse options of torch DDP that are not supported, and copy those that have another name here."""
    if given.get("mixed_precision") is not None:
        raise ValueError(
            "`mixed_precision` of torch DDP is not supported, because Lightning does that: pass `precision` to the"
            ' Trainer or to Fabric, for example "bf16-mixed". What gradients travel as is `reduce_dtype`.'
        )
    for name in ("process_group", "device_mesh"):
        # A user can make one only in a process that is a rank.
        if (group := given.get(name)) is not None:
            shape, world_size = tuple(getattr(group, "shape", [group.size()])), torch.distributed.get_world_size()
            if shape != (world_size,):
                raise ValueError(
                    f"`{name}` has shape {shape}, but gradients are averaged over all ranks of a run, here"
                    f" ({world_size},). Leave it out. For a model that is split between ranks use Lightning's"
                    " `ModelParallelStrategy`."
                )
    # As in torch DDP, buffers are each rank's own from the start only by the older name.
    given["init_sync_buffers"] = given["broadcast_buffers"] or given["forward_sync_buffers"] is not None
    if given["forward_sync_buffers"] is not None:
        given["broadcast_buffers"] = given["forward_sync_buffers"]
    if (caps := given["bucket_cap_mb_list"]) is not None:
        if isinstance(caps, str) or not isinstance(caps, Sequence):
            raise ValueError(f"`bucket_cap_mb_list` must be a list of sizes in MiB, got {caps!r}.")
        given["bucket_cap_mb"] = caps


def check_devices(device: torch.device, device_ids: list[Any] | None, output_device: Any) -> None:
    """Refuse torch DDP's options if they name another device than `device`, which Lightning has chosen."""
    for name, wanted in (("device_ids", device_ids), ("output_device", [output_device])):
        for one in wanted or []:
            named = torch.device(device.type, one) if isinstance(one, int) else one and torch.device(one)
            if named is not None and named != device:
                raise ValueError(
                    f"`{name}` names {named}, but Lightning has given this process {device}. Leave it out, and pass"
                    " `devices` to the Trainer or to Fabric."
                )


def _check_kinds(given: Mapping[str, Any]) -> None:
    """Refuse values of the wrong kind, for the options that no class of their own checks."""

    def check(name: str, is_valid: Callable[[Any], bool], wanted: str) -> None:
        if name in given and not is_valid(given[name]):
            raise ValueError(f"`{name}` must be {wanted}, got {given[name]!r}.")

    methods = get_args(StartMethod)
    for name in _FLAGS:
        check(name, lambda value: isinstance(value, bool), "True or False")
    for name in ("ddp_comm_hook", "ddp_comm_wrapper"):
        check(name, lambda value: value is None or callable(value), "a function or None")
    check("process_group_backend", lambda it: it is None or isinstance(it, str), "a name, for example 'gloo' or 'nccl'")
    check("start_method", lambda value: value in methods, f"one of {', '.join(methods)}")
    check("timeouts", lambda value: isinstance(value, Timeouts), "`Timeouts(...)`")
    check("shard_optimizer", lambda it: isinstance(it, bool) or it == "parameters", "True, False or 'parameters'")
    check("model_averaging_period", lambda it: it is None or is_count(it), "a positive number of steps")
    check("global_batch_size", lambda it: it is None or is_count(it), "a positive number of samples")
    check(
        "gradient_weight",
        lambda value: value is None or value == "batch_size" or callable(value),
        "`batch_size` or a function that takes a batch and gives its weight",
    )


def _check_local_steps(given: Mapping[str, Any]) -> LocalSteps | None:
    """Return `local_steps` as a `LocalSteps`, or None; refuse options that exclude it."""
    option = given.get("local_steps")
    if option is None:
        return None
    for name, why in _NOT_WITH_LOCAL_STEPS.items():
        if given.get(name):
            raise ValueError(f"`local_steps` and `{name}` do not go together: {why} Pass one of them.")
    return option if isinstance(option, LocalSteps) else LocalSteps(option)


def _check_timeouts(timeout: timedelta | float | None, timeouts: Timeouts) -> timedelta | None:
    """Return `timeout` (seconds, or as torch takes it) as a `timedelta`; refuse a `stall_s` that would come later."""
    if timeout is not None:
        seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
        check_seconds("timeout", seconds)
        timeout = timedelta(seconds=seconds)
    longest_s = (timeout or default_pg_timeout).total_seconds()
    if timeouts.stall_s is not None and timeouts.stall_s >= longest_s:
        raise ValueError(
            f"`stall_s` must be less than `timeout`, which ends a run after {longest_s:g} s of waiting in any case, got"
            f" {timeouts.stall_s!r}."
        )
    return timeout
