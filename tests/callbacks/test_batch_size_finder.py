"""`BatchSizeFinder` and `Tuner`: all ranks try the same sizes, and none is left waiting for one that has no memory."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from lightning_bucketddp.config import LocalSteps
from tests.support.programs import SCRIPTS, run
from tests.support.ranks import run_on_ranks
from tests.support.scripts.batch_sizes import SAMPLES_PER_RANK, Memory, find, refusal

# Of these, 32 samples are too many.
TRIED = [2, 4, 8, 16, 32]


def test_one_rank_without_memory_is_enough(tmp_path: Path) -> None:
    # What Lightning's own finder does in one process; and a fit in which nothing was looked for.
    options: dict[str, Any] = {"memory": Memory(rank=0), "mode": "binsearch", "is_ours": False}
    [alone] = run_on_ranks(find, world_size=1, directory=tmp_path, **options)
    fitted, _ = run_on_ranks(find, fixed=alone.size, directory=tmp_path)
    memory = Memory(where="backward")
    for found in run_on_ranks(find, memory=memory, mode="binsearch", directory=tmp_path):
        assert (found.size, found.sizes) == (alone.size, alone.sizes)
        # The trials have left nothing behind.
        assert found.weights == fitted.weights
        assert found.num_steps == found.num_backwards == fitted.num_steps
        assert found.trained_in_mode == {True}
        assert found.files == []


@pytest.mark.parametrize(
    "search",
    [
        {"memory": Memory(where="validation", step=1), "val_check_interval": 1},
        {"memory": Memory(where="bucket", step=1), "mode": "binsearch"},
    ],
    ids=["validation", "bucket"],
)
def test_the_others_wait_in_whatever_collective(search: dict[str, Any], tmp_path: Path) -> None:
    first, second = run_on_ranks(find, directory=tmp_path, **search)
    assert first.size == second.size
    assert first.size in ((22, 24) if "mode" in search else (16,))
    assert first.sizes == second.sizes
    assert first.sizes[:5] == TRIED
    assert first.weights == second.weights
    assert first.trained_in_mode == {True}


def test_evaluation_is_tried_too_by_the_tuner(tmp_path: Path) -> None:
    memory = Memory(where="validation")
    first, second = run_on_ranks(find, memory=memory, method="test", by="tuner", directory=tmp_path)
    assert first.size == second.size == 16
    assert first.sizes == second.sizes
    assert set(first.sizes) == set(TRIED)
    assert first.files == []


def test_no_weight_is_left_of_a_step_that_does_not_end(tmp_path: Path) -> None:
    # The search ends with a trial that fails, after one rank has told the weight of its batch.
    memory, options = Memory(where="before_backward"), {"gradient_weight": "batch_size"}
    fitted = run_on_ranks(find, fixed=16, options=options, directory=tmp_path)
    for found in run_on_ranks(find, memory=memory, options=options, directory=tmp_path):
        assert found.weights == fitted[0].weights


def test_the_search_ends_when_a_rank_has_no_more_samples(tmp_path: Path) -> None:
    for found in run_on_ranks(find, memory=Memory(largest=1000), directory=tmp_path):
        assert found.size == SAMPLES_PER_RANK
        # The last trial has succeeded, and does not count.
        assert found.num_steps == found.num_backwards == 1


def test_an_error_of_one_rank_ends_the_search_on_all(tmp_path: Path) -> None:
    first, second = run_on_ranks(refusal, memory=Memory(error=KeyError), directory=tmp_path)
    assert first == "RuntimeError: Rank 1 has failed in what all ranks were trying. Its own error says why."
    assert second == "KeyError: 'CUDA out of memory. Not really.'"


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (
            {"global_batch_size": 32},
            "`global_batch_size` sets the batch size of each rank, so there is none to look for. Leave it out in a run"
            " with `BatchSizeFinder`, and then give the `DataLoader` the size that was found.",
        ),
        (
            {"local_steps": LocalSteps(2, "rank")},
            "`BatchSizeFinder` needs all ranks in each step, and `local_steps` keeps them apart. Search without"
            " `local_steps`, and pass the batch size that was found.",
        ),
    ],
)
def test_options_that_leave_nothing_to_find_are_refused(options: dict[str, Any], expected: str, tmp_path: Path) -> None:
    assert run_on_ranks(refusal, options=options, directory=tmp_path) == [f"ValueError: {expected}"] * 2


@pytest.mark.parametrize("root", ["lightning.pytorch", "pytorch_lightning"])
def test_a_result_in_other_processes_cannot_be_returned(root: str) -> None:
    binding: Any = import_module(f"lightning_bucketddp.bindings.trainer_{root.partition('.')[0]}")
    lightning = import_module(root)
    assert issubclass(binding.BatchSizeFinder, lightning.callbacks.BatchSizeFinder)
    trainer = lightning.Trainer(
        accelerator="cpu", devices=2, strategy="bucketddp_spawn", logger=False, enable_checkpointing=False
    )
    with pytest.raises(ValueError, match="cannot return") as raised:
        binding.Tuner(trainer).scale_batch_size(lightning.LightningModule())
    assert str(raised.value) == (
        "`Tuner.scale_batch_size` cannot return what is found in other processes, which this strategy starts by spawn."
        " Use the callback `BatchSizeFinder`, or `strategy='bucketddp'`."
    )


def test_processes_that_the_trainer_starts_look_together(tmp_path: Path) -> None:
    finished = run(SCRIPTS / "batch_sizes.py", root="lightning.pytorch", directory=tmp_path)
    assert finished.returncode == 0, finished.output
    first, second = (finished.results[f"found.rank{rank}"] for rank in range(2))
    assert first["size"] == second["size"]
    assert first["sizes"] == second["sizes"]
    assert first["sizes"][:5] == TRIED
    assert 20 <= first["size"] <= 24
