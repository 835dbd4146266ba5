"""Writing checkpoints on rank zero, at once or in the background; non-finite ones never replace finite ones.

Note: in the background
    A snapshot is taken while training waits; one thread writes it. One write is in flight at a time, so there is one
    snapshot: the next save waits for it. When a write fails, the next save, training step or end of training raises.
    Python waits for the thread before it ends.

    An old checkpoint is removed after the write that is in flight, and only if that succeeds. Otherwise a run that is
    killed between the two would have neither the old checkpoint nor the new one.

Note: never in the place of a finite one
    A checkpoint with non-finite weights is written to a directory of its own, beside the path that was asked for. In
    the same directory a program that resumes from the newest checkpoint would take it, under any name.
    `ModelCheckpoint` removes a checkpoint as soon as it has saved the one that replaces it: if that one is non-finite,
    only other non-finite ones are removed. `ModelCheckpoint(save_last="link")` links to the path that it has asked for,
    so that path becomes a link to the newest finite checkpoint.
"""

from __future__ import annotations

import io
import logging
import math
import os
import pickle
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.storage import TypedStorage, UntypedStorage

from lightning_bucketddp.checkpoint.checkpoint_io import CheckpointWriteError
from lightning_bucketddp.trainer_internals import forget_write_error
from lightning_bucketddp.wording import list_names, pluralize, wrap

if TYPE_CHECKING:
    from lightning.fabric.plugins.io.checkpoint_io import CheckpointIO

log = logging.getLogger(__name__)

Path = str | os.PathLike[str]


def snapshot_of(checkpoint: Any) -> Any:
    """Return a copy of `checkpoint` with all tensors in host memory, which saves to the same file.

    It is pickled as by `torch.save`, and each storage is replaced by a copy. So tensors still share storages, a view
    keeps all of its storage, and what cannot be saved is refused at once.
    """
    storages: dict[int, UntypedStorage] = {}

    class Pickler(pickle.Pickler):
        def persistent_id(self, obj: Any) -> tuple[int, torch.dtype | None] | None:
            dtype = None
            if isinstance(obj, TypedStorage):
                obj, dtype = obj._untyped_storage, obj.dtype
            if not isinstance(obj, UntypedStorage):
                return None
            key: int = obj._cdata  # identifies a storage in `torch.save`, too
            storages[key] = obj
            return key, dtype

    class Unpickler(pickle.Unpickler):
        def persistent_load(self, pid: tuple[int, torch.dtype | None]) -> Any:
            key, dtype = pid
            if dtype is None:
                return copies[key]
            return TypedStorage(wrap_storage=copies[key], dtype=dtype, _internal=True)  # type: ignore[no-untyped-call]

    without_storages = io.BytesIO()
    # The protocol is that of `torch.save`: objects may pickle differently by another one.
    Pickler(without_storages, protocol=2).dump(checkpoint)
    # Not as inference tensors, which a save after a validation would make.
    with torch.inference_mode(False), torch.no_grad():
        copies = {key: _copied(storage) for key, storage in storages.items()}
        for device in {one.device for one in storages.values() if one.device.type == "cuda"}:
            torch.cuda.current_stream(device).synchronize()
        without_storages.seek(0)
        return Unpickler(without_storages).load()


def _copied(storage: UntypedStorage) -> UntypedStorage:
    # Torch keeps pinned memory for the next snapshot.
    is_pinned = storage.device.type == "cuda"
    source = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
    copy = torch.empty(storage.nbytes(), dtype=torch.uint8, device="cpu", pin_memory=is_pinned)
    return copy.copy_(source, non_blocking=is_pinned).untyped_storage()


@dataclass(slots=True)
class CheckpointStats:
    """Seconds on rank zero; the other ranks wait for it.

    Attributes:
        num_saves: how many saves there were, also failed ones.
        snapshot_s: copying checkpoints that are written in the background.
        waiting_s: waiting until the previous one was written in the background.
        writing_s: writing them while training waited.
        background_s: writing them while training went on.
    """

    num_saves: int = 0
    snapshot_s: float = 0.0
    waiting_s: float = 0.0
    writing_s: float = 0.0
    background_s: float = 0.0

    @property
    def held_up_s(self) -> float:
        """Return how long training waited for checkpoints."""
        return self.snapshot_s + self.waiting_s + self.writing_s

    @contextmanager
    def timing(self, name: str) -> Iterator[None]:
        """Add the time spent inside to the attribute `name`, however it ends."""
        start = time.perf_counter()
        try:
            yield
        finally:
            setattr(self, name, getattr(self, name) + time.perf_counter() - start)

    def describe(self) -> str:
        """Return everything in one line."""
        held_up = f"{pluralize(self.num_saves, 'checkpoint')} held up training for {self.held_up_s:.3f} s"
        if not self.background_s:
            return held_up
        return (
            f"{held_up} (snapshot {self.snapshot_s:.3f} s, waiting {self.waiting_s:.3f} s, writing"
            f" {self.writing_s:.3f} s), wrote for {self.background_s:.3f} s in the background"
        )


