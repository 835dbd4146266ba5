"""Going on from the newest intact checkpoint of a run, when its program is started again.

Note: what a run is
    A run is identified by what is the same when its program is started again: the command (script and arguments), the
    class of the module, the names and shapes of its parameters, hyperparameters that were saved, and the
    `ModelCheckpoint`s with the directory and name that the user gave them, before Lightning adds the version of a
    logger; all under one `default_root_dir`. If a program fits several times with all of this alike, as in a
    cross-validation, the number of such fits that have ended before counts as well. The number of ranks does not.
"""

from __future__ import annotations

import csv
import hashlib
import inspect
import json
import math
import os
import sys
import warnings
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, fields, is_dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, ClassVar
from weakref import WeakKeyDictionary

import torch
from fsspec.core import url_to_fs  # type: ignore[import-untyped]

from lightning_bucketddp.checkpoint.run_record import Loggers, RunEnd, RunRecord, SavedCheckpoint
from lightning_bucketddp.comm.collectives import Collectives
from lightning_bucketddp.faults.failure import Failure
from lightning_bucketddp.processes import rank_zero_info, rank_zero_warn
from lightning_bucketddp.startup.store import StartError
from lightning_bucketddp.trainer_internals import (
    continue_logger,
    ends_by_search,
    has_ckpt_path,
    load_as_given,
    load_at_start,
)
from lightning_bucketddp.wording import list_some_ranks, pluralize

if TYPE_CHECKING:
    from lightning.pytorch import Trainer


