"""`replica_checks` with Trainer and Fabric: what drifts is found, healed or told; what differs by design is not."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, Trainer, callbacks
from torch import Tensor, nn

from lightning_bucketddp.bindings.fabric_lightning import BucketDDPStrategy as FabricStrategy
from lightning_bucketddp.bindings.trainer_lightning import BucketDDPStrategy
from lightning_bucketddp.config import OnDivergence, ReplicaChecks
from tests.reducer import test_training_changes as changes
from tests.replicas.test_consistency import flip_bit
from tests.strategies.comparison import Program, train
from tests.support.cases import for_each
from tests.support.ranks import on_ranks, raised_by, run_on_ranks
from tests.support.scripts import hooks, models
from tests.support.scripts.fabrics import make_fabric
from tests.support.scripts.trainers import like_torchrun, lines_logged, make_trainer

HEAL = ReplicaChecks(on_divergence="heal")
FOLLOWS = "All ranks go on with the state of rank {}."
NOT_EQUAL = "The replicas are not equal"


class Adam(models.Regression):
    """Has state of every kind: tensors and counters per parameter, numbers per group, a buffer."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(3))

    def loss(self, batch: list[Tensor]) -> Tensor:
        return super().loss(batch) * self.scale.mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def _state_of_weight(trainer: Any) -> Any:
    return trainer.optimizers[0].state[trainer.model.layers[0].weight]


DRIFTS: dict[str, Callable[[Any], Any]] = {
    "weight": lambda trainer: flip_bit(trainer.model.layers[0].weight, 5),
    "moment": lambda trainer: flip_bit(_state_of_weight(trainer)["exp_avg"], 5),
    "counter": lambda trainer: _state_of_weight(trainer)["step"].add_(1),
    "learning_rate": lambda trainer: trainer.optimizers[0].param_groups[0].update(lr=0.02),
    "buffer": lambda trainer: flip_bit(trainer.model.scale, 5),
    "state": lambda trainer: _state_of_weight(trainer).pop("exp_avg"),
}


class Drifts(Callback):
    """Changes something on one rank after a batch."""

    def __init__(self, what: str, *, on_rank: int, after_batch: int) -> None:
        self._change, self._on_rank, self._after_batch = DRIFTS[what], on_rank, after_batch

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == self._after_batch and trainer.global_rank == self._on_rank:
            self._change(trainer)


@dataclass
class Outcome:
    """What a fit left on a rank."""

    error: str
    logged: list[str]
    weights: dict[str, Any]
    optimizer: Any


@like_torchrun()
def drift(
    *,
    of: str,
    on_rank: int = 1,
    after_batch: int = 1,
    max_steps: int = 7,
    saves: Callback | None = None,
    **options: Any,
) -> Outcome:
    """A fit of some steps in which something changes on one rank alone."""
    used = [Drifts(of, on_rank=on_rank, after_batch=after_batch), *([] if saves is None else [saves])]
    strategy = BucketDDPStrategy(**options)
    trainer = make_trainer(strategy, max_steps=max_steps, callbacks=used, enable_checkpointing=saves is not None)
    torch.manual_seed(0)
    module = Adam()
    with lines_logged("lightning_bucketddp.replicas.consistency") as lines:
        error = raised_by(lambda: trainer.fit(module, models.loader()))
    return Outcome(error, lines, dict(module.state_dict()), trainer.optimizers[0].state_dict())


def saves_every(steps: int, directory: Path) -> Callback:
    return callbacks.ModelCheckpoint(directory, every_n_train_steps=steps, save_top_k=-1)


class _LearningRateOfRank(Adam):
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01 * (1 + self.global_rank))


class _GroupsOfRank(Adam):
    def configure_optimizers(self) -> Any:
        first, *others = self.parameters()
        groups = [[first], others] if self.global_rank == 0 else [[first, *others]]
        return torch.optim.AdamW([{"params": params} for params in groups], lr=0.01)


class _Dropout(Adam):
    """With another rate in each step."""

    def __init__(self) -> None:
        super().__init__()
        self.layers.insert(1, nn.Dropout(0.5))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters())
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=40)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


