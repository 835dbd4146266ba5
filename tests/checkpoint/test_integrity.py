"""A damaged checkpoint is refused before anything is loaded, with its name and the newest intact one beside it."""

from __future__ import annotations

import io
import os
import random
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec  # type: ignore[import-untyped]
import pytest
import torch

from lightning_bucketddp.bindings.trainer_lightning import BucketDDPCheckpointIO
from lightning_bucketddp.checkpoint.checkpoint_io import CheckpointReadError
from tests.support.cases import for_each
from tests.support.scripts import models
from tests.support.scripts.trainers import make_trainer

NONE_BESIDE = "No intact checkpoint is beside it. Copy it again from where it came from, or resume from another one."


def save(path: Path | str, **tensors: torch.Tensor) -> None:
    BucketDDPCheckpointIO().save_checkpoint({"state_dict": tensors}, path)


def load(path: Path | str) -> Any:
    return BucketDDPCheckpointIO().load_checkpoint(path)


def refusal_of(path: Path | str) -> str:
    """What is wrong with the checkpoint at `path`, which is refused."""
    with pytest.raises(CheckpointReadError) as raised:
        load(path)
    text = str(raised.value)
    assert text.startswith(f"Cannot read checkpoint `{path}`: ")
    return text.removeprefix(f"Cannot read checkpoint `{path}`: ")


