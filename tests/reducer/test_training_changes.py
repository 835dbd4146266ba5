"""Training that changes while it runs ends with the weights that `ddp` ends with, on two processes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from lightning.pytorch import Callback, LightningModule, Trainer, callbacks
from torch import Tensor, nn

from lightning_bucketddp.bindings.trainer_lightning import BucketDDPStrategy
from tests.support.ranks import on_ranks, run_on_ranks
from tests.support.scripts.models import WIDTH, Regression, loader
from tests.support.scripts.trainers import SMALL_BUCKETS_MB, like_torchrun, make_trainer, ours_and_ddp


class Backbone(Regression):
    """A backbone, under the name that `BackboneFinetuning` wants, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())

    def loss(self, batch: list[Tensor]) -> Tensor:
        return super().loss([self.backbone(batch[0]), batch[1]])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([param for param in self.parameters() if param.requires_grad], lr=0.05, momentum=0.9)


class NormRegression(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1))


class MeanTeacher(NormRegression):
    """Learns from an average of itself, statistics included, that is in evaluation mode while it trains."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = copy.deepcopy(self.layers).requires_grad_(False)

    def training_step(self, batch: list[Tensor]) -> Tensor:
        self.teacher.eval()
        return self.loss(batch) + F.mse_loss(self.layers(batch[0]), self.teacher(batch[0]))

    def on_train_batch_end(self, *_: Any) -> None:
        for mine, others in zip(self.teacher.state_dict().values(), self.layers.state_dict().values(), strict=True):
            if mine.is_floating_point():
                mine.lerp_(others, 0.1)


class LayerByLayer(callbacks.BaseFinetuning):
    """Unfreezes one more layer at the start of each epoch."""

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze([pl_module.backbone, pl_module.layers[0]])

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: torch.optim.Optimizer) -> None:
        layer = {1: pl_module.layers[0], 2: pl_module.backbone}.get(epoch)
        if layer is not None:
            self.unfreeze_and_add_param_group(layer, optimizer, lr=0.05)


class FreezesByHand(Callback):
    """Switches a layer off for every other batch, in the hook before or after a batch."""

    def __init__(self, hook: str) -> None:
        self._hook = hook

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if self._hook == "before":
            pl_module.layers[0].requires_grad_(batch_idx % 2 == 0)

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self._hook == "after":
            pl_module.layers[0].requires_grad_(batch_idx % 2 == 0)


@dataclass(frozen=True)
class Change:
    """What changes a module, and the torch DDP to compare with."""

    by: Callable[[], Callback]
    module: Callable[[], LightningModule] = Regression
    ddp: str = "ddp"
    validates: bool = True
    # Callbacks that copy the module before rank 0's weights have gone round need the same weights from the start.
    same_start: bool = False


def _prune() -> Callback:
    return callbacks.ModelPruning("l1_unstructured", amount=0.3, parameter_names=["weight"])


CHANGES = {
    "mean_teacher": Change(Callback, MeanTeacher),
    "frozen_after_a_batch": Change(lambda: FreezesByHand("after"), ddp="ddp_find_unused_parameters_true"),
    "stochastic_weight_averaging": Change(
        lambda: callbacks.StochasticWeightAveraging(swa_lrs=0.01, swa_epoch_start=1), NormRegression
    ),
    "pruned": Change(_prune, NormRegression, same_start=True),
    "accumulation_by_epoch": Change(lambda: callbacks.GradientAccumulationScheduler({0: 1, 1: 4, 2: 2})),
}
if hasattr(callbacks, "WeightAveraging"):
    CHANGES |= {
        "exponential_weight_averaging": Change(lambda: callbacks.EMAWeightAveraging(decay=0.5)),
        "weight_averaging_with_statistics": Change(callbacks.WeightAveraging, NormRegression),
    }


@like_torchrun()
def train_with_change(*, change: str, strategy: str) -> Any:
    how = CHANGES[change]
    torch.manual_seed(0 if how.same_start else dist.get_rank())
    module = how.module()
    used = how.ddp if strategy == "ddp" else strategy
    trainer = make_trainer(used, max_epochs=3, num_sanity_val_steps=0, callbacks=how.by())
    trainer.fit(module, loader(), loader() if how.validates else None)
    weights = {name: value.tolist() for name, value in module.state_dict().items()}
    return weights, {name: value.item() for name, value in trainer.callback_metrics.items()}, trainer.global_step


@like_torchrun()
def freeze_while_gradients_accumulate(*, options: dict[str, Any] | None) -> dict[str, Any]:
    torch.manual_seed(0)
    module = Regression()
    module.configure_optimizers = lambda: torch.optim.SGD(module.parameters(), lr=0.05)  # type: ignore[method-assign]
    strategy = "ddp_find_unused_parameters_true" if options is None else BucketDDPStrategy(**options)
    # In windows of three the frozen batches are the last one, the middle one, the first and the last.
    trainer = make_trainer(strategy, max_epochs=3, accumulate_grad_batches=3, callbacks=FreezesByHand("before"))
    trainer.fit(module, loader())
    return {name: value.tolist() for name, value in module.state_dict().items()}


FINETUNINGS: dict[str, Callable[[], Callback]] = {
    "backbone": lambda: callbacks.BackboneFinetuning(unfreeze_backbone_at_epoch=1, backbone_initial_lr=0.05),
    "layer_by_layer": LayerByLayer,
}


@like_torchrun()
def finetune(*, finetuning: str) -> tuple[dict[str, Tensor], list[int]]:
    """The weights after the same samples per step on any number of ranks, and how many gradients were planned for."""
    torch.manual_seed(dist.get_rank())
    module, planned = Backbone(), []

    def note(trainer: Any, _: LightningModule) -> None:
        bucket_set = trainer.strategy.reducer.bucket_set  # one rank alone plans nothing
        planned.append(0 if bucket_set is None else len(bucket_set.index_of_bucket))

    changes = [FINETUNINGS[finetuning](), callbacks.LambdaCallback(on_train_epoch_end=note)]
    trainer = make_trainer("bucketddp", max_epochs=4, precision="64-true", callbacks=changes)
    trainer.fit(module, loader(batch_size=8 // dist.get_world_size()))
    return dict(module.state_dict()), planned


@pytest.mark.parametrize("options", [{"replica_checks": 1}, {"shard_optimizer": True}], ids=["plain", "sharded"])
def test_what_is_frozen_while_gradients_accumulate_is_averaged_as_by_ddp(options: dict[str, Any]) -> None:
    """Its gradient has parts of this rank alone, and the optimizer steps it: frozen or not."""
    ours, ddp = (run_on_ranks(freeze_while_gradients_accumulate, options=one) for one in (options, None))
    assert ours == ddp


@pytest.mark.parametrize("change", list(CHANGES))
@pytest.mark.sampled(3)
def test_training_equals_ddp(change: str) -> None:
    ours, ddp = ours_and_ddp(train_with_change, change=change)
    assert ours == [ddp[0]] * 2


# With torch DDP the ranks drift apart: it never averages what is frozen when `fit` begins.
@pytest.mark.parametrize(
    ("finetuning", "planned"), [("backbone", [4, 6, 6, 6]), ("layer_by_layer", [2, 4, 6, 6])], ids=list(FINETUNINGS)
)
def test_what_is_unfrozen_later_trains_like_in_one_process(finetuning: str, planned: list[int]) -> None:
    ranks = run_on_ranks(finetune, finetuning=finetuning)
    [(alone, _)] = run_on_ranks(finetune, finetuning=finetuning, world_size=1)
    for weights, planned_by_rank in ranks:
        assert planned_by_rank == planned
        torch.testing.assert_close(weights, alone)
        torch.testing.assert_close(weights, ranks[0][0], rtol=0, atol=0)


@on_ranks()
@like_torchrun()
def test_an_accumulation_schedule_reduces_each_bucket_once_per_step() -> None:
    steps = []

    def note(trainer: Any, _: LightningModule) -> None:
        reducer = trainer.strategy.reducer
        steps.append(trainer.global_step)
        assert reducer.stats.num_reductions == trainer.global_step * len(reducer.bucket_set.buckets)

    schedule = callbacks.GradientAccumulationScheduler({0: 1, 1: 4, 2: 5})
    noting = callbacks.LambdaCallback(on_train_epoch_end=note)
    strategy = BucketDDPStrategy(bucket_cap_mb=SMALL_BUCKETS_MB)
    make_trainer(strategy, max_epochs=3, callbacks=[schedule, noting]).fit(Regression(), loader())
    assert steps == [10, 13, 15]