class _Sharded(Adam):
    def configure_optimizers(self) -> Any:
        from torch.distributed.optim import ZeroRedundancyOptimizer  # slow to import

        return ZeroRedundancyOptimizer(self.parameters(), torch.optim.AdamW, lr=0.01)


class _Plateau(Adam):
    """A learning rate that follows the mean over the ranks, and a parameter of each rank's own, left out of all."""

    def __init__(self) -> None:
        super().__init__()
        self.local = nn.Parameter(torch.randn(1))
        self._ddp_params_and_buffers_to_ignore = ["local"]

    def training_step(self, batch: list[Tensor]) -> Tensor:
        loss = self.loss(batch) + self.local.square().sum() * (1 + self.global_rank)
        self.log("loss", loss, sync_dist=True, on_step=False, on_epoch=True)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=1.0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "loss"}}


def in_buffers_of_rank(**strategy: Any) -> Program:
    return Program(lambda: models.RankZeroBuffer(changes_in="training_step"), strategy=strategy)


# Trainings in which the replicas stay equal, as far as they should. tests/strategies/test_equals_ddp.py has others.
HEALTHY: dict[str, Callable[[], Program]] = {
    "batchnorm": lambda: Program(
        lambda: models.ConvBatchNorm().to(memory_format=torch.channels_last),
        lambda: {"precision": "bf16-mixed", "accumulate_grad_batches": 3, "gradient_clip_val": 0.01},
    ),
    "sync_batchnorm": lambda: Program(models.ConvBatchNorm, lambda: {"sync_batchnorm": True}),
    "mean_teacher": lambda: Program(changes.MeanTeacher),
    "dropout": lambda: Program(_Dropout, strategy={"rank_seeds": True}),
    "plateau": lambda: Program(_Plateau),
    "finetuning": lambda: Program(changes.Backbone, lambda: {"callbacks": changes.FINETUNINGS["backbone"]()}),
    "freezing": lambda: Program(Adam, lambda: {"callbacks": changes.FreezesByHand("before")}),
    "weight_averaging": lambda: Program(
        changes.NormRegression, lambda: {"callbacks": changes.CHANGES["stochastic_weight_averaging"].by()}
    ),
    "own_buffers": lambda: in_buffers_of_rank(broadcast_buffers=False),
    "local_buffers": in_buffers_of_rank,
    "sharded_optimizer": lambda: Program(_Sharded),
    "power_sgd": lambda: Program(Adam, strategy=hooks.HOOKS["power_sgd"]()),
    # Weights are each rank's own for some steps.
    "post_local_sgd": lambda: Program(hooks.PlainSGD, strategy=hooks.HOOKS["post_local_sgd"]()),
}
if "weight_averaging_with_statistics" in changes.CHANGES:
    # Buffers that a validation shared are not those of the batch after it.
    HEALTHY["swapped_averages"] = lambda: Program(
        changes.NormRegression, lambda: {"callbacks": changes.CHANGES["weight_averaging_with_statistics"].by()}
    )


@like_torchrun()
def num_collectives(*, every_n_steps: int | None, max_steps: int) -> dict[str, int]:
    """How often each collective is called in a fit."""
    names = ["all_reduce", "all_gather", "broadcast", "barrier", "all_gather_object", "broadcast_object_list"]
    trainer = make_trainer(BucketDDPStrategy(replica_checks=every_n_steps), max_steps=max_steps)
    with ExitStack() as counting:
        calls = {name: counting.enter_context(patch.object(dist, name, wraps=getattr(dist, name))) for name in names}
        trainer.fit(Adam(), models.loader())
    return {name: call.call_count for name, call in calls.items()}


def assert_equal(ranks: list[Outcome]) -> None:
    """Weights, buffers and optimizer state, bit by bit."""
    for rank in ranks[1:]:
        torch.testing.assert_close(rank.weights, ranks[0].weights, rtol=0, atol=0)
        torch.testing.assert_close(rank.optimizer, ranks[0].optimizer, rtol=0, atol=0)


