"""Make the module that a command line names by its class, by a function, or by the config of a LightningCLI."""

from __future__ import annotations

import inspect
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import import_module
from itertools import accumulate
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn

from lightning_bucketddp.commands import UsageError, first_line
from lightning_bucketddp.planning.cost import NO_CODECS, Codecs, Profile
from lightning_bucketddp.planning.plan import ParameterSpec
from lightning_bucketddp.recording.schema import RecordedPlan, Run, Step, read
from lightning_bucketddp.recording.typical_step import NO_COST, profile_of
from lightning_bucketddp.reducer.observer import Clock, clock_of
from lightning_bucketddp.reducer.plan_cache import spec_of
from lightning_bucketddp.replicas.replicas import check_parameters, parameters_of, sparse_names_of


@dataclass(frozen=True, slots=True)
class NamedModule:
    """The name of a module, and a function that builds it."""

    name: str
    build: Callable[[], Any]

    @classmethod
    def find(cls, name: str, arguments: Sequence[str], *, config: Path | None = None) -> NamedModule:
        """Find a class or function `MODULE:NAME`, or the model of a LightningCLI config if `name` is its path.

        `arguments` are JSON objects or `key=value`; they override those of the config.
        """
        given = _parse(arguments)
        if name.endswith((".yaml", ".yml")):
            config = Path(name)
            name = _class_in(config)
        maker = _find(name)
        if config is not None:
            return cls(_name_of(maker), _with_config(maker, given, config=config))
        _check_arguments(maker, given)
        return cls(_name_of(maker), lambda: maker(**given))

    def without_memory(self) -> nn.Module:
        """Build the module on the meta device, without memory, or on the CPU if that fails."""
        try:
            return self.make("meta")
        except UsageError:  # a constructor may need real tensors
            return self.make()

    def make(self, device: str = "cpu") -> nn.Module:
        try:
            with torch.device(device):
                module = self.build()
                if not isinstance(module, nn.Module):
                    raise UsageError(f"{self.name} makes no torch.nn.Module, but {module!r:.80}.")
                configure = getattr(module, "configure_model", None)  # a LightningModule's
                if callable(configure):
                    configure()
        except UsageError:
            raise
        except Exception as error:
            raise UsageError(f"{self.name} cannot be made: {first_line(error)}") from error
        return module


def _find(name: str) -> Callable[..., Any]:
    module_name, colon, attribute = name.partition(":")
    if not (module_name and colon and attribute):
        raise UsageError(
            f"{name!r} names no class. Write MODULE:CLASS, for example my_project.models:LitNet, or the path of a"
            " LightningCLI config that ends with .yaml."
        )
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # as `python -m` does
    try:
        module = import_module(module_name)
    except Exception as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing is not None and f"{module_name}.".startswith(f"{missing}."):
            raise UsageError(
                f"There is no module {missing!r}. Run the command in the folder of your project, or set PYTHONPATH."
            ) from error
        raise UsageError(f"Importing {module_name} failed: {first_line(error)}") from error
    try:
        found = attrgetter(attribute)(module)
    except AttributeError:
        classes = [n for n, v in vars(module).items() if _is_module_class(v) and v.__module__ == module_name]
        raise UsageError(f"{module_name} has no {attribute!r}. It has {', '.join(classes) or 'no modules'}.") from None
    if isinstance(found, type) and not _is_module_class(found):
        raise UsageError(f"{name} is no LightningModule and no torch.nn.Module, but {found!r:.80}.")
    if isinstance(found, nn.Module) or not callable(found):
        raise UsageError(f"{name} is neither a class of modules nor a function that makes one, but {found!r:.80}.")
    maker: Callable[..., Any] = found
    return maker


def _is_module_class(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, nn.Module)


def _name_of(maker: Callable[..., Any]) -> str:
    return getattr(maker, "__name__", type(maker).__name__)


def _class_in(config: Path) -> str:
    """Return the class that the config names, as MODULE:CLASS."""
    path = _model_of(config).get("class_path")
    instead = f"`bucketddp plan MODULE:CLASS --config {config}`"
    if not isinstance(path, str):
        raise UsageError(
            f"{config} has no `model.class_path`, as that of a LightningCLI which has one model class. Name the class,"
            f" too: {instead}."
        )
    module_name, _, name = path.rpartition(".")
    if not module_name or module_name == "__main__":
        raise UsageError(
            f"{config} names the class {path!r}, which only the script that wrote it can find. Name it as it can be"
            f" imported: {instead}."
        )
    return f"{module_name}:{name}"


