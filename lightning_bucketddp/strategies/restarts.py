"""`max_restarts`: a fit that has failed goes on in the processes that still run.

Note: a restart
    A restart ends the failed fit as `fit` does when it raises, and begins another one, without returning to the
    program. Rank 0 decides whether there is one, and writes that to the store. If the store has gone with its process,
    the others wait at its address, and with `min_ranks` one of them makes another store there. The launcher starts a
    new process for a rank whose process is gone. All ranks meet, and read the newest checkpoint. A new process knows
    nothing of earlier attempts, so nothing that ranks must agree on may depend on them.
"""

from __future__ import annotations

import copy
import gc
import json
import logging
import signal
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lightning_bucketddp.checkpoint.checkpoint_io import CheckpointWriteError
from lightning_bucketddp.comm.process_group import abort_device_groups, leave_process_group
from lightning_bucketddp.faults.failure import Failure, Kind, chain_of
from lightning_bucketddp.faults.signals import is_main_thread
from lightning_bucketddp.startup.rendezvous import START, Rendezvous, knocks_of
from lightning_bucketddp.startup.store import StartError, StoreAddress, part_of
from lightning_bucketddp.strategies.auto_resume import AutoResume
from lightning_bucketddp.strategies.base import StrategyBase
from lightning_bucketddp.trainer_internals import SET_BY_LIGHTNING, begin_fit, end_failed_fit
from lightning_bucketddp.wording import list_some_ranks, wrap

if TYPE_CHECKING:
    from lightning_bucketddp.strategies.trainer import TrainerStrategy

log = logging.getLogger(__name__)

# How long the others wait until rank 0 has written whether there is a restart.
_VERDICT_WITHIN_S = 30.0
_POLL_S = 0.02
# Back-off while attempts do not come further than earlier ones: 1 s, 2 s, 4 s, ..., and at most this.
_LONGEST_PAUSE_S = 60.0
# A list, dictionary or set with more items is data: nobody changes it in a fit.
_MOST_ITEMS = 1000
_PACKAGE = __name__.partition(".")[0]
_ATTRIBUTES_OF_TORCH = vars(nn.Module()).keys()


class StateAtStart:
    """What a program has when it calls `fit` and no checkpoint holds, for processes that are not new.

    All ranks begin an attempt with it, as those do whose processes are new.
    """

    def __init__(self, trainer: Any) -> None:
        from torchmetrics import Metric

        self._trainer, module = trainer, trainer.lightning_module
        self._settings = trainer.accumulate_grad_batches, trainer.fit_loop.max_epochs
        self._metrics = [it for it in module.modules() if isinstance(it, Metric)]
        self._is_training = {it: it.training for it in module.modules()}
        self._is_trained = {param: param.requires_grad for param in module.parameters()}
        self._buffers = [
            (owner, name, buffer.detach().clone())
            for owner in module.modules()
            for name in owner._non_persistent_buffers_set
            if isinstance(buffer := owner._buffers.get(name), Tensor)
        ]
        owners = [it for it in module.modules() if not isinstance(it, Metric)]
        owners += [it for it in trainer.callbacks if type(it).__module__.partition(".")[0] != _PACKAGE]
        owners += [] if trainer.datamodule is None else [trainer.datamodule]
        self._attributes = [(owner, _attributes_of(owner)) for owner in owners]
        self._containers: dict[int, tuple[Any, Any]] = {}
        for _, attributes in self._attributes:
            for value in attributes.values():
                self._keep_content(value)

    def _keep_content(self, value: Any) -> None:
        is_container = isinstance(value, list | dict | set | deque) and len(value) <= _MOST_ITEMS
        if is_container and id(value) not in self._containers:
            self._containers[id(value)] = value, copy.copy(value)
            for item in _items_of(value):
                self._keep_content(item)

    def restore(self) -> None:
        # A `GradientAccumulationScheduler`, or one that averages weights, has changed them.
        self._trainer.accumulate_grad_batches, self._trainer.fit_loop.max_epochs = self._settings
        for owner, attributes in self._attributes:
            for name in _attributes_of(owner).keys() - attributes.keys():
                del vars(owner)[name]
            vars(owner).update(attributes)
        for container, content in self._containers.values():
            if list(map(id, _items_of(container))) != list(map(id, _items_of(content))):  # some cannot be changed
                container.clear()
                (container.extend if isinstance(container, list | deque) else container.update)(content)
        for module, is_training in self._is_training.items():
            module.training = is_training
        for param, is_trained in self._is_trained.items():
            param.grad = None
            param.requires_grad_(is_trained)
        for owner, name, buffer in self._buffers:
            owner._buffers[name] = buffer.clone()
        for metric in self._metrics:  # before the failure they have counted what is seen again
            metric.reset()


