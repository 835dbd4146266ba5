"""Training through Lightning with `shard_optimizer` gives the weights and the checkpoints of a run without it."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor, nn

from lightning_bucketddp.bindings.fabric_lightning import BucketDDPStrategy as FabricStrategy
from lightning_bucketddp.bindings.trainer_lightning import BucketDDPStrategy
from lightning_bucketddp.sharding.shards import ShardOption, Shards
from tests.reducer import test_batch_weighting as participation
from tests.reducer import test_training_changes as changes
from tests.strategies import test_nonfinite_trainer as nonfinite
from tests.strategies import test_optimization_styles as players
from tests.strategies import test_optimization_styles as styles
from tests.strategies import test_trainer as behaviour
from tests.strategies import test_trainer as parity
from tests.strategies.test_precision import Squares, option
from tests.support.jobs.sharding import (
    assert_equal_on_ranks,
    foreign_parts_spoiled,
    numbers_of,
)
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
    """Calls torch's own clipping, by several norms."""

    def __init__(self, norm_type: float) -> None:
        super().__init__()
        widen(self)
        self.norms: list[dict[str, float]] = []
        self._norm_type = norm_type

    def differentiate(self, batch: list[Tensor]) -> None:
        super().differentiate(batch)
        norm = nn.utils.clip_grad_norm_(self.parameters(), 0.05, norm_type=self._norm_type)
        self.norms.append({"norm": float(norm)})


class ZeroesInPlace(Wide):
    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        optimizer.zero_grad(set_to_none=False)


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


class OwnKernel(Wide):
    """Has a layer that is not torch's, and passes its weights on in a way that torch does not see."""

    def loss(self, batch: list[Tensor]) -> Tensor:
        weights = [param.detach().numpy().copy() for param in self.parameters()]
        return super().loss(batch) + sum(float(weight.sum()) for weight in weights) * self.layers[2].bias.sum()


class Clamped(Wide):
    """Changes weights between steps: by `data`, by an operation, by the memory that they are in, by `to`."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        with torch.no_grad():
            for param in self.parameters():
                param.data.mul_(0.99)
                param.clamp_(-0.4, 0.4)
        if batch_idx == 3:
            self.layers[0].weight.data = self.layers[0].weight.data.clone()
        if batch_idx == 5:
            self.zero_grad()
            self.to(torch.float64)
            self.to(torch.float32)
        if batch_idx == 7:
            self.load_state_dict({name: 0.5 * value for name, value in self.state_dict().items()})


class Copied(Wide):
    """Keeps an average of itself by hand, and learns from it."""

    def __init__(self) -> None:
        super().__init__()
        self.average = copy.deepcopy(self.layers).requires_grad_(False)

    def training_step(self, batch: list[Tensor]) -> Tensor:
        with torch.no_grad():
            for mine, others in zip(self.average.parameters(), self.layers.parameters(), strict=True):
                mine.lerp_(others, 0.1)
        return self.loss(batch) + (self.layers(batch[0]) - self.average(batch[0])).square().mean()


class Scripted(Wide):
    """Has layers that run without Python."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(torch.jit.script(self.layers[:2]), self.layers[2])


@dataclass(frozen=True)
class Scenario:
    """A module and how it is trained.

    Attributes:
        options: of the Trainer.
        strategy: options of the strategy.
        tolerance: by how much weights may differ from those without sharding.
    """

    module: Callable[[], LightningModule]
    options: Callable[[], dict[str, Any]] = dict
    strategy: dict[str, Any] = field(default_factory=dict)
    tolerance: float = 1e-6
    num_epochs: int = 1
    validates: bool = False
    same_start: bool = False
    loader: Callable[[], Any] = models.loader


# Which of the scenarios of other suites read gradients, or have an optimizer that is refused.
_REFUSED = {"lbfgs", "line_search", "kept_gradients", "gradients_kept_without_a_copy", "gradients_replaced"} | {
    "gradients_replaced_while_accumulating"
}


