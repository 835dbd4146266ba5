"""Whether a step can be captured: what it depends on besides tensors, and whether it computes the same twice.

A graph repeats kernels. Python ran once, when it was captured. So a step may be captured only if Python would do the
same in every step. Known to do otherwise: steps that read the number of the batch, of the step or of the epoch; that
change attributes of modules (counters, metrics, buffers that are replaced); that draw Python's, numpy's or torch's
random numbers on the CPU; that have hooks. Attributes that others change between steps are compared before each replay.
What is left (a global variable, the time of day) is found by comparing steps now and then.
"""

from __future__ import annotations

import copy
import functools
import random
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import numpy as np
import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.nn.modules import module as nn_module

from lightning_bucketddp.reducer.reducer import Reducer
from lightning_bucketddp.sharding.gradient import copy_of, own_part
from lightning_bucketddp.trainer_internals import SET_BY_LIGHTNING, ClosureParts, replace_method, trainer_replaced

_PLAIN = (int, float, complex, str, bytes, bool, type(None), torch.dtype, torch.device, torch.Size)
_HOOKS_OF_MODULE = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
# Attributes of modules that torch or Lightning change by themselves, or that have no numbers in them.
_NOT_OF_THE_USER = {*SET_BY_LIGHTNING, "log", "training_step"} | vars(nn.Module()).keys() - {
    *("training", "_parameters", "_buffers"),
}
_HOOKS_IN_CLOSURE = ("on_before_zero_grad", "on_before_backward", "on_after_backward")
# What a step may ask of its Trainer: it is the same in every step.
_CONSTANT_OF_TRAINER = {
    *("strategy", "world_size", "global_rank", "local_rank", "node_rank", "num_nodes", "num_devices", "device_ids"),
    *("precision", "precision_plugin", "accelerator", "datamodule", "lightning_module", "model", "optimizers"),
    *("max_epochs", "max_steps", "num_training_batches", "accumulate_grad_batches", "estimated_stepping_batches"),
    *("training", "validating", "testing", "predicting", "sanity_checking", "evaluating", "state", "barebones"),
    *("is_global_zero", "default_root_dir", "log_dir", "gradient_clip_val", "fast_dev_run", "log_every_n_steps"),
}
# Frames of these packages are not the user's.
_PACKAGES = {
    *("torch", "lightning", "pytorch_lightning", "lightning_fabric", "lightning_utilities", "lightning_bucketddp"),
}
# What asks for the number in an integer.
_USES_OF_INDEX = [
    *("eq", "ne", "lt", "le", "gt", "ge", "hash", "bool", "index", "int", "float", "str", "repr", "format", "neg"),
    *("add", "radd", "sub", "rsub", "mul", "rmul", "mod", "rmod", "floordiv", "truediv", "divmod", "pow", "and", "or"),
]


class NotCapturedError(Exception):
    """A step cannot be captured; the text says why."""


def _is_of_user(thing: Any) -> bool:
    return str(getattr(thing, "__module__", type(thing).__module__)).partition(".")[0] not in _PACKAGES


def users_line(error: BaseException | None = None) -> str:
    """Return the last line of the user's own that `error` has come from, or that runs now, as ` at FILE:LINE`."""
    frames = traceback.walk_stack(None) if error is None else reversed(list(traceback.walk_tb(error.__traceback__)))
    for frame, line in frames:
        if frame.f_globals.get("__name__", "").partition(".")[0] not in _PACKAGES:
            return f" at {frame.f_code.co_filename}:{line}"
    return ""


def explain_failure(error: Exception) -> str:
    """Return why a step was not captured."""
    if isinstance(error, NotCapturedError):
        return str(error)
    if isinstance(error, torch.OutOfMemoryError):
        return "there is no memory for them"
    # When a capture fails, torch raises another error where it ends.
    error = error.__context__ if isinstance(error.__context__, Exception) else error
    return f"capturing raised{users_line(error)}: {str(error).splitlines()[0] if str(error) else type(error).__name__}"


