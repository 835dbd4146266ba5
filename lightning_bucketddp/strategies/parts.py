"""Parts of a run that belong to each step: buffers, compared replicas, synchronised layers, batch weights, undoing."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lightning_bucketddp.checkpoint.rank_state import random_state
from lightning_bucketddp.comm.collectives import Collectives
from lightning_bucketddp.comm.step_exchange import MessageKind, StepExchange, Weighting
from lightning_bucketddp.data.epoch_position import EpochPosition
from lightning_bucketddp.data.uneven_data import UnevenData
from lightning_bucketddp.part import RunPart
from lightning_bucketddp.reducer.observer import ReducerStats
from lightning_bucketddp.reducer.reducer import Reducer
from lightning_bucketddp.replicas.consistency import ReplicaComparison, TrainingState, training_state
from lightning_bucketddp.replicas.replicas import Replicas
from lightning_bucketddp.replicas.sync_batchnorm import convert_sync_batchnorm, revert_sync_batchnorm, set_idle
from lightning_bucketddp.trainer_internals import call_after_swaps, replace_result_class

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

    from lightning_bucketddp.strategies.trainer import TrainerStrategy


@dataclass(eq=False)
class BufferSync(RunPart):
    """Gives the ranks rank 0's buffers before something reads them."""

    replicas: Replicas
    reducer: Reducer | None  # None: nothing trains
    # Only before the first forward, and when training ends. `ddp` does so with manual optimization, because Lightning
    # hides from torch DDP that a synchronised backward follows.
    once: bool
    _num_backwards_shared: int = -1
    _ended_synchronised: bool = True  # the last forward; also one without a backward, as of SWA for batch statistics
    _validation_has_begun: bool = False

    def before_forward(self) -> None:
        self._share_if_due()
        self._ended_synchronised = self.reducer is None or self.reducer.is_synchronised

    def _share_if_due(self) -> bool:
        # As torch DDP, before the first forward after a synchronised backward.
        is_due = self.reducer is not None and self._num_backwards_shared != self.reducer.stats.num_backwards
        if is_due:
            self.before_evaluation()
        return is_due

    def before_evaluation(self) -> None:
        if self.once and self._num_backwards_shared >= 0:
            return
        if self.reducer is not None:
            self._num_backwards_shared = self.reducer.stats.num_backwards
        self.replicas.broadcast_buffers()

    def begin_validation(self) -> None:
        # As torch DDP, in the first step: callbacks exchange weights and statistics before that.
        self._validation_has_begun = True

    def before_validation_step(self) -> None:
        if self._validation_has_begun:
            self._validation_has_begun = False
            if self._ended_synchronised:  # else buffers may differ, in the middle of an accumulation window
                self.before_evaluation()

    def end_training(self) -> None:
        self._num_backwards_shared = -1
        self.before_evaluation()

    def shared_buffers(self) -> dict[str, torch.Tensor]:
        """Return the buffers that are equal on all ranks now, by name."""
        # None if they were shared for a validation: `WeightAveraging` has put others in their place since.
        return self.replicas.buffers() if not self.once and self._share_if_due() else {}


@dataclass(eq=False)
class ScheduledComparison(RunPart):
    """Compares replicas: when training begins and ends, between steps, and before each checkpoint."""

    checks: ReplicaComparison
    strategy: TrainerStrategy
    replicas: Replicas
    stats: ReducerStats

    def begin_training(self) -> None:
        if self.checks.config.every_n_steps:
            self.compare(when="before the first step")

    def begin_batch(self, batch_idx: int) -> None:
        self.checks.between_steps(self._shared_state, num_backwards=self.stats.num_backwards)

    def compare(self, *, when: str) -> bool:
        return self.checks.compare(self._trained_state, when=when)

    def _trained_state(self) -> TrainingState:
        """Return what training changes in the same way on every rank."""
        divides = self.strategy.is_divided
        return training_state(self.replicas.parameters, self.strategy.optimizers, is_divided=divides)

    def _shared_state(self) -> TrainingState:
        """Return the same with the buffers, which are shared first: forwards change them differently on each rank."""
        state = self._trained_state()
        if (buffers := self.strategy._state.buffers) is not None:
            state.tensors.update(buffers.shared_buffers())
        return state

    def end_training(self) -> None:
        if self.checks.config.every_n_steps:
            self.compare(when="at the end of training")


