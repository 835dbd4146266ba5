"""Training through Lightning with `shard_optimizer` gives the weights and the checkpoints of a run without it."""

from __future__ import annotations

import operator
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
from lightning_bucketddp.sharding.shards import ShardOption
from tests.reducer import test_batch_weighting as participation
from tests.reducer import test_training_changes as changes
from tests.strategies import test_fabric as fabric_tests
from tests.strategies import test_nonfinite as nonfinite
from tests.strategies import test_trainer as trainer_tests
from tests.strategies.comparison import Program, assert_equal, ours
from tests.strategies.test_equals_ddp import GANS, Manual, two_losses
from tests.strategies.test_precision import Squares, option
from tests.support.cases import for_each
from tests.support.jobs.sharding import numbers_of
from tests.support.ranks import on_ranks, raised_by, run_on_ranks
from tests.support.scripts import models
from tests.support.scripts.checkpoints import state_in
from tests.support.scripts.fabrics import make_fabric
from tests.support.scripts.trainers import SMALL_BUCKETS_MB, like_torchrun, lines_logged, make_trainer

# Such that a slice is a multiple of what a processor computes at once: it rounds as the whole does.
HIDDEN = 32


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


class Plain(Squares):
    """Is trained by SGD without momentum: the same numbers to the last bit on two ranks."""

    def __init__(self) -> None:
        super().__init__()
        widen(self)

    def configure_optimizers(self) -> Any:
        # Decay changes a weight whose gradient is zero, but not one without a gradient.
        return torch.optim.SGD(self.parameters(), lr=0.05, weight_decay=0.1)


class ConfiguredLate(models.Regression):
    def __init__(self) -> None:
        super().__init__()
        del self.layers

    def configure_model(self) -> None:
        if not hasattr(self, "layers"):
            widen(self)


class Overflowing(Plain):
    """Has an infinite gradient, in one element, in the second of three windows of two micro-batches."""

    seen: list[float]

    def on_after_backward(self) -> None:
        if self.trainer.fit_loop.batch_idx == 3:
            self.layers[0].weight.grad[-1, -1] = torch.inf

    def on_train_end(self) -> None:
        precision: Any = self.trainer.precision_plugin
        self.seen = [precision.scaler.get_scale()]


