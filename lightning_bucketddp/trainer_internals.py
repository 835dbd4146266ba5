"""Everything that is private to Lightning and that we need: no other file outside of `bindings` names any of it.

Functions take objects of the user's Trainer, because each root of Lightning has classes of its own. One that replaces a
method does so on that object, and returns what undoes it. They raise where Lightning has changed.
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
# What a `ModelCheckpoint` knows of its last save, and no checkpoint holds, before the first.
_NOTHING_SAVED = {"_last_global_step_saved": 0, "_last_checkpoint_saved": ""}
# The class of what `fabric.setup` returns.
WRAPPER_OF_FABRIC = "_FabricModule"

_ROOTS = ("lightning", "pytorch_lightning", "lightning_fabric")
# The first version that nobody has tried.
_FIRST_UNKNOWN = "2.7"


def known(owner: Any, name: str) -> Any:
    """Return what Lightning has under this name; raise a `RuntimeError` if it has nothing there any more."""
    try:
        return getattr(owner, name)
    except AttributeError as error:
        if isinstance(owner, ModuleType):
            what, modules = owner.__name__, [owner.__name__]
        else:
            cls = owner if isinstance(owner, type) else type(owner)
            what, modules = cls.__name__, [base.__module__ for base in cls.__mro__]
        # The user may have derived a class of his own.
        root = next((root for module in modules if (root := module.partition(".")[0]) in _ROOTS), "lightning")
        ours, version = (getattr(sys.modules.get(it), "__version__", "") for it in ("lightning_bucketddp", root))
        raise RuntimeError(
            f"lightning-bucketddp {ours} does not know {root} {version}: `{what}` has no `{name}`. Upgrade"
            f" lightning-bucketddp, or install `{root}<{_FIRST_UNKNOWN}`."
        ) from error


def replace_method(owner: Any, name: str, method: Callable[..., Any]) -> Undo:
    """Put `method` in the place of a method of this object."""
    known(owner, name)
    own = vars(owner)
    before = own.get(name)
    own[name] = method
    return partial(own.pop, name, None) if before is None else partial(own.__setitem__, name, before)


def _wrap_method(owner: Any, name: str, wrapper: Callable[..., Any]) -> Undo:
    """Have `wrapper(original, ...)` called in the place of a method of this object."""
    return replace_method(owner, name, partial(wrapper, known(owner, name)))


# Data.


def set_up_training_data_within(trainer: Trainer, context: Callable[[], AbstractContextManager[None]]) -> Undo:
    """Have dataloaders for training, and no others, reach the strategy inside of `context()`."""

    def set_up_within(set_up: Callable[[], None]) -> None:
        with context():
            set_up()

    return _wrap_method(trainer.fit_loop, "setup_data", set_up_within)


def replace_preparation(trainer: Trainer, prepare: Callable[..., Any]) -> Undo:
    """Have `prepare(original, dataloader, shuffle, mode)` give dataloaders their samplers."""
    return _wrap_method(known(trainer, "_data_connector"), "_prepare_dataloader", prepare)


def combined_loader(loop: Any) -> Any:
    """Return the `CombinedLoader` of a loop; None: it has none yet."""
    return known(loop, "_combined_loader")


def mode_of(combined: Any) -> Any:
    """Return in which way a `CombinedLoader` combines, for example `min_size`."""
    return known(combined, "_mode")


def set_num_samples(combined: Any, count: Callable[[], int]) -> None:
    """Have a search for a batch size take the data for as long as `count` says, which is asked once; 0: as it is."""
    if "_dataset_length" not in vars(combined) and (num_samples := count()) > 0:
        replace_method(combined, "_dataset_length", lambda: num_samples)


def batch_sampler_within(batch_sampler: Any) -> Any:
    """Return what makes the batches, without the sampler around it that remembers the indices of a prediction."""
    return getattr(batch_sampler, "_batch_sampler", batch_sampler)


def sampler_within(sampler: Any) -> Any:
    """Return the user's sampler that Lightning has wrapped to divide it, or `sampler`."""
    return getattr(getattr(sampler, "dataset", None), "_sampler", sampler)


