"""How a feature joins a run."""

from __future__ import annotations

from typing import Any

from torch import Tensor


class RunPart:
    """One feature of a run. Override what you need: the strategy calls each hook of all parts, in their order.

    The hooks are in the order in which a run calls them. All ranks have the same parts in the same order, so that a
    part may communicate in any hook but `prepare_loader`, because ranks may have different dataloaders.
    """

    def begin_loaders(self) -> None:
        """Prepare for the training dataloaders, which all follow."""

    def prepare_loader(self, loader: Any, *, is_training: bool) -> Any:
        """Return `loader` or another one in its place; it is for training (`is_training`) or for evaluation."""
        return loader

    def begin_training(self) -> None:
        """Begin to train: everything is restored."""

    def inspect_batch(self, batch: Any) -> None:
        """Inspect a training batch before it goes to the device, from which reading would make the host wait."""

    def begin_batch(self, batch_idx: int) -> None:
        """Begin a training batch."""

    def before_forward(self) -> None:
        """Prepare for `training_step`."""

    @property
    def loss_factor(self) -> float:
        """What `weigh` multiplies the loss of this batch by."""
        return 1.0

    def weigh(self, loss: Tensor) -> Tensor:
        """Return the loss for backward, and count the batch."""
        factor = self.loss_factor
        return loss if factor == 1 else loss * factor

    def complete_step(self) -> None:
        """Note that an optimizer has stepped."""

    def begin_validation(self) -> None:
        """Begin a validation; callbacks may still exchange weights before its first step."""

    def before_validation_step(self) -> None:
        """Prepare for `validation_step`."""

    def before_evaluation(self) -> None:
        """Prepare for a test or a prediction."""

    def begin_prediction(self) -> None:
        """Begin a prediction, once its dataloaders are known."""

    def end_prediction(self) -> None:
        """End a prediction; the loop has those of this rank."""

    def before_save(self) -> None:
        """Make the weights that are saved next the same on all ranks. All ranks call this."""

    def compare(self, *, when: str) -> bool:
        """Compare the ranks before they save; return whether weights were changed by that. All ranks call this."""
        return False

    def end_training(self) -> None:
        """End the training."""

    def describe(self) -> str:
        """Return a summary of the training for the log, or ""."""
        return ""