class NotFinite(Plain):
    """Rank 1 has a loss that is not finite in the second window."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:  # type: ignore[override]
        loss = self.loss(batch)
        return loss * torch.inf if batch_idx == 3 and self.global_rank == 1 else loss


class KeepsGraphs(Plain):
    """Asks for a graph of the gradients in the first micro-batch of each window."""

    def backward(self, loss: Tensor) -> None:
        loss.backward(create_graph=self.trainer.fit_loop.batch_idx % 2 == 0)


class OtherOptimizer(Plain):
    """Goes on with another optimizer after three steps."""

    def on_train_batch_start(self, *_: Any) -> None:
        if self.global_step == 3:
            self.trainer.optimizers = [torch.optim.SGD(self.parameters(), lr=0.1)]


class PostHooks(Plain):
    """Has hooks around steps from `configure_optimizers` on: rows are normalised, and an average is kept."""

    average: Tensor

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        self.register_buffer("average", torch.zeros_like(self.layers[0].weight))

        def normalise(*_: Any) -> None:
            with torch.no_grad():
                weight = self.layers[0].weight
                weight.div_(weight.norm(dim=1, keepdim=True))

        def keep_average(stepped: Any, *_: Any) -> None:
            first = stepped.param_groups[0]["params"][0]
            assert first is self.layers[0].weight
            self.average.lerp_(first.detach(), 0.1)

        optimizer.register_step_post_hook(normalise)
        optimizer.register_step_post_hook(keep_average)
        return optimizer

    def on_train_start(self) -> None:
        optimizer: Any = self.optimizers(use_pl_optimizer=False)

        def check(stepped: Any, *_: Any) -> None:
            params = [param for group in stepped.param_groups for param in group["params"]]
            assert all(map(operator.is_, params, self.parameters()))

        optimizer.register_step_pre_hook(check)


def accumulate(**options: Any) -> dict[str, Any]:
    return {"accumulate_grad_batches": 2, **options}


def overflowing_scaler() -> dict[str, Any]:
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=1000)
    return accumulate(plugins=MixedPrecision("16-mixed", "cpu", scaler=scaler))


def _uneven(**strategy: Any) -> Program:
    sizes = [[4, 2, 3, 1], [1, 4, 2]]
    setting = participation.Setting(sizes if "uneven_data" in strategy else [size[:3] for size in sizes])
    return Program(
        lambda: participation.Module(setting),
        lambda: {"use_distributed_sampler": False, "precision": "64-true"},
        strategy,
        data=lambda: participation.make_loader(
            "iterable", participation.batches_of(dist.get_rank(), setting.sizes[dist.get_rank() % 2])
        ),
    )


def _averaging(name: str) -> Program:
    how = changes.CHANGES[name]
    return Program(
        how.module,
        lambda: {"callbacks": how.by(), "max_epochs": 3},
        validates=how.validates,
        has_one_start=how.same_start,
    )


# The same to the last bit.
EXACT = {
    "plain_sgd": Program(Plain, lambda: {"max_epochs": 2}, validates=True),
    "overflow_of_a_scaler": Program(Overflowing, overflowing_scaler, {"on_nonfinite": None}),
    "step_skipped_for_a_nan": Program(NotFinite, accumulate, {"on_nonfinite": "skip"}),
    "hooks_around_steps": Program(PostHooks),
    "graphs_of_gradients": Program(KeepsGraphs, accumulate),
    "optimizer_replaced": Program(OtherOptimizer),
}
# But for the order in which numbers are added, or rounded.
ROUNDED: dict[str, Program] = {
    "groups_and_schedulers": Program(Groups, lambda: {"max_epochs": 2}),
    "configure_model": Program(ConfiguredLate),
    "clip_norm": Program(Wide, lambda: {"gradient_clip_val": 0.1}),
    "clip_value": Program(Wide, lambda: {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}),
    "scaler": Program(lambda: widen(Squares()), lambda: {"gradient_clip_val": 0.1, **option("scaler")}),
    "layer_added": Program(Wide, lambda: {"callbacks": trainer_tests.AddsLayer(), "max_epochs": 3}),
    "uneven_data": _uneven(uneven_data=True),
    "gradient_weight": _uneven(gradient_weight="batch_size"),
    "two_optimizers": Program(models.TwoPlayers),
    "bf16-mixed": Program(Wide, lambda: {"precision": "bf16-mixed"}),
    "unused_on_rank_0": Program(lambda: widen(models.SpareLayer(used_on=(1,)))),
    "two_losses": Program(lambda: widen(Manual(two_losses))),
    "gan_toggle_optimizer": GANS["toggle_optimizer"],
    **{
        name: _averaging(name)
        for name in ("stochastic_weight_averaging", "exponential_weight_averaging")
        if name in changes.CHANGES
    },
    "finetuned_backbone": Program(
        changes.Backbone, lambda: {"callbacks": changes.FINETUNINGS["backbone"](), "max_epochs": 4}
    ),
}
LONG = {
    *("configure_model", "clip_value", "uneven_data", "two_optimizers", "bf16-mixed", "two_losses"),
    *("gan_toggle_optimizer", "exponential_weight_averaging", "finetuned_backbone"),
}


@like_torchrun()
def compare(program: Program, shard: ShardOption, *, tolerance: float) -> None:
    """Train with and without sharding, and assert that all is equal, and that each element is of one rank."""
    sharded, whole = (ours(program, shard_optimizer=option) for option in (shard, False))
    assert_equal(sharded, whole, tolerance=tolerance)
    strategy: Any = sharded.trainer.strategy
    divided = [member for known in strategy.shards.optimizers for member in known.members.values()]
    own = torch.tensor([stop - start for member in divided for start, stop in [member.own]])
    of_all = own.clone()
    dist.all_reduce(of_all)
    assert of_all.tolist() == [member.param.numel() for member in divided]
    assert 0 < own.sum() < of_all.sum()
    for name, weight in sharded.params.items():
        of_rank_zero = weight.clone()
        dist.broadcast(of_rank_zero, src=0)
        assert torch.equal(weight, of_rank_zero), name


@pytest.mark.parametrize(
    ("name", "shard"),
    [
        pytest.param(name, shard, marks=pytest.mark.long if name in LONG else ())
        for index, name in enumerate([*EXACT, *ROUNDED])
        for shard in ([True, "parameters"] if name in EXACT else [(True, "parameters")[index % 2]])
    ],
)
@on_ranks()
def test_training_equals_that_without_sharding(name: str, shard: ShardOption) -> None:
    program = {**EXACT, **ROUNDED}[name]
    compare(program, shard, tolerance=0.0 if name in EXACT else 1e-3 if name == "bf16-mixed" else 1e-6)


# --- Failures


class Raising(Wide):
    """Does what `what` says after a backward."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self._what = what

    def on_after_backward(self) -> None:
        if self._what == "gradient is read":
            self.layers[0].weight.grad.mean()
        elif self._what == "module fails":
            raise RuntimeError("of the module itself")