class AutoResume:
    """Finds the checkpoints of a run again (Note: what a run is), if it `is_on`."""

    # In this program, by run and `default_root_dir`.
    num_fits_ended: ClassVar[Counter[tuple[str, str]]] = Counter()
    # Fits and evaluations that are over in this program, also those that have raised.
    num_launches: ClassVar[int] = 0
    # The directories of `ModelCheckpoint`s as the user gave them, which Lightning replaces.
    _directories: ClassVar[WeakKeyDictionary[Any, Any]] = WeakKeyDictionary()

    def __init__(self, *, is_on: bool) -> None:
        self._is_on = is_on
        self._name = ""
        self._is_path_given = False
        self._record: RunRecord | None = None
        self._is_over = False
        self.is_restart = False  # on all ranks, also in new processes
        self._has_checkpoint = False
        self.has_saved = False  # a checkpoint, since `Restarts` has last asked

    @contextmanager
    def launched(self, trainer: Any, function: Callable[..., Any], args: tuple[Any, ...]) -> Iterator[None]:
        """Count what is launched inside, and identify the run of a `fit`."""
        for callback in () if trainer is None else trainer.checkpoint_callbacks:
            if hasattr(callback, "dirpath"):  # which Lightning replaces in a validation, too
                self._directories.setdefault(callback, callback.dirpath)
        is_known = self._is_on and trainer is not None and trainer.state.fn == "fit"
        try:
            with self._identified(trainer, function, args) if is_known else nullcontext():
                yield
        finally:
            AutoResume.num_launches += 1

    @contextmanager
    def _identified(self, trainer: Any, function: Callable[..., Any], args: tuple[Any, ...]) -> Iterator[None]:
        """Identify the run of a `fit`, which is launched inside, by its arguments."""
        arguments = inspect.signature(function).bind(*args).arguments
        self._is_path_given = bool(arguments.get("ckpt_path")) or has_ckpt_path(trainer)
        of_run = self._describe_run(trainer, arguments), _absolute(trainer.default_root_dir)
        self._name = f"{of_run[0]}-{self.num_fits_ended[of_run]}"
        minimum = trainer.fit_loop.min_epochs, trainer.fit_loop.epoch_loop.min_steps
        try:
            yield
        finally:
            trainer.fit_loop.min_epochs, trainer.fit_loop.epoch_loop.min_steps = minimum
        self.num_fits_ended[of_run] += 1

    def _describe_run(self, trainer: Any, arguments: Mapping[str, Any]) -> str:
        module = arguments["model"]
        data = [arguments.get("datamodule"), arguments.get("train_dataloaders")]
        # In a notebook, the arguments name another connection file each time.
        script, *given = ("", "") if hasattr(sys, "ps1") else sys.argv or ("",)
        run = {
            "command": [os.path.realpath(script) if os.path.isfile(script) else script, *given],
            "module": f"{type(module).__module__}.{type(module).__qualname__}",
            "parameters": [
                (name, None if torch.nn.parameter.is_lazy(param) else list(param.shape))
                for name, param in module.named_parameters()
            ],
            "hyperparameters": [plain(getattr(it, "hparams_initial", None)) for it in (module, *data)],
            "checkpoints": [
                (it.state_key, str(self._directories[it]), str(it.filename))
                for it in trainer.checkpoint_callbacks
                if it in self._directories
            ],
        }
        return hashlib.sha256(json.dumps(run).encode()).hexdigest()[:16]

    def begin(self, trainer: Any, collectives: Collectives, *, is_first_of_host: bool) -> None:
        """Choose what a fit begins with, and have the Trainer load it. All ranks must call this."""
        if not self._is_on:
            return
        load_as_given(trainer)
        if trainer.state.fn != "fit":
            return
        self._record, self._is_over = None, False
        if finders := [callback for callback in trainer.callbacks if ends_by_search(callback) is not None]:
            if all(ends_by_search(finder) for finder in finders):
                return  # a tuner's fit, which ends before the first step that counts
            raise ValueError(
                f"`auto_resume=True` and the callback `{type(finders[0]).__name__}` do not go together: it searches"
                " again after resuming, and Lightning then forgets what it has loaded. Search with a `Tuner` first."
            )
        ranks = collectives.gather_json(
            [self.is_restart, self._is_path_given, _absolute(trainer.default_root_dir), self._name]
        )
        _, self._is_path_given, root, name = ranks[0]
        if any(is_restart for is_restart, *_ in ranks):  # a new process does not know of it
            self.begin_restart()
        self._record, self._has_checkpoint = RunRecord(root, name), False
        if self._is_path_given:
            rank_zero_info("bucketddp: `auto_resume`: `ckpt_path` was given: resuming from there.")
            return
        chosen = _agree(self._record, collectives, checks_files=is_first_of_host)
        self._has_checkpoint = chosen is not None
        if self.is_restart and chosen is None:
            where = f"under `{root}` is intact, to go on from. To begin with one, pass `ckpt_path`."
            raise StartError(f"`max_restarts`: no checkpoint of this run {where}")
        choice = _log_choice(self._record, chosen, root, trainer) if collectives.rank == 0 else None
        self._is_over, loggers = collectives.broadcast_json(choice)
        if self._is_over:
            # Also where the last checkpoint has fewer steps or epochs than the minimum of the fit.
            trainer.should_stop = True
            trainer.fit_loop.min_epochs = trainer.fit_loop.epoch_loop.min_steps = None
        if chosen is not None:
            _continue_loggers(trainer, loggers, writes=collectives.rank == 0)
        load_at_start(trainer, None if chosen is None else chosen.path)

    def begin_restart(self) -> None:
        """Have the next fit begin with a checkpoint of this run, also where the user gave another for the first."""
        self.is_restart, self._is_path_given = True, False

    def note_restart(self, failure: Failure, trainer: Trainer) -> None:
        """Note, on rank zero, that a restart follows `failure`."""
        if self._record is not None:
            self._record.add_restart(failure.summary(), step=trainer.global_step)

    def restarts(self) -> list[str]:
        """Return when the run went on after a failure, and after which."""
        noted = [] if self._record is None else self._record.restarts
        return [f"Restart {n}, {it['at']}, at step {it['step']}: {it['why']}" for n, it in enumerate(noted, start=1)]

    def save_start(self, trainer: Trainer) -> None:
        """Save what the run begins with, for a failure before the first checkpoint. All ranks must call this."""
        if self._record is not None and not self._has_checkpoint:
            trainer.save_checkpoint(self._record.start_path)

    def forget_path(self, trainer: Trainer) -> None:
        """Let `ModelCheckpoint` remove the checkpoint that was found, which is one of this run."""
        if self._record is not None and not self._is_path_given:
            trainer.ckpt_path = None

    def add(self, path: Any, checkpoint: Mapping[str, Any], trainer: Trainer) -> None:
        """Note that `checkpoint` was written to `path`."""
        is_hidden = os.path.basename(str(path)).startswith(".")
        if self._record is not None and "optimizer_states" in checkpoint and not is_hidden:
            loggers: Loggers | None = None
            if trainer.global_rank == 0:  # others, which may save after a failure, do not know the versions
                versions = [(type(logger).__name__, logger.version) for logger in trainer.loggers]
                loggers = [(kind, version if isinstance(version, int | str) else None) for kind, version in versions]
            step, epoch = checkpoint["global_step"], checkpoint["epoch"]
            self._record.add(_absolute(path), step=step, epoch=epoch, loggers=loggers, is_over=self._is_over)
            self.has_saved = True

    def remove(self, path: Any) -> None:
        """Note that the checkpoint at `path` was removed."""
        if self._record is not None:
            self._record.remove(_absolute(path))

    def end(self, trainer: Any) -> None:
        """Note that a fit has ended by itself."""
        self._is_over = True
        if self._record is not None:
            self._record.remove_start()
            seconds, may_last = _time(trainer)
            num_epochs, was_stopped = trainer.fit_loop.epoch_progress.current.processed, trainer.should_stop
            self._record.set_end(RunEnd(trainer.global_step, num_epochs, seconds, was_stopped and seconds < may_last))


