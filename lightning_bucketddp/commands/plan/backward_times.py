"""When the gradients of a module are ready: recorded, measured here, or estimated."""

from __future__ import annotations

import statistics
import time
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn

from lightning_bucketddp.commands import UsageError, first_line
from lightning_bucketddp.planning.cost import Profile
from lightning_bucketddp.planning.plan import ParameterSpec
from lightning_bucketddp.recording.schema import RecordedPlan, Run, Step, read
from lightning_bucketddp.recording.typical_step import NO_COST, profile_of
from lightning_bucketddp.reducer.observer import Clock, clock_of
from lightning_bucketddp.reducer.plan_cache import spec_of
from lightning_bucketddp.replicas.replicas import check_parameters, parameters_of, sparse_names_of

_NUM_WARM_UP = 2
_NUM_MEASURED = 5
_ENOUGH_S = 20.0


@dataclass(frozen=True, slots=True)
class BackwardTimes:
    """The order and the times of gradients, and their source in one word (`kind`) and in a sentence (`origin`)."""

    profile: Profile
    kind: str
    origin: str
    is_of_cpu: bool = False  # and says nothing about GPUs


def specs_of(module: nn.Module, *, device: torch.device) -> list[ParameterSpec]:
    """Return the trainable parameters of `module` as the reducer sees them on `device`, in order of registration."""
    parameters = parameters_of(module)
    try:
        check_parameters(module, parameters)
    except ValueError as error:
        raise UsageError(str(error)) from error
    sparse = sparse_names_of(module, parameters)
    specs = [
        spec_of(name, param, device=device, sparse=name in sparse, may_be_alone=True)
        for name, param in parameters.items()
        if param.requires_grad
    ]
    if not specs:
        raise UsageError(f"{type(module).__name__} has no parameters that train.")
    return specs


def recorded(path: Path, module: nn.Module, *, device: torch.device) -> BackwardTimes:
    """Read the times that a run recorded, from a profile as JSON or from the record of a rank."""
    specs = {spec.name: spec for spec in specs_of(module, device=device)}
    try:
        if path.suffix == ".jsonl":
            profile, computed_on = _read_record(path)
        else:
            profile = Profile.from_json(path.read_text())
            computed_on = profile.specs[0].kind.split()[-1]
    except (OSError, ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError) as error:
        raise UsageError(f"{path} holds no profile of bucketddp: {error}") from error
    if profile is None:
        raise UsageError(f"{path} holds no step of several ranks that says when its buckets were complete.")
    there = {spec.name: spec.num_bytes for spec in profile.specs}
    here = {name: spec.num_bytes for name, spec in specs.items()}
    for name in [*here, *there]:
        if here.get(name) != there.get(name):
            raise UsageError(
                f"{path} is of another module: `{name}` has {there.get(name, 0):,} bytes there, and"
                f" {here.get(name, 0):,} in {type(module).__name__}."
            )
    # Profiles made from recorded steps do not know kinds.
    profile = replace(profile, specs=[spec if spec.kind else specs[spec.name] for spec in profile.specs])
    unknown = "" if profile.cost is not None else f", which does not tell what an all-reduce costs: {NO_COST}"
    origin = f"recorded in {path}, by a run of {profile.num_ranks} ranks{unknown}"
    return BackwardTimes(profile, "recorded", origin, is_of_cpu=computed_on == "cpu")


def _read_record(path: Path) -> tuple[Profile | None, str]:
    """Return the last profile in a record, or one made from steps with the last plan, and the device."""
    lines = list(read(path))
    last: dict[type, Any] = {type(line): line for line in lines}
    run, plan, profile = last.get(Run), last.get(RecordedPlan), last.get(Profile)
    if profile is None and run is not None and plan is not None:
        steps = [line for line in lines if isinstance(line, Step)]
        profile = profile_of(plan, steps, num_ranks=run.world_size)
        if profile is not None:
            profile = replace(profile, reduce_dtype=run.options.get("reduce_dtype"))
    return profile, "" if run is None else run.device