@for_each(
    ("what", "text"),
    [
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
        module = nonfinite.Module("gradient")
        strategy = BucketDDPStrategy(bucket_cap_mb=SMALL_BUCKETS_MB, shard_optimizer=shard, on_nonfinite=on_nonfinite)
        trainer = make_trainer(strategy, max_epochs=1, use_distributed_sampler=False)
        with lines_logged("lightning_bucketddp") as messages:
            error = raised_by(lambda: trainer.fit(module, nonfinite.Batches()))  # noqa: B023
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


# Dynamo of torch 2.5 cannot read a parameter whose gradient is divided (docs/compatibility.md).
NOT_SHARDED = ("buffer", "hooks", "head", *(["compiled"] if torch.__version__.startswith("2.5") else []))


@pytest.mark.parametrize(
    ("loop", "shard"),
    [(loop, True) for loop in fabric_tests.LOOPS if not loop.startswith(NOT_SHARDED)] + [("two_modules", "parameters")],
)
@pytest.mark.sampled(4)
@on_ranks()
@like_torchrun()
def test_a_loop_of_fabric_trains_as_without_sharding(loop: str, shard: ShardOption) -> None:
    strategies = (FabricStrategy(bucket_cap_mb=SMALL_BUCKETS_MB, shard_optimizer=option) for option in (False, shard))
    whole, sharded = (fabric_tests.LOOPS[loop](make_fabric(strategy)) for strategy in strategies)
    torch.testing.assert_close(sharded, whole, rtol=1e-6, atol=1e-6)


@for_each(("saved", "loaded"), [(True, False), (False, True), ("parameters", True)])
@on_ranks()
@like_torchrun()
def test_a_checkpoint_of_fabric_trains_on(saved: ShardOption, loaded: ShardOption, tmp_path: Path) -> None:
    by, other = (FabricStrategy(bucket_cap_mb=SMALL_BUCKETS_MB, shard_optimizer=shard) for shard in (saved, loaded))
    expected, trained = fabric_tests.save_and_load(by, other, tmp_path / f"{saved}.ckpt")
    torch.testing.assert_close(trained, expected, rtol=1e-6, atol=1e-6)


@on_ranks()
@like_torchrun()
def test_a_whole_gradient_can_be_asked_for() -> None:
    """`strategy.full_gradient` returns what `grad` is without sharding."""
    gradients = []
    for shard in (False, True):
        fabric = make_fabric(FabricStrategy(bucket_cap_mb=SMALL_BUCKETS_MB, shard_optimizer=shard))
        module, _ = fabric_tests.set_up(fabric)
        fabric.backward(fabric_tests.loss_of(module, 0))
        gradients.append([fabric.strategy.full_gradient(param) for param in module.parameters()])
    torch.testing.assert_close(gradients[1], gradients[0], rtol=0, atol=0)