class CheckpointWriter:
    """Writes the checkpoints of one strategy (Note: in the background)."""

    def __init__(self) -> None:
        self.stats = CheckpointStats()
        self._thread: ThreadPoolExecutor | None = None
        self._in_flight: Future[None] | None = None

    @property
    def has_failed(self) -> bool:
        """Return whether a write in the background has failed and its error was not raised yet."""
        return self._in_flight is not None and self._in_flight.done() and self._in_flight.exception() is not None

    def save(
        self, checkpoint: dict[str, Any], write: Callable[[dict[str, Any]], None], *, path: Path, in_background: bool
    ) -> None:
        """Have `write` write `checkpoint` to `path`; then raise the failure of the previous save, if there was one.

        In this order, because this may be the last chance to save.
        """
        self.stats.num_saves += 1
        with self.stats.timing("waiting_s"):
            failure = self._finish()
        if in_background:
            with self.stats.timing("snapshot_s"), CheckpointWriteError.raised_for(path):
                snapshot = snapshot_of(checkpoint)
            if self._thread is None:
                self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="bucketddp checkpoints")
            self._in_flight = self._thread.submit(self._write, snapshot, write, path)
        else:
            with self.stats.timing("waiting_s"):
                self._end_thread()  # which may have something to remove still
            with self.stats.timing("writing_s"):
                write(checkpoint)
        if failure is not None:
            raise failure

    def remove(self, remove: Callable[[], None], *, path: Path) -> None:
        """Have `remove` remove the checkpoint at `path`, after the write that is in flight."""
        if self._thread is None or self._in_flight is None:
            remove()
        else:
            self._thread.submit(self._remove, self._in_flight, remove, path)

    def raise_failure(self) -> None:
        """Raise the failure of a write in the background, without waiting for one that is in flight."""
        if self.has_failed and (failure := self._finish()) is not None:
            raise failure

    def drain(self) -> None:
        """Wait for the write in flight, end the thread, and raise its failure."""
        with self.stats.timing("waiting_s"):
            failure = self._finish()
            self._end_thread()
        if failure is not None:
            raise failure

    def _end_thread(self) -> None:
        """Wait for what the thread has to do, and end it."""
        if self._thread is not None:
            self._thread.shutdown()
            self._thread = None

    def _finish(self) -> BaseException | None:
        """Wait for the write in flight; return its failure."""
        failure = None if self._in_flight is None else self._in_flight.exception()
        self._in_flight = None
        return failure

    def _write(self, snapshot: Any, write: Callable[[dict[str, Any]], None], path: Path) -> None:
        """Write, in the thread."""
        try:
            with self.stats.timing("background_s"), CheckpointWriteError.raised_for(path):
                write(snapshot)
        except CheckpointWriteError as failure:
            # The program may end before the failure is raised.
            log.error(wrap(f"bucketddp: {failure}"))
            raise

    def _remove(self, write: Future[None], remove: Callable[[], None], path: Path) -> None:
        if write.exception() is not None:
            log.warning("bucketddp: checkpoint `%s` is kept, because the one that replaces it was not written.", path)
            return
        try:
            remove()
        except Exception:
            log.exception("bucketddp: could not remove checkpoint `%s`.", path)


@contextmanager
def raised_once(checkpoint_io: CheckpointIO) -> Iterator[None]:
    """Have `checkpoint_io` forget a failure in the background when it has raised it.

    `AsyncCheckpointIO` would raise it again, on rank zero only: in the trainer's teardown, which then stops half-way,
    and in the first save of the next fit.
    """
    try:
        yield
    except BaseException:
        with suppress(Exception):
            checkpoint_io.teardown()  # a second write may be in its queue, and fail for the same reason
        forget_write_error(checkpoint_io)
        raise


DIRECTORY = "nonfinite"
_STATISTICS = ("running_mean", "running_var")

# The worst value in each weight, by name: finite, infinite, or nan.
FINITE, INFINITE, NAN = range(3)
Severities = dict[str, int]


def severities_of(module: nn.Module) -> Severities:
    """Return the worst value of each weight of `module`: of parameters, and of running statistics.

    Other buffers may hold infinities on purpose. A nan in optimizer state is also in the weights after the same step.
    """
    return _severities(_weights_of(module))


def nonfinite_weights(state_dict: Mapping[str, Any], module: nn.Module, *, at_start: Severities) -> list[str]:
    """Return the names of weights of `module` that are worse in `state_dict` than they were `at_start`."""
    weights = _weights_of(module).keys()
    now = _severities({name: value for name, value in state_dict.items() if name in weights})
    return [name for name in state_dict if now.get(name, FINITE) > at_start.get(name, FINITE)]


