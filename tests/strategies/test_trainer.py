"""The stages of a Trainer on two processes, modules that are parallel already, and what a fit leaves behind."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.layer_sync import LayerSync
from lightning.pytorch.profilers import PyTorchProfiler
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from lightning_bucketddp.bindings.trainer_lightning import BucketDDPMonitor, BucketDDPStrategy
from lightning_bucketddp.recording.schema import read_run
from tests.strategies.comparison import Program, assert_equal, train
from tests.strategies.test_equals_ddp import Watching
from tests.support.cases import for_each
from tests.support.collectives import all_reduced
from tests.support.ranks import on_ranks, raised_by
from tests.support.scripts import models
from tests.support.scripts.trainers import SMALL_BUCKETS_MB, like_torchrun, make_trainer, said_about


class _Buckets(Callback):
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        strategy: Any = trainer.strategy
        self.buffers = [bucket.wire for bucket in strategy.reducer.bucket_set.buckets]


@for_each(
    ("module", "accumulate", "steps"),
    [
        (models.Regression, 4, 3),
        (models.ManualRegression, 1, 10),
    ],
)
@on_ranks()
@like_torchrun()
def test_accumulation_reduces_each_bucket_once_per_step(
    module: type[models.Regression], accumulate: int, steps: int
) -> None:
    strategy, buckets = BucketDDPStrategy(bucket_cap_mb=SMALL_BUCKETS_MB), _Buckets()
    trainer = make_trainer(strategy, max_epochs=1, accumulate_grad_batches=accumulate, callbacks=buckets)
    with all_reduced() as reduced:
        trainer.fit(module(), models.loader())
    assert trainer.global_step == steps
    by_bucket = [sum(tensor.data_ptr() == buffer.data_ptr() for tensor in reduced) for buffer in buckets.buffers]
    assert len(by_bucket) > 1
    assert set(by_bucket) == {steps}
    assert strategy.reducer is not None
    assert strategy.reducer.stats.num_reductions == sum(by_bucket)


class _ClassOfBatchNorm(Callback):
    seen = ""

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        self.seen = type(pl_module.layers[2]).__name__


class AddsLayer(Callback):
    """Gives the model another layer at the start of the second epoch, different on every rank."""

    def on_train_epoch_start(self, trainer: Trainer, pl_module: Any) -> None:
        if trainer.current_epoch == 1:
            torch.manual_seed(dist.get_rank())
            layer = nn.Linear(pl_module.layers[-1].out_features, pl_module.layers[-1].out_features)
            pl_module.layers.append(layer)
            trainer.optimizers[0].add_param_group({"params": layer.parameters()})


@on_ranks()
@like_torchrun()
def test_a_layer_added_between_epochs_starts_from_rank_zero_and_is_trained() -> None:
    module = models.Regression()
    make_trainer("bucketddp", max_epochs=3, callbacks=AddsLayer()).fit(module, models.loader())
    torch.manual_seed(0)
    start = nn.Linear(module.layers[-1].in_features, module.layers[-1].out_features)
    assert not torch.equal(start.weight, module.layers[-1].weight)
    for weight in module.state_dict().values():
        of_rank_zero = weight.clone()
        dist.broadcast(of_rank_zero, src=0)
        assert torch.equal(weight, of_rank_zero)


@on_ranks()
@like_torchrun()
def test_counters_and_plans_go_on_after_a_layer_was_added(tmp_path: Path) -> None:
    lines: list[str] = []
    monitor = BucketDDPMonitor(every_n_steps=1, dirpath=tmp_path, summary=False)
    trainer = make_trainer("bucketddp", max_epochs=3, callbacks=[AddsLayer(), monitor])
    with said_about("reductions", lines):
        trainer.fit(models.Regression(), models.loader())
    if dist.get_rank() == 0:
        assert [re.sub(r"; [\d.]+ MiB", "", line) for line in lines] == [
            "bucketddp: 30 optimizer steps sent per rank in 30 reductions; last plan: 1 bucket."
        ]
    record = read_run(tmp_path / "bucketddp").ranks[dist.get_rank()]
    num_parameters = {number: sum(len(it.parameters) for it in plan.buckets) for number, plan in record.plans.items()}
    in_steps = [num_parameters[step.plan] for _, step in sorted(record.steps.items())]
    assert in_steps == [num_parameters[1]] * 10 + [num_parameters[1] + 2] * 20


class OwnLayerSync(LayerSync):
    """A user's own plugin."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def apply(self, model: nn.Module) -> nn.Module:
        self.calls.append("apply")
        return model

    def revert(self, model: nn.Module) -> nn.Module:
        self.calls.append("revert")
        return model


def _put(module: Any, layer: nn.Module) -> None:
    module.layers[2] = layer


def _put_on_rank_one(module: Any) -> None:
    if dist.get_rank() == 1:
        _put(module, nn.DataParallel(module.layers[2]))


def _fully_shard(module: Any) -> None:
    try:
        from torch.distributed.fsdp import fully_shard
    except ImportError:  # before torch 2.6
        from torch.distributed._composable.fsdp import fully_shard  # type: ignore[attr-defined]
    fully_shard(module.layers[2], mesh=init_device_mesh("cpu", (2,)))


def _ignore(module: Any) -> None:
    module._ddp_params_and_buffers_to_ignore = [f"layers.2.module.{name}" for name in ("weight", "bias")]
    _wrap(module)


def _wrap(module: Any) -> None:
    _put(module, DistributedDataParallel(module.layers[2]))


