"""How this rank takes part in a step: with which weight, and whether it has anything to contribute at all."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from lightning_bucketddp.comm.collectives import Collectives
from lightning_bucketddp.comm.step_exchange import MessageKind, StepExchange
from lightning_bucketddp.reducer.weighting import Weighting
from lightning_bucketddp.strategies.uneven_data import UnevenData

if TYPE_CHECKING:
    from lightning.pytorch import Trainer


@dataclass(frozen=True)
class SkippedStep:
    """What the strategy makes of None: there is no loss, but a backward in which this rank contributes nothing."""

    loss: Tensor


def accept_skipped_steps(automatic_optimization: Any) -> None:
    """Have this loop take a `SkippedStep` from `training_step`, and report no loss for it."""
    result_class: Any = type(automatic_optimization).output_result_cls

    class ResultOrSkip(result_class):  # type: ignore[misc]
        @classmethod
        def from_training_step_output(cls, training_step_output: Any, normalize: int = 1) -> Any:
            if not isinstance(training_step_output, SkippedStep):
                return super().from_training_step_output(training_step_output, normalize)
            result = cls(training_step_output.loss)
            result.loss = None
            return result

    automatic_optimization.output_result_cls = ResultOrSkip


GradientWeightOption = Callable[[Any], Any] | Literal["batch_size"] | None


def check_gradient_weight(option: GradientWeightOption) -> GradientWeightOption:
    """`option`, if it is one."""
    if option is None or option == "batch_size" or callable(option):
        return option
    raise ValueError(
        f"`gradient_weight` must be `batch_size` or a function that takes a batch and gives its weight, got {option!r}."
    )


class BatchWeighting:
    """The weight of each backward of this rank in a fit.

    Args:
        trainer: whose fit it is.
        collectives: how to reach the other ranks.
        weight_of: the weight of a batch; None: every batch counts the same.
        extends_uneven_data: a rank that has run out of data goes on, with weight zero, until all have.
        has_alert: asked in each step whether this rank has to alert the others.
    """

    def __init__(
        self,
        trainer: Trainer,
        collectives: Collectives,
        *,
        weight_of: Callable[[Any], Any] | None,
        extends_uneven_data: bool,
        has_alert: Callable[[], bool],
    ) -> None:
        self._trainer = trainer
        self._collectives = collectives
        self._weight_of = weight_of
        self.exchange = StepExchange(collectives, has_alert=has_alert)
        self._uneven_data = UnevenData(self.exchange, extends=extends_uneven_data)
        self.weighting = Weighting(
            self.exchange, by_weight=weight_of is not None, needs_every_weight=extends_uneven_data
        )
        self._weight: float | None = None
        self._reference_weight: float | None = None
        self._skipped_loss: Tensor | None = None
        accept_skipped_steps(trainer.fit_loop.epoch_loop.automatic_optimization)

    @property
    def is_idle(self) -> bool:
        """Whether this rank has run out of data and only keeps the others company."""
        return self._uneven_data.is_repeating

    def take_alert(self) -> bool:
        """Whether some rank has alerted all of them since this was asked. It is the same on every rank."""
        is_alerted, self.exchange.is_alerted = self.exchange.is_alerted, False
        return is_alerted

    def prepare(self, loader: object) -> object:
        """A training dataloader that tells the other ranks when it ends, or goes on until theirs do."""
        return self._uneven_data.prepare(loader, is_only_loader=lambda it: self._trainer.train_dataloader is it)

    def see(self, batch: Any) -> None:
        """Weigh a batch before it goes to the device, from where the host would have to wait for the number."""
        if self._weight_of is None:
            return
        self._weight = float(self._weight_of(batch))
        if not (math.isfinite(self._weight) and self._weight >= 0):
            raise ValueError(
                f"`gradient_weight` gave {self._weight} for a batch on rank {self._collectives.rank}. A weight must be"
                " a finite number that is not negative, such as a number of samples or tokens."
            )

    def begin_batch(self, batch_idx: int) -> None:
        """This rank turns to another batch."""
        self.exchange.epoch = self._trainer.current_epoch
        self.exchange.num_batches = batch_idx + 1
        self._uneven_data.begin_batch()

    def skip(self) -> SkippedStep:
        """This rank has no loss, but calls backward all the same, for the other ranks' sake."""
        self._skipped_loss = torch.zeros((), device=self._collectives.device, requires_grad=True)
        return SkippedStep(self._skipped_loss)

    def weigh(self, loss: Tensor) -> Tensor:
        """`loss` as backward shall see it."""
        # First of all, because it may need all ranks.
        weight = 1.0 if self._weight_of is None else self._relative_weight()
        if loss is self._skipped_loss:
            self._skipped_loss = None
            self.weighting.add(0, skipped=True)
            return loss
        weight = 0.0 if self.is_idle else weight
        self.weighting.add(weight)
        if self._weight_of is not None:
            weight *= self._num_micro_batches
        return loss if weight == 1 else loss * weight

    def agreed(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """A closure that gives None, which means "no backward took place" to Lightning, on all ranks or on none."""

        def run() -> Any:
            loss = closure()
            if loss is None and not self.weighting.nobody_contributed:
                return torch.zeros((), device=self._collectives.device)
            return loss

        return run

    @property
    def _num_micro_batches(self) -> int:
        """What Lightning has divided the loss by."""
        automatic = self._trainer.lightning_module.automatic_optimization
        return self._trainer.accumulate_grad_batches if automatic else 1

    def _relative_weight(self) -> float:
        """The weight in units of a typical one, so that weighing moves no loss out of the range of its dtype."""
        if self._weight is None:
            raise RuntimeError(
                "`gradient_weight` has seen no batch: it cannot weigh batches that `training_step` takes from an"
                " iterator by itself. Use `training_step(self, batch, batch_idx)`."
            )
        if self._reference_weight is None:
            self.exchange.send(MessageKind.REFERENCE_WEIGHT, weight=self._weight)
            weights = [message.weight for message in self.exchange.receive()]
            mean = sum(weights) / len(weights)
            # A power of two, which no rounding depends on.
            self._reference_weight = 2.0 ** round(math.log2(mean)) if mean > 0 else 1.0
        return self._weight / self._reference_weight
