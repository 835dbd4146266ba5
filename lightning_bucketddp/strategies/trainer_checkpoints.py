"""What a `BucketDDPStrategy` for the Trainer writes into a checkpoint and takes from it."""

from __future__ import annotations

import logging
import os
import warnings
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, suppress
from typing import Any, ClassVar

from fsspec.core import url_to_fs  # type: ignore[import-untyped]
from fsspec.implementations.local import LocalFileSystem  # type: ignore[import-untyped]

from lightning_bucketddp.checkpoint.async_writer import CheckpointStats, drain, raised_once
from lightning_bucketddp.checkpoint.collective_io import read_nowhere, read_on_every_rank, write_on_rank_zero
from lightning_bucketddp.checkpoint.finite_weights import (
    NAN,
    Severities,
    nonfinite_weights,
    severities_of,
)
from lightning_bucketddp.checkpoint.rank_state import HookState, bucket_layout, gather_to_rank_zero
from lightning_bucketddp.comm.collectives import Collectives
from lightning_bucketddp.comm.roll_call import RollCall
from lightning_bucketddp.faults.progress import ABOUT_TO_SAVE, SAVING
from lightning_bucketddp.processes import rank_zero_info
from lightning_bucketddp.strategies.auto_resume import AutoResume
from lightning_bucketddp.strategies.fault_handling import lost_shards, partial_step
from lightning_bucketddp.strategies.rank_seeds import RankSeeds
from lightning_bucketddp.strategies.trainer_step import TrainerStepHooks
from lightning_bucketddp.wording import list_some_ranks

log = logging.getLogger(__name__)

# Where our part of a checkpoint is. Other strategies do not look there.
_OURS = "bucketddp"


