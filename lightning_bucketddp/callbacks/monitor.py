"""`BucketDDPMonitor`, without its Lightning base class."""

from __future__ import annotations

import socket
import sys
from collections import Counter, deque
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from lightning_bucketddp.config import MIB
from lightning_bucketddp.planning.cost import Codecs, Profile, measured_between
from lightning_bucketddp.processes import rank_zero_info
from lightning_bucketddp.recording.schema import FOLDER, RecordedPlan, Run, Step, Tuning, read_run
from lightning_bucketddp.recording.summary import Summary, print_summary, suggestions
from lightning_bucketddp.recording.typical_step import NUM_STEPS, RankNumbers, TypicalStep
from lightning_bucketddp.recording.writer import MarkedStep, RecordFile, StepRecorder, metrics_of, plan_of, step_of
from lightning_bucketddp.reducer.observer import OuterStepStats
from lightning_bucketddp.reducer.plan_cache import measure_wires
from lightning_bucketddp.reducer.quantization import measure_codecs
from lightning_bucketddp.strategies.trainer import TrainerStrategy
from lightning_bucketddp.trainer_internals import call_before_fetch, is_log_step, log_at_once

if TYPE_CHECKING:
    from lightning.pytorch import Callback as _Callback
    from lightning.pytorch import LightningModule, Trainer

    from lightning_bucketddp.commands.report import InlinePage
else:
    _Callback = object

_NAME = "BucketDDPMonitor"
# After this many batches every second recorded round is written, after as many more every fourth, and so on: a file
# grows with the logarithm of a run's length. Batches are counted, not bytes: all ranks must write the same steps.
_BATCHES_PER_PORTION = 1000


class RecordedFit:
    """Records every n-th round of one fit, and reads it once the device has reached its end.

    A round is a batch, or several that accumulate, up to the step of one or several optimizers. Without a folder,
    nothing is written.
    """

    def __init__(self, strategy: TrainerStrategy, *, every_n_rounds: int, folder: Path | None) -> None:
        self.run = _describe_run(strategy)
        self.unlogged: list[Step] = []
        # If there is a file, the steps in it: the file must give the same summary.
        self.steps: deque[Step] = deque(maxlen=NUM_STEPS)
        self.new_overlap: float | None = None  # of the last step that was read in this round
        self.outer_steps: list[OuterStepStats] = []
        self.strategy = strategy
        self.plans: dict[int, RecordedPlan] = {}
        self.profile: Profile | None = None  # the one that `bucket_cap_mb="auto"` measured, on rank 0
        self._every_n_rounds = every_n_rounds
        self._recorder = StepRecorder(strategy.root_device)
        self._unread: deque[tuple[MarkedStep, bool]] = deque()
        self._num_rounds = 0
        self._num_recorded = 0
        self._num_batches = 0
        self._write_every = 1
        self._num_written_batches = 0  # since `_write_every` was doubled
        self._is_written = False
        self._has_file = folder is not None
        self._file = RecordFile(folder, rank=self.run.rank)
        self._file.write(self.run)
        self._stop_seeing_fetches = call_before_fetch(strategy.trainer, self.begin_fetch)

    def _begin_if_due(self) -> bool:
        """Start recording, before a batch, if the next round is due; return whether the current one is recorded."""
        recording = self.strategy.recording
        if recording.recorder is None and (self._num_rounds + 1) % self._every_n_rounds == 0:
            self._num_batches = 0
            self._num_recorded += 1
            self._is_written = self._has_file and self._num_recorded % self._write_every == 0
            # Recorded rounds 1, 2, 4, 8, ... wait for the device: so few cost nothing.
            self._recorder.measures_lag = self._num_recorded.bit_count() == 1
            recording.begin(self.strategy, self._recorder, self._keep)
        return recording.recorder is not None

    def begin_fetch(self) -> None:
        """Begin the phase `data`: the trainer asks for a batch."""
        # A `training_step` that fetches batches itself is not interrupted. A fetch that returned nothing, because the
        # epoch was over, is dropped.
        if self._begin_if_due() and self._recorder.phase in (None, "data"):
            self._recorder.forget_phase()
            self._recorder.turn_to("data")

    def begin_batch(self) -> None:
        """End the phase `data`: the batch has arrived."""
        if self._begin_if_due() and self._recorder.phase == "data":
            self._recorder.turn_to(None)
        self._num_batches += 1

    def end_round(self) -> None:
        """Count a round, after the step of one or several optimizers, and read it if it was recorded."""
        self._num_rounds += 1
        self.new_overlap = None
        if self.strategy.recording.recorder is not None:
            self.strategy.recording.end(self.strategy)
            if self._is_written:
                self._num_written_batches += self._num_batches
                if self._num_written_batches >= _BATCHES_PER_PORTION:
                    self._num_written_batches, self._write_every = 0, 2 * self._write_every
            self.read()

    def read_outer_steps(self) -> None:
        """Record the exchanges of weights between islands since the last call."""
        assert self.strategy.reducer is not None
        for one in self.strategy.reducer.stats.outer_steps[len(self.outer_steps) :]:
            self.outer_steps.append(one)
            self._file.write(one)

    def read(self, *, all_of_them: bool = False) -> None:
        """Read the steps whose end the device has reached, or wait for all of them."""
        while self._unread and (all_of_them or self._recorder.is_past(self._unread[0][0])):
            marked, is_written = self._unread.popleft()
            step = step_of(marked, self._recorder.axis, memory_bytes=_peak_memory(self.strategy.root_device))
            if step is not None:
                self.new_overlap = step.overlap
                self.unlogged.append(step)
                if is_written or not self._has_file:
                    self.steps.append(step)
                    self._file.write(step)
        if all_of_them:
            self._write_profile()

    def close(self) -> None:
        """Stop recording. Steps that cannot be read without waiting are dropped."""
        self._stop_seeing_fetches()
        self.strategy.recording.end(self.strategy)
        with suppress(RuntimeError):  # the device may have failed
            self.read()
        self._recorder.close()
        self._file.close()

    def _keep(self, marked: MarkedStep) -> None:
        """Keep a step until the device reaches its end, and write its plan if that is new."""
        reducer = self.strategy.reducer
        assert reducer is not None
        self._unread.append((marked, self._is_written))
        if reducer.bucket_set is not None and marked.plan not in self.plans:
            scatters = reducer.replicas.collectives.scatters
            plan = plan_of(marked.plan, reducer.bucket_set.plan, reducer.specs, scatters=scatters)
            self.plans[marked.plan] = plan
            self._file.write(plan)
        self._write_profile()

    def _write_profile(self) -> None:
        reducer = self.strategy.reducer
        if reducer is not None and reducer.profile is not None and reducer.profile is not self.profile:
            self.profile = reducer.profile
            self._file.write(reducer.profile)
            self._file.write(Tuning(reducer.plans.tuning))