def _widened(module: Callable[[], LightningModule]) -> Callable[[], LightningModule]:
    return lambda: widen(module())


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
    "plain_sgd_accumulated": Scenario(PlainSGD, lambda: {"accumulate_grad_batches": 4}, tolerance=0.0),
    "groups_and_schedulers": Scenario(Groups, num_epochs=2),
    "configure_model": Scenario(ConfiguredLate),
    "changed_gradients": Scenario(ChangedGradients),
    **{f"clipped_by_hand_{p}": Scenario(lambda p=p: ClippedByHand(p)) for p in (1.0, 2.0, math.inf)},  # type: ignore[misc]
    "clip_norm": Scenario(Wide, lambda: {"gradient_clip_val": 0.1}),
    "clip_value": Scenario(Wide, lambda: {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}),
    "zeroes_in_place": Scenario(ZeroesInPlace),
    "module_zero_grad": Scenario(ModuleZeroGrad),
    "penalised": Scenario(Penalised),
    "own_kernel": Scenario(OwnKernel),
    "clamped": Scenario(Clamped),
    "scripted": Scenario(Scripted),
    "copied": Scenario(Copied),
    "scaler": Scenario(lambda: widen(Squares()), lambda: {"gradient_clip_val": 0.1, **option("scaler")}),
    "layer_added": Scenario(Wide, lambda: {"callbacks": behaviour._AddsLayer()}, num_epochs=3),
    "uneven_data": _uneven(uneven_data=True),
    "gradient_weight": _uneven(gradient_weight="batch_size"),
    **{
        name: Scenario(
            how.module if name in ("two_optimizers", "batchnorm") else _widened(how.module),
            lambda how=how: how.options,  # type: ignore[misc]
            tolerance=1e-3 if name == "bf16-mixed" else 1e-6,
        )
        for name, how in parity.SCENARIOS.items()
        if name not in _REFUSED and not name.startswith(("automatic", "clip", "accumulation", "plain", "buffer"))
    },
    **{
        name: Scenario(_widened(how.module), lambda how=how: {"accumulate_grad_batches": how.accumulate})  # type: ignore[misc]
        for name, how in styles.STYLES.items()
        if name not in _REFUSED
    },
    **{
        f"gan_{name}": Scenario(module)
        for name, module in players.GANS.items()
        if hasattr(LightningModule, name) or name != "toggled_optimizer"
    },
    **{
        name: Scenario(
            how.module,
            lambda how=how: {"callbacks": how.by(), "num_sanity_val_steps": 0},  # type: ignore[misc]
            num_epochs=3,
            validates=how.validates,
            same_start=how.same_start,
        )
        for name, how in changes.CHANGES.items()
    },
    **{
        f"finetuned_{name}": Scenario(changes.Backbone, lambda by=by: {"callbacks": by()}, num_epochs=4)  # type: ignore[misc]
        for name, by in changes.FINETUNINGS.items()
    },
}


@dataclass(frozen=True)
class Trained:
    weights: dict[str, Tensor]
    metrics: dict[str, float]
    norms: list[dict[str, float]]
    num_steps: int
    shards: Shards | None


def train(scenario: Scenario, *, shard: ShardOption) -> Trained:
    torch.manual_seed(0 if scenario.same_start else dist.get_rank())  # rank 0's weights are those that count
    module = scenario.module()
    strategy = BucketDDPStrategy(bucket_cap_mb=SMALL_BUCKETS_MB, shard_optimizer=shard, **scenario.strategy)
    trainer = make_trainer(strategy, max_epochs=scenario.num_epochs, **scenario.options())
    with foreign_parts_spoiled():
        trainer.fit(module, scenario.loader(), models.loader() if scenario.validates else None)
    weights = {name: value.clone() for name, value in module.state_dict().items()}
    metrics = {name: value.item() for name, value in trainer.callback_metrics.items()}
    return Trained(weights, metrics, getattr(module, "norms", []), trainer.global_step, strategy.shards)


@like_torchrun()
def compare(*, scenario: str, shard: ShardOption = True) -> int:
    """Train without and with sharding, assert that all is equal, and return how many elements are of this rank."""
    how = SCENARIOS[scenario]
    whole, sharded = (train(how, shard=value) for value in (False, shard))
    assert sharded.num_steps == whole.num_steps > 0
    same: dict[str, Any] = {"rtol": how.tolerance, "atol": how.tolerance}
    torch.testing.assert_close(sharded.weights, whole.weights, **same)
    torch.testing.assert_close(sharded.metrics, whole.metrics, **same)
    torch.testing.assert_close(sharded.norms, whole.norms, rtol=1e-4, atol=1e-6)
    for name, weight in sharded.weights.items():
        assert_equal_on_ranks(weight, name)
    assert sharded.shards is not None
    return assert_divided(sharded.shards)


