"""Jobs about what a Trainer does with us around the training itself: collectives, life cycle, refusals."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins.layer_sync import LayerSync
from torch import nn

from lightning_bucketddp.bindings.trainer_lightning import BucketDDPStrategy
from tests.support.collectives import all_reduced
from tests.support.scripts import models
from tests.support.scripts.trainers import SMALL_BUCKETS_MB, like_torchrun, make_trainer


@like_torchrun()
def count_reductions(*, module: str, accumulate: int) -> dict[str, Any]:
    """How often each bucket was reduced, and in how many optimizer steps."""
    modules: dict[str, Callable[[], LightningModule]] = {
        "automatic": models.Regression,
        "manual": models.ManualRegression,
    }
    strategy = BucketDDPStrategy(bucket_cap_mb=SMALL_BUCKETS_MB)
    buckets = _Buckets()
    trainer = make_trainer(strategy, max_epochs=1, accumulate_grad_batches=accumulate, callbacks=buckets)
    with all_reduced() as reduced:
        trainer.fit(modules[module](), models.loader())
    assert strategy.reducer is not None
    return {
        "steps": trainer.global_step,
        "reductions_by_bucket": [
            sum(tensor.data_ptr() == buffer.data_ptr() for tensor in reduced) for buffer in buckets.buffers
        ],
        "counted_by_stats": strategy.reducer.stats.num_reductions,
    }


class _Buckets(Callback):
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        strategy: Any = trainer.strategy
        self.buffers = [bucket.wire for bucket in strategy.reducer.bucket_set.buckets]


@like_torchrun()
def module_is_not_wrapped() -> dict[str, Any]:
    module = models.Regression()
    trainer = make_trainer("bucketddp", max_epochs=1, limit_train_batches=1)
    trainer.fit(module, models.loader())
    return {
        "is_model": trainer.strategy.model is module,
        "is_lightning_module": trainer.strategy.lightning_module is module,
        "names": list(trainer.strategy.lightning_module_state_dict()),
        "own_names": list(module.state_dict()),
    }


@like_torchrun()
def run_stages(*, stages: list[str], strategy: str) -> dict[str, Any]:
    """Call these entry points of one Trainer one after the other, with one module."""
    torch.manual_seed(dist.get_rank())
    module = models.ConvBatchNorm()
    trainer = make_trainer(strategy, max_epochs=0)
    results = []
    for stage in stages:
        assert trainer.fit_loop.max_epochs is not None
        trainer.fit_loop.max_epochs += stage == "fit"
        results.append(getattr(trainer, stage)(module, models.loader()))
    return {
        "steps": trainer.global_step,
        # Metrics of `validate` and `test`, outputs of `predict`, nothing of `fit`.
        "results": [
            torch.stack(r).tolist() if stage == "predict" else r for stage, r in zip(stages, results, strict=True)
        ],
        "weights": {name: value.tolist() for name, value in module.state_dict().items()},
    }


@like_torchrun()
def fit_with_sync_batchnorm() -> dict[str, Any]:
    """Train on the same samples per step whatever the number of ranks."""
    torch.manual_seed(dist.get_rank())
    module = models.ConvBatchNorm()
    observer = _ClassOfBatchNorm()
    trainer = make_trainer("bucketddp", max_epochs=2, precision="64-true", sync_batchnorm=True, callbacks=observer)
    trainer.fit(module, models.loader(batch_size=8 // dist.get_world_size()))
    return {
        "during": observer.seen,
        "after": type(module.layers[2]).__name__,
        "weights": dict(module.state_dict()),
    }


class _ClassOfBatchNorm(Callback):
    seen = ""

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        self.seen = type(pl_module.layers[2]).__name__


@like_torchrun()
def batchnorm_after_failed_fit() -> str:
    """The class of a BatchNorm layer after a fit that was refused."""
    module = models.ConvBatchNorm().requires_grad_(False)
    with suppress(ValueError):
        make_trainer("bucketddp", max_epochs=1, sync_batchnorm=True).fit(module, models.loader())
    return type(module.layers[2]).__name__


class _AddsLayer(Callback):
    """Gives the model another layer at the start of the second epoch, different on every rank."""

    def on_train_epoch_start(self, trainer: Trainer, pl_module: Any) -> None:
        if trainer.current_epoch == 1:
            torch.manual_seed(dist.get_rank())
            layer = nn.Linear(pl_module.layers[-1].out_features, pl_module.layers[-1].out_features)
            pl_module.layers.append(layer)
            trainer.optimizers[0].add_param_group({"params": layer.parameters()})


@like_torchrun()
def fit_with_a_layer_added_between_epochs() -> dict[str, Any]:
    """The weights at the end, and how far the added layer has come from where rank 0 started it."""
    module = models.Regression()
    make_trainer("bucketddp", max_epochs=3, callbacks=_AddsLayer()).fit(module, models.loader())
    torch.manual_seed(0)
    start = nn.Linear(module.layers[-1].in_features, module.layers[-1].out_features)
    return {
        "weights": {name: value.tolist() for name, value in module.state_dict().items()},
        "trained": not torch.equal(start.weight, module.layers[-1].weight),
    }


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


@like_torchrun()
def use_own_layer_sync() -> list[str]:
    """What a user's own plugin is asked to do in a fit, and in a validation after it."""
    plugin = OwnLayerSync()
    trainer = make_trainer("bucketddp", max_epochs=1, plugins=plugin)
    module = models.Regression()
    trainer.fit(module, models.loader())
    trainer.validate(module, models.loader(), verbose=False)
    return plugin.calls


@like_torchrun()
def refusal(*, of: str) -> tuple[str, str]:
    """The error that a fit raises on this rank."""
    module = models.Regression()
    is_rank_one = dist.get_rank() == 1
    if of == "nothing_to_train":
        module.requires_grad_(False)
    elif of == "lazy":
        module.layers = nn.Sequential(nn.LazyLinear(8), nn.LazyLinear(1))
    elif of == "shape" and is_rank_one:
        module.layers[2] = nn.Linear(8, 3)
    elif of == "dtype" and is_rank_one:
        module.layers[2].double()
    elif of == "requires_grad" and is_rank_one:
        module.layers[0].bias.requires_grad_(False)
    elif of == "extra_layer" and is_rank_one:
        module.extra = nn.Linear(1, 1)
    elif of == "wrapped_on_one_rank" and is_rank_one:
        module.layers[0] = nn.DataParallel(module.layers[0])
    elif of == "wrapped_later":
        module.configure_model = lambda: models.wrap(module, "ddp")  # type: ignore[method-assign]
    elif of.startswith("wrapped: "):
        models.wrap(module, of.removeprefix("wrapped: "))
    try:
        make_trainer("bucketddp", max_epochs=1).fit(module, models.loader())
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


@like_torchrun()
def count_threads_after_fits(*, num_fits: int) -> list[int]:
    """How many threads this process has after each of some fits of new Trainers, all with synchronised layers.

    Those that are about to end are waited for: as many as the second fit has left.
    """
    counts: list[int] = []
    for _ in range(num_fits):
        trainer = make_trainer("bucketddp", max_steps=2, sync_batchnorm=True)
        trainer.fit(models.ConvBatchNorm(), models.loader())
        del trainer
        gc.collect()
        deadline = time.monotonic() + 30
        while len(counts) > 1 and len(os.listdir("/proc/self/task")) > counts[1] and time.monotonic() < deadline:
            time.sleep(0.05)
        counts.append(len(os.listdir("/proc/self/task")))
    return counts