def _describe_run(strategy: TrainerStrategy) -> Run:
    """Return the facts that stay the same in a fit."""
    assert strategy.reducer is not None
    assert strategy.process_group_backend is not None
    config, device = strategy.config, strategy.root_device
    trainer, local_steps = strategy.trainer, strategy.options.local_steps
    params = [param for param in strategy.reducer.replicas.parameters.values() if param.requires_grad]
    bytes_by_kind = Counter[str]()
    for spec in strategy.reducer.specs:
        bytes_by_kind[spec.kind.partition(" ")[0]] += spec.num_bytes
    codecs: Codecs = {}
    if strategy.world_size > 1:
        wires = measure_wires(strategy.reducer.replicas.collectives, module_bytes=MIB)
        codecs = measured_between(wires, measure_codecs(device))
    return Run(
        rank=strategy.global_rank,
        world_size=strategy.world_size,
        host=socket.gethostname(),
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        backend=strategy.process_group_backend,
        num_parameters=sum(param.numel() for param in params),
        gradient_bytes=sum(param.nbytes for param in params),
        options={
            "bucket_cap_mb": config.bucket_cap_mb,
            "overlap": config.overlap,
            "deterministic": torch.are_deterministic_algorithms_enabled(),
            "reduce_dtype": config.reduce_dtype,
            "ddp_comm_hook": getattr(config.comm_hook, "__qualname__", None),
            "gradient_dtype": max(bytes_by_kind, key=lambda kind: bytes_by_kind[kind]),
            "accumulate_grad_batches": trainer.accumulate_grad_batches,
            "global_batch_size": strategy.options.global_batch_size,
            "cuda_graphs": strategy.options.cuda_graphs,
            "automatic_optimization": trainer.lightning_module.automatic_optimization,
            "shard_optimizer": strategy.options.shard_optimizer or None,
            "local_steps": None if local_steps is None else local_steps.steps,
            "num_islands": None if strategy._state.islands is None else strategy._state.islands.number,
            "num_workers": getattr(trainer.train_dataloader, "num_workers", None),
        },
        codecs=codecs,
        restarts=strategy._checkpoints.auto_resume.restarts() if strategy.global_rank == 0 else [],
    )


