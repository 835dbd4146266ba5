"""Training through Lightning with `shard_optimizer` gives the weights and the checkpoints of a run without it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn

from lightning_bucketddp.bindings.fabric_lightning import BucketDDPStrategy as FabricStrategy
from lightning_bucketddp.bindings.trainer_lightning import BucketDDPStrategy
from lightning_bucketddp.sharding.shards import ShardOption, Shards
from tests.reducer import test_batch_weighting as participation
from tests.reducer import test_training_changes as changes
from tests.strategies import test_nonfinite_trainer as nonfinite
from tests.strategies import test_optimization_styles as styles
from tests.strategies import test_trainer as trainer_tests
from tests.strategies.test_precision import Squares, option
from tests.support.cases import for_each
from tests.support.jobs.sharding import assert_equal_on_ranks, foreign_shards_spoiled, numbers_of
from tests.support.ranks import on_ranks, raised_by, run_on_ranks
from tests.support.scripts import fabrics, models
from tests.support.scripts.checkpoints import state_in
from tests.support.scripts.fabrics import LOOPS
from tests.support.scripts.trainers import SMALL_BUCKETS_MB, like_torchrun, lines_logged, make_trainer

HIDDEN = 24


def widen(module: LightningModule) -> LightningModule:
    """Give a `Regression` layers of which no rank has all, even in a bucket of their own."""
    module.layers = nn.Sequential(nn.Linear(models.WIDTH, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, 1))
    return module


class Wide(models.Regression):
    def __init__(self) -> None:
        super().__init__()
        widen(self)


class Groups(Wide):
    """Biases are not decayed, layers have rates of their own, and schedulers change rates and momenta."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(
            [
                {"params": [self.layers[0].weight], "lr": 0.05, "weight_decay": 0.1},
                {"params": [self.layers[2].weight], "lr": 0.01, "betas": (0.5, 0.9)},
                {"params": [self.layers[0].bias, self.layers[2].bias], "lr": 0.02, "weight_decay": 0.0},
            ]
        )
        each_step = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=[0.1, 0.05, 0.02], total_steps=25)
        each_epoch = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
        return [optimizer], [{"scheduler": each_step, "interval": "step"}, each_epoch]


class PlainSGD(Wide):
    """What has the same numbers to the last bit on two ranks."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05)


class ConfiguredLate(models.Regression):
    def __init__(self) -> None:
        super().__init__()
        del self.layers

    def configure_model(self) -> None:
        if not hasattr(self, "layers"):
            widen(self)


class ChangedGradients(Wide):
    """Changes gradients element by element, in all ways that users have."""

    def on_after_backward(self) -> None:
        first, last = self.layers[0], self.layers[2]
        first.weight.grad[3] = 0
        first.weight.grad.data[5:7] = 0
        first.weight.grad += 0.1 * first.weight.detach()
        last.weight.grad.mul_(torch.linspace(0, 1, HIDDEN))
        torch._foreach_add_([first.bias.grad, last.bias.grad], 0.01)
        torch.nan_to_num_(last.weight.grad)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for param in self.parameters():
            assert param.grad is not None
            param.grad.clamp_(-0.2, 0.2)


class ClippedByHand(styles.Manual):
    """Calls torch's own clipping."""

    def __init__(self) -> None:
        super().__init__()
        widen(self)
        self.norms: list[dict[str, float]] = []

    def differentiate(self, batch: list[Tensor]) -> None:
        super().differentiate(batch)
        self.norms.append({"norm": float(nn.utils.clip_grad_norm_(self.parameters(), 0.05))})


class ModuleZeroGrad(styles.Manual):
    def __init__(self) -> None:
        super().__init__()
        widen(self)

    def training_step(self, batch: list[Tensor]) -> None:  # type: ignore[override]
        self.zero_grad()
        self.differentiate(batch)
        optimizer: Any = self.optimizers()
        optimizer.step()


