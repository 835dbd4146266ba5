"""What a batch changes before its optimizer's step: kept, so that a checkpoint of a run that fails is without it.

A forward changes buffers (statistics of BatchNorm, a queue) and draws random numbers. If the batch fails before the
optimizer's step, a resumed run sees it again, and would count it twice. So buffers that a checkpoint holds are copied
before the first forward after a step, and copied back when the run ends by an exception, before callbacks save. With
`auto_resume` a resumed run also repeats micro-batches whose gradients were not applied; otherwise Lightning counts them
as done, and their changes stay.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from lightning_bucketddp.part import RunPart
from lightning_bucketddp.strategies.rank_seeds import random_state, set_random_state

_LARGE_BYTES = 2**20


class UnfinishedBatch(RunPart):
    """Copies what changes before a step, and takes it back.

    Args:
        device: has random numbers that checkpoints hold; None: they hold none.
        counts: Lightning's counts of the batches of the epoch.
        repeats_micro_batches: whether a resumed run begins after the last step.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        device: torch.device | None,
        counts: Callable[[], Any],
        repeats_micro_batches: Callable[[], bool],
    ) -> None:
        self._buffers = [
            _Buffer(owner, key)
            for owner in module.modules()
            for key, _ in owner.named_buffers(recurse=False)
            # A scripted module does not say which of its buffers it saves.
            if key not in getattr(owner, "_non_persistent_buffers_set", ())
        ]
        self._device = device
        self._counts = counts
        self._repeats_micro_batches = repeats_micro_batches
        self._random_state: dict[str, Any] | None = None
        # Since the copies were made there was no step.
        self._has_copies = False
        # Of the epoch, with this one.
        self._num_batches = 0
        self._has_seen_step = False

    def begin_batch(self, batch_idx: int) -> None:
        self._num_batches = self._counts().ready
        is_after_micro_batch = self._has_copies and not self._repeats_micro_batches()
        if is_after_micro_batch or self._random_state is None:
            self._note_random_state()
        if is_after_micro_batch:
            self._has_copies = False

    @torch.no_grad()
    def before_forward(self) -> None:
        if self._has_copies:
            return
        by_kind: dict[tuple[torch.device, torch.dtype], tuple[list[Tensor], list[Tensor]]] = {}
        for kept in self._buffers:
            if kept.is_due():
                buffer, copy = kept.pair()
                copies, buffers = by_kind.setdefault((buffer.device, buffer.dtype), ([], []))
                copies.append(copy)
                buffers.append(buffer)
        for copies, buffers in by_kind.values():
            torch._foreach_copy_(copies, buffers)
        self._has_copies = True

    def complete_step(self) -> None:
        # What the batch has changed is to stay.
        self._has_copies = False
        self._has_seen_step = True
        self._note_random_state()

    def _note_random_state(self) -> None:
        # Before the next batch is loaded, which draws as well.
        if self._device is not None:
            self._random_state = random_state(self._device)

    def undo_if_repeated(self, *, is_automatic: bool) -> None:
        """Undo what a batch has changed that a resumed run will see again."""
        # With manual optimization the user may call optimizers that we do not see.
        if not self._has_copies or not (self._has_seen_step or is_automatic):
            return
        if self._repeats_micro_batches() or self._counts().completed < self._num_batches:
            self.undo()

    @torch.no_grad()
    def undo(self) -> None:
        """Give buffers and random numbers the state that they had before the batch."""
        for kept in self._buffers:
            kept.restore()
        if self._random_state is not None and self._device is not None:
            set_random_state(self._random_state, self._device)
        self._has_copies = False


class _Buffer:
    """A buffer, looked up at each use because modules replace their buffers, and its copy."""

    def __init__(self, owner: nn.Module, key: str) -> None:
        self._owner = owner
        self._key = key
        # As it was when `is_due` was asked last.
        self._seen: Tensor | None = None
        self._version = 0
        self._changes = False
        self._copy: Tensor | None = None

    def is_due(self) -> bool:
        """Return whether to copy it now: always, but for large buffers that training never changes (a mask, a table).

        `Tensor._version` shows neither changes through `Tensor.data` nor those of BatchNorm's statistics, so large ones
        are copied in the first batch, and later if that batch has changed them, or their version has.
        """
        before, version = self._seen, self._version
        buffer: Tensor | None = getattr(self._owner, self._key, None)
        self._seen = buffer
        if buffer is None:
            return False
        self._version = 0 if buffer.is_inference() else buffer._version
        if buffer is not before:
            self._copy = None  # it may have another dtype or device
        if before is None or self._changes:
            return True
        is_same = buffer is before and version == self._version
        if buffer.nbytes > _LARGE_BYTES and is_same and (self._copy is None or torch.equal(self._copy, buffer)):
            self._copy = None
            return False
        self._changes = True
        return True

    def pair(self) -> tuple[Tensor, Tensor]:
        """Return the buffer and room for its copy."""
        buffer, copy = self._seen, self._copy
        assert buffer is not None
        if copy is None or copy.shape != buffer.shape:
            self._copy = copy = torch.empty_like(buffer)
        return buffer, copy

    def restore(self) -> None:
        seen = self._seen
        if seen is None or self._copy is None:
            return
        is_there = getattr(self._owner, self._key, None) is seen
        if is_there:
            seen.copy_(self._copy)
        else:
            setattr(self._owner, self._key, self._copy.clone())
