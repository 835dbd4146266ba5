"""`auto_resume`: a program that is started again goes on by itself, from its own newest checkpoint that is intact."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.ranks import run_on_ranks
from tests.support.scripts.resuming import NUM_EPOCHS, Interruption, Outcome, Setting, interrupt_and_resume, start

def joined(starts: list[Outcome]) -> dict[int, list[int]]:
    """The samples of all starts by epoch, in order."""
    seen: dict[int, list[int]] = {}
    for one in starts:
        for epoch, samples in one.seen.items():
            seen.setdefault(epoch, []).extend(samples)
    return seen


# Batches of 2 samples on 2 ranks: 7 in each epoch.
@pytest.mark.parametrize(
    ("setting", "interruptions"),
    [
        pytest.param(Setting(), [Interruption(9), Interruption(9, "on_train_batch_end")], id="shuffled"),
        pytest.param(Setting(saves=False, accumulate=2), [Interruption(1), Interruption(10)], id="while accumulating"),
        pytest.param(
            Setting(saves=False),
            [Interruption(2, "optimizer_step"), Interruption(9, "on_train_batch_end")],
            id="after the step",
        ),
        pytest.param(
            Setting(saves=False),
            [Interruption(6), Interruption(13, "optimizer_step"), Interruption(14)],
            id="last batches",
        ),
        pytest.param(Setting("workers", plans=True), [Interruption(9), Interruption(14)], id="workers"),
        pytest.param(Setting("single"), [Interruption(20)], id="without batches"),
        pytest.param(Setting("batch sampler"), [Interruption(9)], id="batch sampler"),
        pytest.param(Setting("two"), [Interruption(6), Interruption(12)], id="two loaders"),
        pytest.param(Setting("two, no cycle"), [Interruption(13)], id="two loaders that end"),
        pytest.param(Setting("own sampler"), [Interruption(20)], id="random sampler"),
        pytest.param(Setting("in order", num_samples=27), [Interruption(9)], id="padded"),
        pytest.param(Setting(num_samples=26, global_batch_size=8), [Interruption(5)], id="global batch"),
    ],
)
def test_each_sample_is_trained_on_once_in_each_epoch(
    setting: Setting, interruptions: list[Interruption], tmp_path: Path
) -> None:
    ranks = run_on_ranks(
        interrupt_and_resume, directory=tmp_path, setting=setting, interruptions=interruptions, timeout_s=120
    )
    for undisturbed, starts in ranks:
        assert len(undisturbed.seen) == NUM_EPOCHS
        assert [one.begun_at for one in starts][1:] != [0] * len(interruptions)
        assert joined(starts) == undisturbed.seen
        for ours, theirs in zip(starts[-1].weights, undisturbed.weights, strict=True):
            assert torch.equal(ours, theirs)
