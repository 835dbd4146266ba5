"""Every private name of Lightning that we use: no other file outside of `bindings` has one.

Functions take objects of the user's Trainer, because each root of Lightning has classes of its own. One that replaces a
method does so on that object, and returns a function that undoes it. They raise where Lightning has changed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

Undo = Callable[[], None]

# Attributes of a LightningModule that change while it trains.
SET_BY_LIGHTNING = {"_trainer", "_current_fx_name"}
# The class of the modules that `fabric.setup` returns.
WRAPPER_OF_FABRIC = "_FabricModule"

_ROOTS = ("lightning", "pytorch_lightning", "lightning_fabric")
# The first version that is not tested.
_FIRST_UNKNOWN = "2.7"


def known(owner: Any, name: str) -> Any:
    """Return the attribute of Lightning with this name; raise a `RuntimeError` if there is none any more."""
    try:
        return getattr(owner, name)
    except AttributeError as error:
        what = owner if isinstance(owner, type | ModuleType) else type(owner)
        # A class may be one of the user's.
        modules = [what.__name__] if isinstance(what, ModuleType) else [base.__module__ for base in what.__mro__]
        root = next((root for module in modules if (root := module.partition(".")[0]) in _ROOTS), "lightning")
        ours, version = (getattr(sys.modules.get(it), "__version__", "") for it in ("lightning_bucketddp", root))
        raise RuntimeError(
            f"lightning-bucketddp {ours} does not know {root} {version}: `{what.__name__}` has no `{name}`. Upgrade"
            f" lightning-bucketddp, or install `{root}<{_FIRST_UNKNOWN}`."
        ) from error


def replace_method(owner: Any, name: str, method: Callable[..., Any]) -> Undo:
    """Replace a method of this object by `method`."""
    known(owner, name)
    own = vars(owner)
    before = own.get(name)
    own[name] = method
    return partial(own.pop, name, None) if before is None else partial(own.__setitem__, name, before)


def _wrap_method(owner: Any, name: str, wrapper: Callable[..., Any]) -> Undo:
    """Replace a method of this object by `wrapper(original, ...)`."""
    return replace_method(owner, name, partial(wrapper, known(owner, name)))


@contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Have an attribute of this object be `value` inside."""
    own = vars(owner)
    before, own[name] = known(owner, name), value
    try:
        yield
    finally:
        own[name] = before


# Data.


def replace_preparation(trainer: Trainer, prepare: Callable[..., Any]) -> Undo:
    """Have dataloaders get their samplers by `prepare(original, dataloader, shuffle, mode)`."""
    return _wrap_method(known(trainer, "_data_connector"), "_prepare_dataloader", prepare)


def wrap_requests(trainer: Trainer, wrapper: Callable[[Callable[[], Any]], Any]) -> Undo:
    """Have a fit ask the user for dataloaders by `wrapper(original)`."""
    undo = ExitStack()
    for loop in (trainer.fit_loop, trainer.fit_loop.epoch_loop.val_loop):
        undo.callback(_wrap_method(known(loop, "_data_source"), "dataloader", wrapper))
    return undo.close


def combined_loader(loop: Any) -> Any:
    """Return the `CombinedLoader` of a loop; None: there is none yet."""
    return known(loop, "_combined_loader")


def mode_of(combined: Any) -> Any:
    """Return how a `CombinedLoader` combines loaders, for example `min_size`."""
    return known(combined, "_mode")


def set_num_samples(combined: Any, count: Callable[[], int]) -> None:
    """Have a search for a batch size assume `count()` samples, which is called once; 0: the length of the data."""
    if "_dataset_length" not in vars(combined) and (num_samples := count()) > 0:
        replace_method(combined, "_dataset_length", lambda: num_samples)


def batch_sampler_within(batch_sampler: Any) -> Any:
    """Return the user's batch sampler, without the wrapper that remembers the indices of a prediction."""
    return getattr(batch_sampler, "_batch_sampler", batch_sampler)


def sampler_within(sampler: Any) -> Any:
    """Return the user's sampler, without Lightning's wrapper that divides it among the ranks."""
    return getattr(getattr(sampler, "dataset", None), "_sampler", sampler)


# Counts of a fit.

_COUNTS = ("ready", "started", "processed", "completed")  # of batches


