"""Snapshots: copies of a checkpoint that later training steps cannot change.

Note: what is copied
    The checkpoint goes through pickle, as `torch.save` would put it, except that each storage stays behind and is
    replaced by a copy in host memory. So the copy saves to the same file: tensors that share a storage still share one,
    a view has all of its storage behind it, and what cannot be saved is refused at once.
"""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch
from torch import Tensor
from torch.storage import TypedStorage, UntypedStorage

# As `torch.save` does: an object may answer differently to another one.
_PROTOCOL = 2


class Snapshots:
    """Takes snapshots, one after the other, in the same memory: the next one overwrites the one before."""

    def __init__(self) -> None:
        self._buffers: list[Tensor] = []

    def take(self, checkpoint: Any) -> Any:
        """Return a copy of `checkpoint` with all tensors in host memory (Note: what is copied)."""
        without_storages = io.BytesIO()
        pickler = _Pickler(without_storages, protocol=_PROTOCOL)
        pickler.dump(checkpoint)
        # Not as inference tensors, which a save after a validation would make: those cannot be overwritten later.
        with torch.inference_mode(False), torch.no_grad():
            copies = self._copy(pickler.storages)
            without_storages.seek(0)
            return _Unpickler(without_storages, copies).load()

    def free(self) -> None:
        """Free the memory. Snapshots that were taken are invalid from now on."""
        self._buffers = []

    def _copy(self, storages: dict[int, UntypedStorage]) -> dict[int, UntypedStorage]:
        free: dict[tuple[int, bool], list[Tensor]] = {}
        for buffer in self._buffers:
            free.setdefault((buffer.nbytes, buffer.is_pinned()), []).append(buffer)
        # Buffers that this checkpoint has no use for are freed first.
        self._buffers = []
        sizes = {key: (storage.nbytes(), storage.device.type == "cuda") for key, storage in storages.items()}
        chosen = {key: free[size].pop() for key, size in sizes.items() if free.get(size)}
        free.clear()
        for key, storage in storages.items():
            nbytes, is_pinned = sizes[key]
            if key not in chosen:
                chosen[key] = torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=is_pinned)
            source = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
            chosen[key].copy_(source, non_blocking=is_pinned)
        for device in {storage.device for storage in storages.values() if storage.device.type == "cuda"}:
            torch.cuda.current_stream(device).synchronize()
        self._buffers = list(chosen.values())
        return {key: buffer.untyped_storage() for key, buffer in chosen.items()}


class _Pickler(pickle.Pickler):
    """Leaves storages out, and collects them; in the place of each goes its key, with its dtype if it has one."""

    def __init__(self, file: io.BytesIO, *, protocol: int) -> None:
        super().__init__(file, protocol=protocol)
        self.storages: dict[int, UntypedStorage] = {}

    def persistent_id(self, obj: Any) -> tuple[int, torch.dtype | None] | None:
        dtype = None
        if isinstance(obj, TypedStorage):
            obj, dtype = obj._untyped_storage, obj.dtype
        if not isinstance(obj, UntypedStorage):
            return None
        storage: UntypedStorage = obj
        key: int = storage._cdata  # by which `torch.save` knows a storage
        self.storages[key] = storage
        return key, dtype


class _Unpickler(pickle.Unpickler):
    """Puts other storages, by key, in the places of those that were left out."""

    def __init__(self, file: io.BytesIO, storages: dict[int, UntypedStorage]) -> None:
        super().__init__(file)
        self._storages = storages

    def persistent_load(self, pid: tuple[int, torch.dtype | None]) -> TypedStorage | UntypedStorage:
        storage, dtype = self._storages[pid[0]], pid[1]
        if dtype is None:
            return storage
        typed: TypedStorage = TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)  # type: ignore[no-untyped-call]
        return typed
