"""A snapshot of a checkpoint saves to the same file, and nothing that happens later changes it."""

from __future__ import annotations

import io
import zipfile
from typing import Any

import pytest
import torch
from torch import nn

from lightning_bucketddp.checkpoint.async_writer import snapshot_of


def saved(checkpoint: Any) -> tuple[list[bytes], str]:
    """What `torch.save` writes: each storage, and what comes of it when it is loaded again."""
    file = io.BytesIO()
    torch.save(checkpoint, file)
    with zipfile.ZipFile(file) as archive:
        storages = [archive.read(name) for name in archive.namelist() if "/data/" in name]
    file.seek(0)
    return storages, repr(torch.load(file, weights_only=False))


def checkpoint_of_many_kinds() -> dict[str, Any]:
    linear, storage = nn.Linear(3, 3), torch.arange(1000.0)
    linear.bias.requires_grad_(False)
    return {
        "state_dict": {"tied": linear.weight, "again": linear.weight, **linear.state_dict()},
        "optimizer_states": [{"state": {0: {"step": torch.tensor(3.0), "exp_avg": torch.rand(3, 3)}}}],
        "views": [storage[:10], storage[500:].view(50, 10).T],
        "not a leaf": linear.weight * 2,
        "dtypes": [torch.ones(3, dtype=dtype) for dtype in (torch.bfloat16, torch.bool, torch.int64, torch.complex64)],
        "conjugate": torch.ones(2, dtype=torch.complex64).conj(),
        "sparse": torch.eye(3).to_sparse(),
        "empty": torch.empty(0, 4),
        "channels_last": torch.rand(2, 3, 4, 4).to(memory_format=torch.channels_last),
        "storage": torch.ones(7).untyped_storage(),
        "callbacks": {"best": {"path": "a.ckpt", "scores": [1.0, 2.0]}},
    }


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")  # what a bare storage is loaded as
def test_a_snapshot_saves_to_the_same_file() -> None:
    checkpoint = checkpoint_of_many_kinds()
    assert saved(snapshot_of(checkpoint)) == saved(checkpoint)


def test_later_changes_do_not_reach_a_snapshot() -> None:
    weight, scores, options = torch.ones(3), [1], {"lr": 0.1}
    expected = saved({"weight": weight, "scores": scores, "options": options})
    snapshot = snapshot_of({"weight": weight, "scores": scores, "options": options})
    weight.zero_()
    scores.append(2)
    options["lr"] = 0.2
    assert saved(snapshot) == expected


def test_what_is_shared_is_copied_once() -> None:
    weight = torch.rand(100)
    snapshot = snapshot_of({"whole": weight, "half": weight[50:], "same": weight.view(10, 10)})
    assert len({tensor.untyped_storage().data_ptr() for tensor in snapshot.values()}) == 1


def test_what_cannot_be_saved_is_refused_at_once() -> None:
    with pytest.raises(Exception, match="lambda"):
        snapshot_of({"weight": torch.ones(3), "fn": lambda: 0})