BY_ITSELF = "but this strategy averages the gradients of all submodules by itself."
IGNORED = "or name its parameters in `_ddp_params_and_buffers_to_ignore`."
UNWRAP = f"{BY_ITSELF} Leave the wrapper out: put its `.module` in its place, {IGNORED}"


# What is done to a `Regression` before it is trained, and how it is refused, if it is.
PARALLEL: dict[str, tuple[Callable[[Any], None], str]] = {
    "ddp": (_wrap, f"`layers.2` is wrapped in `DistributedDataParallel`, {UNWRAP}"),
    "later": (
        lambda module: setattr(module, "configure_model", lambda: _wrap(module)),
        f"`layers.2` is wrapped in `DistributedDataParallel`, {UNWRAP}",
    ),
    "on_rank_one": (_put_on_rank_one, f"`layers.2` is wrapped in `DataParallel` on rank 1, {UNWRAP}"),
    "fully_shard": (
        _fully_shard,
        f"`layers.2` was made parallel by `fully_shard`, {BY_ITSELF} Leave that call out, {IGNORED}",
    ),
    "ignored": (_ignore, ""),
}


@for_each("how", PARALLEL)
@on_ranks()
@like_torchrun()
def test_a_submodule_that_is_parallel_already_is_refused_on_every_rank(how: str) -> None:
    module = models.Regression()
    change, text = PARALLEL[how]
    change(module)
    error = raised_by(lambda: make_trainer("bucketddp", max_epochs=1).fit(module, models.loader()))
    assert error == (f"ValueError: {text}" if text else "")


@pytest.mark.parametrize(
    "stages",
    [["predict"], ["validate", "fit", "test", "fit", "predict"]],
    ids="-".join,
)
@on_ranks()
@like_torchrun()
def test_each_stage_equals_ddp(stages: list[str]) -> None:
    """Call these entry points of one Trainer one after the other, with one module."""
    outcomes = []
    for strategy in ("bucketddp", "ddp"):
        torch.manual_seed(dist.get_rank())
        module, trainer = models.ConvBatchNorm(), make_trainer(strategy, max_epochs=0)
        results = []
        for stage in stages:
            assert trainer.fit_loop.max_epochs is not None
            trainer.fit_loop.max_epochs += stage == "fit"
            results.append(getattr(trainer, stage)(module, models.loader()))
        state = {name: value.clone() for name, value in module.state_dict().items()}
        for value in state.values() if strategy == "ddp" else ():  # it leaves the others their own buffers
            dist.broadcast(value, src=0)
        # Metrics of `validate` and `test`, outputs of `predict`, nothing of `fit`.
        outcomes.append(([result for result in results if result is not None], trainer.global_step, state))
    torch.testing.assert_close(outcomes[0], outcomes[1], rtol=0, atol=0)


@on_ranks()
@like_torchrun()
def test_batchnorm_is_synchronized_during_a_fit_and_reverted() -> None:
    """That it trains like one process: tests/replicas."""
    module, observer = models.ConvBatchNorm(), _ClassOfBatchNorm()
    make_trainer("bucketddp", max_epochs=1, sync_batchnorm=True, callbacks=observer).fit(module, models.loader())
    assert (observer.seen, type(module.layers[2])) == ("SyncedBatchNorm2d", nn.BatchNorm2d)


@on_ranks()
@like_torchrun()
def test_sync_batchnorm_is_reverted_after_a_fit_that_fails() -> None:
    module = models.ConvBatchNorm().requires_grad_(False)
    with pytest.raises(ValueError, match="nothing to train"):
        make_trainer("bucketddp", max_epochs=1, sync_batchnorm=True).fit(module, models.loader())
    assert type(module.layers[2]) is nn.BatchNorm2d


@on_ranks()
@like_torchrun()
def test_a_layer_sync_plugin_of_the_user_is_applied_and_reverted_once() -> None:
    plugin = OwnLayerSync()
    trainer = make_trainer("bucketddp", max_epochs=1, plugins=plugin)
    module = models.Regression()
    trainer.fit(module, models.loader())
    trainer.validate(module, models.loader(), verbose=False)
    assert plugin.calls == ["apply", "revert"]


@on_ranks()
@like_torchrun()
def test_the_profiler_of_torch_shows_our_phases(tmp_path: Path) -> None:
    profiler = PyTorchProfiler(
        dirpath=tmp_path, filename="profile", schedule=None, export_to_chrome=False, row_limit=1000
    )
    trainer = make_trainer("bucketddp", max_epochs=1, limit_train_batches=2, profiler=profiler)
    trainer.fit(models.Regression(), models.loader())
    text = (tmp_path / f"fit-profile-{dist.get_rank()}.txt").read_text()
    phases = sorted({word for word in text.split() if word.startswith("bucketddp::")})
    assert phases == ["bucketddp::finish", "bucketddp::launch"]


@on_ranks()
@like_torchrun()
def test_a_run_resumed_within_an_epoch_equals_ddp(tmp_path: Path) -> None:
    """Two epochs, stopped in the middle of the first, go on in another Trainer."""
    trained = []
    for strategy in ("bucketddp", "ddp"):
        saving = ModelCheckpoint(tmp_path / strategy, filename="{step}", every_n_train_steps=3, save_top_k=-1)
        train(Program(trainer=lambda: {"max_steps": 8, "callbacks": saving, "enable_checkpointing": True}), strategy)  # noqa: B023
        program = Program(Watching, lambda: {"max_epochs": 2})
        trained.append(train(program, strategy, ckpt_path=tmp_path / strategy / "step=6.ckpt"))
    assert_equal(*trained)
    assert len(trained[0].seen[0]) == 2 * (4 + 10)