class TrainerCheckpointHooks(TrainerStepHooks):
    """The part of a strategy that Lightning calls to save and to resume."""

    _wrapping_checkpoint_io: ClassVar[type]
    _async_checkpoint_io: ClassVar[type]
    # None: none was given, and nobody has asked for it.
    _io: Any = None
    _rank_seeds: RankSeeds | None
    _auto_resume: AutoResume
    _saves: RollCall | None
    # From the set-up of the environment, which all ranks have, to that of the strategy the Trainer loads a checkpoint
    # on every rank that has found one. Only then are the others asked: a user may load on one rank alone at any time.
    _is_restoring: bool
    # None: nothing was trained.
    _weights_at_start: Severities | None = None
    # As long as training goes on. Who saves before or after that may want to read the file at once.
    _saves_in_background = False
    # The last checkpoints from which training could go on, as every rank knows them. Some may be gone by now.
    _saved: deque[str]

    @property
    def is_global_zero(self) -> bool:
        """Whether this rank does what one does for all: rank zero, or the one that saves when it has died."""
        is_saver = None if self._fault_handler is None else self._fault_handler.is_saver
        return self.global_rank == 0 if is_saver is None else is_saver

    def directory_to_save_in(self) -> str | None:
        if self._state.is_fit:
            for callback in self._trainer.checkpoint_callbacks:
                if (directory := getattr(callback, "dirpath", None)) is not None:
                    filesystem, path = url_to_fs(str(directory))
                    return path if isinstance(filesystem, LocalFileSystem) else None
        return None

    def _newest_saved(self) -> str | None:
        return next((path for path in reversed(self._saved) if os.path.exists(path)), None)

    @property
    def checkpoint_io(self) -> Any:
        if self._io is None:
            self._io = self._default_checkpoint_io()
        elif isinstance(self._io, self._wrapping_checkpoint_io):
            # Ignored by a wrapper that already has something to wrap.
            self._io.checkpoint_io = self._default_checkpoint_io()  # type: ignore[attr-defined]
        return self._io

    @checkpoint_io.setter
    def checkpoint_io(self, io: Any) -> None:
        self._io = io

    def setup_environment(self) -> None:
        if self.options.async_checkpoints and isinstance(self.checkpoint_io, self._async_checkpoint_io):
            raise ValueError(
                f"`async_checkpoints=True` and the plugin `{type(self.checkpoint_io).__name__}` both write in the"
                " background. Pass one of them."
            )
        if self.options.auto_resume and isinstance(self.checkpoint_io, self._async_checkpoint_io):
            raise ValueError(
                f"`auto_resume=True` cannot tell when the plugin `{type(self.checkpoint_io).__name__}` has written a"
                " checkpoint. Pass `async_checkpoints=True` instead of the plugin."
            )
        super().setup_environment()

    def launched(
        self, trainer: Any, function: Callable[..., Any], args: tuple[Any, ...]
    ) -> AbstractContextManager[None]:
        return self._auto_resume.launched(trainer, function, args)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        """Compare the replicas, then write on rank zero; a failure is raised on every rank."""
        if self.trains_elsewhere:
            log.warning("bucketddp: `%s` is not saved here, because other processes have trained.", filepath)
            return
        if self.has_partial_weights:
            log.warning("bucketddp: %s", partial_step(filepath, newest=self._newest_saved()))
            return
        if self.has_lost_shards and "optimizer_states" in checkpoint:
            log.warning("bucketddp: %s", lost_shards(filepath, newest=self._newest_saved()))
            return
        self._await_all(f"checkpoint `{filepath}`")
        with self._progress.during(SAVING):
            self._compare_replicas(checkpoint, filepath)
            self._save(checkpoint, filepath, storage_options)

    def _await_all(self, what: Any) -> None:
        """Wait until all ranks save `what`; raise if some do not. After a failure each of them may save, or none."""
        saves, handler, collectives = self._saves, self._fault_handler, self._collectives
        if saves is None or collectives is None or not collectives.is_open or self._trainer.interrupted:
            return

        def waiting_elsewhere() -> list[int]:
            name = f"saving {saves.number}"
            return [] if handler is None else handler.waiting_elsewhere(name, phase=ABOUT_TO_SAVE)

        with self._progress.during(ABOUT_TO_SAVE):
            absent = saves.absent(waiting_elsewhere=waiting_elsewhere, raise_if_over=self._progress.raise_if_over)
        if absent:
            raise RuntimeError(
                f"Rank {self.global_rank} saves {what}, and {list_some_ranks(sorted(set(absent)))} did not. Call"
                " `trainer.save_checkpoint` on all ranks: rank 0 writes the file."
            )

    def _save(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None) -> None:
        # Without optimizers only the weights are wanted.
        if "optimizer_states" in checkpoint:
            self._add_training_state(checkpoint, filepath)

        # After an exception the process may end at any time: that save is the last one, and nothing is to go on.
        in_background = self._saves_in_background and not self._trainer.interrupted

        def save() -> None:
            path = self._place(checkpoint, filepath)

            def write(content: dict[str, Any]) -> None:
                with self._finite_checkpoints.known_unless_failing(path), raised_once(self.checkpoint_io):
                    super(TrainerCheckpointHooks, self).save_checkpoint(content, path, storage_options)
                if path is filepath and self._trials is None:
                    self._auto_resume.add(path, content, self._trainer)

            self._writer.save(checkpoint, write, path=path, in_background=in_background)
            if path is not filepath and self._links_to_last:
                self._finite_checkpoints.link(filepath)

        write_on_rank_zero(save, self._collectives, path=filepath, is_saver=self.is_global_zero)
        if "optimizer_states" in checkpoint:
            self._saved.append(str(filepath))

    def _place(self, checkpoint: dict[str, Any], path: Any) -> Any:
        """Return where to write `checkpoint`: to `path`, if its weights are finite. On rank zero."""
        nonfinite = []
        if self._weights_at_start is not None and self.lightning_module is not None:
            state_dict = checkpoint.get("state_dict", {})
            nonfinite = nonfinite_weights(state_dict, self.lightning_module, at_start=self._weights_at_start)
        return self._finite_checkpoints.place(
            path,
            nonfinite,
            refuses=not self.config.trains_on,
            can_resume="optimizer_states" in checkpoint,
            step=checkpoint.get("global_step"),
        )

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the weights, which are those of all ranks: the first thing that goes into a checkpoint."""
        if self._state.islands is not None:
            self._await_all("the weights of all islands")
        for part in self._parts:
            part.before_save()
        return super().lightning_module_state_dict()

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Return the state of `optimizer` for a checkpoint: with `shard_optimizer` all of it, on rank zero."""
        if self._state.shards is not None:
            self._await_all("the state of an optimizer")
        state = self._sharded_state(optimizer)
        return super().optimizer_state(optimizer) if state is None else state

    def remove_checkpoint(self, filepath: Any) -> None:
        path = self._finite_checkpoints.path_to_remove(filepath)

        if path is None:
            return

        def remove() -> None:
            super(TrainerCheckpointHooks, self).remove_checkpoint(path)
            if self.is_global_zero:
                self._auto_resume.remove(path)

        self._writer.remove(remove, path=path)

    def _compare_replicas(self, checkpoint: dict[str, Any], path: Any) -> None:
        # Where a rank has failed the others save alone, if at all.
        if self._state.replicas is None or self._collectives is None or not self._collectives.is_open:
            return
        when = f"before checkpoint `{path}` is written"
        has_differed = [part.compare(when=when) for part in self._parts]
        if any(has_differed) and "optimizer_states" in checkpoint:
            # Tensors in a checkpoint are those of the module and the optimizers, numbers are copies.
            checkpoint["optimizer_states"] = [self.optimizer_state(optimizer) for optimizer in self.optimizers]

    def load_checkpoint(self, checkpoint_path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        def read() -> dict[str, Any]:
            return super(TrainerCheckpointHooks, self).load_checkpoint(checkpoint_path, *args, **kwargs)

        if self._saves_in_background:
            self.wait_for_checkpoints()
        if self._trials is not None:
            # Lightning gives the file a name of its own on each rank.
            checkpoint_path = self.broadcast(checkpoint_path)
        if self._is_restoring and self._collectives is not None:
            self._is_restoring = False
            checkpoint = read_on_every_rank(read, self._collectives, path=checkpoint_path)
            self._position.take_from(checkpoint, self._trainer)
        else:
            checkpoint = read()
        if self._rank_seeds is not None:
            self._rank_seeds.take_from(checkpoint)
        return checkpoint

    def _restored(self) -> None:
        """Call when the Trainer would have loaded a checkpoint if it had found one."""
        if self._is_restoring and self._collectives is not None:
            self._is_restoring = False
            read_nowhere(self._collectives)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        # Called in each fit that resumes, after `setup`, and by nothing else that reads a checkpoint.
        if self._state.local_steps is not None:
            checkpoint = self._state.local_steps.take_state(checkpoint, self.precision_plugin)
        super().load_optimizer_state_dict(checkpoint)
        state = checkpoint.get(_OURS, {})
        if "comm_hook_state" in state and (hook_state := self._hook_state(self._collectives)) is not None:
            hook_state.restore(state["comm_hook_state"])
        if "model_averager_step" in state and self._model_averager is not None:
            self._model_averager.step = state["model_averager_step"]

    def on_train_start(self) -> None:
        super().on_train_start()
        self._writer.stats = CheckpointStats()
        self._saves_in_background = self.options.async_checkpoints and not self._links_to_last
        if self.options.async_checkpoints and self._links_to_last:
            rank_zero_info(
                "bucketddp: checkpoints are not written in the background, because of `save_last='link'`: the link"
                " would point to a file that is not there yet. Pass `save_last=True` instead."
            )
        self._weights_at_start = severities_of(self._trainer.lightning_module)
        if self._trainer.ckpt_path is not None:
            self._saved.append(str(self._trainer.ckpt_path))
            if NAN not in self._weights_at_start.values():
                self._finite_checkpoints.add(self._trainer.ckpt_path, can_resume=True)
        self._auto_resume.started(self._trainer)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        # All ranks have heard of it in the last step, or none.
        alerts = [part.take_alert() for part in self._parts]
        if any(alerts):
            write_on_rank_zero(self._writer.raise_failure, self._collectives)
        super().on_train_batch_start(batch, batch_idx)

    def on_train_end(self) -> None:
        super().on_train_end()
        # What is saved from now on is saved by hand.
        self._finite_checkpoints.forget_warning()
        self.wait_for_checkpoints()
        if self.is_global_zero:
            self._auto_resume.end(self._trainer)

    def on_exception(self, exception: BaseException) -> None:
        super().on_exception(exception)
        self._end_writing()

    def teardown(self) -> None:
        self._end_writing()
        super().teardown()

    def wait_for_checkpoints(self) -> None:
        """Wait until all checkpoints are written; a failure is raised on every rank. All ranks must call this."""

        def wait() -> None:
            self._writer.drain()
            drain(self.checkpoint_io)

        write_on_rank_zero(wait, self._collectives)

    def _end_writing(self) -> None:
        """Wait for what is in flight, without the other ranks."""
        self._saves_in_background = False
        with suppress(Exception):  # it is in the log
            self._writer.drain()

    @property
    def _links_to_last(self) -> bool:
        return any(getattr(callback, "save_last", None) == "link" for callback in self._trainer.checkpoint_callbacks)

    def _add_training_state(self, checkpoint: dict[str, Any], filepath: Any) -> None:
        """Add what training needs of ours to resume. All ranks must call this; rank zero's result counts."""
        collectives = self._collectives
        if collectives is not None and not collectives.is_open:
            has_own_state = self.config.comm_state is not None or self._rank_seeds is not None
            has_own_state |= self._state.islands is not None
            if collectives.world_size > 1 and has_own_state and self.is_global_zero:
                what = "the state of the communication hook and the random numbers"
                if self._state.islands is not None:
                    what = "the state of the optimizers of other islands, the outer momentum and the random numbers"
                warnings.warn(
                    f"bucketddp: the other ranks cannot be reached any more. What they have of their own, {what}, is"
                    f" missing in checkpoint `{filepath}`.",
                    stacklevel=2,
                )
            collectives = None
        state: dict[str, Any] = {}
        if (hook_state := self._hook_state(collectives)) is not None:
            state["comm_hook_state"] = hook_state.gather()
        if self._model_averager is not None:
            state["model_averager_step"] = self._model_averager.step
        if self._rank_seeds is not None:
            state["rank_seeds"] = self._rank_seeds.gather(collectives, self.root_device)
            if collectives is None and self._collectives is not None:
                failed = None if self._fault_handler is None else self._fault_handler.failed_rank
                state["rank_seeds"] |= self._rank_seeds.of_survivor(self._collectives, failed_rank=failed)
        if (
            collectives is not None
            and self._state.local_steps is not None
            and (local := self._state.local_steps.gather_state(self.precision_plugin)) is not None
        ):
            state["local_steps"] = local
        if (position := self._position.state()) is not None:
            generators = gather_to_rank_zero(position["generators"], collectives)
            state["position"] = {**position, "generators": generators}
        if state:
            checkpoint[_OURS] = state

    def _hook_state(self, collectives: Collectives | None) -> HookState | None:
        if (
            self.config.comm_hook is None
            or self.config.comm_state is None
            or (replicas := self._state.replicas) is None
        ):
            return None
        layout = bucket_layout(replicas.parameters, self.config)
        return HookState(self.config.comm_state, layout, collectives)