def _model_of(config: Path) -> dict[str, Any]:
    import yaml  # type: ignore[import-untyped]  # a requirement of Lightning

    try:
        content = yaml.safe_load(config.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{config} cannot be read: {error.strerror}.") from error
    except (ValueError, yaml.YAMLError) as error:
        raise UsageError(f"{config} is no YAML: {' '.join(str(error).split())}.") from error
    if isinstance(content, dict) and "model" not in content and isinstance(content.get("fit"), dict):
        content = content["fit"]
    model = content.get("model", {}) if isinstance(content, dict) else None
    if not isinstance(model, dict):
        raise UsageError(f"{config} is no config of a LightningCLI: it says nothing of a `model`.")
    return model


def _with_config(maker: Callable[..., Any], given: dict[str, Any], *, config: Path) -> Callable[[], Any]:
    """Return a function that builds the module as a LightningCLI does, with arguments parsed by their types."""
    model = _model_of(config)
    try:
        from jsonargparse import ArgumentParser
    except ImportError as error:
        raise UsageError(
            "Reading a LightningCLI config needs jsonargparse: `pip install 'jsonargparse[signatures]'`."
        ) from error
    values = model.get("init_args") or {} if "class_path" in model else model
    further = model.get("dict_kwargs") or {} if "class_path" in model else {}
    parser = ArgumentParser(exit_on_error=False)
    try:
        if isinstance(maker, type):
            parser.add_class_arguments(maker, "model", fail_untyped=False, sub_configs=True, instantiate=False)
        else:
            parser.add_function_arguments(maker, "model", fail_untyped=False, sub_configs=True)
        parsed = parser.parse_object({"model": {**values, **given}})
    except Exception as error:  # of many types; all are about the content of the config
        raise UsageError(f"{config} does not fit {_name_of(maker)}: {' '.join(str(error).split())}.") from error
    instantiate = getattr(parser, "instantiate", None) or parser.instantiate_classes  # before jsonargparse 4.49
    return lambda: maker(**{**instantiate(parsed).get("model", {}), **further})


def _parse(arguments: Sequence[str]) -> dict[str, Any]:
    parsed: dict[str, Any] = {}
    for argument in arguments:
        if argument.lstrip().startswith("{"):
            try:
                parsed |= json.loads(argument)
            except ValueError as error:
                raise UsageError(f"--args {argument} is no JSON object: {error}.") from None
            continue
        key, equals, value = argument.partition("=")
        if not (key.isidentifier() and equals):
            raise UsageError(f"--args {argument} is neither a JSON object nor key=value.")
        parsed[key] = value
        with suppress(ValueError):  # a plain string
            parsed[key] = json.loads(value)
    return parsed


def _check_arguments(maker: Callable[..., Any], given: dict[str, Any]) -> None:
    try:
        signature = inspect.signature(maker)
    except (TypeError, ValueError):  # it may be written in C
        return
    by_name = [p for p in signature.parameters.values() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    missing = [p.name for p in by_name if p.default is p.empty and p.name not in given]
    if missing:
        example = " ".join(f"{name}=..." for name in missing)
        raise UsageError(f"{_name_of(maker)} needs arguments: {', '.join(missing)}. Pass `--args {example}`.")
    takes_any = any(p.kind == p.VAR_KEYWORD for p in signature.parameters.values())
    unknown = [name for name in given if not takes_any and name not in {p.name for p in by_name}]
    if unknown:
        takes = ", ".join(p.name for p in by_name) or "none"
        raise UsageError(f"{_name_of(maker)} takes no argument {', '.join(unknown)}. It takes: {takes}.")


_NUM_WARM_UP = 2
_NUM_MEASURED = 5


@dataclass(frozen=True, slots=True)
class BackwardTimes:
    """The order and the times of gradients, and their source in one word (`kind`) and in a sentence (`origin`)."""

    profile: Profile
    kind: str
    origin: str
    is_of_cpu: bool = False  # if so, they say nothing about GPUs
    codecs: Codecs = field(default_factory=dict)  # as measured by the recorded ranks
    # The seconds of forward and backward without and with a CUDA graph; None if they were not captured.
    without_and_with_graph_s: tuple[float, float] | None = None


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
            profile, run = _read_record(path)
            computed_on, codecs = ("", NO_CODECS) if run is None else (run.device, run.codecs)
        else:
            profile = Profile.from_json(path.read_text())
            computed_on, codecs = profile.specs[0].kind.split()[-1], NO_CODECS
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
    return BackwardTimes(profile, "recorded", origin, is_of_cpu=computed_on == "cpu", codecs=codecs)


def _read_record(path: Path) -> tuple[Profile | None, Run | None]:
    """Return the last profile in a record, or one made from steps with the last plan, and the run."""
    lines = list(read(path))
    last: dict[type, Any] = {type(line): line for line in lines}
    run, plan, profile = last.get(Run), last.get(RecordedPlan), last.get(Profile)
    if profile is None and run is not None and plan is not None:
        steps = [line for line in lines if isinstance(line, Step)]
        profile = profile_of(plan, steps, num_ranks=run.num_averaging)
        if profile is not None:
            profile = replace(profile, reduce_dtype=run.options.get("reduce_dtype"))
    return profile, run


def estimated(module: nn.Module, *, backward_s: float, device: torch.device) -> BackwardTimes:
    """Estimate times: gradients in reverse order of registration, each after a time in proportion to its size.

    A `backward_s` of 0 means that it is not known.
    """
    specs = specs_of(module, device=device)[::-1]
    total = sum(spec.num_bytes for spec in specs)
    ready_s = [backward_s * so_far / total for so_far in accumulate(spec.num_bytes for spec in specs)]
    profile = Profile(specs, ready_s, backward_s, cost=None, num_ranks=1)
    if not backward_s:
        return BackwardTimes(profile, "unknown", "not known; gradients are expected in reverse order of registration")
    origin = (
        "an estimate from --backward-ms: gradients in reverse order of registration, each after a time in proportion to"
        " its size"
    )
    return BackwardTimes(profile, "estimated", origin)


def measured(module: nn.Module, *, device: torch.device) -> BackwardTimes:
    """Run forward and backward on the `example_input_array` of `module`, and return the median times."""
    example = module.example_input_array
    module = module.to(device).train()
    clock = clock_of(device)
    runs: list[_Run] = []
    started = time.perf_counter()
    try:
        while len(runs) < _NUM_WARM_UP + _NUM_MEASURED and (not runs or time.perf_counter() - started < 20):
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
    graph_s = None if device.type == "cpu" else _try_graph(module, example, device)
    return BackwardTimes(profile, "measured", origin, is_of_cpu=device.type == "cpu", without_and_with_graph_s=graph_s)


def _try_graph(module: nn.Module, example: Any, device: torch.device) -> tuple[float, float] | None:
    """Time forward and backward without and with a CUDA graph; None if they cannot be captured."""
    example = apply_to_collection(example, Tensor, lambda tensor: tensor.to(device))

    def compute() -> None:
        module.zero_grad(set_to_none=True)
        torch.autograd.backward(_loss_of(module, example))

    clock, graph = clock_of(device), torch.cuda.CUDAGraph()
    try:
        with torch.cuda.stream(torch.cuda.Stream(device)):  # type: ignore[no-untyped-call]
            without_s = statistics.median(clock.times(compute, number=_NUM_MEASURED))
        with torch.cuda.graph(graph):
            compute()
        return without_s, statistics.median(clock.times(graph.replay, number=_NUM_MEASURED))
    except Exception:  # capturing can fail in many ways
        return None


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
    loss = _loss_of(module, example)
    run = _Run(forward_start, start=clock.mark(), end=None)

    def mark_arrival(name: str, _param: Tensor) -> None:
        run.arrivals.pop(name, None)  # a gradient that arrives again counts where it arrives last
        run.arrivals[name] = clock.mark()

    with ExitStack() as hooks:
        for name, param in parameters_of(module).items():
            if param.requires_grad:
                hook = partial(mark_arrival, name)
                hooks.enter_context(param.register_post_accumulate_grad_hook(hook))  # type: ignore[no-untyped-call]
        torch.autograd.backward(loss)
    run.end = clock.mark()
    return run


def _loss_of(module: nn.Module, example: Any) -> Tensor:
    """Return an arbitrary loss, to which every output contributes."""
    if isinstance(example, dict):
        output = module(**example)
    else:
        output = module(*example) if isinstance(example, tuple) else module(example)
    return sum((tensor.float().square().mean() for tensor in _tensors(output) if tensor.requires_grad), torch.zeros(()))


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return [tensor for one in inner for tensor in _tensors(one)]
