"""`ScaleLearningRate` and `ScalingMonitor`, without their Lightning base class, and the size of the global batch."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sized
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_bucketddp.processes import rank_zero_info
from lightning_bucketddp.trainer_internals import is_log_step, log_at_once

if TYPE_CHECKING:
    from lightning.pytorch import Callback as _Callback
    from lightning.pytorch import LightningModule, Trainer
else:
    _Callback = object


@dataclass(frozen=True, slots=True)
class GlobalBatch:
    """The samples of one optimizer step, over all ranks and accumulated batches."""

    num_ranks: int
    over_ranks: int  # the samples of one batch of every rank, added up
    num_micro_batches: int  # the batches that each rank accumulates

    @classmethod
    def of(cls, trainer: Trainer, *, batch_size_per_rank: int | None, asked_by: str) -> GlobalBatch:
        """Return it for `batch_size_per_rank`, or for the batch size of the training data. A collective."""
        # Of a `DataLoader`, not of a batch sampler: a user's own may call anything its batch size.
        of_loader = getattr(trainer.train_dataloader, "batch_size", None)
        on_this_rank = batch_size_per_rank or (of_loader if isinstance(of_loader, int) else None)
        if on_this_rank is None:
            raise ValueError(
                f"`{asked_by}` cannot tell the batch size of the training data, a"
                f" `{type(trainer.train_dataloader).__name__}`. Pass `batch_size_per_rank`, the samples in one batch of"
                " one rank."
            )
        # A sum, so that all ranks get the same number even if their batches differ.
        size = torch.tensor(on_this_rank, device=trainer.strategy.root_device)
        return cls(
            trainer.world_size, int(trainer.strategy.reduce(size, reduce_op="sum")), trainer.accumulate_grad_batches
        )

    @property
    def size(self) -> int:
        return self.over_ranks * self.num_micro_batches

    def __str__(self) -> str:
        per_rank, rest = divmod(self.over_ranks, self.num_ranks)
        ranks = f"{self.over_ranks} on {self.num_ranks} ranks" if rest else f"{self.num_ranks} x {per_rank}"
        return f"global batch {ranks} x {self.num_micro_batches} = {self.size}"


@dataclass(slots=True)
class _AppliedRate:
    """A parameter group whose learning rate is multiplied for now."""

    group: dict[str, Any]
    scheduled: float | Tensor
    effective: float | Tensor

    def is_untouched(self) -> bool:
        # By identity: comparing the values of tensors would make the host wait for the device.
        return self.group["lr"] is self.effective


class EffectiveRates:
    """Multiplies the learning rates of `optimizer` during its steps: no scheduler and no checkpoint ever sees them.

    Args:
        multiplier: returns the multiplier for a step, by its number.
        num_steps: how many steps the optimizer has made.
    """

    def __init__(self, optimizer: Optimizer, multiplier: Callable[[int], float], *, num_steps: int) -> None:
        self.num_steps = num_steps
        self.depth = 0  # of nested steps
        self._optimizer = optimizer
        self._multiplier = multiplier
        self._applied: list[_AppliedRate] = []
        self._handles = [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
            optimizer.register_state_dict_post_hook(self._save_scheduled),
        ]

    def follow(self) -> None:
        """Within a step, multiply learning rates that were set since it began, for example in `training_step`."""
        if self._applied:
            self.apply()

    def close(self) -> None:
        self.restore()
        while self._handles:
            self._handles.pop().remove()

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        # torch calls the hooks again for a `step` that calls the `step` of its base class.
        self.depth += 1
        if self.depth > 1:
            return args, kwargs
        self.apply()
        closure = kwargs.get("closure")
        return args, kwargs if closure is None else {**kwargs, "closure": partial(self._run_closure, closure)}

    def _run_closure(self, closure: Callable[[], Any]) -> Any:
        try:
            return closure()
        except BaseException:
            # There is no step, as where gradients are not finite (`on_nonfinite="skip"`), and schedulers may go on.
            self.depth = 0
            self.restore()
            raise

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self.depth -= 1
        if self.depth == 0:
            self.restore()
            self.num_steps += 1

    def apply(self) -> None:
        """Set the learning rates of the next step, until `restore`."""
        self.restore()  # in case the last step raised
        multiplier = self._multiplier(self.num_steps)
        for group in self._optimizer.param_groups:
            scheduled = group["lr"].clone() if isinstance(group["lr"], Tensor) else group["lr"]
            _set_rate(group, scheduled * multiplier)
            self._applied.append(_AppliedRate(group, scheduled, effective=group["lr"]))

    def restore(self) -> None:
        """Set the learning rates that the scheduler has set, except where they were changed since `apply`."""
        while self._applied:
            rate = self._applied.pop()
            if rate.is_untouched():
                _set_rate(rate.group, rate.scheduled)

    def _save_scheduled(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
        """Save scheduled learning rates even if a signal asks for a checkpoint within a step."""
        for rate, saved in zip(self._applied, state_dict["param_groups"], strict=False):
            if rate.is_untouched():
                saved["lr"] = rate.scheduled


def _set_rate(group: dict[str, Any], rate: Any) -> None:
    if isinstance(group["lr"], Tensor):
        # In place: a captured or compiled step refers to the tensor, not to the group.
        with torch.no_grad():
            group["lr"].copy_(rate)
    else:
        group["lr"] = rate


class LearningRateScaling(_Callback):
    """Multiplies learning rates by how much larger the global batch is than the one they were chosen for.

    Every step of every optimizer is made with the learning rate that its scheduler set, times that factor. The factor
    rises from 1 during warm-up. See Goyal et al. 2017, https://arxiv.org/abs/1706.02677.

    Args:
        base_batch_size: The global batch size that the learning rates and schedules are written for.
        rule: `linear`, or `sqrt` for the square root of the factor.
        warmup_epochs: How long the factor rises; by default 5 epochs.
        warmup_steps: The same in steps of each optimizer.
        batch_size_per_rank: Samples in one batch of one rank, if the training data has no batch size; with manual
            optimization, in all batches that one step accumulates.
    """

    def __init__(
        self,
        *,
        base_batch_size: int,
        rule: Literal["linear", "sqrt"] = "linear",
        warmup_epochs: float | None = None,
        warmup_steps: int | None = None,
        batch_size_per_rank: int | None = None,
    ) -> None:
        if base_batch_size < 1:
            raise ValueError(f"`base_batch_size` is {base_batch_size}; it must be at least 1.")
        if rule not in ("linear", "sqrt"):
            raise ValueError(f"`rule` is {rule!r}; it must be 'linear' or 'sqrt'.")
        if warmup_epochs is not None and warmup_steps is not None:
            raise ValueError("`warmup_epochs` and `warmup_steps` say the same thing. Pass one of them.")
        if min(warmup_epochs or 0, warmup_steps or 0) < 0:
            raise ValueError(f"A warm-up of {warmup_epochs or warmup_steps} is not possible; pass 0 for none.")
        self._base_batch_size = base_batch_size
        self._rule = rule
        self._warmup_epochs = 5 if warmup_epochs is None else warmup_epochs  # as in the paper
        self._warmup_steps = warmup_steps
        self._batch_size_per_rank = batch_size_per_rank
        self._batch: GlobalBatch | None = None
        self._factor = 1.0
        self._num_warmup_steps = 0
        self._rates: list[EffectiveRates] = []
        self._steps_before: list[int] = []
        self._attached = ExitStack()

    def state_dict(self) -> dict[str, Any]:
        return {"num_steps": [rates.num_steps for rates in self._rates]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._steps_before = list(state_dict["num_steps"])

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._steps_before = []  # a checkpoint of this run is loaded later; that of an earlier test does not count

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._warmup_steps is not None:
            self._num_warmup_steps = self._warmup_steps
        elif self._warmup_epochs and math.isinf(trainer.num_training_batches):
            raise ValueError(
                f"`ScaleLearningRate` cannot tell how many steps {self._warmup_epochs:g} epochs are: the training data"
                " has no length. Pass `warmup_steps`."
            )
        else:
            steps_per_epoch = math.ceil(trainer.num_training_batches / trainer.accumulate_grad_batches)
            self._num_warmup_steps = round(self._warmup_epochs * steps_per_epoch)
        self.on_train_epoch_start(trainer, pl_module)  # Lightning leaves it out in the middle of an epoch
        # Optimizers are new in each fit; their steps count from 0 unless a checkpoint was loaded.
        steps = [*self._steps_before, *[0] * len(trainer.optimizers)]
        self._steps_before = []
        multiplier = partial(self._multiplier, trainer)
        self._rates = [
            EffectiveRates(optimizer, multiplier, num_steps=num_steps)
            for optimizer, num_steps in zip(trainer.optimizers, steps, strict=False)
        ]
        # Let each `LearningRateMonitor`, which reads before a step, read the rates that the step uses.
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if any(base.__name__ == "LearningRateMonitor" for base in type(callback).__mro__):
                for hook in ("on_train_epoch_start", "on_train_batch_start"):
                    self._attached.callback(delattr, callback, hook)
                    setattr(callback, hook, partial(self._call_with_rates_applied, getattr(callback, hook)))

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        size = self._batch_size_per_rank  # of the data, which may have been reloaded, if it is None
        self._adopt(GlobalBatch.of(trainer, batch_size_per_rank=size, asked_by="ScaleLearningRate"))

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        for rates in self._rates:
            rates.depth = 0  # it is not, after a step that raised

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        for rates in self._rates:
            rates.follow()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for rates in self._rates:
            rates.close()
        self._attached.close()
        self._batch = None

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self.on_train_end(trainer, pl_module)

    def _adopt(self, batch: GlobalBatch) -> None:
        if batch == self._batch:
            return
        self._batch = batch
        factor = batch.size / self._base_batch_size
        self._factor = factor if self._rule == "linear" else math.sqrt(factor)
        warm_up = f", warmed up over {self._num_warmup_steps} steps" if factor > 1 and self._num_warmup_steps else ""
        rank_zero_info(
            f"ScaleLearningRate: {batch}, base {self._base_batch_size}: learning rate x {self._factor:g}{warm_up}"
        )

    def _multiplier(self, trainer: Trainer, num_steps: int) -> float:
        assert self._batch is not None
        # `GradientAccumulationScheduler` changes the number during training.
        if self._batch.num_micro_batches != trainer.accumulate_grad_batches:
            self._adopt(replace(self._batch, num_micro_batches=trainer.accumulate_grad_batches))
        if self._factor <= 1 or num_steps >= self._num_warmup_steps:
            return self._factor
        return 1 + (self._factor - 1) * num_steps / self._num_warmup_steps

    def _call_with_rates_applied(self, hook: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        with ExitStack() as applied:
            for rates in self._rates:
                applied.callback(rates.restore)
                rates.apply()
            hook(*args, **kwargs)


class ScalingMeasurement(_Callback):
    """Logs the global batch size, the samples per second of all ranks together, and how well that scales.

    Measures from one log point of the Trainer to the next, without validation, checkpoints and the start of an epoch.
    Waits for the device there and nowhere else. Epochs of one step have nothing to measure.

    Args:
        single_rank_samples_per_second: The samples per second of one rank alone with the same batch size per rank. A
            run with `devices=1` and this callback prints them at its end. Without them no efficiency is logged.
        batch_size_per_rank: Samples in one batch of one rank, if the data has no batch size.
    """

    def __init__(
        self, *, single_rank_samples_per_second: float | None = None, batch_size_per_rank: int | None = None
    ) -> None:
        if single_rank_samples_per_second is not None and single_rank_samples_per_second <= 0:
            raise ValueError(
                f"`single_rank_samples_per_second` is {single_rank_samples_per_second:g}; it must be more than 0."
            )
        self._single_rank_samples_per_second = single_rank_samples_per_second
        self._batch_size_per_rank = batch_size_per_rank
        self._batch: GlobalBatch | None = None
        self._global_step = 0
        # When consecutive steps with nothing but training between them began, and the samples of all ranks in them.
        self._began_at: float | None = None
        self._new_samples = 0
        self._num_samples, self._seconds = 0.0, 0.0  # in all measurements together

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.on_train_epoch_start(trainer, pl_module)  # Lightning leaves it out in the middle of an epoch
        self._global_step = trainer.global_step
        self._num_samples, self._seconds = 0.0, 0.0

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        size = self._batch_size_per_rank  # of the data, which may have been reloaded, if it is None
        self._batch = GlobalBatch.of(trainer, batch_size_per_rank=size, asked_by="ScalingMonitor")
        self._began_at = None

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._began_at = None

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        self._began_at = None

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._began_at is not None:
            self._count(trainer, batch_idx)
        if trainer.global_step == self._global_step:
            return  # still accumulating
        self._global_step = trainer.global_step
        if self._began_at is None:
            self._began_at, self._new_samples = _now(trainer.strategy.root_device), 0
        elif is_log_step(trainer):
            self._log(trainer, self._began_at)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._seconds == 0:
            return
        rate, hint = self._num_samples / self._seconds, ""
        if trainer.world_size == 1:
            hint = f" Pass `single_rank_samples_per_second={rate:.6g}` when you train on more ranks."
        elif self._single_rank_samples_per_second is not None:
            hint = f" Scaling efficiency {rate / (trainer.world_size * self._single_rank_samples_per_second):.3f}."
        rank_zero_info(f"ScalingMonitor: {trainer.world_size} rank(s): {rate:.6g} samples per second.{hint}")

    def _count(self, trainer: Trainer, batch_idx: int) -> None:
        """Add the samples of a batch on all ranks, or stop measuring if they are unknown."""
        assert self._batch is not None
        size = self._batch.over_ranks
        batch_sampler = getattr(trainer.train_dataloader, "batch_sampler", None)
        may_be_short = trainer.is_last_batch and not getattr(batch_sampler, "drop_last", False)
        if may_be_short and self._batch_size_per_rank is None:
            sampler = getattr(batch_sampler, "sampler", None)
            if not isinstance(sampler, Sized):  # that of an iterable dataset has no length
                self._began_at = None
                return
            size = min(size, trainer.world_size * len(sampler) - batch_idx * size)
        self._new_samples += size

    def _log(self, trainer: Trainer, began_at: float) -> None:
        assert self._batch is not None
        now = _now(trainer.strategy.root_device)
        rate = self._new_samples / (now - began_at)
        size = self._batch.over_ranks * trainer.accumulate_grad_batches
        values = {"bucketddp/global_batch_size": float(size), "bucketddp/samples_per_second": rate}
        if self._single_rank_samples_per_second is not None:
            alone = self._single_rank_samples_per_second
            values["bucketddp/scaling_efficiency"] = rate / (trainer.world_size * alone)
        log_at_once(trainer, values)
        self._num_samples += self._new_samples
        self._seconds += now - began_at
        self._began_at, self._new_samples = now, 0


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