def logged_on(ranks: list[Outcome]) -> list[str]:
    """The lines of rank 0; the other ranks have none."""
    assert not any(rank.logged for rank in ranks[1:])
    return ranks[0].logged


def test_the_error_itself_leaves_no_checkpoint(tmp_path: Path) -> None:
    ranks = run_on_ranks(drift, of="weight", saves=callbacks.OnExceptionCheckpoint(tmp_path), replica_checks=3)
    assert all(rank.error.startswith("ReplicaDivergedError: ") for rank in ranks)
    assert not list(tmp_path.rglob("*.ckpt"))


def test_drift_is_raised_on_every_rank_two_steps_after_a_check() -> None:
    ranks = run_on_ranks(drift, of="weight", replica_checks=3)
    for rank in ranks:
        assert rank.error.startswith(f"ReplicaDivergedError: {NOT_EQUAL} after 5 synchronised backwards: `layers.0.w")
        assert "or pass `replica_checks=ReplicaChecks(on_divergence='heal')` to the strategy: all ranks" in rank.error
    assert logged_on(ranks) == []


@for_each(
    ("of", "name"),
    [
        ("weight", "`layers.0.weight`"),
        ("moment", "`optimizer 0: exp_avg of layers.0.weight`"),
        ("counter", "`optimizer 0: step of layers.0.weight`"),
        ("learning_rate", "`optimizer 0: lr of group 0` is 0.01 on rank 0 but 0.02 on rank 1"),
    ],
)
def test_drift_is_healed(of: str, name: str) -> None:
    ranks = run_on_ranks(drift, of=of, replica_checks=ReplicaChecks(3, "heal"))
    assert [rank.error for rank in ranks] == ["", ""]
    [line] = logged_on(ranks)
    assert line.startswith(f"bucketddp: {NOT_EQUAL} after 5 synchronised backwards: `")
    assert name in line
    assert line.endswith(FOLLOWS.format(0))
    assert_equal(ranks)


def test_drift_that_is_only_logged_goes_on() -> None:
    ranks = run_on_ranks(drift, of="weight", replica_checks=ReplicaChecks(3, "log"), max_steps=9)
    assert [rank.error for rank in ranks] == ["", ""]
    after = [line.partition(":")[2].partition(":")[0] for line in logged_on(ranks)]
    assert after == [
        f" {NOT_EQUAL} after 5 synchronised backwards",
        f" {NOT_EQUAL} after 8 synchronised backwards",
        f" {NOT_EQUAL} at the end of training",
    ]
    assert not torch.equal(ranks[0].weights["layers.0.weight"], ranks[1].weights["layers.0.weight"])


def test_drift_after_the_last_check_is_found_at_the_end() -> None:
    for rank in run_on_ranks(drift, of="weight", after_batch=6):
        assert rank.error.startswith(f"ReplicaDivergedError: {NOT_EQUAL} at the end of training: `layers.0.weight`")


@for_each("every_n_steps", [None, 0])
def test_nothing_is_compared_without_a_checkpoint_if_the_user_says_so(every_n_steps: int | None) -> None:
    assert [rank.error for rank in run_on_ranks(drift, of="weight", replica_checks=every_n_steps)] == ["", ""]


def test_a_buffer_that_drifts_follows_rank_zero_from_the_next_step_on() -> None:
    ranks = run_on_ranks(drift, of="buffer", replica_checks=1, max_steps=5)
    assert [rank.error for rank in ranks] == ["", ""]
    assert logged_on(ranks) == []
    assert_equal(ranks)
    assert torch.equal(ranks[1].weights["scale"], torch.ones(3))


def test_checks_ride_in_the_notes_of_the_steps() -> None:
    """Two gathers more in all: before the first step and at the end."""
    [without, _] = run_on_ranks(num_collectives, every_n_steps=None, max_steps=9)
    for every_n_steps in (1, 3):
        [with_checks, _] = run_on_ranks(num_collectives, every_n_steps=every_n_steps, max_steps=9)
        assert with_checks == {**without, "all_gather": without["all_gather"] + 2}