class SavedProgress(NamedTuple):
    """The counts in a checkpoint, as dictionaries that may be changed."""

    epochs: dict[str, Any]
    batches: dict[str, Any]
    optimizer_steps: dict[str, Any]

    def set_batches(self, num_batches: int) -> None:
        """Have Lightning go on after `num_batches` batches of the epoch."""
        total, current = self.batches["total"], self.batches["current"]
        # As if saved at the end of the batch that was going on, which Lightning knows from callbacks; else after one.
        is_at_end = num_batches > current["processed"] or current["completed"] < current["processed"] == num_batches
        for name in _COUNTS:
            count = num_batches - (is_at_end and name == "completed")
            total[name] += count - current[name]
            current[name] = count

    def begin_epochs(self, *, is_over: bool) -> None:
        """Have Lightning go on with an epoch that has begun; `is_over`: with the next one."""
        for name, counts in self.epochs.items():
            counts["ready"] = counts["started"]  # in `on_train_epoch_start`, after which Lightning would end the epoch
            if is_over:  # Otherwise Lightning ends it again, or does not count the next one as begun.
                counts["completed"] = counts["processed"] = counts["started"]
                self.batches[name]["completed"] = self.batches[name]["processed"]


def set_batches(trainer: Trainer, num_batches: int) -> None:
    """Have a fit that begins go on after `num_batches` batches of the epoch."""
    progress: Any = trainer.fit_loop.epoch_loop.batch_progress
    shift = num_batches - progress.current.processed
    for counts in (progress.total, progress.current):
        for name in _COUNTS:
            setattr(counts, name, getattr(counts, name) + shift)


def saved_progress(checkpoint: Mapping[str, Any]) -> SavedProgress | None:
    """Return the counts in `checkpoint`; None: it holds no training."""
    loop = checkpoint.get("loops", {}).get("fit_loop")
    if loop is None:
        return None
    optimizers = loop["epoch_loop.automatic_optimization.optim_progress"]["optimizer"]
    return SavedProgress(loop["epoch_progress"], loop["epoch_loop.batch_progress"], optimizers["step"])


def mark_as_begun(trainer: Trainer, *, lacks_metrics: bool) -> None:
    """Have a resumed fit begin or end its epoch like any other, with a step of schedules unless it `lacks_metrics`."""
    is_over = trainer.fit_loop.epoch_progress.current.completed == trainer.fit_loop.epoch_progress.current.ready
    known(trainer.fit_loop, "_restarting")
    trainer.fit_loop._restarting = lacks_metrics and not is_over
    if is_over:
        trainer.fit_loop.epoch_loop.restarting = False


# Logging.


def known_metrics(trainer: Trainer) -> Any:
    """Return the dictionary of `trainer.callback_metrics` without computing them, which would need the other ranks."""
    return known(known(trainer, "_logger_connector"), "_callback_metrics")


def logged_results(trainer: Trainer) -> Any:
    """Return the dictionary of the values logged in this epoch."""
    return known(trainer, "_results")


def is_log_step(trainer: Trainer) -> bool:
    """Return whether loggers get metrics of this step."""
    return bool(known(known(trainer, "_logger_connector"), "should_update_logs"))


def logged_steps(trainer: Trainer) -> int:
    """Return how many steps are behind a fit as loggers count them."""
    return int(known(trainer.fit_loop.epoch_loop, "_batches_that_stepped"))


def set_logged_steps(trainer: Trainer, num_steps: int) -> None:
    """Have loggers count on from `num_steps`."""
    trainer.fit_loop.epoch_loop._batches_that_stepped = num_steps


def log_at_once(trainer: Trainer, metrics: dict[str, Any]) -> None:
    """Give `metrics` to the loggers once. `pl_module.log` would repeat them at the next log step."""
    known(known(trainer, "_logger_connector"), "log_metrics")(metrics)


def continue_logger(logger: Any, version: int | str) -> bool:
    """Have `logger` continue this version, or run of W&B or MLflow, unless the user names one; False: it is in use."""
    own = vars(logger)
    if own.get("_experiment") is not None:
        return False
    for name in {"_version", "_run_id", "_id"} & own.keys():
        if own[name] is None:
            own[name] = version
            own.get("_wandb_init", {})["id"] = version
    return True


# Training.


def call_before_fetch(trainer: Trainer, function: Callable[[], object]) -> Undo:
    """Have `function` called before a fit waits for a batch, after validation, checkpoints and callbacks."""
    loop = trainer.fit_loop.epoch_loop
    return _wrap_method(loop, "_on_before_fetch", lambda before_fetch: (function(), before_fetch()))


def replace_result_class(trainer: Trainer, derive: Callable[[Any], Any]) -> None:
    """Have the output of `training_step` read by the class that `derive` makes of Lightning's class."""
    optimization: Any = trainer.fit_loop.epoch_loop.automatic_optimization
    # Derived from that of the class: the object may still have that of an earlier fit.
    optimization.output_result_cls = derive(known(type(optimization), "output_result_cls"))


def call_for_step(strategy: Any, step: str, *args: Any, **kwargs: Any) -> Any:
    """Call the module, which runs its hooks, and in place of its `forward` this step of it."""
    module = strategy.lightning_module
    return known(strategy, "_forward_redirection")(module, module, step, *args, **kwargs)


