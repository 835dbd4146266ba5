"""The keywords of `BucketDDPStrategy`: torch DDP's and Lightning's, so that a project ports by one word."""

from __future__ import annotations

import difflib
import inspect
import logging
import math
import sys
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, ClassVar, Literal, get_args

import torch
import torch.distributed
from lightning_utilities.core.rank_zero import rank_zero_info

StartMethod = Literal["popen", "spawn", "fork", "forkserver"]

log = logging.getLogger(__name__)

_WHY_WITHOUT_EFFECT = {
    "find_unused_parameters": "unused parameters are always handled; only a step that leaves some out takes longer",
    "static_graph": "how often each parameter is used is learned from the first backward",
    "gradient_as_bucket_view": "gradients always live in their buckets",
    "batched_grad_copy": "gradients are always copied by one call per bucket",
    "skip_all_reduce_unused_params": "unused parameters need no mode of their own",
    "device_ids": "Lightning gives each process its device",
    "output_device": "outputs stay on the device of the process",
    "dim": "batches are not scattered to devices",
    "check_reduction": "torch ignores it, too",
    "delay_all_reduce_named_params": "each bucket leaves as soon as it is complete",
    "param_to_hook_all_reduce": "each bucket leaves as soon as it is complete",
    "process_group": "gradients are averaged over all ranks in any case",
    "device_mesh": "gradients are averaged over all ranks in any case",
}


class RejectsUnknownOptions:
    """Answers a misspelt keyword with the nearest right one."""

    __signature__: ClassVar[inspect.Signature]
    # What was given and is not the default, for a class of another root of Lightning.
    given_options: dict[str, Any]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        # Python 3.10 would show the signature of `__new__` below to whoever inspects the class.
        of_init = inspect.signature(cls.__init__)
        cls.__signature__ = of_init.replace(parameters=list(of_init.parameters.values())[1:])

    def __new__(cls, *args: Any, **options: Any) -> Any:
        parameters = inspect.signature(cls.__init__).parameters
        takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
        unknown = [] if takes_any else [name for name in options if name not in parameters]
        if unknown:
            nearest = difflib.get_close_matches(unknown[0], parameters, n=1)
            hint = f" Did you mean `{nearest[0]}`?" if nearest else f" It takes: {', '.join(list(parameters)[1:])}."
            raise TypeError(f"`{cls.__name__}` has no option `{unknown[0]}`.{hint}")
        strategy = super().__new__(cls)
        given = {**dict(zip(list(parameters)[1:], args, strict=False)), **options}
        strategy.given_options = {
            name: value
            for name, value in given.items()
            if name in parameters and name not in _WHY_WITHOUT_EFFECT and value != parameters[name].default
        }
        return strategy


def settle_torch_options(**options: Any) -> None:
    """Explain in one line those of torch DDP's options that were given (not None) and have no effect; refuse the rest.

    Raises:
        ValueError: if an option asks for something else than what is done anyway.
    """
    given = {name: value for name, value in options.items() if value is not None}
    if given.pop("mixed_precision", None) is not None:
        raise ValueError(
            "`mixed_precision` of torch DDP is not supported, because Lightning does that: pass `precision` to the"
            ' Trainer or to Fabric, for example "bf16-mixed". What gradients travel as is `reduce_dtype`.'
        )
    for name in ("process_group", "device_mesh"):
        if name in given:
            _check_holds_all_ranks(name, given[name])
    reasons = [f"`{name}` ({_WHY_WITHOUT_EFFECT[name]})" for name in given]
    if reasons:
        rank_zero_info(f"bucketddp: no effect, and no need to set: {', '.join(reasons)}.")


def _check_holds_all_ranks(name: str, group: Any) -> None:
    """`group` is a process group or a device mesh, which exists only in a process that is one of several ranks."""
    shape = tuple(getattr(group, "shape", [group.size()]))
    world_size = torch.distributed.get_world_size()
    if shape != (world_size,):
        raise ValueError(
            f"`{name}` has shape {shape}, but gradients are averaged over all ranks of a run, here ({world_size},)."
            " Leave it out. For a model that is split between ranks use Lightning's `ModelParallelStrategy`."
        )


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


def resolve_start_method(start_method: StartMethod) -> StartMethod:
    """Choose fork in a notebook or interactive interpreter, where there is no script to run again."""
    if start_method not in get_args(StartMethod):
        raise ValueError(f"`start_method` must be one of {', '.join(get_args(StartMethod))}, got {start_method!r}.")
    if start_method == "popen" and hasattr(sys, "ps1"):
        rank_zero_info("bucketddp: starting processes by fork, because this is an interactive session.")
        return "fork"
    return start_method


def check_flags(**flags: object) -> None:
    """Refuse a value that is neither True nor False."""
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise ValueError(f"`{name}` must be True or False, got {value!r}.")


def check_functions(**functions: object) -> None:
    """Refuse a value that is neither None nor can be called."""
    for name, value in functions.items():
        if value is not None and not callable(value):
            raise ValueError(f"`{name}` must be a function or None, got {value!r}.")


def check_backend(backend: str | None) -> str | None:
    """Return `backend` if it can be the name of one; torch knows which there are."""
    if backend is not None and not isinstance(backend, str):
        raise ValueError(f"`process_group_backend` must be a name, for example 'gloo' or 'nccl', got {backend!r}.")
    return backend


def check_period(steps: int | None) -> int | None:
    """Return `steps` if it is a positive number of them, or None."""
    if steps is not None and (not isinstance(steps, int) or isinstance(steps, bool) or steps < 1):
        raise ValueError(f"`model_averaging_period` must be a positive number of steps, got {steps!r}.")
    return steps


def choose_bucket_sizes(
    cap: float | list[float] | Literal["auto"] | None, caps: list[float] | None
) -> float | Sequence[float] | Literal["auto"] | None:
    """Return what `bucket_cap_mb` says, or `bucket_cap_mb_list`, torch DDP's name for a list of sizes."""
    if caps is None:
        return cap
    if isinstance(caps, str) or not isinstance(caps, Sequence):
        raise ValueError(f"`bucket_cap_mb_list` must be a list of sizes in MiB, got {caps!r}.")
    return caps


def check_seconds(name: str, seconds: float, *, may_be_endless: bool = False) -> float:
    """Return `seconds` if it is a positive number."""
    is_number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
    if not is_number or not seconds > 0 or (math.isinf(seconds) and not may_be_endless):
        raise ValueError(f"`{name}` must be a positive number of seconds, got {seconds!r}.")
    return float(seconds)


def check_timeout(timeout: timedelta | float | None) -> timedelta | None:
    """Return `timeout` as torch takes it; a number is one of seconds."""
    if timeout is None:
        return None
    seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
    return timedelta(seconds=check_seconds("timeout", seconds))
