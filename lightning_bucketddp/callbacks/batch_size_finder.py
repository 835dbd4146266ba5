"""`BatchSizeFinder` and `Tuner` for several ranks, less their Lightning base classes."""

from __future__ import annotations

import gc
import traceback
from collections.abc import Iterator, Sized
from contextlib import ExitStack, contextmanager
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar

from lightning_bucketddp.data.evaluation import share_of
from lightning_bucketddp.strategies.launchers import ProcessLauncher
from lightning_bucketddp.strategies.trainer import TrainerStrategy
from lightning_bucketddp.strategies.trainer_step import forget_step, searching
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
    """Have each run of the active loop be a trial of all ranks, and restore the loop at the end."""
    assert trainer.state.fn is not None  # it runs
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
            # Where the loop was interrupted it may have been validating.
            trainer.state.stage = stage
            for module, mode in modes.items():
                module.training = mode
            traceback.clear_frames(error.__traceback__)
            gc.collect()
            forget_step(strategy)
            raise

    def setup_data_and_count() -> None:
        setup_data()
        # None in a fit that trains nothing.
        if (combined := combined_loader(loop)) is not None:
            set_num_samples(combined, lambda: _smallest_num_samples(combined, strategy))

    with ExitStack() as restored:
        # As an error leaves it in Lightning before 2.6.
        restored.callback(setattr, trainer, "callbacks", callbacks)
        restored.callback(replace_method(loop, "run", run_as_trial))
        restored.callback(replace_method(loop, "setup_data", setup_data_and_count))
        with searching(strategy) as trials:
            yield


def _smallest_num_samples(combined: Any, strategy: TrainerStrategy) -> int:
    """Return how many samples a rank has, where all ranks must stop: no batch can be larger. 0: nobody knows."""
    lengths = [_num_samples(of_rank, strategy.world_size) for of_rank in combined.flattened]
    smallest: int = min(strategy.gather_json(max(lengths, default=0)))
    return smallest


def _num_samples(loader: Any, world_size: int) -> int:
    """Return how many samples a rank has of `loader`; 0: nobody knows."""
    sampler = getattr(loader, "sampler", None)
    if not isinstance(sampler, Sized):
        return 0
    # What is divided among the ranks has a sampler of all samples.
    return len(sampler) // world_size if share_of(loader) is not None else len(sampler)
