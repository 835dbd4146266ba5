"""The state of a communication hook is part of the checkpoint."""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

from lightning_bucketddp.bindings.trainer_lightning import BucketDDPStrategy
from lightning_bucketddp.checkpoint.rank_state import gather_to_rank_zero
from lightning_bucketddp.comm.collectives import Collectives
from lightning_bucketddp.wording import wrap
from tests.support.ranks import device, on_ranks, run_on_ranks
from tests.support.scripts import models
from tests.support.scripts.hooks import HOOKS, DDPWithHooksOnCPU, PlainSGD, power_sgd
from tests.support.scripts.trainers import SMALL_BUCKETS_MB, like_torchrun, make_trainer


@like_torchrun()
def fit_and_save(
    *,
    hook: str,
    max_epochs: int,
    save_to: Path,
    resume_from: Path | None = None,
    like_ddp: bool = False,
    state_options: dict[str, Any] | None = None,
    **options: Any,
) -> list[str]:
    """Train until `max_epochs`, from the start or from a checkpoint, save, and tell what warnings there were."""
    how = HOOKS[hook]()
    if state_options is not None:
        how["ddp_comm_state"] = power_sgd(**state_options)
    strategy = (
        DDPWithHooksOnCPU(**how)
        if like_ddp
        else BucketDDPStrategy(**{"bucket_cap_mb": SMALL_BUCKETS_MB, **how, **options})
    )
    trainer = make_trainer(strategy, max_epochs=max_epochs)
    with _warnings() as warned:
        trainer.fit(PlainSGD(), models.loader(), ckpt_path=resume_from)
    trainer.save_checkpoint(save_to)
    return warned


@like_torchrun()
def resume_only(*, path: Path, state_options: dict[str, Any] | None = None, **options: Any) -> dict[str, Any]:
    """What a PowerSGD state holds after a fit that begins at the end of the checkpoint, and what was warned of."""
    state = power_sgd(**(state_options or {}))
    strategy = BucketDDPStrategy(
        **{"bucket_cap_mb": SMALL_BUCKETS_MB, **options},
        ddp_comm_hook=powerSGD_hook.powerSGD_hook,
        ddp_comm_state=state,
    )
    with _warnings() as warned:
        make_trainer(strategy, max_epochs=1).fit(PlainSGD(), models.loader(), ckpt_path=path)
    return {
        "iter": state.iter,
        "random": state.rng.randint(1_000_000_000),
        "errors": {bucket: error.tolist() for bucket, error in state.error_dict.items()},
        "warned": warned,
    }


@like_torchrun()
def save_weights_only(*, path: Path) -> None:
    strategy = BucketDDPStrategy(**HOOKS["power_sgd"]())
    trainer = make_trainer(strategy, max_epochs=1)
    trainer.fit(PlainSGD(), models.loader())
    trainer.save_checkpoint(path, weights_only=True)


class OwnState:
    """A user's own state with all kinds of attributes."""

    def __init__(self, seed: int) -> None:
        self.number = seed
        self.nested: dict[Any, Any] = {
            "tensors": [torch.full((2,), float(seed)), (torch.tensor(seed), None)],
            3: "text",
        }
        self.array = np.arange(seed, seed + 3, dtype=np.uint32)
        self.random = np.random.RandomState(seed)
        self.torch_random = torch.Generator().manual_seed(seed)
        # The run that resumes (seed 0) has a group, the one that saved had none.
        self.group = None if seed else dist.group.WORLD
        self.function = lambda: seed
        self.recent = deque([seed])

    def values(self) -> list[Any]:
        return [
            self.number,
            self.nested["tensors"][0].tolist(),
            self.nested["tensors"][1][0].item(),
            self.nested[3],
            (self.array.tolist(), str(self.array.dtype)),
            self.random.randint(1_000_000_000),
            torch.rand(1, generator=self.torch_random).item(),
        ]