def flip(path: Path, *positions: int) -> None:
    """Flip bits, counted from the start of the file."""
    content = bytearray(path.read_bytes())
    for position in positions:
        content[position // 8] ^= 1 << position % 8
    path.write_bytes(content)


def position_of(path: Path, record: str) -> int:
    """The first bit of what a record holds."""
    with zipfile.ZipFile(path) as archive, archive.open(record):
        entry = archive.getinfo(record)
        start = path.read_bytes()[entry.header_offset :]
        # The name and the extra field follow a header of 30 bytes, which has their sizes.
        sizes = int.from_bytes(start[26:28], "little") + int.from_bytes(start[28:30], "little")
        return 8 * (entry.header_offset + 30 + sizes)


# --- Truncated, empty, garbage


@for_each("where", ["{}/cut.ckpt", "file://{}/cut.ckpt", "memory://bucketddp{}/cut.ckpt"])
@for_each("keep", [1, 3, 4, 100, 0.5, -200, -22, -1])
def test_a_truncated_checkpoint_is_named(keep: float, where: str, tmp_path: Path) -> None:
    path = where.format(tmp_path)
    save(path, weights=torch.ones(10_000))
    with fsspec.open(path, "rb") as file:
        content = file.read()
    content = content[: int(keep * len(content)) if keep == 0.5 else int(keep)]
    with fsspec.open(path, "wb") as file:
        file.write(content)
    assert refusal_of(path) == (
        f"it is cut short or damaged ({len(content):,} bytes that are not a complete archive). {NONE_BESIDE}"
    )


@pytest.mark.parametrize(
    ("content", "damage"),
    [
        (b"", "it is empty (0 bytes)"),
        (
            b"version https://git-lfs.github.com/spec/v1\n",
            "it is not a checkpoint (43 bytes that start with b'version https://git-lfs.')",
        ),
        (bytes(5_000), f"it is not a checkpoint (5,000 bytes that start with {bytes(24)!r})"),
    ],
    ids=["empty", "text", "zeros"],
)
def test_a_file_that_is_no_checkpoint_is_named(content: bytes, damage: str, tmp_path: Path) -> None:
    path = tmp_path / "model.ckpt"
    path.write_bytes(content)
    assert refusal_of(path) == f"{damage}. {NONE_BESIDE}"


def test_a_path_that_is_not_a_file_is_no_damage(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"Checkpoint file not found: .*/absent.ckpt"):
        load(tmp_path / "absent.ckpt")
    with pytest.raises(IsADirectoryError):
        load(tmp_path)


# --- Flipped bits


@pytest.mark.parametrize("record", ["archive/data/3", "archive/data.pkl"])
def test_a_damaged_record_is_named(record: str, tmp_path: Path) -> None:
    path = tmp_path / "model.ckpt"
    save(path, **{f"layer{i}.weight": torch.full((1_000,), float(i)) for i in range(5)})
    flip(path, position_of(path, record) + 100)
    assert refusal_of(path) == f"its record `{record}` is damaged (the checksum is wrong). {NONE_BESIDE}"


@pytest.mark.long
def test_no_flipped_bit_changes_what_is_loaded(tmp_path: Path) -> None:
    path = tmp_path / "model.ckpt"
    trainer = make_trainer("auto", devices=1, max_steps=1)
    trainer.fit(models.Regression(), models.loader())
    trainer.save_checkpoint(path)
    intact, expected = path.read_bytes(), bytes_of(torch.load(path, weights_only=True))
    positions = list(positions_of_index(path))
    generator = random.Random(0)
    sample = [*generator.sample(positions, 1_000), *generator.sample(range(8 * len(intact)), 200)]
    num_refused = num_loaded = 0
    for position in sample:
        path.write_bytes(intact)
        flip(path, position)
        try:
            found = load(path)
        except CheckpointReadError as error:
            num_refused += str(error).startswith(f"Cannot read checkpoint `{path}`: ")
        else:  # a time stamp, or what fills the space between records
            assert bytes_of(found) == expected, position
            num_loaded += 1
    assert num_refused + num_loaded == len(sample)
    assert num_refused > 500


def bytes_of(checkpoint: Any) -> bytes:
    content = io.BytesIO()
    torch.save(checkpoint, content)
    return content.getvalue()


def positions_of_index(path: Path) -> Iterator[int]:
    """Yield the positions of the bits of the index, in the order of the file."""
    size = path.stat().st_size
    with zipfile.ZipFile(path) as archive:
        for entry in archive.infolist():
            yield from range(8 * entry.header_offset, 8 * (entry.header_offset + 30 + len(entry.filename)))
        yield from range(8 * archive.start_dir, 8 * size)


def test_a_tensor_that_the_index_calls_a_directory_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.ckpt"
    save(path, weight=torch.ones(1_000))
    with zipfile.ZipFile(path) as archive:
        entry = path.read_bytes().index(b"archive/data/0", archive.start_dir) - 46
    # Torch reads nothing then, reports nothing, and leaves in the tensor what was in memory.
    flip(path, 8 * (entry + 38) + 4)
    assert refusal_of(path).startswith("it is cut short or damaged")


@pytest.mark.skipif(not hasattr(torch.serialization, "set_crc32_options"), reason="this torch writes checksums always")
def test_a_checkpoint_without_checksums_is_loaded(tmp_path: Path) -> None:
    path = tmp_path / "model.ckpt"
    torch.serialization.set_crc32_options(False)
    try:
        save(path, weight=torch.ones(10))
    finally:
        torch.serialization.set_crc32_options(True)
    with zipfile.ZipFile(path) as archive:
        assert archive.getinfo("archive/data/0").CRC == 0
    assert load(path)["state_dict"]["weight"].sum() == 10


# --- Files from before there were archives


def test_an_old_file_is_loaded_or_named(tmp_path: Path) -> None:
    path = tmp_path / "model.ckpt"
    torch.save({"weight": torch.arange(1_000)}, path, _use_new_zipfile_serialization=False)
    assert load(path)["weight"].equal(torch.arange(1_000))
    intact = path.read_bytes()
    for size in (2, 10, 50, 200, len(intact) // 2, len(intact) - 1):
        path.write_bytes(intact[:size])
        damage, _, advice = refusal_of(path).rpartition("). ")
        assert damage.startswith("it is cut short or damaged (")
        assert advice == NONE_BESIDE


# --- The newest intact checkpoint beside a damaged one


@pytest.mark.parametrize("where", ["{}/run", "memory://bucketddp{}/run"])
def test_the_newest_intact_checkpoint_beside_is_named(where: str, tmp_path: Path) -> None:
    directory = where.format(tmp_path)
    names = ["oldest.ckpt", "older.ckpt", "damaged.ckpt", ".hidden.ckpt", "other.pt", "last.ckpt"]
    for time, name in enumerate(names):
        save(f"{directory}/{name}", weight=torch.ones(1_000))
        if where.startswith("{}"):
            os.utime(f"{directory}/{name}", (time, time))
    for name in ("damaged.ckpt", "last.ckpt"):
        with fsspec.open(f"{directory}/{name}", "rb") as file:
            content = file.read()
        with fsspec.open(f"{directory}/{name}", "wb") as file:
            file.write(content[:-100])
    if where.startswith("{}"):
        Path(directory, "directory.ckpt").mkdir()
    advice = refusal_of(f"{directory}/last.ckpt").partition("archive). ")[2]
    assert advice == f"The newest intact checkpoint beside it is `{directory}/older.ckpt`: resume from that one."
    assert load(f"{directory}/older.ckpt")["state_dict"]["weight"].sum() == 1_000


def test_a_link_to_the_damaged_file_is_not_advised(tmp_path: Path) -> None:
    save(tmp_path / "epoch=1.ckpt", weight=torch.ones(1_000))
    flip(tmp_path / "epoch=1.ckpt", position_of(tmp_path / "epoch=1.ckpt", "archive/data/0"))
    (tmp_path / "last.ckpt").symlink_to("epoch=1.ckpt")
    assert refusal_of(tmp_path / "last.ckpt").endswith(NONE_BESIDE)