@dataclass(eq=False)
class ConvertedLayers(RunPart):
    """Converts layers for `Trainer(sync_batchnorm=True)`, with the interface of Lightning's plugin, and on CPU too."""

    collectives: Collectives
    weighting: BatchWeighting
    _was_idle: bool = False

    def apply(self, model: nn.Module) -> nn.Module:
        convert_sync_batchnorm(model, self.collectives)
        return model

    def begin_batch(self, batch_idx: int) -> None:
        if (is_idle := self.weighting.is_idle) != self._was_idle:
            set_idle(self.weighting.trainer.lightning_module, is_idle)
            self._was_idle = is_idle

    def revert(self, model: nn.Module) -> nn.Module:
        revert_sync_batchnorm(model)
        return model


@dataclass(frozen=True)
class SkippedStep:
    """Stands for a loss of None: there is a backward, in which this rank contributes nothing."""

    loss: Tensor


def _with_skips(result_class: Any) -> Any:
    """Return a `result_class` that takes a `SkippedStep` from `training_step`, and reports no loss for it."""

    class ResultOrSkip(result_class):  # type: ignore[misc]
        @classmethod
        def from_training_step_output(cls, training_step_output: Any, normalize: int = 1) -> Any:
            if not isinstance(training_step_output, SkippedStep):
                return super().from_training_step_output(training_step_output, normalize)
            result = cls(training_step_output.loss)
            result.loss = None
            return result

    return ResultOrSkip


