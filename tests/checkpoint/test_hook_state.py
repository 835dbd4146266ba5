"""The state of a communication hook is part of the checkpoint."""

from __future__ import annotations

import warnings
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

from lightning_bucketddp.bindings.trainer_lightning import BucketDDPStrategy
from lightning_bucketddp.wording import wrap
from tests.support.ranks import on_ranks, run_on_ranks
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
) -> None:
    """Train until `max_epochs`, from the start or from a checkpoint, and save."""
    how = HOOKS[hook]()
    ours = BucketDDPStrategy(bucket_cap_mb=SMALL_BUCKETS_MB, **how)
    trainer = make_trainer(DDPWithHooksOnCPU(**how) if like_ddp else ours, max_epochs=max_epochs)
    trainer.fit(PlainSGD(), models.loader(), ckpt_path=resume_from)
    trainer.save_checkpoint(save_to)


@like_torchrun()
def resume_only(*, path: Path, max_epochs: int = 1, **options: Any) -> dict[str, Any]:
    """What a PowerSGD state holds after a fit that begins at the end of the checkpoint, and what was warned of."""
    state = power_sgd()
    strategy = BucketDDPStrategy(
        **{"bucket_cap_mb": SMALL_BUCKETS_MB, **options},
        ddp_comm_hook=powerSGD_hook.powerSGD_hook,
        ddp_comm_state=state,
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        make_trainer(strategy, max_epochs=max_epochs).fit(PlainSGD(), models.loader(), ckpt_path=path)
    return {
        "iter": state.iter,
        "random": state.rng.randint(1_000_000_000),
        "errors": {bucket: error.tolist() for bucket, error in state.error_dict.items()},
        "warned": [text for text in (str(one.message) for one in caught) if "bucketddp" in text],
    }


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
    """A user's own state with a `state_dict`."""

    def __init__(self, seed: int) -> None:
        self.entries: dict[str, Any] = {"seed": seed, "memory": torch.full((2,), float(seed))}

    def state_dict(self) -> dict[str, Any]:
        return self.entries

    def load_state_dict(self, entries: dict[str, Any]) -> None:
        self.entries = entries

    def values(self) -> list[Any]:
        return [self.entries["seed"], self.entries["memory"].tolist()]


def _train_with_state(state: Any, *, resume_from: Path | None = None) -> Trainer:
    def hook(_state: Any, bucket: Any) -> Any:
        return default_hooks.allreduce_hook(None, bucket)  # type: ignore[arg-type]  # the default group

    trainer = make_trainer(BucketDDPStrategy(ddp_comm_hook=hook, ddp_comm_state=state), max_epochs=1)
    trainer.fit(PlainSGD(), models.loader(), ckpt_path=resume_from)
    return trainer


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


@pytest.mark.parametrize("hook", ["power_sgd", pytest.param("post_local_sgd", marks=pytest.mark.long)])
def test_a_resumed_run_equals_an_uninterrupted_one(hook: str, tmp_path: Path) -> None:
    how: dict[str, Any] = {"hook": hook}
    run_on_ranks(fit_and_save, max_epochs=1, save_to=tmp_path / "1.ckpt", **how)
    run_on_ranks(fit_and_save, max_epochs=3, save_to=tmp_path / "3.ckpt", resume_from=tmp_path / "1.ckpt", **how)
    run_on_ranks(fit_and_save, max_epochs=3, save_to=tmp_path / "expected.ckpt", **how)
    assert state_in(tmp_path / "3.ckpt") == state_in(tmp_path / "expected.ckpt")


@pytest.fixture(scope="module")
def saved_by_two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("power_sgd") / "two_ranks.ckpt"
    run_on_ranks(fit_and_save, hook="power_sgd", max_epochs=1, save_to=path)
    return path


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


def test_ddp_takes_a_checkpoint_with_the_state_and_one_of_ddp_leaves_it_as_it_is(
    saved_by_two_ranks: Path, tmp_path: Path
) -> None:
    path = tmp_path / "ddp.ckpt"
    how: dict[str, Any] = {"save_to": path, "resume_from": saved_by_two_ranks}
    run_on_ranks(fit_and_save, hook="allreduce", like_ddp=True, max_epochs=2, **how)
    assert torch.load(path, weights_only=True)["global_step"] == 20
    assert [state["iter"] for state in run_on_ranks(resume_only, path=path, max_epochs=2)] == [0, 0]


@pytest.mark.parametrize("kind", ["object", "dict", "protocol"])
@on_ranks()
@like_torchrun()
def test_a_state_of_the_users_own_comes_back(kind: str, tmp_path: Path) -> None:
    """To each rank its own."""
    make: Any = StateWithProtocol if kind == "protocol" else OwnState
    saved, restored = make(5 + dist.get_rank()), make(0)
    _train_with_state(vars(saved) if kind == "dict" else saved).save_checkpoint(tmp_path / "own.ckpt")
    torch.load(tmp_path / "own.ckpt", weights_only=True)
    _train_with_state(vars(restored) if kind == "dict" else restored, resume_from=tmp_path / "own.ckpt")
    assert restored.values() == saved.values()
    if kind != "protocol":
        assert restored.group is dist.group.WORLD
        assert restored.function() == 0
        assert list(restored.recent) == [0]
