"""What a `BucketDDPStrategy` for the Trainer writes into a checkpoint and takes from it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from lightning_bucketddp.checkpoint.background import drain, raised_once
from lightning_bucketddp.checkpoint.finite_weights import check_weights
from lightning_bucketddp.checkpoint.hook_state import HookState, bucket_layout
from lightning_bucketddp.checkpoint.rank_zero import write_on_rank_zero
from lightning_bucketddp.core.collectives import Collectives
from lightning_bucketddp.core.config import ReducerConfig
from lightning_bucketddp.core.replicas import Replicas
from lightning_bucketddp.strategies.rank_seeds import RankSeeds

if TYPE_CHECKING:
    from lightning.pytorch.strategies import DDPStrategy as _ParallelStrategy
else:
    _ParallelStrategy = object

# Where our part of a checkpoint is. Other strategies do not look there.
_OURS = "bucketddp"


class CheckpointHooks(_ParallelStrategy):
    """The part of a strategy that Lightning calls to save and to resume."""

    config: ReducerConfig
    _replicas: Replicas | None
    _collectives: Collectives | None
    _model_averager: Any
    _rank_seeds: RankSeeds | None

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        """Write on rank zero; a failure is raised on every rank."""
        # Without optimizers only the weights are wanted.
        if "optimizer_states" in checkpoint and (state := self._training_state()):
            checkpoint[_OURS] = state
        if self._rank_seeds is not None and self._collectives is not None:
            self._rank_seeds.add_to(checkpoint, self._collectives, self.root_device)

        def write() -> None:
            if self.lightning_module is not None:
                refuses = self.config.on_nonfinite != "warn"
                check_weights(checkpoint.get("state_dict", {}), self.lightning_module, path=filepath, refuses=refuses)
            with raised_once(self.checkpoint_io):
                super(CheckpointHooks, self).save_checkpoint(checkpoint, filepath, storage_options)

        write_on_rank_zero(write, self._collectives, path=filepath)

    def load_checkpoint(self, checkpoint_path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        checkpoint = super().load_checkpoint(checkpoint_path, *args, **kwargs)
        if self._rank_seeds is not None:
            self._rank_seeds.take_from(checkpoint)
        return checkpoint

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        # Called in each fit that resumes, after `setup`, and by nothing else that reads a checkpoint.
        super().load_optimizer_state_dict(checkpoint)
        state = checkpoint.get(_OURS, {})
        if "comm_hook_state" in state and (hook_state := self._hook_state()) is not None:
            hook_state.restore(state["comm_hook_state"])
        if "model_averager_step" in state and self._model_averager is not None:
            self._model_averager.step = state["model_averager_step"]

    def on_train_end(self) -> None:
        super().on_train_end()
        write_on_rank_zero(lambda: drain(self.checkpoint_io), self._collectives)

    def _training_state(self) -> dict[str, Any]:
        """What training needs of ours to resume. All ranks must call this; rank zero's result counts."""
        state: dict[str, Any] = {}
        if (hook_state := self._hook_state()) is not None:
            state["comm_hook_state"] = hook_state.gather()
        if self._model_averager is not None:
            state["model_averager_step"] = self._model_averager.step
        return state

    def _hook_state(self) -> HookState | None:
        if self.config.comm_hook is None or self.config.comm_state is None or self._replicas is None:
            return None
        layout = bucket_layout(self._replicas.parameters, self.config)
        return HookState(self.config.comm_state, layout, self._collectives)