def _log_choice(record: RunRecord, chosen: SavedCheckpoint | None, root: str, trainer: Trainer) -> tuple[bool, Loggers]:
    """Log where the fit begins; return whether the run is over, and which loggers it had."""
    if chosen is None:
        others = record.num_other_runs()
        advice = f" ({pluralize(others, 'other run')} left some)" if others else ""
        rank_zero_info(
            f"bucketddp: `auto_resume`: no checkpoint of this run under `{root}`{advice}: training begins at the start."
        )
        return False, ()
    end = record.end
    is_over = end is not None and _is_over(end, trainer)
    where = "."
    if end is not None and chosen.step == end.step:
        where = ", where the run had ended."
    elif end is not None and is_over:
        where = f". The run had ended at step {end.step}: nothing is trained."
    rank_zero_info(f"bucketddp: `auto_resume`: resuming from {chosen.describe()}{where}")
    return is_over, record.loggers


def _is_over(end: RunEnd, trainer: Trainer) -> bool:
    """Return whether a run that has ended at `end` has nothing left to do: its limits may have been raised."""
    limits = [(end.step, trainer.max_steps), (end.num_epochs, trainer.max_epochs), (end.seconds, _time(trainer)[1])]
    return end.was_stopped or any(limit not in (-1, None) and reached >= limit for reached, limit in limits)


def _time(trainer: Any) -> tuple[float, float]:
    """Return how many seconds a `Timer` has counted, and its limit."""
    timers = [callback for callback in trainer.callbacks if hasattr(callback, "time_remaining")]
    limits = [timer.time_elapsed() + left for timer in timers if (left := timer.time_remaining()) is not None]
    return max((timer.time_elapsed() for timer in timers), default=0.0), min(limits, default=math.inf)


def _continue_loggers(trainer: Any, saved: Loggers, *, writes: bool) -> None:
    """Have loggers continue their earlier versions, unless the user names others."""
    for logger, (kind, version) in zip(trainer.loggers, saved, strict=False):
        if type(logger).__name__ != kind or version is None or not continue_logger(logger, version):
            continue
        if writes and any(base.__name__ == "CSVLogger" for base in type(logger).__mro__):
            _reopen_csv(logger)
    for callback in trainer.callbacks:
        if hasattr(callback, "config_filename"):
            callback.overwrite = True  # `LightningCLI` raises if its configuration is in that directory already


def _reopen_csv(logger: Any) -> None:
    """Have a `CSVLogger` append to its file, which it would remove."""
    filesystem, path = url_to_fs(os.path.join(logger.log_dir, "metrics.csv"))
    if not filesystem.isfile(path):
        return
    filesystem.mv(path, f"{path}.kept")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about files in its directory
        writer = logger.experiment
    filesystem.mv(f"{path}.kept", path)
    with filesystem.open(path, "r", newline="") as file:
        writer.metrics_keys = next(csv.reader(file), [])  # none if the disk was full


def _agree(record: RunRecord, collectives: Collectives, *, checks_files: bool) -> SavedCheckpoint | None:
    """Return the newest checkpoint that is intact on every host, or None. All ranks must call this."""
    entries = [asdict(saved) for saved in record.newest_first()] if collectives.rank == 0 else None
    for candidate in [SavedCheckpoint(**entry) for entry in collectives.broadcast_json(entries)]:
        is_there = candidate.is_there()
        # One rank of each host reads the whole file. Rank zero also finds out why it does not have it.
        reads = checks_files and (is_there or collectives.rank == 0)
        found = collectives.gather_json([is_there, candidate.damage() if reads else None])
        without = [rank for rank, (is_on_rank, _) in enumerate(found) if not is_on_rank]
        problem = next((problem for _, problem in found if problem is not None), None)
        if problem is None and not without:
            return candidate
        if problem is None and 0 not in without:
            problem = f"it is not on {list_some_ranks(without)}"
        if problem is not None:
            rank_zero_warn(f"bucketddp: `auto_resume` leaves out checkpoint {candidate.describe()}: {problem}.")
    return None


def _absolute(path: Any) -> str:
    return str(path) if "://" in str(path) else os.path.abspath(path)


def plain(value: Any) -> Any:
    """Return `value` as data that JSON can hold; of objects that it does not know, only the class."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if type(value).__module__.startswith("omegaconf."):
        from omegaconf import OmegaConf  # unresolved: references may change, such as one to the time of day

        return plain(OmegaConf.to_container(value, resolve=False))
    if isinstance(value, Enum):
        return f"{type(value).__qualname__}.{value.name}"
    if isinstance(value, Namespace):
        value = vars(value)
    elif is_dataclass(value) and not isinstance(value, type):
        value = {field.name: getattr(value, field.name) for field in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, set | frozenset):
        return sorted(str(plain(item)) for item in value)
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    kind = value if isinstance(value, type) or hasattr(value, "__qualname__") else type(value)
    return f"{kind.__module__}.{kind.__qualname__}"
