"""Whether a step can be captured: what it depends on besides tensors, and the state that it begins with.

A graph repeats kernels; Python ran once, at the capture. So a step may be captured only if Python does the same in
every step. These steps do not: those that read the number of the batch, step or epoch, or a learning rate; that change
attributes of modules (counters, metrics, replaced buffers); that draw random numbers on the CPU; that have hooks.
Attributes that other code changes between steps are compared before each replay. Comparing steps now and then finds
the rest (a global variable, an entry of a large table).
"""

from __future__ import annotations

import copy
import functools
import inspect
import operator
import random
import sys
import traceback
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.nn.modules import module as nn_module
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lightning_bucketddp.graphs.replay import Outcome, Values
from lightning_bucketddp.reducer.reducer import Reducer
from lightning_bucketddp.sharding.gradient import copy_of
from lightning_bucketddp.trainer_internals import SET_BY_LIGHTNING, ClosureParts, replace_method, trainer_replaced

_PLAIN = (int, float, complex, str, bytes, bool, type(None), np.generic, torch.dtype, torch.device, torch.Size)
# A larger container is a table of data: its entries are not compared before each replay.
_MOST_ENTRIES = 1000
# Types that change without a change under some key, and their state.
_STATES: dict[Any, Callable[[Any], Any]] = {
    np.ndarray: np.ndarray.tolist,
    set | frozenset: lambda items: sorted(map(repr, items)),
    random.Random: random.Random.getstate,
    np.random.Generator: lambda generator: generator.bit_generator.state,
    torch.Generator: lambda generator: generator.get_state().tolist() if generator.device.type == "cpu" else "",
}
HOOKS_OF_MODULE = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
# Attributes of modules that torch or Lightning change, or that hold no numbers.
_NOT_OF_THE_USER = {*SET_BY_LIGHTNING, "log", "training_step"} | vars(nn.Module()).keys() - {
    *("training", "_parameters", "_buffers"),
}
# A step may read these of its Trainer: they are the same in every step.
_CONSTANT_OF_TRAINER = {
    *("strategy", "world_size", "global_rank", "local_rank", "node_rank", "num_nodes", "num_devices", "device_ids"),
    *("precision", "precision_plugin", "accelerator", "lightning_module", "model", "optimizers"),
    *("max_epochs", "max_steps", "accumulate_grad_batches"),  # not of the data, which may be loaded again
    *("training", "validating", "testing", "predicting", "sanity_checking", "evaluating", "state", "barebones"),
    *("is_global_zero", "default_root_dir", "log_dir", "gradient_clip_val", "fast_dev_run", "log_every_n_steps"),
}
# Frames of these packages are not the user's.
_PACKAGES = {
    *("torch", "torchmetrics", "lightning", "pytorch_lightning", "lightning_fabric", "lightning_utilities"),
    "lightning_bucketddp",
}
# The special methods by which an integer is used.
_USES_OF_INDEX = [
    *("eq", "ne", "lt", "le", "gt", "ge", "hash", "bool", "index", "int", "float", "str", "repr", "format", "neg"),
    *("add", "radd", "sub", "rsub", "mul", "rmul", "mod", "rmod", "floordiv", "truediv", "divmod", "pow", "and", "or"),
]


class NotCapturedError(Exception):
    """A step cannot be captured; the text says why."""


def is_of_user(thing: Any) -> bool:
    """Return whether a function or a class is the user's own."""
    return str(getattr(thing, "__module__", type(thing).__module__)).partition(".")[0] not in _PACKAGES