@dataclass(eq=False)
class BatchWeighting(RunPart):
    """The weight of each backward of this rank in a fit."""

    trainer: Trainer
    exchange: StepExchange | None  # with the ranks that take each step together; None: a single rank, without weights
    collectives: Collectives
    weight_of: Callable[[Any], Any] | None = None  # the weight of a batch; None: every batch counts the same
    extends_uneven_data: bool = False  # a rank that has run out of data goes on, with weight zero, until all have
    uneven_data: UnevenData | None = None  # for ranks that do not take steps together; None: there are no such ranks
    weighting: Weighting | None = None  # passed to the reducer; None: it takes plain means
    _weight: float | None = None
    _reference_weight: float | None = None
    _skips: bool = False  # in the backward that comes next

    def __post_init__(self) -> None:
        # A rank that repeats a batch has gradients of zero, with which an optimizer with momentum would still step.
        self._withholds_empty_steps = self.uneven_data is not None or self.extends_uneven_data
        if self.exchange is not None:
            self.uneven_data = self.uneven_data or UnevenData(self.exchange, extends=self.extends_uneven_data)
            self.weighting = Weighting(self.exchange, by_weight=self.weight_of is not None)
        replace_result_class(self.trainer, _with_skips)

    @property
    def is_idle(self) -> bool:
        """Whether this rank has run out of data and takes part with weight zero."""
        return self.uneven_data is not None and self.uneven_data.is_repeating

    @property
    def nobody_trained(self) -> bool:
        """Whether no rank that this one steps with had data for this step, which is withheld then."""
        return self._withholds_empty_steps and self.weighting is not None and self.weighting.nobody_contributed

    def prepare_loader(self, loader: Any, *, is_training: bool) -> Any:
        if self.uneven_data is None or not is_training:
            return loader
        return self.uneven_data.prepare(loader, is_only_loader=lambda it: self.trainer.train_dataloader is it)

    def inspect_batch(self, batch: Any) -> None:
        if self.weight_of is None:
            return
        self._weight = float(self.weight_of(batch))
        if not (math.isfinite(self._weight) and self._weight >= 0):
            raise ValueError(
                f"`gradient_weight` gave {self._weight} for a batch on rank {self.collectives.global_rank}. A weight"
                " must be a finite number that is not negative, such as a number of samples or tokens."
            )

    def begin_batch(self, batch_idx: int) -> None:
        if self.exchange is not None and self.uneven_data is not None:
            self.exchange.epoch = self.trainer.current_epoch
            self.exchange.num_batches = batch_idx + 1
            self.uneven_data.begin_batch()

    def complete_step(self) -> None:
        if self.weighting is not None:
            self.weighting.has_stepped = True

    def forget_step(self) -> None:
        """Drop what belongs to a step that does not end."""
        if self.weighting is not None:
            self.weighting.forget()
        self._skips = False

    def skip(self) -> SkippedStep | None:
        """Return a substitute for a loss of None, if the other ranks need a backward of this one."""
        if self.trainer.world_size == 1:
            return None  # Lightning skips the batch
        self._skips = True
        return SkippedStep(torch.zeros((), device=self.collectives.device, requires_grad=True))

    def weigh(self, loss: Tensor) -> Tensor:
        if self.weighting is None:
            return loss
        # This comes first, because it may exchange messages.
        weight = 1.0 if self.weight_of is None else self._relative_weight()
        if self._skips:
            self._skips = False
            self.weighting.add(0, skipped=True)
            return loss
        self.weighting.add(0.0 if self.is_idle else weight)
        return super().weigh(loss)

    @property
    def loss_factor(self) -> float:
        if self.is_idle or self.weight_of is None:
            return 0.0 if self.is_idle else 1.0
        # Lightning has divided the loss by the number of micro-batches.
        automatic = self.trainer.lightning_module.automatic_optimization
        return self._relative_weight() * (self.trainer.accumulate_grad_batches if automatic else 1)

    def agree(self, loss: Any) -> Any:
        """Return None, by which Lightning knows that no backward took place, on all ranks or on none."""
        if self.weighting is None:
            return loss
        if self.weighting.nobody_contributed:
            return None
        return torch.zeros((), device=self.collectives.device) if loss is None else loss

    def _relative_weight(self) -> float:
        """Return the weight relative to a typical one, so that a weighted loss stays in the range of its dtype."""
        if self._weight is None:
            raise RuntimeError(
                "`gradient_weight` has seen no batch: it cannot weigh batches that `training_step` takes from an"
                " iterator by itself. Use `training_step(self, batch, batch_idx)`."
            )
        if self._reference_weight is None:
            assert self.exchange is not None  # or nothing is weighed
            self.exchange.send(MessageKind.REFERENCE_WEIGHT, weight=self._weight)
            mean = self.exchange.receive().total.weight / self.collectives.world_size
            # A power of two changes no rounding.
            self._reference_weight = 2.0 ** round(math.log2(mean)) if mean > 0 else 1.0
        return self._weight / self._reference_weight