def assert_divided(shards: Shards) -> int:
    """Assert that each element is of one rank; return how many are of this one."""
    divided = [shard for known in shards.optimizers for shard in known.shards.values()]
    own = torch.tensor([stop - start for shard in divided for start, stop in [shard.own]])
    of_all = own.clone()
    dist.all_reduce(of_all)
    assert of_all.tolist() == [shard.param.numel() for shard in divided]
    assert 0 < own.sum() < of_all.sum()
    return int(own.sum())


# --- Refusals and failures


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


@like_torchrun()
def failure(*, what: str) -> tuple[str, set[str]]:
    """What a fit raises, and what gradients it leaves."""
    trainer = make_trainer(BucketDDPStrategy(shard_optimizer=True), max_epochs=1)
    module = Raising(what)
    error = raised_by(lambda: trainer.fit(module, models.loader()))
    return error, {type(param.grad).__name__ for param in module.parameters()}


class Overflowing(Squares):
    """Has an infinite gradient in one element, which one rank owns, of its third batch on each rank."""

    def __init__(self) -> None:
        super().__init__()
        widen(self)
        self.found: list[bool] = []

    def on_after_backward(self) -> None:
        if self.trainer.fit_loop.batch_idx == 3:
            # The last row is of the last rank.
            self.layers[0].weight.grad[-1, -1] = math.inf


@like_torchrun()
def fit_with_bad_gradient(*, on_nonfinite: Literal["warn", "raise", "skip"]) -> tuple[str, list[str]]:
    """What is raised and warned of when rank 1 has a gradient that is not finite, with and without sharding alike."""
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
    return error, messages


class Diverges(Wide):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        # After the last step: another one would give all ranks what the owner of the weight has.
        if self.trainer.is_last_batch and self.global_rank == 1:
            with torch.no_grad():
                self.layers[0].weight[0, 0] += 1


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
    """Train on the same samples per step on any number of ranks, and save in the last epoch and after the end.

    Args:
        shard: None: with torch DDP.
    """
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


# --- Fabric


@like_torchrun()
def save_or_load_fabric(*, shard: ShardOption, path: Path, loads: bool) -> list[Any]:
    """Save with Fabric after a step, or load that; the weights after one more."""
    fabric = fabrics.make_fabric(FabricStrategy(bucket_cap_mb=SMALL_BUCKETS_MB, shard_optimizer=shard))
    module, optimizer = fabrics._set_up(fabric)
    state = {"module": module, "optimizer": optimizer}
    if loads:
        fabric.load(path, state)
    else:
        fabrics._step(fabric, module, optimizer, step=0)
        fabric.save(path, state)
    fabrics._step(fabric, module, optimizer, step=1)
    return fabrics._weights(module)


TOLERANCE = 1e-6
# What others in `SCENARIOS` show as well; beside ddp all of them are compared.
ALIKE = {
    *("clipped_by_hand_1.0", "manual_backward", "64-true", "unused_everywhere", "unused_on_rank_1", "idle_rank"),
    *("same_graph_twice", "graph_of_backward", "manual_clipping", "own_clipping"),
    *("gradients_changed_while_accumulating", "input_penalty", "gan_toggled_optimizer", "gan_toggle_model"),
    *("gan_discriminator_every_second_batch", "mean_teacher", "frozen_after_a_batch", "pruned_without_validation"),
    *("pruned_for_good", "weight_averaging_with_statistics", "weight_averaging", "accumulation_by_epoch", "copied"),
    *("clipped_by_hand_inf", "plain_sgd_accumulated", "clamped", "two_losses_one_reduction", "closure", "batchnorm"),
    *("gradients_changed_in_place", "weight_penalty", "pruned_by_masks", "frozen_before_a_batch"),
    *("finetuned_layer_by_layer", "gan_nothing_switched_off"),
}


@pytest.mark.parametrize("scenario", [name for name in SCENARIOS if name not in ALIKE])
@pytest.mark.sampled(5)
def test_training_equals_that_without_sharding(scenario: str) -> None:
    run_on_ranks(compare, scenario=scenario)


