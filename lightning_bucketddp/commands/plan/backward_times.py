"""When the gradients of a module are ready: recorded, measured here, or estimated. It always says which."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path

import torch
from torch import nn

from lightning_bucketddp.commands.usage import UsageError
from lightning_bucketddp.planning.backward_profile import Profile
from lightning_bucketddp.planning.plan import ParameterSpec
from lightning_bucketddp.recording.schema import RecordedPlan, Run, Step, read
from lightning_bucketddp.recording.typical_step import NO_COST, profile_of
from lightning_bucketddp.reducer.plan_cache import spec_of
from lightning_bucketddp.replicas.replicas import check_parameters, parameters_of, sparse_names_of


@dataclass(frozen=True, slots=True)
class BackwardTimes:
    """A profile, and where its times and its order come from.

    Attributes:
        profile: the times.
        kind: in a word, where they come from.
        origin: in a sentence.
        is_of_cpu: a CPU took these times, and a GPU would take others.
    """

    profile: Profile
    kind: str
    origin: str
    is_of_cpu: bool = False


def specs_of(module: nn.Module, *, device: torch.device) -> list[ParameterSpec]:
    """The parameters of `module` that train, as the reducer sees them on `device`, in order of registration."""
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
    """What a run has recorded: a profile as JSON, or a rank's record."""
    specs = {spec.name: spec for spec in specs_of(module, device=device)}
    try:
        if path.suffix == ".jsonl":
            profile, computed_on = _read_record(path)
        else:
            profile = Profile.from_json(path.read_text())
            computed_on = profile.specs[0].kind.split()[-1]
    except (OSError, ValueError, TypeError, KeyError, IndexError) as error:
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
    # What is made of recorded steps does not know kinds.
    profile = replace(profile, specs=[spec if spec.kind else specs[spec.name] for spec in profile.specs])
    unknown = "" if profile.cost is not None else f", which does not tell what an all-reduce costs: {NO_COST}"
    origin = f"recorded in {path}, by a run of {profile.num_ranks} ranks{unknown}"
    return BackwardTimes(profile, "recorded", origin, is_of_cpu=computed_on == "cpu")


def _read_record(path: Path) -> tuple[Profile | None, str]:
    """The last profile that was written, or else what the steps with the last plan show; and the device."""
    lines = list(read(path))
    runs = [line for line in lines if isinstance(line, Run)]
    device = runs[-1].device if runs else ""
    profiles = [line for line in lines if isinstance(line, Profile)]
    if profiles:
        return profiles[-1], device
    plans = [line for line in lines if isinstance(line, RecordedPlan)]
    if not (runs and plans):
        return None, device
    steps = [line for line in lines if isinstance(line, Step)]
    return profile_of(plans[-1], steps, num_ranks=runs[-1].world_size), device


def estimated(module: nn.Module, *, backward_s: float, device: torch.device) -> BackwardTimes:
    """Gradients come in reverse order of registration, each after a time in proportion to its size."""
    specs = specs_of(module, device=device)[::-1]
    total = sum(spec.num_bytes for spec in specs)
    ready_s = [backward_s * so_far / total for so_far in accumulate(spec.num_bytes for spec in specs)]
    origin = (
        "an estimate from --backward-ms: gradients in reverse order of registration, each after a time in proportion to"
        " its size"
    )
    return BackwardTimes(Profile(specs, ready_s, backward_s, cost=None, num_ranks=1), "estimated", origin)


def without_times(module: nn.Module, *, device: torch.device) -> BackwardTimes:
    """Their order only."""
    times = estimated(module, backward_s=0.0, device=device)
    return BackwardTimes(times.profile, "unknown", "not known; gradients are expected in reverse order of registration")
