"""Training that changes while it runs ends with the weights that `ddp` ends with, on two processes."""

from __future__ import annotations

import pytest
import torch

from tests.support.ranks import run_on_ranks
from tests.support.scripts.changes import CHANGES, FINETUNINGS, finetune, reductions_by_epoch, train_with_change


@pytest.mark.parametrize("change", list(CHANGES))
@pytest.mark.sampled(3)
def test_training_equals_ddp(change: str) -> None:
    ours = run_on_ranks(train_with_change, change=change, like_ddp=False)
    ddp = run_on_ranks(train_with_change, change=change, like_ddp=True)
    assert ours == [ddp[0]] * 2


# With torch DDP the ranks drift apart: it never averages what is frozen when `fit` begins.
@pytest.mark.parametrize(
    ("finetuning", "planned"), [("backbone", [4, 6, 6, 6]), ("layer_by_layer", [2, 4, 6, 6])], ids=list(FINETUNINGS)
)
def test_what_is_unfrozen_later_trains_like_in_one_process(finetuning: str, planned: list[int]) -> None:
    ranks = run_on_ranks(finetune, finetuning=finetuning)
    [alone] = run_on_ranks(finetune, finetuning=finetuning, world_size=1)
    for rank in ranks:
        assert rank["planned"] == planned
        torch.testing.assert_close(rank["weights"], alone["weights"])
        torch.testing.assert_close(rank["weights"], ranks[0]["weights"], rtol=0, atol=0)


def test_an_accumulation_schedule_reduces_each_bucket_once_per_step() -> None:
    for rank in run_on_ranks(reductions_by_epoch, factors={0: 1, 1: 4, 2: 5}):
        assert rank["steps"] == [10, 3, 2]
        assert rank["reductions"] == rank["steps"]