@pytest.mark.parametrize("scenario", ["clip_norm", "finetuned_backbone", "scaler"])
@pytest.mark.sampled(1)
def test_training_by_whole_parameters_equals_that_without_sharding(scenario: str) -> None:
    run_on_ranks(compare, scenario=scenario, shard="parameters")


@pytest.mark.parametrize("shard", [True, "parameters"])
def test_training_on_four_ranks_equals_that_without_sharding(shard: bool | str) -> None:
    run_on_ranks(compare, world_size=4, scenario="64-true", shard=shard)


# --- Failures


def test_an_optimizer_that_cannot_be_divided_is_refused_on_every_rank() -> None:
    for error, _ in run_on_ranks(failure, what="LBFGS"):
        assert error.startswith("ValueError: `shard_optimizer` cannot divide the state of `LBFGS`: it is not known")


def test_a_gradient_that_is_read_is_an_error_and_stays_in_no_module() -> None:
    for rank, (error, gradients) in enumerate(run_on_ranks(failure, what="gradient is read")):
        assert f"`mean` reads the gradient of `layers.0.weight`, of which rank {rank} of 2 has" in error
        assert gradients == {"NoneType"}


def test_an_error_between_backward_and_step_is_the_one_that_is_raised() -> None:
    for error, gradients in run_on_ranks(failure, what="module fails"):
        assert "of the module itself" in error
        assert gradients == {"NoneType"}


@on_ranks()
@like_torchrun()
def test_all_ranks_skip_the_step_of_which_one_rank_has_an_infinite_gradient() -> None:
    """One rank's share of a gradient overflows."""
    outcomes = []
    for shard in (False, True):
        torch.manual_seed(0)
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=1000)
        strategy = BucketDDPStrategy(bucket_cap_mb=SMALL_BUCKETS_MB, shard_optimizer=shard, on_nonfinite=None)
        module = Overflowing()
        plugin = MixedPrecision("16-mixed", "cpu", scaler=scaler)
        trainer = make_trainer(strategy, max_epochs=1, gradient_clip_val=0.1, plugins=plugin)
        trainer.fit(module, models.loader())
        outcomes.append((scaler.get_scale(), dict(module.state_dict())))
    (scale, weights), (sharded_scale, sharded) = outcomes
    assert scale == sharded_scale
    torch.testing.assert_close(sharded, weights, rtol=1e-6, atol=1e-6)
    for name, weight in sharded.items():
        assert_equal_on_ranks(weight, name)
    assert scale == 32.0  # halved once
    assert all(bool(weight.isfinite().all()) for weight in sharded.values())


@pytest.mark.parametrize("on_nonfinite", ["skip", "raise"])
def test_a_gradient_that_is_not_finite_is_named_by_all_ranks(on_nonfinite: str) -> None:
    ranks = run_on_ranks(fit_with_bad_gradient, on_nonfinite=on_nonfinite)
    told = [error if on_nonfinite == "raise" else " ".join(messages) for error, messages in ranks]
    assert "the gradient of `layers.0.bias` on rank 1" in told[0]


@on_ranks()
@like_torchrun()
def test_a_weight_that_differs_is_found() -> None:
    strategy = BucketDDPStrategy(shard_optimizer=True, replica_checks=4)
    error = raised_by(lambda: make_trainer(strategy, max_epochs=1).fit(Diverges(), models.loader()))
    assert "`layers.0.weight` differs between rank 0 and rank 1" in error


# --- Checkpoints


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


@pytest.mark.parametrize("shard", [True, "parameters"])
@pytest.mark.parametrize("asynchronously", [False, True])
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


@pytest.mark.parametrize(("saved", "loaded"), [(True, False), (False, True), ("parameters", True)])
def test_a_checkpoint_of_fabric_trains_on(saved: bool | str, loaded: bool | str, tmp_path: Path) -> None:
    path = tmp_path / "model.ckpt"
    expected = run_on_ranks(save_or_load_fabric, shard=saved, path=path, loads=False)
    trained = run_on_ranks(save_or_load_fabric, shard=loaded, path=path, loads=True)
    torch.testing.assert_close(trained, expected, rtol=TOLERANCE, atol=TOLERANCE)


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