# Counts of a fit. Public names, but for Lightning itself.


def batch_progress(trainer: Trainer) -> Any:
    """Return the counts of batches, of this epoch and in total."""
    return trainer.fit_loop.epoch_loop.batch_progress


def epoch_progress(trainer: Trainer) -> Any:
    """Return the counts of epochs."""
    return trainer.fit_loop.epoch_progress


class SavedProgress(NamedTuple):
    """The counts in a checkpoint: dictionaries, which may be changed."""

    epochs: dict[str, Any]
    batches: dict[str, Any]
    optimizer_steps: dict[str, Any]


def saved_progress(checkpoint: Mapping[str, Any]) -> SavedProgress | None:
    """Return the counts in `checkpoint`; None: it holds no training."""
    loop = checkpoint.get("loops", {}).get("fit_loop")
    if loop is None:
        return None
    optimizers = loop["epoch_loop.automatic_optimization.optim_progress"]["optimizer"]
    return SavedProgress(loop["epoch_progress"], loop["epoch_loop.batch_progress"], optimizers["step"])


def mark_as_begun(trainer: Trainer) -> None:
    """Have a fit that was resumed end its epoch like any other: with a step of the schedules that follow a metric."""
    known(trainer.fit_loop, "_restarting")
    trainer.fit_loop._restarting = False


# Logging.


def known_metrics(trainer: Trainer) -> Any:
    """Return the dictionary of `trainer.callback_metrics` as it is: computing them again would ask the other ranks."""
    return known(known(trainer, "_logger_connector"), "_callback_metrics")


def logged_results(trainer: Trainer) -> Any:
    """Return the dictionary of what was logged in this epoch."""
    return known(trainer, "_results")


def is_log_step(trainer: Trainer) -> bool:
    """Return whether loggers get metrics of this step."""
    return bool(known(known(trainer, "_logger_connector"), "should_update_logs"))


def log_at_once(trainer: Trainer, metrics: dict[str, Any]) -> None:
    """Give `metrics` to the loggers once. `pl_module.log` would repeat them at the next log step."""
    known(known(trainer, "_logger_connector"), "log_metrics")(metrics)


def continue_logger(logger: Any, version: int | str) -> bool:
    """Have `logger` go on in this version, or run of W&B or MLflow, unless the user names one; False: it logs."""
    own = vars(logger)
    if own.get("_experiment") is not None:
        return False
    for name in {"_version", "_run_id", "_id"} & own.keys():
        if own[name] is None:
            own[name] = version
            own.get("_wandb_init", {})["id"] = version
    return True


# Training.


def call_before_fetch(trainer: Trainer, function: Callable[[], None]) -> Undo:
    """Have `function` called last before a fit waits for a batch: validation, checkpoints and callbacks are over."""

    def call_both(before_fetch: Callable[[], None]) -> None:
        function()
        before_fetch()

    return _wrap_method(trainer.fit_loop.epoch_loop, "_on_before_fetch", call_both)


def replace_result_class(trainer: Trainer, derive: Callable[[Any], Any]) -> None:
    """Have the class that `derive` makes of Lightning's read what `training_step` returns."""
    optimization: Any = trainer.fit_loop.epoch_loop.automatic_optimization
    # Of the class: that of an earlier fit may be there.
    optimization.output_result_cls = derive(known(type(optimization), "output_result_cls"))


class ClosureParts(NamedTuple):
    """What makes up the closure that automatic optimization gives to an optimizer."""

    run: Callable[[], Any]  # all of it, as Lightning runs it
    arguments: dict[str, Any]  # what `training_step` is called with, by name
    optimizer: Any  # whose gradients are set to zero
    result_of: Callable[[Any], Any]  # reads what `training_step` has returned
    zero_grad: Callable[[], None] | None  # None: gradients accumulate
    has_backward: bool  # or else there is nothing to do but `training_step`


def replace_closures(trainer: Trainer, run: Callable[[ClosureParts], Any]) -> Undo:
    """Have `run` called in the place of what a closure of automatic optimization does; it returns what that does."""
    optimization: Any = trainer.fit_loop.epoch_loop.automatic_optimization
    make = known(optimization, "_make_closure")

    def make_closure(kwargs: Any, optimizer: Any, batch_idx: int) -> Any:
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

    return replace_method(optimization, "_make_closure", make_closure)


