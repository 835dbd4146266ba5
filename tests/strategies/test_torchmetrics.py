"""Logged metrics are those of one process that sees all the data."""

from __future__ import annotations

import pytest

from tests.support.ranks import run_on_ranks
from tests.support.scripts.metrics import log_epochs


def test_epoch_values_are_those_of_one_process() -> None:
    [alone] = run_on_ranks(log_epochs, world_size=1)
    assert [epoch["train_samples"] for epoch in alone] == [48, 48]
    assert len({epoch["train_accuracy"] for epoch in alone}) == 2  # it learns, so that one stale value would show
    for rank in run_on_ranks(log_epochs, world_size=2):
        for epoch, expected in zip(rank, alone, strict=True):
            assert epoch == pytest.approx(expected)
