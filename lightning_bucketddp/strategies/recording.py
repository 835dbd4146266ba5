"""Steps that are recorded, of a `BucketDDPStrategy` for the Trainer."""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_bucketddp.comm.collectives import Collectives
from lightning_bucketddp.strategies.trainer_step import TrainingHooks

# Whoever records has imported them; every other start would have to wait for them.
if TYPE_CHECKING:
    from lightning_bucketddp.recording.schema import Run
    from lightning_bucketddp.reducer.step_recorder import MarkedStep, StepRecorder


class RecordsSteps(TrainingHooks):
    """The part of a strategy that tells a recorder what a step does; in other steps it does nothing."""

    # The `BucketDDPMonitor` of the root.
    _monitor_class: ClassVar[Any]
    _has_monitor: bool
    _collectives: Collectives | None
    # Set while steps are recorded.
    recorder: StepRecorder | None = None
    _on_recorded: Callable[[MarkedStep], None] | None = None
    if TYPE_CHECKING:
        _get_process_group_backend: Any

    def setup_environment(self) -> None:
        super().setup_environment()
        if not self._has_monitor or self.lightning_module is None:
            return
        monitor: type = self._monitor_class()
        callbacks: list[Any] = self.lightning_module.trainer.callbacks  # type: ignore[attr-defined]
        if not any(isinstance(callback, monitor) for callback in callbacks):
            callbacks.append(monitor())

    def begin_recording(self, recorder: StepRecorder, on_recorded: Callable[[MarkedStep], None]) -> None:
        """Record steps from now on; `on_recorded` gets each when the optimizer has stepped."""
        assert self.reducer is not None  # there is one as long as there is a fit
        recorder.begin(self.reducer.stats)
        self.recorder, self._on_recorded = recorder, on_recorded

    def end_recording(self) -> None:
        """Record nothing any more."""
        if self.recorder is not None:
            self.recorder.forget_phase()
        self.recorder = self._on_recorded = None
        if self.reducer is not None:
            self.reducer.recorder = None

    def describe_run(self) -> Run:
        """What stays the same in a fit."""
        from lightning_bucketddp.recording.schema import Run

        assert self.reducer is not None
        trainer, specs = self._module.trainer, self.reducer.specs
        params = [param for param in self.reducer.replicas.parameters.values() if param.requires_grad]
        bytes_by_kind = Counter[str]()
        for spec in specs:
            bytes_by_kind[spec.kind.partition(" ")[0]] += spec.num_bytes
        is_gpu = self.root_device.type == "cuda"
        return Run(
            rank=self.global_rank,
            world_size=self.world_size,
            host=socket.gethostname(),
            device=torch.cuda.get_device_name(self.root_device) if is_gpu else self.root_device.type,
            backend=self._get_process_group_backend(),
            num_parameters=sum(param.numel() for param in params),
            gradient_bytes=sum(param.nbytes for param in params),
            options={
                "bucket_cap_mb": self.config.bucket_cap_mb,
                "overlap": self.config.overlap,
                "deterministic": torch.are_deterministic_algorithms_enabled(),
                "reduce_dtype": self.config.reduce_dtype,
                "ddp_comm_hook": getattr(self.config.comm_hook, "__qualname__", None),
                "gradient_dtype": max(bytes_by_kind, key=lambda kind: bytes_by_kind[kind]),
                "accumulate_grad_batches": trainer.accumulate_grad_batches,
                "num_workers": getattr(trainer.train_dataloader, "num_workers", None),
            },
        )

    def gather_json(self, value: Any) -> list[Any]:
        """This JSON value of every rank, by rank."""
        assert self._collectives is not None  # there is a run
        return self._collectives.gather_json(value)

    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        batch = super().batch_to_device(batch, device, dataloader_idx)
        # Validation has batches of its own.
        if self.recorder is not None and self.recorder.phase == "data" and self._module.trainer.training:
            self.recorder.turn_to(None)
        return batch

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        if self.recorder is None:
            return super().training_step(*args, **kwargs)
        assert self.reducer is not None
        self.reducer.recorder = self.recorder
        with self.recorder.during("forward"):
            return super().training_step(*args, **kwargs)

    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        if self.recorder is None:
            return super().backward(closure_loss, optimizer, *args, **kwargs)
        with self.recorder.during("backward"):
            return super().backward(closure_loss, optimizer, *args, **kwargs)

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        recorder = self.recorder
        if recorder is None:
            return super().optimizer_step(optimizer, closure, model, **kwargs)
        phase = recorder.phase

        def run() -> Any:
            output = closure()
            recorder.turn_to("optimizer")
            return output

        output = super().optimizer_step(optimizer, run, model, **kwargs)
        self._complete_step(recorder)
        if phase is not None:  # within a `training_step` that optimizes by itself
            recorder.turn_to(phase)
        return output

    def _complete_step(self, recorder: StepRecorder) -> None:
        assert self.reducer is not None
        assert self._on_recorded is not None
        bucket_set = self.reducer.bucket_set
        marked = recorder.complete(
            self.reducer.stats,
            # The trainer counts this one later.
            step=self._module.trainer.global_step,
            plan=0 if bucket_set is None else bucket_set.version,
        )
        self._on_recorded(marked)
