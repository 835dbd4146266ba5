"""A module that is copied, pickled or saved in the middle of training: the copy is free, and nothing is spoilt."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.ranks import run_on_ranks
from tests.support.scripts.copies import WAYS, sizes, train_with_copies

NUM_BATCHES = 10


@pytest.mark.parametrize("hook", ["on_after_backward", "on_train_batch_end"])
@pytest.mark.parametrize("way", list(WAYS))
def test_a_copy_is_independent(way: str, hook: str) -> None:
    ranks = run_on_ranks(train_with_copies, strategy="bucketddp", way=way, hook=hook)
    [expected, _] = run_on_ranks(train_with_copies, strategy="ddp", way=None)
    for rank in ranks:
        assert rank["copies"] == NUM_BATCHES
        assert rank["collectives_by_copies"] == 0
        assert rank["weights"] == expected["weights"]


@pytest.mark.parametrize("way", list(WAYS))
def test_a_module_with_synchronised_layers_can_be_copied(way: str) -> None:
    ranks = run_on_ranks(
        train_with_copies, strategy="bucketddp", way=way, hook="on_after_backward", sync_batchnorm=True
    )
    [expected, _] = run_on_ranks(train_with_copies, strategy="bucketddp", way=None, sync_batchnorm=True)
    for rank in ranks:
        assert rank["collectives_by_copies"] == 0
        assert rank["weights"] == expected["weights"]


def test_what_is_saved_is_as_small_as_with_ddp(tmp_path: Path) -> None:
    ours = run_on_ranks(sizes, strategy="bucketddp", directory=tmp_path)
    assert ours == run_on_ranks(sizes, strategy="ddp", directory=tmp_path)