def _items_of(container: Any) -> list[Any]:
    return [*container, *(container.values() if isinstance(container, dict) else ())]


def _attributes_of(owner: object) -> dict[str, Any]:
    """Return the attributes that a program can have changed, without the weights and hooks of a module."""
    of_others = (_ATTRIBUTES_OF_TORCH | SET_BY_LIGHTNING) if isinstance(owner, nn.Module) else set()
    return {name: value for name, value in vars(owner).items() if name not in of_others}


class Restarts:
    """Decides after a failure whether a fit begins again, and cleans up after the failed one."""

    def __init__(self, strategy: TrainerStrategy) -> None:
        self._strategy = strategy
        self._option = strategy.options.max_restarts
        self.count = 0
        self._has_trained = False
        self._requeue_signal = 0  # that has come to a failed attempt; 0: none
        self._pause_s = 0.0  # of rank 0, for which the others wait at the rendezvous
        self._at_start: StateAtStart | None = None

    def run(self, attempt: Callable[[], Any]) -> Any:
        """Return the result of `attempt`: a fit, which begins again if it fails, or another function of a Trainer."""
        if self._strategy.lightning_module is None:
            return attempt()
        excepthook, auto_resume = sys.excepthook, self._strategy._checkpoints.auto_resume
        auto_resume.is_restart = False
        self.count, self._has_trained, self._requeue_signal = 0, False, 0
        self._last: tuple[object, ...] = ()  # the last failure and where it was
        self._furthest = 0  # the most steps of an attempt
        self._num_in_vain = 0  # attempts in a row that did not come further
        while True:
            try:
                result = attempt()
                self._at_start = None
                return result
            except Exception as error:
                self.note_requeue(is_pause=False)
                if not self._follows(error):
                    raise
            # Outside of `except`, so that the error does not keep its frames.
            self._clean_up(excepthook)
            self._strategy.has_partial_step = True  # until the checkpoint is loaded
            auto_resume.begin_restart()
            self._strategy._loaders.restore_combined()
            begin_fit(self._strategy.trainer)

    def rendezvous(self, address: StoreAddress) -> Rendezvous:
        """Return the rendezvous of a restart."""
        timeouts, min_ranks = self._strategy.options.timeouts, self._option.min_ranks
        members = self._strategy.members or list(range(address.world_size))
        # The first member decides when it has waited long enough. It may have paused before.
        is_first = address.rank == members[0]
        timeout_s = timeouts.rejoin_s + (0 if is_first else _LONGEST_PAUSE_S)
        rendezvous = Rendezvous(address, timeout_s=timeout_s, option="Timeouts(rejoin_s=...)")
        rendezvous.opens_round, rendezvous.min_ranks, rendezvous.awaited = is_first, min_ranks, set(members)
        if self._strategy.store is None and not is_first and min_ranks is not None:
            rendezvous.takes_over_after_s, rendezvous.awaited = timeouts.rejoin_s, set(members[1:])
        return rendezvous

    def set_members(self, ranks: list[int], *, num_launched: int) -> None:
        """Renumber `ranks`, which have met. They may be fewer than were launched, or others than before."""
        strategy = self._strategy
        before = list(range(num_launched)) if strategy.members is None else strategy.members
        StrategyBase.members = ranks if len(ranks) < num_launched else None
        if ranks != before and strategy.global_rank == 0:
            absent = [rank for rank in range(num_launched) if rank not in ranks]
            text = f" Nobody has brought {list_some_ranks(absent)} back." if absent else ""
            if strategy.options.global_batch_size is None:
                text += f" The global batch is that of {len(ranks)} now, and the steps of an epoch change with it: pass"
                text += " `global_batch_size` to keep both."
            log.warning(wrap(f"bucketddp: going on with {len(ranks)} of {num_launched} ranks, numbered anew.{text}"))

    def admit_returned(self) -> None:
        """Raise if a rank that was left out has returned, and a checkpoint was just saved, so that nothing is lost."""
        strategy, auto_resume = self._strategy, self._strategy._checkpoints.auto_resume
        if strategy.members is not None and auto_resume.has_saved:
            auto_resume.has_saved = False
            left_out = set(range(strategy.cluster_environment.world_size())).difference(strategy.members)
            if knocks := knocks_of(part_of(strategy.store.underlying_store, START), left_out):
                raise RuntimeError(f"{list_some_ranks(knocks)} can be taken in again")

    def begin_attempt(self) -> None:
        """Keep what the program has in the first attempt: all others begin with it."""
        if self.count == 0 and self._strategy.lightning_module is not None:
            self._at_start = StateAtStart(self._strategy.trainer)

    def begin_training(self) -> None:
        """Restart after failures from now on, when there is a checkpoint. Earlier failures are those of the program."""
        self._strategy.has_partial_step = False
        self._strategy._checkpoints.auto_resume.save_start(self._strategy.trainer)
        self._has_trained = True
        if self._requeue_signal:
            number, self._requeue_signal = self._requeue_signal, 0
            signal.raise_signal(number)

    def note_requeue(self, *, is_pause: bool) -> None:
        """Note SLURM's requeue signal in the pause before an attempt has its handlers: it would end the process."""
        number = getattr(self._strategy.cluster_environment, "requeue_signal", None)
        before, after = (signal.SIG_DFL, self._on_requeue) if is_pause else (self._on_requeue, signal.SIG_DFL)
        if number is not None and is_main_thread() and signal.getsignal(number) == before:
            signal.signal(number, after)

    def _on_requeue(self, number: int, _frame: object) -> None:
        self._requeue_signal = number

    def _follows(self, error: Exception) -> bool:
        """Return whether a restart follows `error`, which has ended the run; if so, end the failed fit."""
        strategy = self._strategy
        has_trained = self._has_trained or strategy._checkpoints.auto_resume.is_restart
        if not has_trained or isinstance(error, (*strategy.root.normal_ends, StartError)):
            return False
        handler = strategy._fault_handler
        failure = None if handler is None else handler.watchdog.failure
        if failure is None:
            failure = Failure.of(error, rank=strategy.global_rank, where=strategy._progress.describe_origin(error))
        if failure.kind is Kind.STOPPED or not self._is_agreed(failure):
            return False
        self.count += 1
        try:
            end_failed_fit(strategy.trainer, error, interrupt=strategy.root.interrupt)
        except Exception as own:  # of a callback, such as one that saves to a full disk
            has_aborted = handler is None or handler.watchdog.shutdown.has_aborted
            if not has_aborted and not isinstance(own, CheckpointWriteError):  # which is raised on all ranks
                raise  # others may wait for this one
            if has_aborted or strategy.global_rank == 0:
                log.error(wrap(f"bucketddp: a callback has failed before the restart: {type(own).__name__}: {own}"))
        self.note_requeue(is_pause=True)
        if strategy.global_rank == 0:  # now, because the thread that writes checkpoints has changed the record
            strategy._checkpoints.auto_resume.note_restart(failure, strategy.trainer)
        if handler is not None:
            handler.forget_at_exit()
            if handler.signals is not None:
                self._requeue_signal = self._requeue_signal or handler.signals.requeue_signal
                if handler.signals.late_signal:
                    signal.raise_signal(handler.signals.late_signal)  # ends the run, not only the attempt
        # Its frames hold the tensors of the failed step.
        for seen in chain_of(error):
            traceback.clear_frames(seen.__traceback__)
        return True

    def _is_agreed(self, failure: Failure) -> bool:
        store, is_rank_zero = self._strategy.store, self._strategy.global_rank == 0
        handler = self._strategy._fault_handler
        # Of this run: the store may hold the verdict on an earlier one, after which the program has gone on.
        key = "" if handler is None else f"restart/{handler.watchdog.channel.run_id}"
        why_not = self._judge(failure) if is_rank_zero else None
        if self._strategy.world_size > 1:
            try:
                if store is None:
                    why_not = "the process group was made by the program, and only the program can make another"
                elif is_rank_zero:
                    store.set(key, json.dumps(why_not))
                else:
                    deadline = time.monotonic() + _VERDICT_WITHIN_S
                    while not store.check([key]) and time.monotonic() < deadline:
                        time.sleep(_POLL_S)
                    return store.check([key]) and json.loads(store.get(key)) is None
            except RuntimeError:  # the store has gone with the process of rank 0, which may be started again
                StrategyBase.store = None
                is_gone = failure.kind in (Kind.DIED, Kind.LOST)
                # A launcher that is no rank replaces a process that has called `sys.exit`, too.
                is_gone |= failure.what.startswith("SystemExit") and self._strategy.options.start_method != "popen"
                return failure.rank == 0 and is_gone and self.count < self._option.number
        if why_not is not None and is_rank_zero:
            log.error(wrap(f"bucketddp: no restart: {why_not}."))
        return why_not is None

    def _judge(self, failure: Failure) -> str | None:
        """Return why there is no restart after `failure`; None: there is one, after `_pause_s`."""
        trainer = self._strategy.trainer
        what = failure.what.partition(":")[0] if failure.kind is Kind.RAISED else failure.what
        phase = failure.where.partition(" of batch ")[0]  # without details, which may differ
        # Where all ranks raise, the first to report it may be another one each time.
        rank = None if failure.kind is Kind.RAISED else failure.rank
        # Before the first batch of an epoch Lightning still knows the last one of the epoch before.
        at = trainer.global_step, trainer.current_epoch, trainer.fit_loop.batch_idx
        this = (rank, failure.kind, what, phase, *at)
        num_fits, is_lost = AutoResume.num_launches, failure.kind in (Kind.DIED, Kind.LOST)
        if num_fits and is_lost and self._option.min_ranks is None and self._strategy.options.start_method == "popen":
            why = f"this is fit or evaluation {num_fits + 1} of the program, and a new process begins with the first"
            return f"{why}. `start_method='spawn'` starts processes for each fit"
        if self.count >= self._option.number:
            return f"`max_restarts`, {self._option.number}, is reached"
        if this == self._last and what != CheckpointWriteError.__name__:  # a full disk may have room again
            return "the same failure at the same batch twice is a defect of the program, or of its data"
        self._last = this
        self._num_in_vain = 0 if trainer.global_step > self._furthest else self._num_in_vain + 1
        self._furthest = max(self._furthest, trainer.global_step)
        self._pause_s = min(2.0 ** (self._num_in_vain - 1), _LONGEST_PAUSE_S) if self._num_in_vain else 0.0
        when = f"in {self._pause_s:g} s" if self._pause_s else "now"
        log.warning(wrap(f"bucketddp: restart {self.count + 1} of {self._option.number} {when}. {failure.summary()}"))
        return None

    def _clean_up(self, excepthook: Any) -> None:
        """Clean up after the failed attempt in this process."""
        # Where all ranks have raised, none has left the process group.
        if torch.distributed.is_initialized():
            abort_device_groups()
            leave_process_group()
        # Otherwise each process group adds another prefix, "[rank0]: ", to the lines of an exception.
        if sys.excepthook.__module__ == torch.distributed.distributed_c10d.__name__:
            sys.excepthook = excepthook
        time.sleep(self._pause_s)
        if self._at_start is not None:
            self._at_start.restore()
        gc.collect()
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.empty_cache()
