"""`BatchSizeFinder` and `Tuner` for several ranks, without their Lightning base classes.

When one rank runs out of memory, the others wait for it in some collective. In a trial the ranks therefore exchange
their status before each collective of all ranks, over connections of their own. A rank that has failed comes to the
next exchange instead of to the collective, and all ranks raise. Every collective was begun by all ranks or by none, so
process groups stay usable.
"""

from __future__ import annotations

import functools
import gc
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sized
from contextlib import ExitStack, contextmanager
from enum import IntEnum
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed as dist

from lightning_bucketddp.comm.collectives import Collectives
from lightning_bucketddp.data.evaluation import share_of
from lightning_bucketddp.faults.failure import chain_of
from lightning_bucketddp.processes import WorkerThread
from lightning_bucketddp.strategies.fit_state import set_up_model
from lightning_bucketddp.strategies.launchers import ProcessLauncher
from lightning_bucketddp.strategies.trainer import TrainerStrategy
from lightning_bucketddp.trainer_internals import (
    AsIfAlone,
    combined_loader,
    replace_method,
    set_num_samples,
    trainer_of,
    tuning_as_if_alone,
)

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.callbacks import BatchSizeFinder as _BatchSizeFinder
    from lightning.pytorch.tuner.tuning import Tuner as _Tuner
else:
    _BatchSizeFinder = _Tuner = object


# Methods of `ProcessGroup`: each collective of Python calls one of them. Some exist in some versions of torch only.
_COLLECTIVES = (
    *("allreduce", "allreduce_coalesced", "reduce", "broadcast", "gather", "scatter", "barrier", "monitored_barrier"),
    *("allgather", "allgather_coalesced", "allgather_into_tensor_coalesced", "_allgather_base"),
    *("all_gather_single", "all_gather_single_coalesced", "all_to_all_single", "alltoall", "alltoall_base"),
    *("reduce_scatter", "reduce_scatter_tensor_coalesced", "_reduce_scatter_base"),
    *("reduce_scatter_single", "reduce_scatter_single_coalesced"),
)


class SharedBatchSizeFinder(_BatchSizeFinder):
    """Lightning's `BatchSizeFinder`, also on several ranks of `bucketddp`.

    All ranks try the same sizes. A size that is too large for one of them is too large for all.
    """

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str | None = None) -> None:
        if isinstance(trainer.strategy, TrainerStrategy):
            if trainer.strategy.options.global_batch_size is not None:
                raise ValueError(
                    "`global_batch_size` sets the batch size of each rank, so there is none to look for. Leave it out"
                    " in a run with `BatchSizeFinder`, and then give the `DataLoader` the size that was found."
                )
            trainer = AsIfAlone(trainer)  # type: ignore[assignment]
        super().setup(trainer, pl_module, stage)

    def scale_batch_size(self, trainer: Trainer, pl_module: LightningModule) -> None:
        with ExitStack() as search:
            if isinstance(trainer.strategy, TrainerStrategy):
                search.enter_context(_searching_together(trainer, trainer.strategy))
            super().scale_batch_size(trainer, pl_module)


class SharedTuner(_Tuner):
    """Lightning's `Tuner`, whose `scale_batch_size` also works on several ranks of `bucketddp`."""

    # The module that has the other classes for the same root of Lightning.
    _binding: ClassVar[str]

    def scale_batch_size(self, *args: Any, **kwargs: Any) -> int | None:
        """Return the largest batch size that no rank runs out of memory with. Takes what Lightning's takes."""
        trainer = trainer_of(self)
        if not isinstance(trainer.strategy, TrainerStrategy):
            return super().scale_batch_size(*args, **kwargs)
        if isinstance(trainer.strategy.launcher, ProcessLauncher):
            raise ValueError(
                "`Tuner.scale_batch_size` cannot return what is found in other processes, which this strategy starts by"
                f" {trainer.strategy.options.start_method}. Use the callback `BatchSizeFinder`, or"
                " `strategy='bucketddp'`."
            )
        finder: Any = import_module(self._binding).BatchSizeFinder
        lightnings: Any = import_module(finder.lightning_base.__module__)
        with ExitStack() as restored:
            restored.enter_context(tuning_as_if_alone(self))
            # Lightning's method imports the class when it is called.
            restored.callback(setattr, lightnings, "BatchSizeFinder", lightnings.BatchSizeFinder)
            lightnings.BatchSizeFinder = finder
            return super().scale_batch_size(*args, **kwargs)


@contextmanager
def _searching_together(trainer: Trainer, strategy: TrainerStrategy) -> Iterator[None]:
    """Make each run of the active loop a trial of all ranks; afterwards training begins as if there had been none."""
    assert trainer.state.fn is not None
    assert strategy._collectives is not None
    if strategy._state.islands is not None:
        raise ValueError(
            "`BatchSizeFinder` needs all ranks in each step, and `local_steps` keeps them apart. Search"
            " without `local_steps`, and pass the batch size that was found."
        )
    trials = Trials(strategy._collectives, is_out_of_memory=strategy.root.is_oom_error)
    loop: Any = getattr(trainer, f"{trainer.state.fn.value}_loop")
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    run, setup_data = loop.run, loop.setup_data

    def run_as_trial() -> Any:
        stage = trainer.state.stage
        modes = {module: module.training for module in trainer.lightning_module.modules()}
        try:
            with trials.attempt():
                return run()
        except Exception as error:
            # The loop may have been interrupted in its validation.
            trainer.state.stage = stage
            for module, mode in modes.items():
                module.training = mode
            traceback.clear_frames(error.__traceback__)
            gc.collect()
            _forget_step(strategy)
            raise

    def setup_data_and_count() -> None:
        setup_data()
        # None in a fit that trains nothing.
        if (combined := combined_loader(loop)) is not None:
            set_num_samples(combined, lambda: _smallest_num_samples(combined, strategy))

    with ExitStack() as restored:
        # Lightning before 2.6 does not restore the callbacks after an error.
        restored.callback(setattr, trainer, "callbacks", callbacks)
        restored.callback(replace_method(loop, "run", run_as_trial))
        restored.callback(replace_method(loop, "setup_data", setup_data_and_count))
        strategy.is_searching = True
        restored.callback(setattr, strategy, "is_searching", False)
        yield
    _forget_step(strategy)