class FiniteCheckpoints:
    """Knows the finite checkpoints, on rank zero, and places others (Note: never in the place of a finite one)."""

    def __init__(self) -> None:
        # In the order in which they were saved; True: training can resume from it.
        self._finite: dict[str, bool] = {}
        # By the path that was asked for: where a non-finite one was written instead.
        self._beside: dict[str, str] = {}
        self._links: set[str] = set()
        self._is_nonfinite = False
        self.has_warned = False  # since the last finite one

    def add(self, path: Path, *, can_resume: bool) -> None:
        """Remember that the newest finite checkpoint is at `path`."""
        self._finite.pop(str(path), None)
        self._beside.pop(str(path), None)
        self._finite[str(path)] = can_resume
        self._is_nonfinite = self.has_warned = False

    def place(
        self, path: Path, nonfinite: list[str], *, refuses: bool, can_resume: bool = True, step: int | None = None
    ) -> Path:
        """Return where to write a checkpoint that was meant for `path`, and has these `nonfinite` weights.

        Raises if it `refuses` those. One that `can_resume` has everything that training needs to go on.
        """
        if not nonfinite:
            self.add(path, can_resume=can_resume)
            return path
        self._is_nonfinite = True
        newest = self._newest()
        if refuses:
            raise CheckpointWriteError(
                f"Checkpoint `{path}` is not written, because weights are not finite: {list_names(nonfinite)}. Earlier"
                f" ones are untouched: resume from {'one of them' if newest is None else f'`{newest}`'}."
            )
        directory, name = os.path.split(str(path))
        beside = self._beside[str(path)] = os.path.join(directory, DIRECTORY, name)
        if not self.has_warned:
            self.has_warned = True
            by_step = "" if step is None else f" by step {step}"
            advice = "No finite one is known." if newest is None else f"Resume from `{newest}`."
            text = (
                f"bucketddp: weights have become infinite or nan{by_step}: {list_names(nonfinite)}. Checkpoint `{path}`"
                f" is written as `{beside}`, and further ones likewise; earlier ones are neither replaced nor removed."
            )
            warnings.warn(wrap(f"{text} {advice}"), stacklevel=2)
        return beside

    def link(self, path: Path) -> None:
        """Make `path`, of a checkpoint that was written beside it, a link to the newest finite one, if there is one."""
        if not os.path.lexists(path):
            newest = self._newest()
            target = self._beside[str(path)] if newest is None else newest
            os.symlink(os.path.relpath(target, os.path.dirname(path)), path)
            self._links.add(str(path))

    @contextmanager
    def known_unless_failing(self, path: Path) -> Iterator[None]:
        """Forget `path` if writing it, in the block, fails."""
        try:
            yield
        except BaseException:
            self._finite.pop(str(path), None)
            raise

    def path_to_remove(self, path: Path) -> str | None:
        """Return what to remove for the checkpoint that was to be saved to `path`; None: nothing."""
        if (beside := self._beside.pop(str(path), None)) is not None:
            if str(path) in self._links:
                self._links.remove(str(path))
                os.unlink(path)
            return beside
        if self._is_nonfinite:
            return None
        self._finite.pop(str(path), None)
        return str(path)

    def _newest(self) -> str | None:
        paths = list(self._finite)
        return next((path for path in reversed(paths) if self._finite[path]), paths[-1] if paths else None)


def _weights_of(module: nn.Module) -> dict[str, Tensor]:
    buffers = dict(module.named_buffers(remove_duplicate=False))
    statistics = {name: buffer for name, buffer in buffers.items() if name.rpartition(".")[2] in _STATISTICS}
    return {**dict(module.named_parameters(remove_duplicate=False)), **statistics}


def _severities(weights: Mapping[str, Any]) -> Severities:
    extremes: dict[str, Tensor] = {}
    for name, weight in weights.items():
        if not isinstance(weight, Tensor) or weight.layout != torch.strided or weight.numel() == 0:
            continue
        numbers = torch.view_as_real(weight.detach()) if weight.is_complex() else weight.detach()
        if numbers.is_floating_point():
            # Several times faster than `isfinite`; there is none for 8-bit floats.
            extremes[name] = torch.stack((numbers.float() if numbers.itemsize == 1 else numbers).aminmax()).double()
    if not extremes:
        return {}
    device = next(iter(extremes.values())).device
    pairs = torch.stack([pair.to(device) for pair in extremes.values()]).tolist()  # the host waits for the device once
    return {
        name: NAN if any(map(math.isnan, pair)) else INFINITE if any(map(math.isinf, pair)) else FINITE
        for name, pair in zip(extremes, pairs, strict=True)
    }