class WatchedTrainer:
    """Stands for the Trainer in a step; `tell` hears what the step asks of it that is not the same in each step."""

    def __init__(self, trainer: Any, tell: Callable[[str], None]) -> None:
        vars(self).update(watched=trainer, tell=tell)

    def __getattr__(self, name: str) -> Any:
        if name not in _CONSTANT_OF_TRAINER:
            vars(self)["tell"](f"`training_step` reads `trainer.{name}`{users_line()}")
        return getattr(vars(self)["watched"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        vars(self)["tell"](f"`training_step` sets `trainer.{name}`{users_line()}")
        setattr(vars(self)["watched"], name, value)


def watched_index(index: int, tell: Callable[[str], None]) -> int:
    """Return the number of a batch; `tell` hears when it is used."""

    def using(name: str) -> Callable[..., Any]:
        def use(self: int, *args: Any) -> Any:
            tell(f"`training_step` uses the number of the batch{users_line()}")
            return getattr(int, name)(self, *args)

        return use

    names = [f"__{name}__" for name in _USES_OF_INDEX]
    watched: int = type("WatchedIndex", (int,), {name: using(name) for name in names})(index)
    return watched


@contextmanager
def waits_told(device: torch.device, tell: Callable[[str], None]) -> Iterator[None]:
    """Tell when the host waits for the device inside, as `Tensor.item` does."""
    if device.type != "cuda":
        yield
        return
    mode = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        show = warnings.showwarning

        def see(message: Warning | str, *args: Any, **kwargs: Any) -> None:
            if "synchronizing CUDA operation" in str(message):
                tell(f"`training_step` waits for the device{users_line()}")
            else:
                show(message, *args, **kwargs)

        warnings.filterwarnings("always", message=".*synchronizing CUDA operation")
        warnings.showwarning = see
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(mode)


def find_obstacle(trainer: Any, reducer: Reducer) -> str:
    """Return why no step of this fit can be captured; empty: it may be possible."""
    module = trainer.lightning_module
    if not module.automatic_optimization:
        return "optimization is manual"
    for owner in (module, *trainer.callbacks):
        for name in (*_HOOKS_IN_CLOSURE, *(("backward", "optimizer_zero_grad") if owner is module else ())):
            # Lightning's classes have these hooks, and do nothing in them.
            if (method := getattr(type(owner), name, None)) is not None and _is_of_user(method):
                return f"`{type(owner).__name__}.{name}` runs within it"
    return "a communication hook may do other things in each step" if reducer.uses_hook else ""


def find_hooks(root: nn.Module, num_ours: Callable[[Tensor], int]) -> str:
    """Return a hook of the user's that runs in a step, in words; `num_ours` are the others on a parameter."""
    for name, module in root.named_modules():
        hooks = [hook for kind in _HOOKS_OF_MODULE for hook in getattr(module, kind, {}).values()]
        for hook in hooks:
            if _is_of_user(hook):
                return f"`{name or type(module).__name__}` has a hook, `{getattr(hook, '__qualname__', hook)}`"
    for name, param in root.named_parameters():
        if param._backward_hooks or len(param._post_accumulate_grad_hooks or ()) > num_ours(param):
            return f"`{name}` has a hook on its gradient"
    if any(getattr(nn_module, f"_global{kind}", None) for kind in _HOOKS_OF_MODULE):
        return "there is a hook on all modules"
    return ""


class PythonState:
    """Plain attributes of all modules, and where their tensors are: compared before a captured step is replayed."""

    def __init__(self, root: nn.Module) -> None:
        # What holds something under a key, what that is, its address if it is a tensor, and its name.
        self._values: list[tuple[Any, Any, Any, int, str]] = []
        self._sizes: list[tuple[Any, int, str]] = []
        for path, module in root.named_modules():
            own = vars(module)
            self._sizes.append((own, len(own), path or type(module).__name__))
            for key, value in own.items():
                if key not in _NOT_OF_THE_USER:
                    self._note(own, key, value, f"{path}.{key}" if path else key)

    def _note(self, owner: Any, key: Any, value: Any, name: str, *, depth: int = 0) -> None:
        if isinstance(value, _PLAIN):
            self._values.append((owner, key, value, 0, name))
        elif isinstance(value, Tensor):
            self._values.append((owner, key, value, value.data_ptr(), name))
        elif depth < 2 and not isinstance(value, nn.Module):
            is_object = hasattr(value, "__dict__") and _is_of_user(type(value))
            inside = vars(value) if is_object and not isinstance(value, dict) else value
            if isinstance(inside, dict | list | tuple):
                self._sizes.append((inside, len(inside), name))
                for each, item in list(inside.items() if isinstance(inside, dict) else enumerate(inside)):
                    self._note(inside, each, item, f"{name}[{each!r}]", depth=depth + 1)

    def find_change(self) -> str:
        """Return the name of something that is not as it was; empty: all is."""
        for container, size, name in self._sizes:
            if len(container) != size:
                return name
        for owner, key, value, address, name in self._values:
            try:
                now = owner[key]
            except KeyError:
                return name
            if address:
                if now is not value or now.data_ptr() != address:
                    return name
            elif now is not value and not (type(now) is type(value) and now == value):
                return name
        return ""


def random_states(device: torch.device) -> tuple[Any, ...]:
    """Return the states of the generators on the host that a step on `device` has no need of."""
    of_torch = b"" if device.type == "cpu" else torch.get_rng_state().numpy().tobytes()
    return random.getstate(), str(np.random.get_state(legacy=False)), of_torch


# Kernels that add in no fixed order differ from run to run by rounding.
_ROUNDING = {torch.float64: 1e-9, torch.float32: 1e-4}
_OTHER_ROUNDING = 2e-2


@dataclass(frozen=True)
class Outcome:
    """What a step has computed."""

    values: list[Tensor]
    gradients: list[Tensor | None]
    buffers: list[Tensor]

    @classmethod
    def of(cls, module: nn.Module, values: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> Outcome:
        """Copy it."""
        copies = [None if gradient is None else own_part(gradient).clone() for gradient in gradients]
        return cls([value.clone() for value in values], copies, [buffer.clone() for buffer in module.buffers()])

    def find_difference(self, other: Outcome, module: nn.Module, *, factor: float) -> str:
        """Return what is another there, in words; empty: nothing is, but for rounding and `factor`, of gradients."""
        if len(self.values) != len(other.values):
            return "the number of logged values"
        names = ["the loss", *("an output or a logged value" for _ in self.values[1:])]
        names += [f"the gradient of `{name}`" for name, _ in module.named_parameters()]
        names += [f"`{name}`" for name, _ in module.named_buffers()]
        gradients = self.gradients
        if factor != 1:
            gradients = [None if gradient is None else own_part(gradient) * factor for gradient in gradients]
        ours = [*self.values, *gradients, *self.buffers]
        theirs = [*other.values, *other.gradients, *other.buffers]
        for name, one, another in zip(names, ours, theirs, strict=True):
            if not _are_alike(one, another):
                return name
        return ""


def _are_alike(one: Tensor | None, another: Tensor | None) -> bool:
    if one is None or another is None:
        return one is another
    one, another = own_part(one), own_part(another)
    if one.shape != another.shape or one.dtype != another.dtype:
        return False
    if torch.equal(one, another) or not one.numel():
        return True
    if not (one.is_floating_point() or one.is_complex()):
        return False
    one, another = one.nan_to_num(), another.nan_to_num()
    tolerance = _ROUNDING.get(one.dtype, _OTHER_ROUNDING)
    return bool((one - another).abs().max() <= tolerance * another.abs().max())


class StepStart:
    """What a step begins with: its gradients, buffers and random numbers."""

    def __init__(self, module: nn.Module, closure: ClosureParts, device: torch.device, reducer: Reducer) -> None:
        self._module = module
        self._optimizer = closure.optimizer
        self._zeroes = closure.zero_grad is not None
        on_gpu = device.type == "cuda"
        self._generator = torch.cuda.default_generators[device.index] if on_gpu else torch.default_generator
        self.loss_digest = reducer.finiteness.loss_digest
        zeroed = {id(param) for group in closure.optimizer.param_groups for param in group["params"]}
        self._gradients = [
            (param, param.grad, copy_of(param.grad))
            for param in module.parameters()
            if param.grad is not None and not (self._zeroes and id(param) in zeroed)
        ]
        self._buffers = [(buffer, buffer.clone()) for buffer in module.buffers()]
        self._random_state = self._generator.get_state()

    @torch.no_grad()
    def restore(self, *, zero: bool = False) -> None:
        """Have all of it as it was; `zero`: as it is after `zero_grad`."""
        if zero and self._zeroes:
            self._optimizer.zero_grad()
        for param, gradient, copied in self._gradients:
            param.grad = gradient
            if gradient is not copied:
                gradient.copy_(copied)
        for buffer, copied in self._buffers:
            buffer.copy_(copied)
        self._generator.set_state(self._random_state)

    def outcome(self, values: list[Tensor]) -> Outcome:
        """Return what a step has computed that ended with this; nothing is copied."""
        by_param = {id(param): copied for param, _, copied in self._gradients}
        gradients = [by_param.get(id(param)) for param in self._module.parameters()]
        return Outcome(values, gradients, [copied for _, copied in self._buffers])

    def keep(self) -> StepStart:
        """Return the same of now, with copies of all gradients in the place of those that there are."""
        kept = copy.copy(self)
        kept._gradients = [
            (param, copied, copied)
            for param in self._module.parameters()
            if param.grad is not None and (copied := copy_of(param.grad)) is not None
        ]
        kept._buffers = [(buffer, buffer.clone()) for buffer in self._module.buffers()]
        kept._random_state = self._generator.get_state()
        return kept


def tensors_in(collection: Any) -> list[Tensor]:
    """Return all tensors in a collection, in their order."""
    tensors: list[Tensor] = []
    apply_to_collection(collection, Tensor, tensors.append)
    return tensors


def signature_of(arguments: Mapping[str, Any], device: torch.device) -> tuple[Any, list[Tensor]]:
    """Return what a graph has fixed of a batch, hashable, and the tensors in it, in their order."""
    tensors: list[Tensor] = []

    def visit(value: Any) -> Any:
        if isinstance(value, Tensor):
            if value.device != device:
                raise NotCapturedError(f"the batch has a tensor on {value.device}")
            if value.layout is not torch.strided or type(value) is not Tensor:
                raise NotCapturedError(f"the batch has a tensor of another kind, `{type(value).__name__}`")
            tensors.append(value)
            return value.shape, value.stride(), value.dtype
        if isinstance(value, str | bytes | int | float | bool | type(None)):
            return type(value), value
        if isinstance(value, Mapping):
            return type(value), tuple((key, visit(each)) for key, each in value.items())
        if isinstance(value, list | tuple):
            return type(value), tuple(map(visit, value))
        if is_dataclass(value):
            return type(value), tuple(visit(getattr(value, field.name)) for field in fields(value))
        raise NotCapturedError(f"the batch has a `{type(value).__name__}`, which is unknown")

    # Whether a step uses the number of the batch is found out otherwise.
    return visit({name: value for name, value in arguments.items() if name != "batch_idx"}), tensors


def checked_call(args: tuple[Any, ...], kwargs: dict[str, Any], found: list[str]) -> tuple[Any, ...]:
    """Return the arguments of a call of `self.log` without the graph of autograd; tell what cannot be repeated."""
    value = args[1] if len(args) > 1 else kwargs.get("value")
    if isinstance(value, nn.Module):
        found.append(f"`training_step` logs a metric, `{type(value).__name__}`{users_line()}")
    call: tuple[Any, ...] = apply_to_collection((args, kwargs), Tensor, Tensor.detach)
    return call


@contextmanager
def methods_replaced(module: nn.Module, **methods: Callable[..., Any]) -> Iterator[None]:
    """Replace methods of `module` inside."""
    undo = [replace_method(module, name, method) for name, method in methods.items()]
    try:
        yield
    finally:
        for each in undo:
            each()


def compute_watched(
    closure: ClosureParts, trainer: Any, reducer: Reducer, device: torch.device
) -> tuple[Any, list[Tensor], list[str]]:
    """Compute a step without a graph; return its result, with copies of all values, and why not to capture it."""
    found: list[str] = []
    logged: list[Any] = []
    module = trainer.lightning_module
    training_step, log = module.training_step, module.log

    def watched_log(*args: Any, **kwargs: Any) -> None:
        logged.append(checked_call(args, kwargs, found))
        num_found = len(found)
        with trainer_replaced(module, trainer):
            log(*args, **kwargs)
        del found[num_found:]  # it will not be captured

    @functools.wraps(training_step)
    def watched_step(*args: Any, **kwargs: Any) -> Any:
        watched = WatchedTrainer(trainer, found.append)
        with trainer_replaced(module, watched), waits_told(device, found.append):
            return training_step(*args, **kwargs)

    arguments = dict(closure.arguments)
    if "batch_idx" in arguments:
        closure.arguments["batch_idx"] = watched_index(arguments["batch_idx"], found.append)
    if hook := find_hooks(module, reducer.num_hooks):
        found.append(hook)
    with methods_replaced(module, log=watched_log, training_step=watched_step):
        state, numbers = PythonState(module), random_states(device)
        result = closure.run()
        if changed := state.find_change():
            found.append(f"`training_step` changes `{changed}`")
        if random_states(device) != numbers:
            found.append("`training_step` draws random numbers on the CPU")
    closure.arguments.update(arguments)
    return result, [value.clone() for value in tensors_in((result.loss, result.extra, logged))], found