def estimated(module: nn.Module, *, backward_s: float, device: torch.device) -> BackwardTimes:
    """Estimate times: gradients in reverse order of registration, each after a time in proportion to its size."""
    specs = specs_of(module, device=device)[::-1]
    total = sum(spec.num_bytes for spec in specs)
    ready_s = [backward_s * so_far / total for so_far in accumulate(spec.num_bytes for spec in specs)]
    origin = (
        "an estimate from --backward-ms: gradients in reverse order of registration, each after a time in proportion to"
        " its size"
    )
    return BackwardTimes(Profile(specs, ready_s, backward_s, cost=None, num_ranks=1), "estimated", origin)


def without_times(module: nn.Module, *, device: torch.device) -> BackwardTimes:
    """Return the expected order of gradients, without times."""
    times = estimated(module, backward_s=0.0, device=device)
    return BackwardTimes(times.profile, "unknown", "not known; gradients are expected in reverse order of registration")


def measured(module: nn.Module, *, device: torch.device) -> BackwardTimes:
    """Run forward and backward on the `example_input_array` of `module`, and return the median times."""
    example = module.example_input_array
    module = module.to(device).train()
    clock = clock_of(device)
    runs: list[_Run] = []
    started = time.perf_counter()
    try:
        while len(runs) < _NUM_WARM_UP + _NUM_MEASURED and (not runs or time.perf_counter() - started < _ENOUGH_S):
            runs.append(_run(module, example, clock, device))
    except Exception as error:
        raise UsageError(
            f"{type(module).__name__} cannot be trained on its `example_input_array`: {first_line(error)}. Pass"
            " --backward-ms, and nothing is run."
        ) from error
    runs = runs[_NUM_WARM_UP:] or runs[-1:]
    specs = {spec.name: spec for spec in specs_of(module, device=device)}
    arrived = [name for name in runs[0].arrivals if all(name in run.arrivals for run in runs)]
    missing = [name for name in reversed(specs) if name not in arrived]
    ready_s = [statistics.median(clock.seconds(run.start, run.arrivals[name]) for run in runs) for name in arrived]
    backward_s = statistics.median(clock.seconds(run.start, run.end) for run in runs)
    profile = Profile(
        [specs[name] for name in (*arrived, *missing)],
        ready_s,
        max(backward_s, *ready_s, 0.0),
        cost=None,
        num_ranks=1,
        forward_s=statistics.median(clock.seconds(run.forward_start, run.start) for run in runs),
    )
    shapes = ", ".join(str(tuple(tensor.shape)) for tensor in _tensors(example))
    origin = f"measured here, on {device}, with `example_input_array` of shape {shapes}"
    return BackwardTimes(profile, "measured", origin, is_of_cpu=device.type == "cpu")


@dataclass(slots=True)
class _Run:
    """The clock marks of one forward and backward."""

    forward_start: Any
    start: Any
    end: Any
    arrivals: dict[str, Any] = field(default_factory=dict)


def _run(module: nn.Module, example: Any, clock: Clock, device: torch.device) -> _Run:
    module.zero_grad(set_to_none=True)
    forward_start = clock.mark()
    example = apply_to_collection(example, Tensor, lambda tensor: tensor.to(device))
    if isinstance(example, dict):
        output = module(**example)
    else:
        output = module(*example) if isinstance(example, tuple) else module(example)
    # A loss without a meaning, to which every output contributes.
    loss = sum((tensor.float().square().mean() for tensor in _tensors(output) if tensor.requires_grad), torch.zeros(()))
    run = _Run(forward_start, start=clock.mark(), end=None)
    trainable = {name: param for name, param in parameters_of(module).items() if param.requires_grad}
    with ExitStack() as hooks:
        for name, param in trainable.items():
            mark = partial(_mark_arrival, run, name, clock)
            hooks.enter_context(param.register_post_accumulate_grad_hook(mark))  # type: ignore[no-untyped-call]
        torch.autograd.backward(loss)
    run.end = clock.mark()
    return run


def _mark_arrival(run: _Run, name: str, clock: Clock, _param: Tensor) -> None:
    run.arrivals.pop(name, None)  # a gradient that arrives again counts where it arrives last
    run.arrivals[name] = clock.mark()


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return [tensor for one in inner for tensor in _tensors(one)]
