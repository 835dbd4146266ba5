"""A backward that is measured here, on a module's own example of an input."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lightning_bucketddp.commands.plan.backward_times import BackwardTimes, specs_of
from lightning_bucketddp.commands.usage import UsageError
from lightning_bucketddp.planning.backward_profile import Profile
from lightning_bucketddp.reducer.clock import Clock, clock_of
from lightning_bucketddp.reducer.grad_hooks import hook
from lightning_bucketddp.replicas.replicas import parameters_of

_NUM_WARM_UP = 2
_NUM_MEASURED = 5
_ENOUGH_S = 20.0


def measured(module: nn.Module, *, device: torch.device) -> BackwardTimes:
    """Forward and backward of its `example_input_array`, here."""
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
            f"{type(module).__name__} cannot be trained on its `example_input_array`: {type(error).__name__}:"
            f" {str(error).strip().partition(chr(10))[0]}. Pass --backward-ms, and nothing is run."
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
    """One forward and backward, by marks of a clock."""

    forward_start: Any
    start: Any
    end: Any
    arrivals: dict[str, Any] = field(default_factory=dict)


def _run(module: nn.Module, example: Any, clock: Clock, device: torch.device) -> _Run:
    module.zero_grad(set_to_none=True)
    forward_start = clock.mark()
    example = _moved(example, device)
    if isinstance(example, dict):
        output = module(**example)
    else:
        output = module(*example) if isinstance(example, tuple) else module(example)
    # Of no meaning, and every output takes part in it.
    loss = sum((tensor.float().square().mean() for tensor in _tensors(output) if tensor.requires_grad), torch.zeros(()))
    run = _Run(forward_start, start=clock.mark(), end=None)
    trainable = {name: param for name, param in parameters_of(module).items() if param.requires_grad}
    handles = [hook(param, _see(run, name, clock)) for name, param in trainable.items()]
    try:
        torch.autograd.backward(loss)
    finally:
        for handle in handles:
            handle.remove()
    run.end = clock.mark()
    return run


def _see(run: _Run, name: str, clock: Clock) -> Callable[[Tensor], None]:
    def on_gradient(_param: Tensor) -> None:
        run.arrivals.pop(name, None)  # what comes again is placed where it comes last
        run.arrivals[name] = clock.mark()

    return on_gradient


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, dict):
        return {key: _moved(inner, device) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_moved(inner, device) for inner in value)
    return value


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for inner in value.values():
            yield from _tensors(inner)
    elif isinstance(value, Sequence) and not isinstance(value, str):
        for inner in value:
            yield from _tensors(inner)
