"""`BucketDDPMonitor`, less its Lightning base class."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_utilities.core.rank_zero import rank_zero_info

from lightning_bucketddp.callbacks.recorded_fit import RecordedFit
from lightning_bucketddp.recording.marked_steps import metrics_of
from lightning_bucketddp.recording.record import FOLDER
from lightning_bucketddp.recording.suggestions import suggestions
from lightning_bucketddp.recording.summary import Summary, print_summary
from lightning_bucketddp.recording.typical_step import RankNumbers, TypicalStep
from lightning_bucketddp.strategies.trainer_step import TrainerStepHooks

if TYPE_CHECKING:
    from lightning.pytorch import Callback as _Callback
    from lightning.pytorch import LightningModule, Trainer
else:
    _Callback = object

_NAME = "BucketDDPMonitor"


class StepMonitoring(_Callback):
    """Logs how long steps wait for communication, records what they do when, and sums it up at the end of a fit.

    Works with `strategy="bucketddp"`. What is recorded is read when the device has come to it, and never waited for.
    Each rank writes `bucketddp/rank-N.jsonl`, from which `bucketddp report` makes a page. Files stay small: after
    1,000 recorded batches every second recorded step is written, after 1,000 more every fourth, and so on. What an
    earlier fit has written there is replaced.

    Args:
        every_n_steps: Which optimizer steps are recorded. Of several optimizers all steps are that belong to one batch.
        dirpath: Where the folder `bucketddp` is made; by default where the logger writes, or `default_root_dir`.
        summary: Print a table and suggestions at the end of a fit, on rank zero.
        progress_bar: Show `overlap_pct` in the progress bar.
    """

    def __init__(
        self,
        *,
        every_n_steps: int = 10,
        dirpath: str | Path | None = None,
        summary: bool = True,
        progress_bar: bool = False,
    ) -> None:
        if every_n_steps < 1:
            raise ValueError(f"`every_n_steps` is {every_n_steps}; it must be at least 1.")
        self._every_n_steps = every_n_steps
        self._dirpath = dirpath
        self._has_summary = summary
        self._shows_overlap = progress_bar
        self._fit: RecordedFit | None = None
        self._global_step = 0
        self._summary: Summary | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit" and not isinstance(trainer.strategy, TrainerStepHooks):
            raise TypeError(
                f"`{_NAME}` records what `bucketddp` does, but the strategy of this Trainer is a"
                f' `{type(trainer.strategy).__name__}`. Pass `strategy="bucketddp"`, or leave the callback out.'
            )

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert isinstance(trainer.strategy, TrainerStepHooks)
        # Asked on all ranks: it is a broadcast.
        parent = self._dirpath or trainer.log_dir or trainer.default_root_dir
        folder = None if trainer.fast_dev_run else Path(parent, FOLDER)  # type: ignore[attr-defined]
        self._summary = None
        self._global_step = trainer.global_step
        self._fit = RecordedFit(trainer.strategy, every_n_rounds=self._every_n_steps, folder=folder)
        loop = trainer.fit_loop.epoch_loop
        before_fetch = type(loop)._on_before_fetch

        def see_fetch() -> None:
            if self._fit is not None:
                self._fit.begin_if_due()
                self._fit.begin_fetch()
            before_fetch(loop)

        # The last thing that is called before the trainer waits for a batch. Validation, checkpoints and callbacks
        # are behind it.
        loop._on_before_fetch = see_fetch  # type: ignore[method-assign]

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self._fit is not None:
            self._fit.begin_if_due()
            self._fit.begin_batch()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._fit is None or trainer.global_step == self._global_step:
            return  # still accumulating
        self._global_step = trainer.global_step
        self._fit.end_round()
        if self._shows_overlap and self._fit.has_news:
            # The bar goes on showing it until there is another.
            pl_module.log("overlap_pct", 100 * self._fit.overlap, prog_bar=True, logger=False)
        if trainer._logger_connector.should_update_logs:
            self._log(trainer, self._fit)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._fit is None:
            return
        assert isinstance(trainer.strategy, TrainerStepHooks)
        self._fit.read(all_of_them=True)
        self._log(trainer, self._fit)
        if self._has_summary:
            # Of all ranks, whether they have recorded anything or not: it is a collective.
            numbers = RankNumbers.of(self._fit.run, list(self._fit.steps))
            gathered = trainer.strategy.gather_json(numbers.to_json())
            if trainer.is_global_zero:
                self._summary = _sum_up(self._fit, [RankNumbers.from_json(content) for content in gathered])
        self._close(trainer)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # Progress bars are gone by now.
        summary, self._summary = self._summary, None
        if summary is not None:
            print_summary(summary)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._close(trainer)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._close(trainer)

    def _log(self, trainer: Trainer, fit: RecordedFit) -> None:
        steps = fit.take()
        if steps:
            values = metrics_of(steps, num_ranks=trainer.world_size)
            named: dict[str, Any] = {f"bucketddp/{name}": value for name, value in values.items()}
            # Not by `pl_module.log`: at a later log point where nothing was recorded it would log the same values.
            trainer._logger_connector.log_metrics(named)

    def _close(self, trainer: Trainer) -> None:
        fit, self._fit = self._fit, None
        if fit is not None:
            delattr(trainer.fit_loop.epoch_loop, "_on_before_fetch")
            fit.close()


def _sum_up(fit: RecordedFit, ranks: list[RankNumbers]) -> Summary | None:
    if not fit.steps:
        rank_zero_info(f"{_NAME}: the fit was too short, no step was recorded. Pass a smaller `every_n_steps`.")
        return None
    typical = TypicalStep(ranks, num_ranks=fit.run.world_size)
    advice = suggestions(typical, fit.plan, fit.profile, options=fit.run.options)
    return Summary.of(typical, fit.plan, suggestions=advice)
