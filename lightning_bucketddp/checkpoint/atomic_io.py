"""Lightning's default checkpoint I/O, made atomic and explicit about failures."""

from __future__ import annotations

import io
import os
from typing import TYPE_CHECKING, Any

import torch
from fsspec import AbstractFileSystem  # type: ignore[import-untyped]
from fsspec.core import url_to_fs  # type: ignore[import-untyped]
from fsspec.implementations.local import LocalFileSystem  # type: ignore[import-untyped]

from lightning_bucketddp.checkpoint.atomic_file import atomic_file
from lightning_bucketddp.checkpoint.errors import CheckpointWriteError
from lightning_bucketddp.checkpoint.safe_loading import read_checkpoint

if TYPE_CHECKING:
    from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO as _TorchCheckpointIO
else:
    # Each of Lightning's two import roots has a `TorchCheckpointIO` of its own: it comes after this class in the bases.
    _TorchCheckpointIO = object


class AtomicCheckpointIO(_TorchCheckpointIO):
    """A reader sees the old checkpoint or the new one; a failed write keeps the old one and names path and cause."""

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any | None = None
    ) -> None:
        if storage_options is not None:
            super().save_checkpoint(checkpoint, str(path), storage_options)  # which refuses them
            return
        with CheckpointWriteError.raised_for(path):
            filesystem, target = url_to_fs(str(path))
            if isinstance(filesystem, LocalFileSystem):
                with atomic_file(target) as file:
                    torch.save(checkpoint, file)
            else:
                _upload(checkpoint, filesystem, target)

    def load_checkpoint(
        self,
        path: str | os.PathLike[str],
        map_location: Any = lambda storage, _: storage,  # Lightning's default: as torch reads it, in host memory
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        checkpoint: dict[str, Any] = read_checkpoint(str(path), map_location=map_location, weights_only=weights_only)
        return checkpoint


def _upload(checkpoint: dict[str, Any], filesystem: AbstractFileSystem, target: str) -> None:
    # Not by Lightning, which drops a PermissionError here (2.6) and reports success.
    content = io.BytesIO()
    torch.save(checkpoint, content)
    filesystem.makedirs(os.path.dirname(target), exist_ok=True)
    with filesystem.transaction:
        filesystem.pipe_file(target, content.getvalue())