def users_line(error: BaseException | None = None) -> str:
    """Return the innermost line of user code that `error` came from, or that runs now, as ` at FILE:LINE`."""
    others = _PACKAGES | sys.stdlib_module_names
    own = inspect.currentframe()  # `walk_stack(None)` skips a number of frames that depends on Python's version
    frames = traceback.walk_stack(own) if error is None else reversed(list(traceback.walk_tb(error.__traceback__)))
    for frame, line in frames:
        if frame.f_globals.get("__name__", "").partition(".")[0] not in others:
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
    """Stands for the Trainer in a step, and reports what the step reads of it that may change between steps."""

    def __init__(self, trainer: Any, report: Callable[[str], None]) -> None:
        vars(self).update(watched=trainer, report=report)

    def __getattr__(self, name: str) -> Any:
        if name not in _CONSTANT_OF_TRAINER:
            vars(self)["report"](f"`training_step` reads `trainer.{name}`{users_line()}")
        return getattr(vars(self)["watched"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        vars(self)["report"](f"`training_step` sets `trainer.{name}`{users_line()}")
        setattr(vars(self)["watched"], name, value)


@contextmanager
def rate_reads_reported(report: Callable[[str], None]) -> Iterator[None]:
    """Report each read of an optimizer or a scheduler inside: what they hold changes from step to step."""

    def read(self: Any, name: str) -> Any:
        report(f"`training_step` reads `{type(self).__name__}.{name}`{users_line()}")
        return object.__getattribute__(self, name)

    for cls in (Optimizer, LRScheduler):
        cls.__getattribute__ = read  # type: ignore[method-assign]
    try:
        yield
    finally:
        for cls in (Optimizer, LRScheduler):
            del cls.__getattribute__


def watched_index(index: int, report: Callable[[str], None]) -> int:
    """Return the number of a batch, which reports when it is used."""

    def using(name: str) -> Callable[..., Any]:
        def use(self: int, *args: Any) -> Any:
            report(f"`training_step` uses the number of the batch{users_line()}")
            return getattr(int, name)(self, *args)

        return use

    names = [f"__{name}__" for name in _USES_OF_INDEX]
    watched: int = type("WatchedIndex", (int,), {name: using(name) for name in names})(index)
    return watched


@contextmanager
def host_waits_reported(device: torch.device, report: Callable[[str], None]) -> Iterator[None]:
    """Report when the host waits for the device inside, as `Tensor.item` does."""
    if device.type != "cuda":
        yield
        return
    mode = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        show = warnings.showwarning

        def filtered(message: Warning | str, *args: Any, **kwargs: Any) -> None:
            if "synchronizing CUDA operation" in str(message):
                report(f"`training_step` waits for the device{users_line()}")
            else:
                show(message, *args, **kwargs)

        warnings.filterwarnings("always", message=".*synchronizing CUDA operation")
        warnings.showwarning = filtered
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(mode)


def find_hooks(root: nn.Module, num_ours: Callable[[Tensor], int]) -> str:
    """Describe a user's hook that runs in a step, or return ""; `num_ours` counts our own on a parameter."""
    for name, module in root.named_modules():
        for hook in (hook for kind in HOOKS_OF_MODULE for hook in getattr(module, kind, {}).values()):
            if is_of_user(hook) or module is root:  # a captured step calls `training_step`
                return f"`{name or type(module).__name__}` has a hook, `{getattr(hook, '__qualname__', hook)}`"
    for name, param in root.named_parameters():
        if param._backward_hooks or len(param._post_accumulate_grad_hooks or ()) > num_ours(param):
            return f"`{name}` has a hook on its gradient"
    if any(getattr(nn_module, f"_global{kind}", None) for kind in HOOKS_OF_MODULE):
        return "there is a hook on all modules"
    return ""


class PythonState:
    """Attributes of all modules, their contents, and the addresses of their tensors: compared before each replay."""

    def __init__(self, root: nn.Module, device: torch.device) -> None:
        # Parallel lists, which `map` compares: a loop in Python would take nearly as long as a replay.
        self._owners: list[Any] = []
        self._keys: list[Any] = []
        self._values: list[Any] = []
        self._names: list[str] = []
        self._texts: dict[int, str] = {}  # by position, the state of values whose type is in `_STATES`
        self._containers: list[Any] = []
        self._tensors: list[Tensor] = []
        self._name_of: dict[int, str] = {}  # by the id of a container or a tensor
        self._visited: set[int] = set()
        for path, module in root.named_modules():
            own = vars(module)
            self._add(self._containers, own, path or type(module).__name__)
            for key, value in own.items():
                name = f"{path}.{key}" if path else key
                if key in ("_parameters", "_buffers"):
                    self._record_items(value, name)
                elif key not in _NOT_OF_THE_USER:
                    self._record(own, key, value, name)
        self._sizes = list(map(len, self._containers))
        self._places = list(map(Tensor.data_ptr, self._tensors))
        # A graph on a GPU holds the contents that a CPU tensor had at the capture.
        is_on_gpu = device.type != "cpu"
        self._fixed = [each for each in self._tensors if each.is_cpu and is_on_gpu and not each.is_inference()]
        self._versions = [tensor._version for tensor in self._fixed]

    def _add(self, things: list[Any], thing: Any, name: str) -> None:
        things.append(thing)
        self._name_of[id(thing)] = name

    def _record(self, owner: Any, key: Any, value: Any, name: str) -> None:
        if (text := _text_of(value)) is not None:
            self._texts[len(self._values)] = text
        self._owners.append(owner)
        self._keys.append(key)
        self._values.append(value)
        self._names.append(name)
        if isinstance(value, Tensor):
            self._add(self._tensors, value, name)
        elif not isinstance(value, (*_PLAIN, nn.Module)) and id(value) not in self._visited:
            self._visited.add(id(value))
            self._record_items(vars(value) if hasattr(value, "__dict__") and is_of_user(type(value)) else value, name)

    def _record_items(self, container: Any, name: str) -> None:
        if isinstance(container, dict | list | tuple | deque):
            self._add(self._containers, container, name)
            if len(container) <= _MOST_ENTRIES:
                for key, item in list(container.items() if isinstance(container, dict) else enumerate(container)):
                    self._record(container, key, item, f"{name}[{key!r}]")

    def find_change(self) -> str:
        """Return the name of something that has changed, or ""."""
        if change := self._first_other(self._containers, map(len, self._containers), self._sizes):
            return change
        try:
            values = list(map(operator.getitem, self._owners, self._keys))
        except KeyError as error:
            return str(error.args[0])
        if not all(map(operator.is_, values, self._values)):
            for position, (now, value) in enumerate(zip(values, self._values, strict=True)):
                is_equal = type(now) is type(value) and isinstance(now, _PLAIN) and now == value
                if now is not value and position not in self._texts and not is_equal:
                    return self._names[position]
        for position, text in self._texts.items():
            if _text_of(values[position]) != text:
                return self._names[position]
        return self._first_other(self._tensors, map(Tensor.data_ptr, self._tensors), self._places) or self._first_other(
            self._fixed, (tensor._version for tensor in self._fixed), self._versions
        )

    def _first_other(self, things: list[Any], now: Iterable[int], before: list[int]) -> str:
        """Return the name of the first of `things` whose number has changed, or ""."""
        if (numbers := list(now)) == before:
            return ""
        changed = (n for n, (number, old) in enumerate(zip(numbers, before, strict=True)) if number != old)
        return self._name_of[id(things[next(changed)])]


def _text_of(value: Any) -> str | None:
    """Return the state of a value whose type is in `_STATES`, else None."""
    for kind, state_of in _STATES.items():
        if isinstance(value, kind) and getattr(value, "size", 0) <= _MOST_ENTRIES:
            return str(state_of(value))
    return None


def random_states(device: torch.device) -> tuple[Any, ...]:
    """Return the states of the generators on the host, without the one that a step on `device` may use."""
    of_torch = b"" if device.type == "cpu" else torch.get_rng_state().numpy().tobytes()
    return random.getstate(), str(np.random.get_state(legacy=False)), of_torch


class StepStart:
    """A copy of what a step begins with: gradients, buffers and random state."""

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
        """Restore the state at the start; `zero`: after `zero_grad`."""
        if zero and self._zeroes:
            self._optimizer.zero_grad()
        for param, gradient, copied in self._gradients:
            param.grad = gradient
            if gradient is not copied:
                gradient.copy_(copied)
        for buffer, copied in self._buffers:
            buffer.copy_(copied)
        self._generator.set_state(self._random_state)

    def outcome(self, values: Values) -> Outcome:
        """Return the outcome of a step that ended in this state; nothing is copied."""
        by_param = {id(param): copied for param, _, copied in self._gradients}
        gradients = [by_param.get(id(param)) for param in self._module.parameters()]
        return Outcome(values, gradients, [copied for _, copied in self._buffers])

    def keep(self) -> StepStart:
        """Return the present state, with copies in the place of the gradients."""
        kept = copy.copy(self)
        kept._gradients = [
            (param, copied, copied)
            for param in self._module.parameters()
            if param.grad is not None and (copied := copy_of(param.grad)) is not None
        ]
        kept._buffers = [(buffer, buffer.clone()) for buffer in self._module.buffers()]
        kept._random_state = self._generator.get_state()
        return kept


def checked_call(args: tuple[Any, ...], kwargs: dict[str, Any], found: list[str]) -> tuple[Any, ...]:
    """Return the arguments of a call of `self.log`, detached; add to `found` why it cannot be repeated."""
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
) -> tuple[Any, Values, list[str]]:
    """Run a step without a graph; return its result, copies of all values, and reasons not to capture it."""
    found: list[str] = []
    logged: list[Any] = []
    module = trainer.lightning_module
    training_step, log = module.training_step, module.log

    def watched_log(*args: Any, **kwargs: Any) -> None:
        logged.append(checked_call(args, kwargs, found))
        num_found = len(found)
        with trainer_replaced(module, trainer):
            log(*args, **kwargs)
        del found[num_found:]  # Lightning's `log` itself is not captured

    @functools.wraps(training_step)
    def watched_step(*args: Any, **kwargs: Any) -> Any:
        watched = WatchedTrainer(trainer, found.append)
        with (
            trainer_replaced(module, watched),
            host_waits_reported(device, found.append),
            rate_reads_reported(found.append),
        ):
            return training_step(*args, **kwargs)

    arguments = dict(closure.arguments)
    if "batch_idx" in arguments:
        closure.arguments["batch_idx"] = watched_index(arguments["batch_idx"], found.append)
    if hook := find_hooks(module, reducer.num_hooks):
        found.append(hook)
    with methods_replaced(module, log=watched_log, training_step=watched_step):
        state, numbers = PythonState(module, device), random_states(device)
        result = closure.run()
        if changed := state.find_change():
            found.append(f"`training_step` changes `{changed}`")
        for name, param in module.named_parameters():
            if param.grad is not None and param.grad.layout is not torch.strided:
                found.append(f"the gradient of `{name}` is sparse")
        if random_states(device) != numbers:
            found.append("`training_step` draws random numbers on the CPU")
    closure.arguments.update(arguments)
    return result, Values.of((result.loss, result.extra, logged)).copied(), found