class Penalised(Wide):
    """Reads all weights before the forward, and one by another layer than its own."""

    def training_step(self, batch: list[Tensor]) -> Tensor:
        penalty = torch.stack([param.square().sum() for param in self.parameters()]).sum()
        back = nn.functional.linear(self.layers[2].weight, self.layers[0].weight.t())
        return self.loss(batch) + 0.01 * penalty + 0.1 * back.square().mean()


@dataclass(frozen=True)
class Scenario:
    """A module, how it is trained, and by how much weights may differ from those without sharding."""

    module: Callable[[], LightningModule]
    options: Callable[[], dict[str, Any]] = dict  # of the Trainer
    strategy: dict[str, Any] = field(default_factory=dict)
    tolerance: float = 1e-6
    num_epochs: int = 1
    validates: bool = False
    same_start: bool = False
    loader: Callable[[], Any] = models.loader


def _uneven(**strategy: Any) -> Scenario:
    sizes = [[4, 2, 3, 1], [1, 4, 2]]
    setting = participation.Setting(sizes if "uneven_data" in strategy else [size[:3] for size in sizes])
    return Scenario(
        lambda: participation.Module(setting),
        lambda: {"use_distributed_sampler": False, "precision": "64-true"},
        strategy,
        loader=lambda: participation.make_loader(
            "iterable", participation.batches_of(dist.get_rank(), setting.sizes[dist.get_rank() % 2])
        ),
    )


SCENARIOS: dict[str, Scenario] = {
    "plain_sgd": Scenario(PlainSGD, tolerance=0.0, num_epochs=2, validates=True),
    "groups_and_schedulers": Scenario(Groups, num_epochs=2),
    "configure_model": Scenario(ConfiguredLate),
    "changed_gradients": Scenario(ChangedGradients),
    "clipped_by_hand": Scenario(ClippedByHand),
    "clip_norm": Scenario(Wide, lambda: {"gradient_clip_val": 0.1}),
    "clip_value": Scenario(Wide, lambda: {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}),
    "module_zero_grad": Scenario(ModuleZeroGrad),
    "penalised": Scenario(Penalised),
    "scaler": Scenario(lambda: widen(Squares()), lambda: {"gradient_clip_val": 0.1, **option("scaler")}),
    "layer_added": Scenario(Wide, lambda: {"callbacks": trainer_tests.AddsLayer()}, num_epochs=3),
    "uneven_data": _uneven(uneven_data=True),
    "gradient_weight": _uneven(gradient_weight="batch_size"),
    "two_optimizers": Scenario(models.TwoPlayers),
    "bf16-mixed": Scenario(Wide, lambda: {"precision": "bf16-mixed"}, tolerance=1e-3),
    "unused_on_rank_0": Scenario(lambda: widen(models.SpareLayer(used_on=(1,)))),
    "two_losses": Scenario(lambda: widen(styles.TwoLosses(first_stays_here=False))),
    "gan_toggle_optimizer": Scenario(styles.GANS["toggle_optimizer"]),
    "gan_accumulating": Scenario(styles.GANS["accumulating"]),
    **{
        name: Scenario(
            how.module,
            lambda how=how: {"callbacks": how.by(), "num_sanity_val_steps": 0},  # type: ignore[misc]
            num_epochs=3,
            validates=how.validates,
            same_start=how.same_start,
        )
        for name, how in changes.CHANGES.items()
        if name in ("stochastic_weight_averaging", "exponential_weight_averaging")
    },
    "finetuned_backbone": Scenario(
        changes.Backbone, lambda: {"callbacks": changes.FINETUNINGS["backbone"]()}, num_epochs=4
    ),
}


