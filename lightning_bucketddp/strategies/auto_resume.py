"""Going on from the newest intact checkpoint of a run, when its program is started again.

Note: what a run is
    A second start has nothing in common with the first but what the user has written down. So a run is known by the
    command (script and arguments), the class of the module, the names and shapes of its parameters, hyperparameters
    that were saved, and the `ModelCheckpoint`s with the directory and name that the user gave them, before Lightning
    adds the version of a logger; all under one `default_root_dir`. A program may fit several times with all of this
    alike, as in a cross-validation: then it is also the number of such fits that have ended before. The number of ranks
    does not count: who starts a run again may have fewer.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import sys
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, fields, is_dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, ClassVar
from weakref import WeakKeyDictionary

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_bucketddp.checkpoint.run_record import RunRecord, SavedCheckpoint
from lightning_bucketddp.comm.collectives import Collectives
from lightning_bucketddp.rank_zero import rank_zero_info
from lightning_bucketddp.wording import list_some_ranks, pluralize

if TYPE_CHECKING:
    from lightning.pytorch import Trainer


class NoAutoResume:
    """Training begins with the checkpoint that the user names."""

    def launched(
        self, trainer: Any, function: Callable[..., Any], args: tuple[Any, ...]
    ) -> AbstractContextManager[None]:
        """Take note of a call of a function of the `trainer`, which is made inside."""
        return nullcontext()

    def begin(self, trainer: Trainer, collectives: Collectives, *, is_first_of_host: bool) -> None:
        """Choose what a fit begins with, and have the Trainer load it. All ranks must call this."""

    def add(self, path: Any, checkpoint: Mapping[str, Any]) -> None:
        """Note that `checkpoint` was written to `path`."""

    def remove(self, path: Any) -> None:
        """Note that the checkpoint at `path` was removed."""

    def end(self, trainer: Trainer) -> None:
        """Note that a fit has ended by itself."""


class AutoResume(NoAutoResume):
    """Finds the checkpoints of a run again (Note: what a run is)."""

    # Of this program, by what they have in common.
    num_fits_ended: ClassVar[Counter[str]] = Counter()
    # As the user gave them: Lightning puts others in their place.
    _directories: ClassVar[WeakKeyDictionary[Any, Any]] = WeakKeyDictionary()

    def __init__(self) -> None:
        self._name = ""
        self._is_path_given = False
        self._record: RunRecord | None = None

    @contextmanager
    def launched(self, trainer: Any, function: Callable[..., Any], args: tuple[Any, ...]) -> Iterator[None]:
        if trainer is None or trainer.state.fn != "fit":
            yield
            return
        arguments = inspect.signature(function).bind(*args).arguments
        self._is_path_given = bool(arguments.get("ckpt_path")) or trainer._checkpoint_connector._user_managed
        of_run = self._describe_run(trainer, arguments)
        self._name = f"{of_run}-{self.num_fits_ended[of_run]}"
        yield
        self.num_fits_ended[of_run] += 1

    def _describe_run(self, trainer: Any, arguments: Mapping[str, Any]) -> str:
        module = arguments["model"]
        data = [arguments.get("datamodule"), arguments.get("train_dataloaders")]
        run = {
            "command": _command(),
            "module": f"{type(module).__module__}.{type(module).__qualname__}",
            "parameters": [(name, _shape(param)) for name, param in module.named_parameters()],
            "hyperparameters": [plain(getattr(it, "hparams_initial", None)) for it in (module, *data)],
            "checkpoints": [
                (it.state_key, str(self._directories.setdefault(it, it.dirpath)), str(it.filename))
                for it in trainer.checkpoint_callbacks
                if hasattr(it, "dirpath")
            ],
        }
        return hashlib.sha256(json.dumps(run).encode()).hexdigest()[:16]

    def begin(self, trainer: Trainer, collectives: Collectives, *, is_first_of_host: bool) -> None:
        connector: Any = trainer._checkpoint_connector
        vars(connector).pop("resume_start", None)
        if trainer.state.fn != "fit":
            return
        self._record = None
        if finders := [callback for callback in _callbacks(trainer) if hasattr(callback, "_early_exit")]:
            if all(finder._early_exit for finder in finders):
                return  # a tuner's fit, which ends before the first step that counts
            raise ValueError(
                f"`auto_resume=True` and the callback `{type(finders[0]).__name__}` do not go together: it searches"
                " again after resuming, and Lightning then forgets what it has loaded. Search with a `Tuner` first."
            )
        root, name = collectives.broadcast_json([_absolute(trainer.default_root_dir), self._name])
        self._record = RunRecord(root, name)
        if self._is_path_given:
            rank_zero_info("bucketddp: `auto_resume`: `ckpt_path` was given: resuming from there.")
            return
        chosen = _agree(self._record, collectives, checks_files=is_first_of_host)
        path = None if chosen is None else chosen.path
        is_over = self._tell(self._record, chosen, root) if collectives.rank == 0 else None
        if collectives.broadcast_json(is_over):
            trainer.should_stop = True  # as a callback has decided there
        resume_start = connector.resume_start

        def resume_from_chosen(checkpoint_path: Any = None, *args: Any, **kwargs: Any) -> None:
            del connector.resume_start
            resume_start(path, *args, **kwargs)

        connector.resume_start = resume_from_chosen

    def _tell(self, record: RunRecord, chosen: SavedCheckpoint | None, root: str) -> bool:
        """Say what is done; return whether the run has been stopped where it goes on now."""
        if chosen is None:
            others = record.num_other_runs()
            advice = f" ({pluralize(others, 'other run')} left some)" if others else ""
            rank_zero_info(
                f"bucketddp: `auto_resume`: no checkpoint of this run under `{root}`{advice}: training begins at the"
                " start."
            )
            return False
        is_end = chosen.step == record.ended_at
        where = ", where the run had ended" if is_end else ""
        rank_zero_info(f"bucketddp: `auto_resume`: resuming from {chosen.describe()}{where}.")
        return is_end and record.was_stopped

    def add(self, path: Any, checkpoint: Mapping[str, Any]) -> None:
        is_hidden = os.path.basename(str(path)).startswith(".")
        if self._record is not None and "optimizer_states" in checkpoint and not is_hidden:
            self._record.add(_absolute(path), step=checkpoint["global_step"], epoch=checkpoint["epoch"])

    def remove(self, path: Any) -> None:
        if self._record is not None:
            self._record.remove(_absolute(path))

    def end(self, trainer: Trainer) -> None:
        # A `Timer` stops a run that goes on when it has more time.
        has_timer = any(hasattr(callback, "time_remaining") for callback in _callbacks(trainer))
        if self._record is not None:
            self._record.end(step=trainer.global_step, was_stopped=trainer.should_stop and not has_timer)


def _agree(record: RunRecord, collectives: Collectives, *, checks_files: bool) -> SavedCheckpoint | None:
    """Return the newest checkpoint that is intact on every host, or None. All ranks must call this."""
    found = [asdict(saved) for saved in record.newest_first()] if collectives.rank == 0 else None
    candidates = [SavedCheckpoint(**entry) for entry in collectives.broadcast_json(found)]
    for candidate in candidates:
        is_there = candidate.is_there()
        # Reads all of it, once on each host. What is missing on rank zero may be damaged, or replaced.
        looks = checks_files and (is_there or collectives.rank == 0)
        told = collectives.gather_json([is_there, candidate.damage() if looks else None])
        without = [rank for rank, (is_on_rank, _) in enumerate(told) if not is_on_rank]
        problem = next((problem for _, problem in told if problem is not None), None)
        if problem is None and not without:
            return candidate
        if problem is None and 0 not in without:
            problem = f"it is not on {list_some_ranks(without)}"
        if problem is not None:
            rank_zero_warn(f"bucketddp: `auto_resume` leaves out checkpoint {candidate.describe()}: {problem}.")
    return None


def _callbacks(trainer: Trainer) -> list[Any]:
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    return callbacks


def _absolute(path: Any) -> str:
    return str(path) if "://" in str(path) else os.path.abspath(path)


def _command() -> list[str]:
    # Where a notebook's kernel was started is another file each time.
    script, *arguments = ("", "") if hasattr(sys, "ps1") else sys.argv or ("",)
    return [os.path.realpath(script) if os.path.isfile(script) else script, *arguments]


def _shape(param: torch.nn.Parameter) -> list[int] | None:
    return None if torch.nn.parameter.is_lazy(param) else list(param.shape)


def plain(value: Any) -> Any:
    """Return `value` as JSON has it; what an object of another kind is, but not what it holds."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if type(value).__module__.startswith("omegaconf."):
        from omegaconf import OmegaConf  # as the user has it; what it refers to may be the time of day

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