class StateWithProtocol:
    """A user's own state that says by itself what is to be saved."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.loaded: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        return {"seed": self.seed, "memory": torch.full((2,), float(self.seed))}

    def load_state_dict(self, entries: dict[str, Any]) -> None:
        self.loaded = entries


def _train_with_state(state: Any, *, max_epochs: int, resume_from: Path | None) -> Trainer:
    def hook(_state: Any, bucket: Any) -> Any:
        return default_hooks.allreduce_hook(None, bucket)  # type: ignore[arg-type]  # the default group

    strategy = BucketDDPStrategy(ddp_comm_hook=hook, ddp_comm_state=state)
    trainer = make_trainer(strategy, max_epochs=max_epochs)
    trainer.fit(PlainSGD(), models.loader(), ckpt_path=resume_from)
    return trainer


@like_torchrun()
def save_own_state(*, kind: str, path: Path) -> list[Any]:
    """Save the user's own state, a different one on each rank; what it holds."""
    seed = 5 + dist.get_rank()
    if kind == "protocol":
        _train_with_state(StateWithProtocol(seed), max_epochs=1, resume_from=None).save_checkpoint(path)
        return [seed, [float(seed)] * 2]
    state = OwnState(seed)
    given = vars(state) if kind == "dict" else state
    _train_with_state(given, max_epochs=1, resume_from=None).save_checkpoint(path)
    return state.values()


@like_torchrun()
def resume_own_state(*, kind: str, path: Path) -> list[Any]:
    """What a fresh state of the user's holds after it was restored."""
    if kind == "protocol":
        restored = StateWithProtocol(0)
        _train_with_state(restored, max_epochs=1, resume_from=path)
        return [restored.loaded["seed"], restored.loaded["memory"].tolist()]
    state = OwnState(0)
    given = vars(state) if kind == "dict" else state
    _train_with_state(given, max_epochs=1, resume_from=path)
    assert state.group is dist.group.WORLD
    assert state.function() == 0
    assert list(state.recent) == [0]
    return state.values()


def tree_of(rank: int) -> dict[Any, Any]:
    """A tree that is different on every rank, in its shape too."""
    tensors = [
        torch.full((3, 2), rank + 0.5, dtype=dtype)
        for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.bool)
    ]
    return {
        "tensors": [*tensors, *[torch.ones(n) for n in range(rank + 2)]],
        "complex": (torch.tensor(1 + rank * 1j), None),
        rank: {"transposed": torch.arange(6.0).view(2, 3).t() + rank, "text": f"rank {rank}"},
        "large": torch.full((1000,), float(rank)),
    }


def gather_trees() -> dict[str, Any]:
    """What this rank gets, and the largest number of elements that ever went to all ranks at once."""
    tree = _on_device(tree_of(dist.get_rank()))
    with patch.object(dist, "all_gather", wraps=dist.all_gather) as all_gather:
        gathered = gather_to_rank_zero(tree, Collectives(device()))
    to_all = max(call.args[1].nbytes for call in all_gather.call_args_list)
    return {"gathered": gathered, "bytes_to_all": to_all}


def _on_device(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {key: _on_device(value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)([_on_device(value) for value in tree])
    return tree.to(device()) if isinstance(tree, Tensor) else tree


@contextmanager
def _warnings() -> Iterator[list[str]]:
    """Our warnings."""
    texts: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield texts
    texts += [str(warning.message) for warning in caught if "bucketddp" in str(warning.message)]


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
        text = wrap(
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


@on_ranks()
@like_torchrun()
def test_evaluation_leaves_the_state_as_it_is(saved_by_two_ranks: Path) -> None:
    state = power_sgd()
    strategy = BucketDDPStrategy(ddp_comm_hook=powerSGD_hook.powerSGD_hook, ddp_comm_state=state)
    make_trainer(strategy).validate(PlainSGD(), models.loader(), ckpt_path=saved_by_two_ranks, verbose=False)
    assert state.iter == 0


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
