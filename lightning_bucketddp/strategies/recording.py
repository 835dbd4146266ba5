"""What a run says of itself: lines in the log, and what the strategy for the Trainer tells a recorder of steps."""

from __future__ import annotations

import socket
import time
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import is_dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from lightning_bucketddp.config import MIB, NAME_OF_DTYPE, ReducerConfig
from lightning_bucketddp.faults.progress import FORWARD, OPTIMIZER
from lightning_bucketddp.reducer.observer import NO_OBSERVER, ReducerStats
from lightning_bucketddp.reducer.reducer import Reducer
from lightning_bucketddp.wording import pluralize

if TYPE_CHECKING:
    from lightning_bucketddp.planning.cost import Codecs
    from lightning_bucketddp.recording.schema import Run
    from lightning_bucketddp.recording.writer import MarkedStep, StepRecorder
    from lightning_bucketddp.strategies.base import StrategyBase
    from lightning_bucketddp.strategies.trainer import TrainerStrategy

_NOTHING = nullcontext()


class StepRecording:
    """Tells a recorder what a step does, as long as there is one."""

    def __init__(self) -> None:
        self.recorder: StepRecorder | None = None
        self._on_recorded: Callable[[MarkedStep], None] | None = None

    def begin(
        self, strategy: TrainerStrategy, recorder: StepRecorder, on_recorded: Callable[[MarkedStep], None]
    ) -> None:
        """Record steps from now on; `on_recorded` gets each when the optimizer has stepped."""
        assert strategy.reducer is not None  # there is one as long as there is a fit
        recorder.begin(strategy.reducer.stats)
        self.recorder, self._on_recorded = recorder, on_recorded
        if strategy.shards is not None:
            strategy.shards.observe(recorder)

    def end(self, strategy: TrainerStrategy) -> None:
        """Record nothing any more."""
        if self.recorder is not None:
            self.recorder.forget_phase()
        self.recorder = self._on_recorded = None
        if strategy.reducer is not None:
            strategy.reducer.observer = NO_OBSERVER
        if strategy.shards is not None:
            strategy.shards.observe(NO_OBSERVER)

    def batch_arrived(self) -> None:
        if self.recorder is not None and self.recorder.phase == "data":
            self.recorder.turn_to(None)

    def forward(self, reducer: Reducer | None) -> AbstractContextManager[Any]:
        """Record what happens inside as forward, and have `reducer` tell of the backward that follows."""
        if self.recorder is not None and reducer is not None:
            reducer.observer = self.recorder
        return self.during(FORWARD)

    def during(self, phase: str) -> AbstractContextManager[Any]:
        """Record what happens inside as `phase`."""
        return _NOTHING if self.recorder is None else self.recorder.during(phase)

    @property
    def phase(self) -> str | None:
        """What the step is doing; None: nothing that is recorded."""
        return None if self.recorder is None else self.recorder.phase

    def optimizer_begins(self) -> None:
        if self.recorder is not None:
            self.recorder.turn_to(OPTIMIZER)

    def complete_step(self, reducer: Reducer | None, *, step: int, phase: str | None) -> None:
        """End a recorded step, after the optimizer's, and go on with the `phase` from before, if there was one."""
        if self.recorder is None or reducer is None:
            return
        assert self._on_recorded is not None
        bucket_set = reducer.bucket_set
        version, buckets = (0, []) if bucket_set is None else (bucket_set.version, bucket_set.buckets)
        self._on_recorded(self.recorder.complete(reducer.stats, step=step, plan=version, buckets=buckets))
        if phase is not None:  # within a `training_step` that optimizes by itself
            self.recorder.turn_to(phase)


# Objects of Lightning, and what the line says in words.
_NOT_LISTED = {
    *("accelerator", "parallel_devices", "cluster_environment", "checkpoint_io", "precision_plugin", "precision"),
    *("process_group_backend", "start_method", "overlap", "reduce_dtype", "ddp_comm_hook"),
}