@pytest.mark.parametrize(("on_divergence", "of"), [("raise", "weight"), ("heal", "moment"), ("log", "learning_rate")])
def test_diverged_replicas_are_not_written_silently(on_divergence: OnDivergence, of: str, tmp_path: Path) -> None:
    checks = ReplicaChecks(None, on_divergence)
    saves = saves_every(2, tmp_path)
    ranks = run_on_ranks(drift, of=of, after_batch=3, saves=saves, max_steps=4, replica_checks=checks)
    path = tmp_path / "epoch=0-step=4.ckpt"
    text = f"{NOT_EQUAL} before checkpoint `{path}` is written: `"
    if on_divergence == "raise":
        assert all(text in rank.error for rank in ranks)
        assert [file.name for file in tmp_path.iterdir()] == ["epoch=0-step=2.ckpt"]
        return
    assert [rank.error for rank in ranks] == ["", ""]
    [line] = logged_on(ranks)
    assert text in line
    assert path.exists()
    if on_divergence == "heal":
        assert_equal(ranks)


def test_a_checkpoint_holds_what_most_ranks_hold_and_a_run_without_drift(tmp_path: Path) -> None:
    """Rank 0 writes it, and is the one that is healed."""
    options: dict[str, Any] = {"world_size": 3, "max_steps": 3}
    healthy, *_ = run_on_ranks(drift, of="moment", on_rank=9, **options)
    for of in ("weight", "moment", "learning_rate"):
        saves = saves_every(3, tmp_path / of)
        ranks = run_on_ranks(drift, of=of, on_rank=0, after_batch=2, saves=saves, replica_checks=HEAL, **options)
        saved = torch.load(tmp_path / of / "epoch=0-step=3.ckpt", weights_only=False)
        torch.testing.assert_close(saved["state_dict"], healthy.weights, rtol=0, atol=0)
        torch.testing.assert_close(saved["optimizer_states"], [healthy.optimizer], rtol=0, atol=0)
        assert_equal([healthy, *ranks])


def test_what_exists_on_one_rank_only_cannot_be_healed(tmp_path: Path) -> None:
    for rank in run_on_ranks(drift, of="state", saves=saves_every(2, tmp_path), max_steps=2, replica_checks=HEAL):
        assert "`optimizer 0: exp_avg of layers.0.weight` exists on rank 0 but not on rank 1." in rank.error
        assert rank.error.endswith("so none can follow another: make their optimizers the same.")
    assert list(tmp_path.iterdir()) == []


@for_each(
    ("kind", "text"),
    [
        (_LearningRateOfRank, "`optimizer 0: lr of group 0` is 0.01 on rank 0 but 0.02 on rank 1. "),
        (_GroupsOfRank, "`optimizer 0: group of layers.0.bias` is 1 on rank 0 but 0 on rank 1; "),
        (Adam, "`layers.0.weight` differs between rank 0 and rank 1; "),
    ],
)
@on_ranks()
@like_torchrun()
def test_other_optimizers_or_weights_are_refused_before_the_first_step(kind: type[Adam], text: str) -> None:
    torch.manual_seed(dist.get_rank() if kind is Adam else 0)
    trainer = make_trainer(BucketDDPStrategy(init_sync=False), max_steps=3)
    module = kind()
    error = raised_by(lambda: trainer.fit(module, models.loader()))
    assert error.startswith(f"ReplicaDivergedError: {NOT_EQUAL} before the first step: {text}")
    assert trainer.global_step == 0


@on_ranks()
@like_torchrun()
def test_modules_are_compared_without_init_sync() -> None:
    """A validation comes first, which shares buffers: gloo ends a process that gets more than it has room for."""
    module = Adam()
    if dist.get_rank() == 0:
        module.scale = torch.ones(4)
    trainer = make_trainer(BucketDDPStrategy(init_sync=False), max_steps=3)
    error = raised_by(lambda: trainer.fit(module, models.loader(), models.loader()))
    assert error.startswith("ReplicaMismatchError: `scale` has shape [4] on rank 0 but [3] on rank 1.")
    assert trainer.global_step == 0


