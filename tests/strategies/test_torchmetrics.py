"""Metrics are those of one process that sees all the data."""

from __future__ import annotations

import pytest

from tests.metric_classes import GOOD, PACKAGES, find_usage, metric_classes, verdict
from tests.support.ranks import run_on_ranks
from tests.support.scripts.metrics import log_epochs


def test_epoch_values_are_those_of_one_process() -> None:
    [alone] = run_on_ranks(log_epochs, world_size=1)
    assert [epoch["train_samples"] for epoch in alone] == [48, 48]
    assert len({epoch["train_accuracy"] for epoch in alone}) == 2  # it learns, so that one stale value would show
    for rank in run_on_ranks(log_epochs, world_size=2):
        for epoch, expected in zip(rank, alone, strict=True):
            assert epoch == pytest.approx(expected)


FEW = ("classification.BinaryAUROC", "regression.PearsonCorrCoef", "retrieval.RetrievalMAP", "text.BLEUScore")


@pytest.mark.parametrize("names", [FEW, *(pytest.param((f"{name}.",), marks=pytest.mark.long) for name in PACKAGES)])
def test_every_class_gives_the_value_of_one_process_or_that_of_ddp(names: tuple[str, ...]) -> None:
    tried = 0
    for name, cls in metric_classes().items():
        usage = find_usage(cls) if name.startswith(names) else "not asked for"
        if not isinstance(usage, str):
            tried += 1
            assert verdict(cls, usage, world_size=2) in GOOD, name
    assert tried