def describe_start(strategy: StrategyBase, *, backend: str, reducer: Reducer | None) -> str:
    """Return what was chosen for a run; without a `reducer` it is not known yet what will train."""
    options, given, num_nodes = strategy.options, strategy.given_options, strategy._num_nodes
    ranks = pluralize(strategy.world_size, "rank") + (f" on {num_nodes} nodes" if num_nodes > 1 else "")
    started = "" if options.start_method == "popen" else f", started by {options.start_method}"
    parts = [f"{ranks} ({backend}{started})"]
    if strategy.world_size == 1:
        parts.append("no gradients to exchange")
    else:
        wire = _describe_wire(options.reducer, reducer)
        gradients = "gradients" if reducer is None else reducer.plans.describe_outlook()
        parts += [f"{gradients} sent{wire}"] if wire else []
    listed = [name for name in given if name not in _NOT_LISTED and name not in options.without_effect]
    parts += [", ".join(f"{name}={_describe_value(given[name])}" for name in listed)] if listed else []
    parts += [f"no effect: {', '.join(options.without_effect)}"] if options.without_effect else []
    return f"bucketddp: {'; '.join(parts)}."


def _describe_wire(config: ReducerConfig, reducer: Reducer | None) -> str:
    when = "" if config.overlap else " after backward"
    if config.comm_hook is not None:
        return f" by `{_describe_value(config.comm_hook)}`{when}"
    params = [] if reducer is None else reducer.replicas.parameters.values()
    dtypes = [param.dtype for param in params if param.requires_grad]
    own = [NAME_OF_DTYPE.get(dtype, str(dtype).removeprefix("torch.")) for dtype in dict.fromkeys(dtypes)]
    named = config.reduce_dtype or " and ".join(own)
    return f" as {named}{when}" if named else when


def _describe_value(value: object) -> str:
    if value is None or is_dataclass(value) or isinstance(value, bool | int | float | str | list | tuple):
        return str(value)
    return getattr(value, "__qualname__", type(value).__qualname__)


class FitTally:
    """What a fit did since it began to train."""

    def __init__(self, global_step: int, reducer: Reducer) -> None:
        self._global_step = global_step
        self._began_at = time.monotonic()
        self._reducer = reducer
        self._before: ReducerStats = replace(reducer.stats)  # trials of a learning rate may have left something
        self.num_withheld = 0  # not finite, or without a loss on any rank

    def describe(self, strategy: TrainerStrategy) -> list[str]:
        """Return the steps and reductions, what was decided about buckets, and what the parts of the run have done."""
        reducer, stats = self._reducer, self._reducer.stats
        # Lightning counts all of them.
        num_steps = strategy.trainer.global_step - self._global_step - self.num_withheld
        skipped = f" and {self.num_withheld} skipped" if self.num_withheld else ""
        lines = [pluralize(num_steps, "optimizer step") + skipped]
        if num_reductions := stats.num_reductions - self._before.num_reductions:
            mib = (stats.bytes_sent - self._before.bytes_sent) / MIB
            lines.append(f"{mib:.1f} MiB sent per rank in {pluralize(num_reductions, 'reduction')}")
        if reducer.bucket_set is not None and stats.num_plans > 1:
            lines.append(f"last plan: {pluralize(len(reducer.bucket_set.buckets), 'bucket')}")
        lines += [reducer.plans.tuning, *(part.describe() for part in strategy._parts)]
        if strategy.shards is not None:
            lines.append(strategy.shards.describe())
        if strategy.checkpoint_stats.held_up_s >= max(1.0, (time.monotonic() - self._began_at) / 100):
            lines.append(strategy.checkpoint_stats.describe())
        return [line for line in lines if line]


def describe_run(strategy: TrainerStrategy) -> Run:
    """Return what stays the same in a fit."""
    from lightning_bucketddp.planning.cost import measured_between
    from lightning_bucketddp.recording.schema import Run
    from lightning_bucketddp.reducer.plan_cache import measure_wires
    from lightning_bucketddp.reducer.quantization import measure_codecs

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