def _peak_memory(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if sys.platform == "win32":
        return 0  # not known
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


class StepMonitoring(_Callback):
    """Logs how long steps wait for communication, records their phases, and prints a summary at the end of a fit.

    Works with `strategy="bucketddp"`. Only recorded steps 1, 2, 4, 8, ... wait for the device, once each, to find out
    whether it waits for Python. Each rank writes `bucketddp/rank-N.jsonl`, from which `bucketddp report` makes a page,
    in place of the file of an earlier fit. Files stay small: after 1,000 recorded batches every second recorded step
    is written, after 1,000 more every fourth, and so on.

    Args:
        every_n_steps: Record every n-th optimizer step; with several optimizers, all steps that belong to one batch.
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
        self.recorded_in: Path | None = None  # the folder of the last fit; also in a process that has forked the ranks

    def show(self, height: int = 900) -> InlinePage:
        """Return the page of the last fit, `height` pixels high, for the last line of a notebook's cell."""
        from lightning_bucketddp.commands.report import InlinePage, make_page

        if self.recorded_in is None:
            raise RuntimeError(f"`{_NAME}.show()` shows the last fit, and there was none that was recorded.")
        return InlinePage(make_page(read_run(self.recorded_in)), height)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit" and not isinstance(trainer.strategy, TrainerStrategy):
            raise TypeError(
                f"`{_NAME}` records what `bucketddp` does, but the strategy of this Trainer is a"
                f' `{type(trainer.strategy).__name__}`. Pass `strategy="bucketddp"`, or leave the callback out.'
            )

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert isinstance(trainer.strategy, TrainerStrategy)
        # On all ranks: `log_dir` is a broadcast.
        parent = self._dirpath or trainer.log_dir or trainer.default_root_dir
        folder = None if trainer.fast_dev_run else Path(parent, FOLDER)  # type: ignore[attr-defined]
        self._summary = None
        self.recorded_in = folder
        self._global_step = trainer.global_step
        self._fit = RecordedFit(trainer.strategy, every_n_rounds=self._every_n_steps, folder=folder)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self._fit is not None:
            self._fit.begin_batch()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._fit is None or trainer.global_step == self._global_step:
            return  # still accumulating
        self._global_step = trainer.global_step
        self._fit.read_outer_steps()
        self._fit.end_round()
        if self._shows_overlap and self._fit.new_overlap is not None:
            # The bar shows it until there is a new one.
            pl_module.log("overlap_pct", 100 * self._fit.new_overlap, prog_bar=True, logger=False)
        if is_log_step(trainer):
            self._log(trainer, self._fit)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._fit is None:
            return
        self._fit.read(all_of_them=True)
        self._fit.read_outer_steps()
        self._log(trainer, self._fit)
        if self._has_summary:
            # A collective: all ranks take part, whether they recorded anything or not.
            numbers = RankNumbers.of(self._fit.run, list(self._fit.steps))
            gathered = self._fit.strategy.gather_json(asdict(numbers))
            if trainer.is_global_zero and not self._fit.steps:
                rank_zero_info(f"{_NAME}: the fit was too short, no step was recorded. Pass a smaller `every_n_steps`.")
            elif trainer.is_global_zero:
                self._summary = _summarize(self._fit, [RankNumbers.from_json(content) for content in gathered])
        self._close()

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # By now the progress bar is gone.
        if self._summary is not None:
            print_summary(self._summary)
        self._summary = None

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._close()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._close()

    def _log(self, trainer: Trainer, fit: RecordedFit) -> None:
        steps, fit.unlogged = fit.unlogged, []
        if steps:
            values = metrics_of(steps, num_ranks=fit.run.num_averaging)
            log_at_once(trainer, {f"bucketddp/{name}": value for name, value in values.items()})

    def _close(self) -> None:
        fit, self._fit = self._fit, None
        if fit is not None:
            fit.close()


def _summarize(fit: RecordedFit, ranks: list[RankNumbers]) -> Summary:
    step = TypicalStep.of(ranks, fit.run, fit.plans.get(fit.steps[-1].plan), fit.profile)
    shards = fit.strategy.shards
    state = None if shards is None else (shards.state_bytes, shards.whole_state_bytes)
    return Summary.of(step, suggestions=suggestions(step), state_bytes=state, outer_steps=fit.outer_steps)