def train(scenario: Scenario, *, shard: ShardOption) -> tuple[dict[str, Any], Shards | None]:
    torch.manual_seed(0 if scenario.same_start else dist.get_rank())  # rank 0's weights are those that count
    module = scenario.module()
    strategy = BucketDDPStrategy(bucket_cap_mb=SMALL_BUCKETS_MB, shard_optimizer=shard, **scenario.strategy)
    trainer = make_trainer(strategy, max_epochs=scenario.num_epochs, **scenario.options())
    with foreign_shards_spoiled():
        trainer.fit(module, scenario.loader(), models.loader() if scenario.validates else None)
    outcome = {
        "weights": {name: value.clone() for name, value in module.state_dict().items()},
        "metrics": {name: value.item() for name, value in trainer.callback_metrics.items()},
        "norms": getattr(module, "norms", []),
        "num_steps": trainer.global_step,
    }
    return outcome, strategy.shards


@like_torchrun()
def compare(*, scenario: Scenario, shard: ShardOption = True) -> None:
    """Train without and with sharding, and assert that all is equal."""
    (whole, _), (sharded, shards) = (train(scenario, shard=value) for value in (False, shard))
    assert sharded["num_steps"] == whole["num_steps"] > 0
    torch.testing.assert_close(sharded.pop("norms"), whole.pop("norms"), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(sharded, whole, rtol=scenario.tolerance, atol=scenario.tolerance)
    for name, weight in sharded["weights"].items():
        assert_equal_on_ranks(weight, name)
    # Each element is of one rank.
    assert shards is not None
    divided = [member for known in shards.optimizers for member in known.members.values()]
    own = torch.tensor([stop - start for member in divided for start, stop in [member.own]])
    of_all = own.clone()
    dist.all_reduce(of_all)
    assert of_all.tolist() == [member.param.numel() for member in divided]
    assert 0 < own.sum() < of_all.sum()


@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.sampled(5)
@on_ranks()
def test_training_equals_that_without_sharding(scenario: str) -> None:
    compare(scenario=SCENARIOS[scenario])


@pytest.mark.parametrize("scenario", ["clip_norm", "finetuned_backbone", "scaler"])
@pytest.mark.sampled(1)
@on_ranks()
def test_training_by_whole_parameters_equals_that_without_sharding(scenario: str) -> None:
    compare(scenario=SCENARIOS[scenario], shard="parameters")


@for_each("shard", [True, "parameters"])
@on_ranks(4)
def test_training_on_four_ranks_equals_that_without_sharding(shard: ShardOption) -> None:
    compare(scenario=Scenario(Wide, lambda: {"precision": "64-true"}), shard=shard)


# --- Failures


class Raising(Wide):
    """Does what `what` says after a backward, or in `configure_optimizers`."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self._what = what

    def on_after_backward(self) -> None:
        if self._what == "gradient is read":
            self.layers[0].weight.grad.mean()
        elif self._what == "module fails":
            raise RuntimeError("of the module itself")

    def configure_optimizers(self) -> Any:
        if self._what == "LBFGS":
            return torch.optim.LBFGS(self.parameters())
        return super().configure_optimizers()


@for_each(
    ("what", "text"),
    [
        ("LBFGS", "ValueError: `shard_optimizer` cannot divide the state of `LBFGS`: it is not known"),
        ("gradient is read", "`mean` reads the gradient of `layers.0.weight`, of which rank {rank} of 2 has"),
        ("module fails", "of the module itself"),
    ],
)
@on_ranks()
@like_torchrun()
def test_what_fails_is_told_on_every_rank_and_leaves_no_gradient_in_the_module(what: str, text: str) -> None:
    module = Raising(what)
    trainer = make_trainer(BucketDDPStrategy(shard_optimizer=True), max_epochs=1)
    error = raised_by(lambda: trainer.fit(module, models.loader()))
    assert text.format(rank=dist.get_rank()) in error
    assert [param.grad for param in module.parameters()] == [None] * 4


@for_each("on_nonfinite", ["skip", "raise"])
@on_ranks()
@like_torchrun()
def test_a_gradient_that_is_not_finite_is_named_as_without_sharding(on_nonfinite: Literal["skip", "raise"]) -> None:
    results = []
    for shard in (False, True):
        module = nonfinite.Module(nonfinite.Setting("gradient"))
        strategy = BucketDDPStrategy(bucket_cap_mb=SMALL_BUCKETS_MB, shard_optimizer=shard, on_nonfinite=on_nonfinite)
        trainer = make_trainer(strategy, max_epochs=1, use_distributed_sampler=False)
        with lines_logged("lightning_bucketddp") as messages:
            error = raised_by(lambda: trainer.fit(module, nonfinite.Batches(())))  # noqa: B023
        results.append((error, list(messages), dict(module.state_dict())))
    (error, messages, weights), (error_sharded, messages_sharded, sharded) = results
    assert (error_sharded, messages_sharded) == (error, messages)
    torch.testing.assert_close(sharded, weights, rtol=1e-6, atol=1e-6)
    if on_nonfinite == "raise" or dist.get_rank() == 0:
        assert "the gradient of `layers.0.bias` on rank 1" in f"{error} {messages}"


class Diverges(Wide):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        # After the last step: another one would give all ranks what the owner of the weight has.
        if self.trainer.is_last_batch and self.global_rank == 1:
            with torch.no_grad():
                self.layers[0].weight[0, 0] += 1


@on_ranks()
@like_torchrun()
def test_a_weight_that_differs_is_found() -> None:
    strategy = BucketDDPStrategy(shard_optimizer=True, replica_checks=4)
    error = raised_by(lambda: make_trainer(strategy, max_epochs=1).fit(Diverges(), models.loader()))
    assert "`layers.0.weight` differs between rank 0 and rank 1" in error


# --- Checkpoints


class Saved(Wide):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(
            [
                {"params": self.layers[0].parameters()},
                {"params": self.layers[2].parameters(), "lr": 0.02, "amsgrad": True},
            ],
            lr=0.01,
        )
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)]


@like_torchrun()
def fit_and_save(
    *,
    shard: ShardOption | None,
    save_to: Path,
    max_epochs: int,
    resume_from: Path | None = None,
    asynchronously: bool = False,
) -> None:
    """Train on the same samples per step on any number of ranks, with torch DDP if `shard` is None, and save twice."""
    torch.manual_seed(0)
    strategy: Any = "ddp"
    if shard is not None:
        options: dict[str, Any] = {"async_checkpoints": True} if asynchronously else {}
        strategy = BucketDDPStrategy(bucket_cap_mb=SMALL_BUCKETS_MB, shard_optimizer=shard, **options)
    trainer = make_trainer(strategy, max_epochs=max_epochs, callbacks=_SavesInEpoch(save_to))
    with numbers_of(torch.float64):
        trainer.fit(Saved(), models.loader(batch_size=16 // dist.get_world_size()), ckpt_path=resume_from)
        trainer.save_checkpoint(save_to)


class _SavesInEpoch(Callback):
    """Saves after a step, while new weights are on their way."""

    def __init__(self, path: Path) -> None:
        self._path = path.with_suffix(".inside")

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        assert trainer.max_epochs is not None
        if batch_idx == 1 and trainer.current_epoch == trainer.max_epochs - 1:
            trainer.save_checkpoint(self._path)


def assert_same_state(path: Path, expected: Path) -> None:
    """Assert that checkpoints have the same entries, of the same kinds, and the same numbers but for rounding."""
    ours, others = state_in(path), state_in(expected)
    torch.testing.assert_close(ours, others, rtol=1e-12, atol=1e-12)
    assert outline(ours) == outline(others)


def outline(state: Any) -> Any:
    """Return `state` with what kind each value is."""
    if isinstance(state, dict):
        return {key: outline(value) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return [outline(value) for value in state]
    if isinstance(state, torch.Tensor):
        return type(state), state.dtype, state.shape, state.stride(), state.device
    return type(state)


@pytest.fixture(scope="module")
def undivided(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What torch DDP has after three epochs, and in the last one."""
    path: Path = tmp_path_factory.mktemp("undivided") / "3.ckpt"
    run_on_ranks(fit_and_save, shard=None, max_epochs=3, save_to=path)
    return path


@pytest.mark.parametrize(("shard", "asynchronously"), [(True, True), ("parameters", False)])
def test_a_checkpoint_is_that_of_ddp(shard: bool | str, asynchronously: bool, undivided: Path, tmp_path: Path) -> None:
    path = tmp_path / "3.ckpt"
    run_on_ranks(fit_and_save, shard=shard, max_epochs=3, save_to=path, asynchronously=asynchronously)
    assert_same_state(path, undivided)
    assert_same_state(path.with_suffix(".inside"), undivided.with_suffix(".inside"))


@pytest.mark.parametrize(
    "runs",
    [
        [(2, True), (2, None)],
        [(2, None), (2, True)],
        [(2, True), (1, None)],
        [(1, None), (2, "parameters")],
        [(2, True), (4, True), (2, "parameters")],
        [(2, "parameters"), (4, "parameters"), (1, True)],
    ],
    ids=str,
)
@pytest.mark.sampled(3)
def test_a_checkpoint_resumes_with_and_without_sharding_on_any_number_of_ranks(
    runs: list[tuple[int, bool | str | None]], undivided: Path, tmp_path: Path
) -> None:
    before: Path | None = None
    for epoch, (world_size, shard) in enumerate(runs, start=1):
        max_epochs = 3 if epoch == len(runs) else epoch
        path = tmp_path / f"{epoch}.ckpt"
        run_on_ranks(
            fit_and_save, world_size=world_size, shard=shard, max_epochs=max_epochs, save_to=path, resume_from=before
        )
        before = path
    assert before is not None
    assert_same_state(before, undivided)


# --- Fabric


@pytest.mark.parametrize(
    ("loop", "shard"),
    [*((loop, True) for loop in LOOPS if not loop.startswith("buffer")), ("two_modules", "parameters")],
)
@pytest.mark.sampled(4)
@on_ranks()
@like_torchrun()
def test_a_loop_of_fabric_trains_as_without_sharding(loop: str, shard: ShardOption) -> None:
    """Train with Fabric, without and with sharding, and assert that weights are equal."""
    whole, sharded = (
        fabrics.LOOPS[loop](fabrics.make_fabric(FabricStrategy(bucket_cap_mb=SMALL_BUCKETS_MB, shard_optimizer=option)))
        for option in (False, shard)
    )
    torch.testing.assert_close(sharded, whole, rtol=1e-6, atol=1e-6)


@for_each(("saved", "loaded"), [(True, False), (False, True), ("parameters", True)])
@on_ranks()
@like_torchrun()
def test_a_checkpoint_of_fabric_trains_on(saved: ShardOption, loaded: ShardOption, tmp_path: Path) -> None:
    saved_by, loaded_by = (
        FabricStrategy(bucket_cap_mb=SMALL_BUCKETS_MB, shard_optimizer=shard) for shard in (saved, loaded)
    )
    expected, trained = fabrics.save_and_load(saved_by=saved_by, loaded_by=loaded_by, path=tmp_path / f"{saved}.ckpt")
    torch.testing.assert_close(trained, expected, rtol=1e-6, atol=1e-6)


@on_ranks()
@like_torchrun()
def test_a_whole_gradient_can_be_asked_for() -> None:
    """`strategy.full_gradient` returns what `grad` is without sharding."""
    gradients = []
    for shard in (False, True):
        fabric = fabrics.make_fabric(FabricStrategy(bucket_cap_mb=SMALL_BUCKETS_MB, shard_optimizer=shard))
        module, _ = fabrics._set_up(fabric)
        fabric.backward(fabrics._loss(module, 0))
        gradients.append([fabric.strategy.full_gradient(param) for param in module.parameters()])
    torch.testing.assert_close(gradients[1], gradients[0], rtol=0, atol=0)
