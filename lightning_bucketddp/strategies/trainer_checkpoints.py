"""Checkpoints of a fit: which rank writes them, what the strategy adds to them, and what a resumed run restores."""

from __future__ import annotations

import logging
import os
import warnings
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from fsspec.core import url_to_fs  # type: ignore[import-untyped]
from fsspec.implementations.local import LocalFileSystem  # type: ignore[import-untyped]
from torch.distributed.constants import default_pg_timeout

from lightning_bucketddp.checkpoint.async_writer import (
    NAN,
    CheckpointStats,
    Severities,
    nonfinite_weights,
    raised_once,
    severities_of,
)
from lightning_bucketddp.checkpoint.checkpoint_io import read_nowhere, read_on_every_rank, write_on_rank_zero
from lightning_bucketddp.checkpoint.rank_state import HookState, bucket_layout, gather_to_rank_zero
from lightning_bucketddp.comm.collectives import Collectives
from lightning_bucketddp.comm.process_group import RollCall
from lightning_bucketddp.comm.step_exchange import OutOfStepError
from lightning_bucketddp.faults.progress import ABOUT_TO_SAVE, SAVING
from lightning_bucketddp.processes import rank_zero_info
from lightning_bucketddp.strategies.auto_resume import AutoResume
from lightning_bucketddp.strategies.fault_handling import explain_unsaved
from lightning_bucketddp.wording import list_some_ranks, wrap

if TYPE_CHECKING:
    from lightning_bucketddp.strategies.trainer import TrainerStrategy

log = logging.getLogger(__name__)

# The key of our part of a checkpoint, which other strategies ignore.
_OURS = "bucketddp"
# `ModelCheckpoint` removes older checkpoints; one of so many should be left.
_NUM_SAVED_KNOWN = 20


