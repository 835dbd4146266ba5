"""The state of a communication hook is part of the checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_bucketddp.checkpoint.rank_state import gather_to_rank_zero
from tests.support.ranks import run_on_ranks
from tests.support.scripts.hook_state import (
    evaluate,
    fit_and_save,
    gather_trees,
    resume_only,
    resume_own_state,
    save_own_state,
    save_weights_only,
    tree_of,
)


def state_in(path: Path) -> dict[str, Any]:
    checkpoint = torch.load(path, weights_only=True)
    return {name: as_lists(checkpoint.get(name)) for name in ("state_dict", "optimizer_states", "bucketddp")}


def as_lists(tree: Any) -> Any:
    """`tree` with its tensors in a form that `==` compares."""
    if isinstance(tree, dict):
        return {key: as_lists(value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [as_lists(value) for value in tree]
    return (str(tree.dtype), str(tree.device), tree.tolist()) if isinstance(tree, torch.Tensor) else tree


@pytest.mark.parametrize(
    ("hook", "state_options"),
    [("power_sgd", {}), ("power_sgd", {"warm_start": False}), ("post_local_sgd", None)],
    ids=["power_sgd", "power_sgd without warm start", "post_local_sgd"],
)
@pytest.mark.sampled(1)
def test_a_resumed_run_equals_an_uninterrupted_one(
    hook: str, state_options: dict[str, Any] | None, tmp_path: Path
) -> None:
    how: dict[str, Any] = {"hook": hook, "state_options": state_options}
    run_on_ranks(fit_and_save, max_epochs=1, save_to=tmp_path / "1.ckpt", **how)
    run_on_ranks(fit_and_save, max_epochs=3, save_to=tmp_path / "3.ckpt", resume_from=tmp_path / "1.ckpt", **how)
    run_on_ranks(fit_and_save, max_epochs=3, save_to=tmp_path / "expected.ckpt", **how)
    assert state_in(tmp_path / "3.ckpt") == state_in(tmp_path / "expected.ckpt")


@pytest.fixture(scope="module")
def saved_by_two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("power_sgd") / "two_ranks.ckpt"
    run_on_ranks(fit_and_save, hook="power_sgd", max_epochs=1, save_to=path)
    return path


def test_every_rank_gets_its_own_errors_back(saved_by_two_ranks: Path) -> None:
    saved = state_in(saved_by_two_ranks)["bucketddp"]["comm_hook_state"]["by_rank"]
    ranks = run_on_ranks(resume_only, path=saved_by_two_ranks)
    for rank, state in enumerate(ranks):
        assert state["errors"] == {bucket: error[-1] for bucket, error in saved[rank]["error_dict"].items()}
        assert state["warned"] == []
    assert ranks[0]["errors"] != ranks[1]["errors"]
    assert len(ranks[0]["errors"]) > 1  # buckets


REASON = {
    "ranks": "it was saved by 2 ranks and 1 rank resume",
    "bucket_cap_mb": "the trainable parameters or `bucket_cap_mb` are not those it was saved with",
}


@pytest.mark.parametrize("change", ["ranks", "bucket_cap_mb"])
def test_another_layout_keeps_what_the_ranks_have_in_common(change: str, saved_by_two_ranks: Path) -> None:
    as_saved = run_on_ranks(resume_only, path=saved_by_two_ranks)[0]
    how = {"world_size": 1} if change == "ranks" else {"bucket_cap_mb": 1.0}
    for rank, state in enumerate(run_on_ranks(resume_only, path=saved_by_two_ranks, **how)):
        assert (state["iter"], state["random"]) == (as_saved["iter"], as_saved["random"])
        assert state["errors"] == {}
        text = (
            "bucketddp: the tensors in the communication hook's state (`PowerSGDState`) are not restored, because"
            f" {REASON[change]}. What all ranks had in common is restored: the hook starts again with empty memory at"
            " the iteration that was saved."
        )
        assert state["warned"] == ([text] if rank == 0 else [])


def test_training_goes_on_with_more_ranks(tmp_path: Path) -> None:
    run_on_ranks(fit_and_save, hook="power_sgd", max_epochs=1, save_to=tmp_path / "1.ckpt", world_size=1)
    ranks = run_on_ranks(
        fit_and_save, hook="power_sgd", max_epochs=2, save_to=tmp_path / "2.ckpt", resume_from=tmp_path / "1.ckpt"
    )
    assert [len(warned) for warned in ranks] == [1, 0]
    by_rank = state_in(tmp_path / "2.ckpt")["bucketddp"]["comm_hook_state"]["by_rank"]
    assert [state["iter"] for state in by_rank] == [20 + 10, 20 + 10]


def test_a_checkpoint_of_ddp_leaves_the_state_as_it_is(tmp_path: Path) -> None:
    run_on_ranks(fit_and_save, hook="power_sgd", like_ddp=True, max_epochs=1, save_to=tmp_path / "ddp.ckpt")
    assert [state["iter"] for state in run_on_ranks(resume_only, path=tmp_path / "ddp.ckpt")] == [0, 0]


def test_ddp_takes_a_checkpoint_with_the_state(saved_by_two_ranks: Path, tmp_path: Path) -> None:
    run_on_ranks(
        fit_and_save,
        hook="allreduce",
        like_ddp=True,
        max_epochs=2,
        save_to=tmp_path / "ddp.ckpt",
        resume_from=saved_by_two_ranks,
    )
    assert torch.load(tmp_path / "ddp.ckpt", weights_only=True)["global_step"] == 20


def test_evaluation_leaves_the_state_as_it_is(saved_by_two_ranks: Path) -> None:
    assert run_on_ranks(evaluate, path=saved_by_two_ranks) == [0, 0]


def test_a_checkpoint_of_the_weights_has_no_state(tmp_path: Path) -> None:
    run_on_ranks(save_weights_only, path=tmp_path / "weights.ckpt")
    assert "bucketddp" not in torch.load(tmp_path / "weights.ckpt", weights_only=True)


@pytest.mark.parametrize("kind", ["object", "dict", "protocol"])
def test_a_state_of_the_users_own_comes_back(kind: str, tmp_path: Path) -> None:
    saved = run_on_ranks(save_own_state, kind=kind, path=tmp_path / "own.ckpt")
    torch.load(tmp_path / "own.ckpt", weights_only=True)
    assert run_on_ranks(resume_own_state, kind=kind, path=tmp_path / "own.ckpt") == saved
    assert saved[0] != saved[1]


def test_trees_are_gathered_on_rank_zero_only() -> None:
    rank_zero, rank_one = run_on_ranks(gather_trees)
    assert rank_one["gathered"] is None
    assert as_lists(rank_zero["gathered"]) == as_lists([tree_of(rank) for rank in range(2)])
    # Beside the tensors only an outline travels, and that goes to everybody.
    assert rank_zero["bytes_to_all"] < tree_of(0)["large"].nbytes


def test_what_is_gathered_does_not_change_when_training_goes_on() -> None:
    tensor = torch.zeros(2)
    (gathered,) = gather_to_rank_zero([tensor], None) or []
    tensor += 1
    assert gathered[0].tolist() == [0, 0]