@pytest.mark.parametrize("training", HEALTHY)
@pytest.mark.sampled(4)
@on_ranks()
@like_torchrun()
def test_what_differs_by_design_is_no_drift(training: str, tmp_path: Path) -> None:
    """Train with a check in every step and checkpoints, and resume."""
    num_checked = 0
    with lines_logged("lightning_bucketddp.replicas.consistency") as lines:
        for max_epochs, ckpt_path in ((2, None), (3, tmp_path / "last.ckpt")):
            program = HEALTHY[training]()
            options = program.trainer()
            saves = callbacks.ModelCheckpoint(tmp_path, filename="last", enable_version_counter=False)
            options["callbacks"] = [saves, *([options["callbacks"]] if "callbacks" in options else [])]
            options |= {"max_epochs": max_epochs, "enable_checkpointing": True}
            strategy = BucketDDPStrategy(replica_checks=1, **program.strategy)
            program = replace(program, trainer=lambda: options, validates=True)  # noqa: B023
            train(program, strategy, ckpt_path=ckpt_path)
            comparison: Any = strategy._state.comparison
            num_checked += 0 if comparison is None else comparison.checks._begun_at
    assert lines == []
    assert (num_checked > 0) == (training != "post_local_sgd")


@pytest.mark.parametrize(
    ("on_divergence", "every_n_steps", "of"), [("raise", None, "moment"), ("heal", 2, "moment"), ("log", 2, "weight")]
)
@on_ranks()
@like_torchrun()
def test_fabric_compares_too(on_divergence: OnDivergence, every_n_steps: int | None, of: str, tmp_path: Path) -> None:
    """Four steps; then a weight or a moment changes on rank 1; six more steps, and a checkpoint."""
    fabric = make_fabric(FabricStrategy(replica_checks=ReplicaChecks(every_n_steps, on_divergence)))
    torch.manual_seed(0)
    bare: Any = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1))
    module, optimizer = fabric.setup(bare, torch.optim.AdamW(bare.parameters(), lr=0.01))
    path = tmp_path / "model.ckpt"

    def train_on(steps: range) -> None:
        for _ in steps:
            optimizer.zero_grad()
            fabric.backward(module(torch.randn(4, 4)).square().mean())
            optimizer.step()
        if steps.start > 0:
            fabric.save(path, {"model": module, "optimizer": optimizer, "step": steps.stop})

    train_on(range(4))
    if dist.get_rank() == 1:
        flip_bit(bare[0].weight if of == "weight" else optimizer.state[bare[0].weight]["exp_avg"], 5)
    with lines_logged("lightning_bucketddp.replicas.consistency") as lines:
        error = raised_by(lambda: train_on(range(4, 10)))
    fabric.barrier()  # rank 0 writes; the file is there when the others know that it is
    assert path.exists() == (on_divergence != "raise")
    assert bool(error) == (on_divergence == "raise")
    if dist.get_rank() == 1:
        assert lines == []
        return
    said = [error] if error else lines
    when = f"before checkpoint `{path}` is written" if every_n_steps is None else "after 6 synchronised"
    assert f"{NOT_EQUAL} {when}" in said[0]
    assert ("`optimizer 0: exp_avg of 0.weight`" if of == "moment" else "`0.weight`") in said[0]
    # Healed once, or found again by each check and before the checkpoint.
    assert len(said) == (3 if on_divergence == "log" else 1)


@on_ranks()
@like_torchrun()
def test_ranks_may_accumulate_differently_in_fabric() -> None:
    """Rank 1 accumulates over three micro-batches, rank 0 over one, with a check in every step."""
    fabric = make_fabric(FabricStrategy(replica_checks=1))
    bare = nn.Linear(4, 1)
    module, optimizer = fabric.setup(bare, torch.optim.AdamW(bare.parameters()))
    with lines_logged("lightning_bucketddp.replicas.consistency") as lines:
        for _ in range(6):
            optimizer.zero_grad()
            for micro_batch in reversed(range(1 + 2 * fabric.global_rank)):
                with fabric.no_backward_sync(module, enabled=micro_batch > 0):
                    fabric.backward(module(torch.randn(2, 4)).square().mean())
            optimizer.step()
    assert lines == []