class ClosureParts(NamedTuple):
    """The parts of the closure that automatic optimization gives to an optimizer."""

    run: Callable[[], Any]  # all of it, as Lightning runs it
    arguments: dict[str, Any]  # of `training_step`, by name
    optimizer: Any  # whose gradients are set to zero
    result_of: Callable[[Any], Any]  # reads the output of `training_step`
    zero_grad: Callable[[], None] | None  # None: gradients accumulate
    has_backward: bool  # otherwise there is only `training_step`


def replace_closures(trainer: Trainer, run: Callable[[ClosureParts], Any]) -> Undo:
    """Have closures of automatic optimization call `run`, which returns their result."""
    optimization: Any = trainer.fit_loop.epoch_loop.automatic_optimization

    def make_closure(make: Callable[..., Any], kwargs: Any, optimizer: Any, batch_idx: int) -> Any:
        closure = make(kwargs, optimizer, batch_idx)
        parts = ClosureParts(
            closure.closure,
            kwargs,
            optimizer,
            lambda output: optimization.output_result_cls.from_training_step_output(
                output, trainer.accumulate_grad_batches
            ),
            known(closure, "_zero_grad_fn"),
            known(closure, "_backward_fn") is not None,
        )
        closure.closure = lambda *_args, **_kwargs: run(parts)
        return closure

    return _wrap_method(optimization, "_make_closure", make_closure)


def logging_in(module: Any, hook: str) -> AbstractContextManager[None]:
    """Have `module.log` treat calls inside as calls from this hook."""
    return _replaced(module, "_current_fx_name", hook)


def trainer_replaced(module: Any, trainer: Any) -> AbstractContextManager[None]:
    """Have `module.trainer` be `trainer` inside."""
    return _replaced(module, "_trainer", trainer)


def layer_sync_of(strategy: Any) -> Any:
    """Return the plugin by which a strategy synchronises layers; None: there is none."""
    return known(strategy, "_layer_sync")


def averaged_models(callbacks: Iterable[Any]) -> list[Any]:
    """Return the averaged models of callbacks; Lightning has such a callback since 2.6."""
    return [model for callback in callbacks if (model := getattr(callback, "_average_model", None)) is not None]


def call_after_swaps(callbacks: Iterable[Any], function: Callable[[], object]) -> Undo:
    """Have `function` called when callbacks have swapped averages and the weights that are trained, or swapped back."""
    undo = ExitStack()
    for callback in callbacks:
        if hasattr(callback, "_swap_models"):
            undo.callback(_wrap_method(callback, "_swap_models", lambda swap, module: (swap(module), function())))
    return undo.close


# Evaluation.


def replace_step(loop: Any, step: Callable[..., None]) -> Undo:
    """Have `step(original, batch, batch_idx, dataloader_idx, dataloader_iter)` run in an evaluation or prediction."""
    return _wrap_method(loop, "_predict_step" if hasattr(loop, "_predict_step") else "_evaluation_step", step)


def predict_unseen(trainer: Any, batch: Any, batch_idx: int, dataloader_idx: int) -> None:
    """Run `predict_step` without callbacks, and drop its output."""
    strategy, loop = trainer.strategy, trainer.predict_loop
    batch = strategy.precision_plugin.convert_input(batch)
    batch = known(trainer.lightning_module, "_on_before_batch_transfer")(batch, dataloader_idx=dataloader_idx)
    batch = strategy.batch_to_device(batch, dataloader_idx=dataloader_idx)
    index = dataloader_idx if loop.num_dataloaders > 1 else None
    arguments = known(loop, "_build_kwargs")(batch, batch_idx, index)
    strategy.predict_step(*known(loop, "_build_step_args_from_hook_kwargs")(arguments, "predict_step"))


def return_predictions(trainer: Trainer) -> None:
    """Have a prediction return its outputs also where Lightning has launched processes, and would not."""
    known(trainer.predict_loop, "_return_predictions")
    trainer.predict_loop._return_predictions = True


# Checkpoints.


def has_ckpt_path(trainer: Trainer) -> bool:
    """Return whether the user has set `trainer.ckpt_path`."""
    return bool(known(known(trainer, "_checkpoint_connector"), "_user_managed"))


def load_at_start(trainer: Trainer, path: str | None) -> None:
    """Have the Trainer load the checkpoint at `path` once, in place of the one that it was given."""

    def resume_from_path(resume_start: Callable[..., None], _: Any = None, *args: Any, **kwargs: Any) -> None:
        undo()
        resume_start(path, *args, **kwargs)

    undo = _wrap_method(known(trainer, "_checkpoint_connector"), "resume_start", resume_from_path)


def load_as_given(trainer: Trainer) -> None:
    """Undo `load_at_start`, if the Trainer has loaded nothing since."""
    vars(known(trainer, "_checkpoint_connector")).pop("resume_start", None)