class TrainerCheckpoints:
    """Saves and restores what `strategy` trains."""

    def __init__(self, strategy: TrainerStrategy) -> None:
        self._strategy = strategy
        self.auto_resume = AutoResume(is_on=strategy.options.auto_resume)
        self._roll_call: RollCall | None = None
        # Between the set-up of the environment and that of the strategy, the Trainer loads a checkpoint on every rank,
        # and ranks wait for each other. At any other time, a user may load on one rank alone.
        self._is_restoring = False
        self._weights_at_start: Severities | None = None  # None: nothing was trained
        # While training goes on. A user who saves before or after may want to read the file at once.
        self._in_background = False
        # The last checkpoints from which training could go on, the same on every rank. Some may be removed by now.
        self._saved: deque[str] = deque(maxlen=_NUM_SAVED_KNOWN)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_roll_call": None}

    def refuse_plugin(self) -> None:
        """Raise if an option excludes the user's plugin, which writes in the background."""
        plugin, options = self._strategy.checkpoint_io, self._strategy.options
        if not isinstance(plugin, self._strategy.root.async_checkpoint_io):
            return
        name = type(plugin).__name__
        if options.async_checkpoints:
            raise ValueError(
                f"`async_checkpoints=True` and the plugin `{name}` both write in the background. Pass one of them."
            )
        if options.auto_resume:
            raise ValueError(
                f"`auto_resume=True` cannot tell when the plugin `{name}` has written a checkpoint. Pass"
                " `async_checkpoints=True` instead of the plugin."
            )

    def join_process_group(self) -> None:
        strategy = self._strategy
        self._roll_call = None  # a rank that goes on alone has nobody to wait for
        if strategy.world_size > 1:
            timeout_s = (strategy.options.timeout or default_pg_timeout).total_seconds()
            self._roll_call = RollCall(rank=strategy.global_rank, world_size=strategy.world_size, timeout_s=timeout_s)

    def begin_restoring(self) -> None:
        strategy = self._strategy
        if strategy.lightning_module is not None:
            assert strategy._collectives is not None
            is_first_of_host = strategy.local_rank == 0 or strategy.members is not None  # which may not have that one
            self.auto_resume.begin(strategy.trainer, strategy._collectives, is_first_of_host=is_first_of_host)
        self._is_restoring = True

    def load(self, path: Any, read: Callable[[Any], dict[str, Any]]) -> dict[str, Any]:
        strategy = self._strategy
        if self._in_background:
            self.wait()
        if strategy.is_searching:
            # Lightning names the file differently on each rank.
            path = strategy.broadcast(path)
        if self._is_restoring and strategy._collectives is not None:
            self._is_restoring = False
            checkpoint = read_on_every_rank(lambda: read(path), strategy._collectives, path=path)
            strategy._position.take_from(checkpoint, strategy.trainer)
        else:
            checkpoint = read(path)
        if strategy._rank_seeds is not None:
            strategy._rank_seeds.take_from(checkpoint)
        return checkpoint

    def end_restoring(self, *, is_fit: bool) -> None:
        """Note that the Trainer has loaded a checkpoint by now, if it has found one."""
        if self._is_restoring and self._strategy._collectives is not None:
            self._is_restoring = False
            read_nowhere(self._strategy._collectives)
        if is_fit:
            self._weights_at_start = None  # known when all is restored

    def restore(self, checkpoint: Mapping[str, Any]) -> None:
        """Restore the states that Lightning does not know."""
        state = checkpoint.get(_OURS, {})
        if "comm_hook_state" in state and (hook_state := self._hook_state(self._strategy._collectives)) is not None:
            hook_state.restore(state["comm_hook_state"])
        if "model_averager_step" in state and self._strategy._model_averager is not None:
            self._strategy._model_averager.step = state["model_averager_step"]

    def begin_training(self) -> None:
        strategy, trainer = self._strategy, self._strategy.trainer
        steps = strategy.gather_json([trainer.current_epoch, trainer.global_step])
        if any(step != steps[0] for step in steps):  # ranks would save and end at different times
            where = ", ".join(f"rank {rank}: step {step} in epoch {epoch}" for rank, (epoch, step) in enumerate(steps))
            raise OutOfStepError(
                f"The ranks would go on from different steps ({where}), at which an error has ended the last fit of"
                " this Trainer. Pass `ckpt_path`, or fit with a new Trainer, which begins at step 0."
            )
        strategy._writer.stats = CheckpointStats()
        self._in_background = strategy.options.async_checkpoints and not self._links_to_last
        if strategy.options.async_checkpoints and self._links_to_last:
            rank_zero_info(
                "bucketddp: checkpoints are not written in the background, because of `save_last='link'`: the link"
                " would point to a file that is not there yet. Pass `save_last=True` instead."
            )
        self._weights_at_start = severities_of(trainer.lightning_module)
        if trainer.ckpt_path is not None:
            self._saved.append(str(trainer.ckpt_path))
            if NAN not in self._weights_at_start.values():
                strategy._finite_checkpoints.add(trainer.ckpt_path, can_resume=True)
        self.auto_resume.forget_path(trainer)
        if strategy.restarts is not None:
            strategy.restarts.begin_training()
        if strategy._rank_seeds is not None:
            strategy._rank_seeds.continue_after_start(trainer, strategy.root_device)

    def await_all(self, what: str) -> None:
        """Wait until all ranks save `what`; raise if some do not. After a failure any of them may save alone."""
        strategy, roll_call = self._strategy, self._roll_call
        handler, collectives = strategy._fault_handler, strategy._collectives
        if roll_call is None or collectives is None or not collectives.is_open or strategy.trainer.interrupted:
            return

        def waiting_elsewhere() -> list[int]:
            name = f"saving {roll_call.number}"
            return [] if handler is None else handler.watchdog.monitor.waiting_elsewhere(name, phase=ABOUT_TO_SAVE)

        with strategy._progress.during(ABOUT_TO_SAVE):
            absent = roll_call.absent(
                waiting_elsewhere=waiting_elsewhere, raise_if_over=strategy._progress.raise_if_over
            )
        if absent:
            raise RuntimeError(
                f"Rank {strategy.global_rank} saves {what}, and {list_some_ranks(sorted(set(absent)))} did not. Call"
                " `trainer.save_checkpoint` on all ranks: rank 0 writes the file."
            ) from roll_call.broken_by  # by which the watchdog knows that it has to find out who died

    def save(self, checkpoint: dict[str, Any], path: Any, write: Callable[[dict[str, Any], Any], None]) -> None:
        """Compare the replicas, then `write` on rank zero; a failure is raised on every rank."""
        strategy = self._strategy
        newest = next((saved for saved in reversed(self._saved) if os.path.exists(saved)), None)
        with_optimizers = "optimizer_states" in checkpoint
        why_not = explain_unsaved(strategy, path, with_optimizers=with_optimizers, newest=newest)
        if strategy.trains_elsewhere:
            log.warning(wrap(f"bucketddp: `{path}` is not saved here, because other processes have trained."))
        elif why_not is not None:
            log.warning(wrap(f"bucketddp: {why_not}"))
        else:
            self.await_all(f"checkpoint `{path}`")
            with strategy._progress.during(SAVING):
                self._compare_replicas(checkpoint, path)
                self._save(checkpoint, path, write)

    def _compare_replicas(self, checkpoint: dict[str, Any], path: Any) -> None:
        strategy = self._strategy
        # After a failure there is nobody to compare with.
        if strategy._state.replicas is None or strategy._collectives is None or not strategy._collectives.is_open:
            return
        has_differed = [part.compare(when=f"before checkpoint `{path}` is written") for part in strategy._parts]
        if any(has_differed) and "optimizer_states" in checkpoint:
            # Tensors in a checkpoint are those of the module and the optimizers, which were healed; numbers are copies.
            checkpoint["optimizer_states"] = [strategy.optimizer_state(it) for it in strategy.optimizers]

    def _save(self, checkpoint: dict[str, Any], path: Any, write: Callable[[dict[str, Any], Any], None]) -> None:
        strategy, finite = self._strategy, self._strategy._finite_checkpoints
        can_resume = "optimizer_states" in checkpoint  # otherwise the user saves weights only
        before: dict[str, Any] | None = None
        if can_resume and (unfinished := strategy._state.unfinished) is not None:
            before = unfinished.undo_in(checkpoint)
        if can_resume and (state := self._training_state(path, random_state=before)):
            checkpoint[_OURS] = state
        # After an exception the process may end at any time, so this save completes before anything else.
        in_background = self._in_background and not strategy.trainer.interrupted

        def save() -> None:
            nonfinite = []
            if self._weights_at_start is not None and strategy.lightning_module is not None:
                weights = checkpoint.get("state_dict", {})
                nonfinite = nonfinite_weights(weights, strategy.lightning_module, at_start=self._weights_at_start)
            place = finite.place(
                path,
                nonfinite,
                refuses=not strategy.config.trains_on,
                can_resume=can_resume,
                step=checkpoint.get("global_step"),
            )

            def write_there(content: dict[str, Any]) -> None:
                with finite.known_unless_failing(place), raised_once(strategy.checkpoint_io):
                    write(content, place)
                if place is path and not strategy.is_searching:
                    self.auto_resume.add(place, content, strategy.trainer)

            strategy._writer.save(checkpoint, write_there, path=place, in_background=in_background)
            if place is not path and self._links_to_last:
                finite.link(path)

        write_on_rank_zero(save, strategy._collectives, path=path, is_saver=strategy.is_global_zero)
        if can_resume:
            self._saved.append(str(path))

    def _training_state(self, path: Any, *, random_state: dict[str, Any] | None) -> dict[str, Any]:
        """Return our part of a checkpoint, which counts on rank zero. All ranks must call this.

        `random_state` is the one to resume with; None: the current one.
        """
        strategy, local_steps = self._strategy, self._strategy._state.local_steps
        collectives, seeds, islands = strategy._collectives, strategy._rank_seeds, strategy._state.islands
        if collectives is not None and not collectives.is_open:
            has_own_state = strategy.config.comm_state is not None or seeds is not None or islands is not None
            if collectives.world_size > 1 and has_own_state and strategy.is_global_zero:
                what = "the state of the communication hook and the random numbers"
                if islands is not None:
                    what = "the state of the optimizers of other islands, the outer momentum and the random numbers"
                text = "bucketddp: the other ranks cannot be reached any more. What they have of their own,"
                warnings.warn(wrap(f"{text} {what}, is missing in checkpoint `{path}`."), stacklevel=2)
            collectives = None
        state: dict[str, Any] = {}
        if (hook_state := self._hook_state(collectives)) is not None:
            state["comm_hook_state"] = hook_state.gather()
        if strategy._model_averager is not None:
            state["model_averager_step"] = strategy._model_averager.step
        if seeds is not None:
            state["rank_seeds"] = seeds.gather(collectives, strategy.root_device, random_state)
            if collectives is None and (left := strategy._collectives) is not None:
                failed = None if strategy._fault_handler is None else strategy._fault_handler.watchdog.failed_rank
                state["rank_seeds"] |= {"saved_by": left.rank, "world_size": left.world_size, "failed_rank": failed}
        if collectives is not None and local_steps is not None:
            local = local_steps.gather_state(strategy.precision_plugin)
            state |= {} if local is None else {"local_steps": local}
        if (position := strategy._position.state()) is not None:
            generators = gather_to_rank_zero(position["generators"], collectives)
            state["position"] = {**position, "generators": generators}
        return state

    def _hook_state(self, collectives: Collectives | None) -> HookState | None:
        config, replicas = self._strategy.config, self._strategy._state.replicas
        if config.comm_hook is None or config.comm_state is None or replicas is None:
            return None
        return HookState(config.comm_state, bucket_layout(replicas.parameters, config), collectives)

    def remove(self, path: Any, remove: Callable[[Any], None]) -> None:
        strategy = self._strategy
        if (place := strategy._finite_checkpoints.path_to_remove(path)) is None:
            return

        def remove_there() -> None:
            remove(place)
            if strategy.is_global_zero:
                self.auto_resume.remove(place)

        strategy._writer.remove(remove_there, path=place)

    def wait(self) -> None:
        """Wait until all checkpoints are written; a failure is raised on every rank. All ranks must call this."""

        def wait() -> None:
            self._strategy._writer.drain()
            with raised_once(self._strategy.checkpoint_io):
                self._strategy.checkpoint_io.teardown()  # which Lightning calls after each fit, too

        write_on_rank_zero(wait, self._strategy._collectives)

    def end_training(self) -> None:
        self._strategy._finite_checkpoints.has_warned = False
        self.wait()
        if self._strategy.is_global_zero:
            self.auto_resume.end(self._strategy.trainer)

    def close(self) -> None:
        """Wait for writes in flight, without the other ranks."""
        self._in_background = False
        with suppress(Exception):  # it is in the log
            self._strategy._writer.drain()

    def directory(self) -> str | None:
        """Return the directory in which callbacks save, if it is local."""
        for callback in self._strategy.trainer.checkpoint_callbacks:
            if (directory := getattr(callback, "dirpath", None)) is not None:
                filesystem, path = url_to_fs(str(directory))
                return path if isinstance(filesystem, LocalFileSystem) else None
        return None

    @property
    def _links_to_last(self) -> bool:
        callbacks = self._strategy.trainer.checkpoint_callbacks
        return any(getattr(callback, "save_last", None) == "link" for callback in callbacks)
