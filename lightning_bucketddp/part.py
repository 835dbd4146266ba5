"""How a feature joins a run."""

from __future__ import annotations

from typing import Any

from torch import Tensor


class RunPart:
    """One feature of a run. Override what you need: the strategy calls each hook of all parts, in their order.

    Hooks stand here in the order in which a run calls them. All ranks have the same parts in the same order, so that a
    part may communicate in any hook but `prepare_loader`, which data that only some ranks have may skip.
    """

    def begin_loaders(self) -> None:
        """Expect the training dataloaders, all of them."""

    def prepare_loader(self, loader: Any, *, is_training: bool) -> Any:
        """Return a dataloader, or one like it; `is_training`: or else it is for an evaluation."""
        return loader

    def begin_training(self) -> None:
        """Begin to train: everything is restored."""

    def inspect_batch(self, batch: Any) -> None:
        """Look at a training batch before it goes to the device, from where the host would have to wait for it."""

    def take_alert(self) -> bool:
        """Return whether some rank has alerted all of them since the last call. It is the same on every rank."""
        return False

    def begin_batch(self, batch_idx: int) -> None:
        """Turn to another training batch."""

    def before_forward(self) -> None:
        """Come before `training_step`."""

    def weigh(self, loss: Tensor) -> Tensor:
        """Return `loss` as backward shall see it."""
        return loss

    def complete_step(self) -> None:
        """Note that an optimizer has stepped."""

    def begin_validation(self) -> None:
        """Begin a validation; callbacks may still exchange weights before its first step."""

    def before_validation_step(self) -> None:
        """Come before `validation_step`."""

    def before_evaluation(self) -> None:
        """Come before a test, a prediction, and whatever comes after training."""

    def begin_prediction(self) -> None:
        """Begin a prediction, once its dataloaders are known."""

    def end_prediction(self) -> None:
        """End a prediction; the loop has those of this rank."""

    def before_save(self) -> None:
        """Have all ranks hold the weights that are saved next. All ranks call this."""

    def compare(self, *, when: str) -> bool:
        """Compare the ranks before they save; return whether one has changed. All ranks call this."""
        return False

    def end_training(self) -> None:
        """End the training."""

    def describe(self) -> str:
        """Return what was done in a training, for the log; empty: nothing to say."""
        return ""
