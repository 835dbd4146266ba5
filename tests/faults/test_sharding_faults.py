"""What is saved when a run with a sharded optimizer goes wrong: all of its state, or nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.faults.test_faults import end_of
from tests.support.scripts.faults import Fault

LOST = "is not saved: the other ranks cannot be reached any more, and each of them has a part of the optimizers' state"


# It has stepped its own shard of the weights.
PARTIAL = "is not saved, because a rank was lost while gradients or weights were being exchanged"


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (Fault("raise", "optimizer", rank=0), PARTIAL),
        (Fault("raise", "on_train_batch_end", rank=0), LOST),
        (Fault("SIGKILL", "on_train_batch_end"), LOST),
    ],
    ids=["rank_zero_raises_in_its_step", "rank_zero_raises", "another_dies"],
)
def test_a_checkpoint_without_the_shard_of_a_lost_rank_is_not_written(
    fault: Fault, reason: str, tmp_path: Path
) -> None:
    ended = end_of(tmp_path, fault=fault, shard_optimizer=True, save_every=2)
    assert not (tmp_path / "on_exception" / "on_exception.ckpt").exists()
    assert reason in " ".join(ended.output[0].split())
    # The one that was saved before is all of it.
    [saved] = (tmp_path / "saved").glob("*.ckpt")
    checkpoint = torch.load(saved, weights_only=True)
    assert checkpoint["global_step"] in (2, 4)
    state = checkpoint["optimizer_states"][0]["state"]
    shapes = [weights.shape for name, weights in checkpoint["state_dict"].items() if name.endswith(("weight", "bias"))]
    assert [state[i]["exp_avg"].shape for i in range(len(shapes))] == shapes


def test_ranks_that_fail_together_save_all_of_it(tmp_path: Path) -> None:
    end_of(tmp_path, fault=Fault("raise", rank=None), shard_optimizer=True)
    checkpoint = torch.load(tmp_path / "on_exception" / "on_exception.ckpt", weights_only=True)
    assert all(state["exp_avg"].any() for state in checkpoint["optimizer_states"][0]["state"].values())
    assert len(checkpoint["optimizer_states"][0]["state"]) == 6