@dataclass(eq=False)
class UnfinishedBatch(RunPart):
    """Copies what micro-batches change, for checkpoints from which a resumed run repeats them."""

    trainer: Trainer
    module: nn.Module
    position: EpochPosition
    device: torch.device | None  # whose random numbers checkpoints hold; None: they hold none
    _random_state: dict[str, Any] | None = None
    _has_copies: bool = False  # made after the last step
    _num_batches: int = 0  # of the epoch, with this one
    _has_seen_step: bool = False
    is_interrupted: bool = False  # the batch, by an exception: checkpoints that callbacks save now are without it
    _has_swapped: bool = False  # the module holds averages, for a validation
    _undo: ExitStack = field(default_factory=ExitStack)

    def __post_init__(self) -> None:
        # A buffer is known by its module and its name there, because modules replace their buffers.
        self._places = [
            (owner, key)
            for owner in self.module.modules()
            for key, _ in owner.named_buffers(recurse=False)
            # A scripted module does not have this attribute.
            if key not in getattr(owner, "_non_persistent_buffers_set", ())
        ]
        # By place: the buffer when it was copied, and its copy.
        self._kept: dict[tuple[nn.Module, str], tuple[Tensor, Tensor]] = {}

    def begin_training(self) -> None:
        def swap() -> None:
            self._has_swapped = not self._has_swapped

        self._undo.callback(call_after_swaps(self.trainer.callbacks, swap))  # type: ignore[attr-defined]

    def close(self) -> None:
        self.is_interrupted = False
        self._undo.close()

    @property
    def _repeats_micro_batches(self) -> bool:
        """Whether a resumed run begins after the last step."""
        return self.position.num_batches_trained() is not None

    def begin_batch(self, batch_idx: int) -> None:
        self._num_batches = self.trainer.fit_loop.epoch_loop.batch_progress.current.ready
        is_after_micro_batch = self._has_copies and not self._repeats_micro_batches
        if is_after_micro_batch or self._random_state is None:
            self._note_random_state()
        if is_after_micro_batch:
            self._has_copies = False

    @torch.no_grad()
    def before_forward(self) -> None:
        if self._has_copies:
            return
        by_kind: dict[tuple[torch.device, torch.dtype], tuple[list[Tensor], list[Tensor]]] = {}
        before, self._kept = self._kept, {}
        for place in self._places:
            buffer: Tensor | None = getattr(*place, None)
            if buffer is not None:
                known, copy = before.get(place, (None, None))
                if copy is None or known is not buffer or copy.shape != buffer.shape:
                    copy = torch.empty_like(buffer)
                self._kept[place] = buffer, copy
                copies, buffers = by_kind.setdefault((buffer.device, buffer.dtype), ([], []))
                copies.append(copy)
                buffers.append(buffer)
        for copies, buffers in by_kind.values():
            torch._foreach_copy_(copies, buffers)
        self._has_copies = True

    def complete_step(self) -> None:
        self._has_copies = False
        self._has_seen_step = True
        self._note_random_state()

    def _note_random_state(self) -> None:
        # Loading the next batch, which comes later, may draw random numbers.
        if self.device is not None:
            self._random_state = random_state(self.device)

    def undo_in(self, checkpoint: dict[str, Any]) -> dict[str, Any] | None:
        """Undo in `checkpoint` the changes of micro-batches after the last step, if a resumed run repeats them.

        The module itself stays as the program has left it. Return the random state after that step, if there is one.
        """
        if self._has_swapped and (trained := checkpoint.get("current_model_state")) is not None:
            checkpoint["state_dict"], checkpoint["current_model_state"] = trained, checkpoint["state_dict"]
        num_completed = self.trainer.fit_loop.epoch_loop.batch_progress.current.completed
        is_unfinished = self.is_interrupted and num_completed < self._num_batches
        # With manual optimization a user may step optimizers without the strategy.
        has_seen_step = self._has_seen_step or self.trainer.lightning_module.automatic_optimization
        if not (is_unfinished or self._repeats_micro_batches) or not (self._has_copies and has_seen_step):
            return None
        now = {place: getattr(*place, None) for place in self._kept}
        copy_of = {buffer.data_ptr(): self._kept[place][1] for place, buffer in now.items() if buffer is not None}
        # `WeightAveraging` moves what is trained from `state_dict` to an entry of its own.
        for state in [entry for entry in checkpoint.values() if isinstance(entry, dict)]:
            for name, tensor in state.items():
                is_dense = isinstance(tensor, Tensor) and tensor.layout == torch.strided
                copy = copy_of.get(tensor.data_ptr()) if is_dense else None
                if copy is not None and copy.shape == tensor.shape:
                    state[name] = copy
        return self._random_state