@contextmanager
def logging_in(module: Any, hook: str) -> Iterator[None]:
    """Have `module.log` take calls inside for calls from this hook."""
    before, module._current_fx_name = known(module, "_current_fx_name"), hook
    try:
        yield
    finally:
        module._current_fx_name = before


@contextmanager
def trainer_replaced(module: Any, trainer: Any) -> Iterator[None]:
    """Have `module.trainer` be `trainer` inside."""
    own = vars(module)
    before, own["_trainer"] = known(module, "_trainer"), trainer
    try:
        yield
    finally:
        own["_trainer"] = before


def layer_sync_of(strategy: Any) -> Any:
    """Return the plugin that the Trainer has given a strategy to synchronise layers with; None: none."""
    return known(strategy, "_layer_sync")


def averaged_models(callbacks: Iterable[Any]) -> list[Any]:
    """Return what callbacks keep as averages of the weights; Lightning has such a callback since 2.6."""
    return [model for callback in callbacks if (model := getattr(callback, "_average_model", None)) is not None]


# Evaluation.


def replace_step(loop: Any, step: Callable[..., None]) -> Undo:
    """Have `step(original, batch, batch_idx, dataloader_idx, dataloader_iter)` run in an evaluation or prediction."""
    return _wrap_method(loop, "_predict_step" if hasattr(loop, "_predict_step") else "_evaluation_step", step)


def predict_unseen(trainer: Any, batch: Any, batch_idx: int, dataloader_idx: int) -> None:
    """Run `predict_step`, and tell nobody."""
    strategy, loop = trainer.strategy, trainer.predict_loop
    batch = strategy.precision_plugin.convert_input(batch)
    batch = known(trainer.lightning_module, "_on_before_batch_transfer")(batch, dataloader_idx=dataloader_idx)
    batch = strategy.batch_to_device(batch, dataloader_idx=dataloader_idx)
    index = dataloader_idx if loop.num_dataloaders > 1 else None
    arguments = known(loop, "_build_kwargs")(batch, batch_idx, index)
    strategy.predict_step(*known(loop, "_build_step_args_from_hook_kwargs")(arguments, "predict_step"))


def return_predictions(trainer: Trainer) -> None:
    """Have a prediction return something also where Lightning, which has launched processes by itself, would not."""
    known(trainer.predict_loop, "_return_predictions")
    trainer.predict_loop._return_predictions = True


# Checkpoints.


def has_ckpt_path(trainer: Trainer) -> bool:
    """Return whether the user has set `trainer.ckpt_path`."""
    return bool(known(known(trainer, "_checkpoint_connector"), "_user_managed"))


def load_at_start(trainer: Trainer, path: str | None) -> None:
    """Have the Trainer begin with the checkpoint at `path`, once, and not with the one that it was given."""
    connector = known(trainer, "_checkpoint_connector")
    resume_start = known(connector, "resume_start")

    def resume_from_path(_: Any = None, *args: Any, **kwargs: Any) -> None:
        undo()
        resume_start(path, *args, **kwargs)

    undo = replace_method(connector, "resume_start", resume_from_path)


def load_as_given(trainer: Trainer) -> None:
    """Undo `load_at_start`, if the Trainer has not come to load anything."""
    vars(known(trainer, "_checkpoint_connector")).pop("resume_start", None)


def ends_by_search(callback: Any) -> bool | None:
    """Return whether a callback that searches for a setting ends the fit when it has found it; None: it is another."""
    return getattr(callback, "_early_exit", None)


def forget_write_error(checkpoint_io: Any) -> None:
    """Have Lightning's `AsyncCheckpointIO` forget what has failed in the background."""
    if getattr(checkpoint_io, "_error", None) is not None:
        checkpoint_io._error = None


def convert_to_state(strategy: Any, state: dict[str, Any], **kwargs: Any) -> Any:
    """Return the dictionary that a checkpoint of Fabric's holds for modules, optimizers and others in `state`."""
    return known(strategy, "_convert_stateful_objects_in_state")(state, **kwargs)


