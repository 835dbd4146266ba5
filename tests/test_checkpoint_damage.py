"""A checkpoint that cannot be read: a damaged file is named, any other error stays what it was."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch

from lightning_bucketddp.checkpoint.errors import CheckpointReadError
from lightning_bucketddp.checkpoint.lightning_io import BucketDDPCheckpointIO


@pytest.mark.parametrize("where", ["{}/cut.ckpt", "memory://bucketddp/cut.ckpt"])
@pytest.mark.parametrize("keep", [1, 3, 4, 100, 0.5, -200, -22, -1])
def test_a_truncated_checkpoint_is_named(keep: float, where: str, tmp_path: Path) -> None:
    path = where.format(tmp_path)
    BucketDDPCheckpointIO().save_checkpoint({"weights": torch.ones(10_000)}, path)
    with fsspec.open(path, "rb") as file:
        content = file.read()
    content = content[: int(keep * len(content)) if keep == 0.5 else int(keep)]
    with fsspec.open(path, "wb") as file:
        file.write(content)
    with pytest.raises(CheckpointReadError) as raised:
        BucketDDPCheckpointIO().load_checkpoint(path)
    assert str(raised.value) == (
        f"Cannot read checkpoint `{path}`: it is cut short or damaged ({len(content):,} bytes that are not a complete"
        " archive). Copy it again from where it came from, or resume from another checkpoint."
    )


def test_a_hole_in_a_checkpoint_is_named(tmp_path: Path) -> None:
    path = tmp_path / "model.ckpt"
    BucketDDPCheckpointIO().save_checkpoint({"weights": torch.ones(10_000), "bias": torch.ones(10_000)}, path)
    with path.open("r+b") as file:
        file.seek(1_000)
        file.write(bytes(50_000))
    with pytest.raises(CheckpointReadError, match=f"`{path}`: it is cut short or damaged"):
        BucketDDPCheckpointIO().load_checkpoint(path)


@pytest.mark.parametrize(
    ("content", "damage"),
    [
        (b"", r"it is empty \(0 bytes\)"),
        (
            b"version https://git-lfs.github.com/spec/v1\n",
            r"not a checkpoint \(43 bytes that start with b'version http",
        ),
        (bytes(5_000), r"not a checkpoint \(5,000 bytes that start with b'\\x00\\x00"),
    ],
    ids=["empty", "text", "zeros"],
)
def test_a_file_that_is_no_checkpoint_is_named(content: bytes, damage: str, tmp_path: Path) -> None:
    path = tmp_path / "model.ckpt"
    path.write_bytes(content)
    with pytest.raises(CheckpointReadError, match=f"Cannot read checkpoint `{path}`: .*{damage}"):
        BucketDDPCheckpointIO().load_checkpoint(path)


class _Refused:
    def __reduce__(self) -> tuple[Any, ...]:
        return _refuse, ()


def _refuse() -> None:
    raise ValueError("refused")


@pytest.mark.parametrize("as_archive", [True, False])
def test_an_intact_file_with_refused_content_keeps_the_error_of_torch(as_archive: bool, tmp_path: Path) -> None:
    path = tmp_path / "model.ckpt"
    torch.save({"refused": _Refused()}, path, _use_new_zipfile_serialization=as_archive)
    # Whether torch unpickles it depends on Lightning's default for `weights_only`.
    with pytest.raises((pickle.UnpicklingError, ValueError), match="refuse"):
        BucketDDPCheckpointIO().load_checkpoint(path)


def test_a_path_that_is_not_a_file_keeps_the_error_of_lightning(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"Checkpoint file not found: .*/absent.ckpt"):
        BucketDDPCheckpointIO().load_checkpoint(tmp_path / "absent.ckpt")
    with pytest.raises(IsADirectoryError):
        BucketDDPCheckpointIO().load_checkpoint(tmp_path)