def ends_by_search(callback: Any) -> bool | None:
    """Return whether a callback that searches for a setting then ends the fit; None: it does not search."""
    return getattr(callback, "_early_exit", None)


def forget_write_error(checkpoint_io: Any) -> None:
    """Drop the background error of Lightning's `AsyncCheckpointIO`."""
    if getattr(checkpoint_io, "_error", None) is not None:
        checkpoint_io._error = None


def convert_to_state(strategy: Any, state: dict[str, Any], **kwargs: Any) -> Any:
    """Return the content of a checkpoint of Fabric for the modules, optimizers and other values in `state`."""
    return known(strategy, "_convert_stateful_objects_in_state")(state, **kwargs)


# Processes and signals.


def set_main_port(environment: Any, port: int) -> None:
    """Have ranks find each other at `port`."""
    known(environment, "_main_port")
    environment._main_port = port


def processes_started_by(start: Callable[..., Any], launcher: Any) -> AbstractContextManager[None]:
    """Have `launcher`, which starts a process for each rank, call `start` in place of torch's `start_processes`."""
    name = next(base.__module__ for base in type(launcher).__mro__ if base.__name__ == "_MultiProcessingLauncher")
    module = sys.modules[name]
    ours = SimpleNamespace(get_context=known(module, "mp").get_context, start_processes=start)
    return _replaced(module, "mp", ours)


def slurm_requeue_of(trainer: Trainer) -> Any:
    """Return Lightning's handler of SLURM's requeue signal, which saves and asks for another run."""
    return known(known(trainer, "_signal_connector"), "_slurm_sigusr_handler_fn")


def replace_signal_handlers(
    trainer: Trainer,
    *,
    on_sigterm: Callable[..., Any],
    on_requeue: Callable[..., Any],
    on_registered: Callable[[], object],
) -> Undo:
    """Have Lightning register these handlers in place of its own, and then call `on_registered`.

    Its handler of SIGTERM calls a broadcast. So does its training loop before each batch (2.6), which is disabled.
    """
    connector, loop = known(trainer, "_signal_connector"), trainer.fit_loop.epoch_loop
    undo = ExitStack()
    undo.callback(replace_method(connector, "_sigterm_notifier_fn", on_sigterm))
    undo.callback(replace_method(connector, "_slurm_sigusr_handler_fn", on_requeue))
    undo.callback(_wrap_method(connector, "register_signal_handlers", lambda register: (register(), on_registered())))
    if hasattr(loop, "_broadcast_sigterm_tensor"):
        undo.callback(replace_method(loop, "_broadcast_sigterm_tensor", lambda: None))
    return undo.close


def end_failed_fit(trainer: Trainer, error: BaseException, *, interrupt: Callable[..., None]) -> None:
    """Do what a Trainer does when a fit raises: notify callbacks, which may save, and tear down."""
    try:
        interrupt(trainer, error)
    finally:
        known(trainer, "_teardown")()
        trainer.state.stage = None


def begin_fit(trainer: Trainer) -> None:
    """Prepare a Trainer for another launch of `fit`, as if it had trained nothing."""
    # New loops, because no checkpoint holds the whole state of an interrupted loop.
    loop: Any = trainer.fit_loop
    steps = loop.epoch_loop
    trainer.fit_loop = type(loop)(trainer, min_epochs=loop.min_epochs, max_epochs=loop.max_epochs)
    trainer.fit_loop.epoch_loop = type(steps)(trainer, min_steps=steps.min_steps, max_steps=steps.max_steps)
    known(known(trainer, "_logger_connector"), "reset_metrics")()
    trainer.state.status = type(trainer.state.status)("running")
    trainer.training = True
    trainer.should_stop = False


def stop_after_batch(trainer: Trainer) -> None:
    """Have a fit end at the end of this batch as by SIGTERM. All ranks must call this."""
    known(known(trainer, "_signal_connector"), "received_sigterm")
    trainer._signal_connector.received_sigterm = True


# Searching for a batch size.


class AsIfAlone:
    """A Trainer that claims not to be distributed, because Lightning's finder refuses to search otherwise."""

    _accelerator_connector = SimpleNamespace(is_distributed=False)

    def __init__(self, trainer: Trainer) -> None:
        vars(self)["_of"] = trainer

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["_of"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(vars(self)["_of"], name, value)


def trainer_of(tuner: Any) -> Any:
    """Return the Trainer of a `Tuner`."""
    return known(tuner, "_trainer")


def tuning_as_if_alone(tuner: Any) -> AbstractContextManager[None]:
    """Have a `Tuner` search inside as it would with one rank."""
    return _replaced(tuner, "_trainer", AsIfAlone(trainer_of(tuner)))