# Processes and signals.


def set_main_port(environment: Any, port: int) -> None:
    """Have ranks find each other at `port`."""
    known(environment, "_main_port")
    environment._main_port = port


@contextmanager
def processes_started_by(start: Callable[..., Any], launcher: Any) -> Iterator[None]:
    """Have `launcher`, which starts a process for each rank, call `start` in the place of torch's `start_processes`."""
    name = next(base.__module__ for base in type(launcher).__mro__ if base.__name__ == "_MultiProcessingLauncher")
    module: Any = sys.modules[name]
    before = known(module, "mp")
    module.mp = SimpleNamespace(get_context=before.get_context, start_processes=start)
    try:
        yield
    finally:
        module.mp = before


def slurm_requeue_of(trainer: Trainer) -> Any:
    """Return Lightning's handler of SLURM's requeue signal, which saves and asks for another run."""
    return known(known(trainer, "_signal_connector"), "_slurm_sigusr_handler_fn")


def replace_signal_handlers(
    trainer: Trainer,
    *,
    on_sigterm: Callable[..., Any],
    on_requeue: Callable[..., Any],
    on_registered: Callable[[], None],
) -> Undo:
    """Have Lightning register these handlers where it would register its own, and then call `on_registered`.

    Its handler of SIGTERM broadcasts from within. So does its training loop before each batch (2.6), which is left out.
    """
    connector, loop = known(trainer, "_signal_connector"), trainer.fit_loop.epoch_loop

    def register_and_tell(register: Callable[[], None]) -> None:
        register()
        on_registered()

    undo = ExitStack()
    undo.callback(replace_method(connector, "_sigterm_notifier_fn", on_sigterm))
    undo.callback(replace_method(connector, "_slurm_sigusr_handler_fn", on_requeue))
    undo.callback(_wrap_method(connector, "register_signal_handlers", register_and_tell))
    if hasattr(loop, "_broadcast_sigterm_tensor"):
        undo.callback(replace_method(loop, "_broadcast_sigterm_tensor", lambda: None))
    return undo.close


def end_failed_fit(trainer: Trainer, error: BaseException, *, interrupt: Callable[..., None]) -> None:
    """Do what a Trainer does when a fit raises: tell callbacks, which may save, and tear down."""
    interrupt(trainer, error)
    known(trainer, "_teardown")()
    trainer.state.stage = None


def begin_fit(trainer: Trainer) -> None:
    """Do what `trainer.fit` does before it launches, in a Trainer that has trained nothing."""
    # No checkpoint holds all of the state of a loop that was left in the middle of something.
    loop: Any = trainer.fit_loop
    steps = loop.epoch_loop
    trainer.fit_loop = type(loop)(trainer, min_epochs=loop.min_epochs, max_epochs=loop.max_epochs)
    trainer.fit_loop.epoch_loop = type(steps)(trainer, min_steps=steps.min_steps, max_steps=steps.max_steps)
    known(known(trainer, "_logger_connector"), "reset_metrics")()
    for callback in trainer.checkpoint_callbacks:
        # As in a new process of another rank: all save in the same steps, or none.
        vars(callback).update({name: it for name, it in _NOTHING_SAVED.items() if name in vars(callback)})
    trainer.state.status = type(trainer.state.status)("running")
    trainer.training = True
    trainer.should_stop = False


def stop_after_batch(trainer: Trainer) -> None:
    """Have a fit end at the end of this batch as by SIGTERM. All ranks must call this."""
    known(known(trainer, "_signal_connector"), "received_sigterm")
    trainer._signal_connector.received_sigterm = True


# Searching for a batch size.


class AsIfAlone:
    """A Trainer that says that its strategy is not distributed, which is all that Lightning's finder asks of that."""

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


@contextmanager
def tuning_as_if_alone(tuner: Any) -> Iterator[None]:
    """Have a `Tuner` search inside as it would with one rank."""
    trainer = trainer_of(tuner)
    tuner._trainer = AsIfAlone(trainer)
    try:
        yield
    finally:
        tuner._trainer = trainer