def _forget_step(strategy: TrainerStrategy) -> None:
    """Drop the state of steps that do not count, or that were interrupted. All ranks must call this."""
    strategy._state.tally = None
    if strategy._state.weighting is not None:
        strategy._state.weighting.forget_step()
    if strategy._state.is_fit:
        set_up_model(strategy, strategy.trainer.lightning_module)


def _smallest_num_samples(combined: Any, strategy: TrainerStrategy) -> int:
    """Return the samples of the rank that has the fewest: no batch can be larger. 0: not known."""
    most = 0
    for loader in combined.flattened:
        sampler = getattr(loader, "sampler", None)
        if isinstance(sampler, Sized):
            # A loader that is divided among the ranks has a sampler of all samples.
            most = max(most, len(sampler) // (1 if share_of(loader) is None else strategy.world_size))
    smallest: int = min(strategy.gather_json(most))
    return smallest


class Status(IntEnum):
    """The status of a rank in a trial, the worst last."""

    RUNNING = 0
    DONE = 1
    OUT_OF_MEMORY = 2
    FAILED = 3


class Trials:
    """Trials that succeed on all ranks or on none, one after the other.

    Args:
        is_out_of_memory: whether an error is for lack of memory; it is true of the error raised on the other ranks.
    """

    def __init__(self, collectives: Collectives, *, is_out_of_memory: Callable[[BaseException], bool]) -> None:
        self._ranks = collectives.further_group("agreement", in_host_memory=True)
        self._is_out_of_memory = is_out_of_memory
        self._outcome: Status | None = None  # of all ranks, once the trial is over
        self._rank = 0  # the rank that decided the outcome

    def _ran_out_of_memory(self, error: BaseException | None) -> bool:
        """Return whether `error`, or one in whose handling it was raised, is for lack of memory."""
        return error is not None and any(map(self._is_out_of_memory, chain_of(error)))

    @contextmanager
    def attempt(self) -> Iterator[None]:
        """Run the body as a trial, on all ranks; it raises on all of them if it raises on one."""
        self._outcome, error = None, None
        try:
            with _before_each_collective(self._go_on):
                yield
        except Exception as raised:
            error = raised
        own = Status.DONE
        if error is not None:
            own = Status.OUT_OF_MEMORY if self._ran_out_of_memory(error) else Status.FAILED
        while self._outcome is None:
            self._exchange(own)
        try:
            # The rank's own error is the best explanation, unless it only hides a lack of memory.
            if error is not None and self._outcome is own and (own is Status.FAILED or self._is_out_of_memory(error)):
                raise error
            self._raise_if_over()
        finally:
            del error  # it holds this frame, and all objects of the trial

    def _go_on(self, group: Any) -> None:
        if group is self._ranks.group or group.size() != self._ranks.world_size:
            return
        self._raise_if_over()
        # The cleanup after a failure may come to other collectives than the ranks that have not failed.
        has_failed = self._ran_out_of_memory(sys.exc_info()[1])
        self._exchange(Status.OUT_OF_MEMORY if has_failed else Status.RUNNING)
        self._raise_if_over()

    def _exchange(self, status: Status) -> None:
        """Exchange the status of all ranks, and set the outcome if the trial is over."""
        statuses = [int(gathered) for gathered in self._ranks.gather(torch.tensor(int(status)))]
        if max(statuses) > Status.DONE or min(statuses) == Status.DONE:
            self._outcome, self._rank = Status(max(statuses)), statuses.index(max(statuses))

    def _raise_if_over(self) -> None:
        if self._outcome is Status.OUT_OF_MEMORY:
            raise RuntimeError(f"CUDA out of memory, or that of the host, on rank {self._rank}.")
        if self._outcome is Status.FAILED:
            raise RuntimeError(f"Rank {self._rank} has failed in what all ranks were trying. Its own error says why.")


@contextmanager
def _before_each_collective(act: Callable[[Any], None]) -> Iterator[None]:
    """Call `act` with the process group before each collective that begins inside."""
    group_class: Any = dist.ProcessGroup
    originals = {name: vars(group_class)[name] for name in _COLLECTIVES if name in vars(group_class)}

    def acting(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def collective(group: Any, *args: Any, **kwargs: Any) -> Any:
            # A worker continues an operation that all ranks have begun, wherever they are by now.
            if not isinstance(threading.current_thread(), WorkerThread):
                act(group)
            return original(group, *args, **kwargs)

        return collective

    for name, original in originals.items():
        setattr(group_class, name, acting(original))
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(group_class, name, original)
