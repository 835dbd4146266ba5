"""Jobs in which one rank's replica changes behind the Trainer's back, and jobs in which none does."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer, callbacks
from torch import Tensor, nn

from lightning_bucketddp.bindings.fabric_lightning import BucketDDPStrategy as FabricStrategy
from lightning_bucketddp.bindings.trainer_lightning import BucketDDPStrategy
from tests.support.jobs.replicas import flip_bit
from tests.support.scripts import changes, hooks, models
from tests.support.scripts.fabrics import make_fabric
from tests.support.scripts.trainers import like_torchrun, make_trainer


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


def _weight(trainer: Any) -> None:
    flip_bit(trainer.model.layers[0].weight, 5)


def _moment(trainer: Any) -> None:
    flip_bit(trainer.optimizers[0].state[trainer.model.layers[0].weight]["exp_avg"], 5)


def _counter(trainer: Any) -> None:
    trainer.optimizers[0].state[trainer.model.layers[0].weight]["step"] += 1


def _learning_rate(trainer: Trainer) -> None:
    trainer.optimizers[0].param_groups[0]["lr"] = 0.02


def _buffer(trainer: Any) -> None:
    flip_bit(trainer.model.scale, 5)


def _state(trainer: Any) -> None:
    del trainer.optimizers[0].state[trainer.model.layers[0].weight]["exp_avg"]


DRIFTS = {
    "weight": _weight,
    "moment": _moment,
    "counter": _counter,
    "learning_rate": _learning_rate,
    "buffer": _buffer,
    "state": _state,
}


class Drifts(Callback):
    """Changes something on one rank after a batch."""

    def __init__(self, what: str, *, on_rank: int, after_batch: int) -> None:
        self._change = DRIFTS[what]
        self._on_rank = on_rank
        self._after_batch = after_batch

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == self._after_batch and trainer.global_rank == self._on_rank:
            self._change(trainer)


@dataclass
class Outcome:
    """What a fit left on a rank."""

    error: str | None
    logged: list[str]
    weights: dict[str, Any]
    optimizer: Any


@contextmanager
def logged() -> Iterator[list[str]]:
    """What the checks log."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("lightning_bucketddp.replicas.consistency")
    logger.addHandler(handler)
    logger.propagate = False
    try:
        yield lines
    finally:
        logger.removeHandler(handler)
        logger.propagate = True


@like_torchrun()
def drift(
    *,
    of: str,
    on_rank: int = 1,
    after_batch: int = 1,
    save_every: tuple[Path, int] | None = None,
    save_on_exception: Path | None = None,
    max_steps: int = 7,
    **options: Any,
) -> Outcome:
    """A fit of some steps in which something changes on one rank alone."""
    used: list[Callback] = [Drifts(of, on_rank=on_rank, after_batch=after_batch)]
    if save_every is not None:
        directory, steps = save_every
        used.append(callbacks.ModelCheckpoint(directory, every_n_train_steps=steps, save_top_k=-1))
    if save_on_exception is not None:
        used.append(callbacks.OnExceptionCheckpoint(save_on_exception))
    trainer = make_trainer(
        BucketDDPStrategy(**options),
        max_steps=max_steps,
        callbacks=used,
        enable_checkpointing=save_every is not None or save_on_exception is not None,
    )
    torch.manual_seed(0)
    module = Adam()
    with logged() as lines:
        error = _raised_by(lambda: trainer.fit(module, models.loader()))
    return Outcome(error, lines, dict(module.state_dict()), trainer.optimizers[0].state_dict())


def _raised_by(call: Callable[[], Any]) -> str | None:
    try:
        call()
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"
    return None


class _LearningRateOfRank(Adam):
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01 * (1 + self.global_rank))


class _GroupsOfRank(Adam):
    def configure_optimizers(self) -> Any:
        first, *others = self.parameters()
        groups = [[first], others] if self.global_rank == 0 else [[first, *others]]
        return torch.optim.AdamW([{"params": params} for params in groups], lr=0.01)


class _FreezesOneRank(Callback):
    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 3 and trainer.global_rank == 1:
            pl_module.layers[0].requires_grad_(False)


REFUSALS: dict[str, Callable[[], LightningModule]] = {
    "learning_rate": _LearningRateOfRank,
    "groups": _GroupsOfRank,
    "weights": Adam,
}


@like_torchrun()
def refusal(*, of: str) -> tuple[str | None, int]:
    """What a fit raises in which the ranks are not equal from the start, and after how many steps."""
    torch.manual_seed(dist.get_rank() if of == "weights" else 0)
    trainer = make_trainer(BucketDDPStrategy(init_sync=False), max_steps=3)
    module = REFUSALS[of]()
    return _raised_by(lambda: trainer.fit(module, models.loader())), trainer.global_step


@like_torchrun()
def other_shape_without_init_sync() -> tuple[str | None, int]:
    """A validation comes first, which shares buffers: gloo ends a process that gets more than it has room for."""
    module = Adam()
    if dist.get_rank() == 0:
        module.scale = torch.ones(4)
    trainer = make_trainer(BucketDDPStrategy(init_sync=False), max_steps=3)
    return _raised_by(lambda: trainer.fit(module, models.loader(), models.loader())), trainer.global_step


@like_torchrun()
def freeze_on_one_rank() -> tuple[str | None, int]:
    """What a fit raises in which one rank freezes a layer when all have a plan.

    Without overlap, so that no bucket is under way then and the other tests can use the processes.
    """
    trainer = make_trainer(BucketDDPStrategy(overlap=False), max_steps=6, callbacks=[_FreezesOneRank()])
    return _raised_by(lambda: trainer.fit(Adam(), models.loader())), trainer.global_step


class _Dropout(Adam):
    def __init__(self) -> None:
        super().__init__()
        self.layers.insert(1, nn.Dropout(0.5))


class _ChannelsLast(models.ConvBatchNorm):
    def __init__(self) -> None:
        super().__init__()
        self.to(memory_format=torch.channels_last)


class _Sharded(Adam):
    def configure_optimizers(self) -> Any:
        from torch.distributed.optim import ZeroRedundancyOptimizer  # slow to import

        return ZeroRedundancyOptimizer(self.parameters(), torch.optim.AdamW, lr=0.01)


class _LocalParameter(Adam):
    """Each rank has its own value of a parameter that is left out of everything, with its state."""

    def __init__(self) -> None:
        super().__init__()
        self.local = nn.Parameter(torch.randn(1))
        self._ddp_params_and_buffers_to_ignore = ["local"]

    def loss(self, batch: list[Tensor]) -> Tensor:
        return super().loss(batch) + self.local.square().sum() * (1 + self.global_rank)


class _Plateau(Adam):
    """A learning rate that follows a metric, which Lightning averages over the ranks."""

    def training_step(self, batch: list[Tensor]) -> Tensor:
        loss = self.loss(batch)
        self.log("loss", loss, sync_dist=True, on_step=False, on_epoch=True)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=1.0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "loss"}}


class _OneCycle(Adam):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters())
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=40)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


@dataclass(frozen=True)
class Healthy:
    """A training in which the replicas stay equal, as far as they should."""

    module: Callable[[], LightningModule] = Adam
    trainer: Callable[[], dict[str, Any]] = dict
    strategy: Callable[[], dict[str, Any]] = dict
    is_checked: bool = True


HEALTHY = {
    "batchnorm": Healthy(models.ConvBatchNorm),
    "sync_batchnorm": Healthy(models.ConvBatchNorm, lambda: {"sync_batchnorm": True}),
    "mean_teacher": Healthy(changes.MeanTeacher),
    "dropout": Healthy(_Dropout, strategy=lambda: {"rank_seeds": True}),
    "channels_last": Healthy(_ChannelsLast),
    "accumulation": Healthy(trainer=lambda: {"accumulate_grad_batches": 3}),
    "two_optimizers": Healthy(models.TwoPlayers),
    "line_search": Healthy(models.LBFGSRegression),
    "manual": Healthy(models.ManualRegression),
    "bf16": Healthy(trainer=lambda: {"precision": "bf16-mixed"}),
    "clipping": Healthy(trainer=lambda: {"gradient_clip_val": 0.01}),
    "one_cycle": Healthy(_OneCycle),
    "plateau": Healthy(_Plateau),
    "finetuning": Healthy(changes.Backbone, lambda: {"callbacks": changes.FINETUNINGS["backbone"]()}),
    "freezing": Healthy(trainer=lambda: {"callbacks": changes.FreezesByHand("before")}),
    "weight_averaging": Healthy(
        changes.NormRegression, lambda: {"callbacks": changes.CHANGES["stochastic_weight_averaging"].by()}
    ),
    "local_buffer": Healthy(lambda: models.RankZeroBuffer(changes_in="training_step")),
    "own_buffers": Healthy(
        lambda: models.RankZeroBuffer(changes_in="training_step"), strategy=lambda: {"broadcast_buffers": False}
    ),
    "local_parameter": Healthy(_LocalParameter),
    "sharded_optimizer": Healthy(_Sharded),
    "unused_on_one_rank": Healthy(lambda: models.SpareLayer(used_on=(0,))),
    "power_sgd": Healthy(strategy=hooks.HOOKS["power_sgd"]),
    "bf16_wire": Healthy(strategy=lambda: {"reduce_dtype": "bf16"}),
    "post_local_sgd": Healthy(hooks.PlainSGD, strategy=hooks.HOOKS["post_local_sgd"], is_checked=False),
}


@like_torchrun()
def train_healthy(*, training: str, directory: Path) -> tuple[list[str], bool]:
    """Train with a check in every step and checkpoints, and resume; what is logged, and whether checks were made."""
    how = HEALTHY[training]
    torch.manual_seed(dist.get_rank())
    num_checked = 0
    with logged() as lines:
        for max_epochs in (2, 3):
            strategy = BucketDDPStrategy(replica_checks=1, **how.strategy())
            options = how.trainer()
            each_epoch = callbacks.ModelCheckpoint(directory, filename="last", enable_version_counter=False)
            options["callbacks"] = [each_epoch, *([options["callbacks"]] if "callbacks" in options else [])]
            trainer = make_trainer(strategy, max_epochs=max_epochs, enable_checkpointing=True, **options)
            resumed = directory / "last.ckpt" if max_epochs == 3 else None
            trainer.fit(how.module(), models.loader(), models.loader(), ckpt_path=resumed)
            comparison: Any = strategy._state.comparison
            num_checked += 0 if comparison is None else comparison._checks._begun_at
    return lines, num_checked > 0


@like_torchrun()
def num_collectives(*, every_n_steps: int | None, max_steps: int) -> dict[str, int]:
    """How often each collective is called in a fit."""
    names = ["all_reduce", "all_gather", "broadcast", "barrier", "all_gather_object", "broadcast_object_list"]
    originals = {name: getattr(dist, name) for name in names}
    calls = dict.fromkeys(names, 0)

    def counting(name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            calls[name] += 1
            return originals[name](*args, **kwargs)

        return call

    trainer = make_trainer(BucketDDPStrategy(replica_checks=every_n_steps), max_steps=max_steps)
    for name in names:
        setattr(dist, name, counting(name))
    try:
        trainer.fit(Adam(), models.loader())
    finally:
        for name in names:
            setattr(dist, name, originals[name])
    return calls


@like_torchrun()
def drift_in_fabric(*, of: str, directory: Path, **options: Any) -> tuple[str | None, list[str], bool]:
    """Four steps; then a weight or a moment changes on rank 1. What six more steps say, or a checkpoint."""
    fabric = make_fabric(FabricStrategy(**options))
    torch.manual_seed(0)
    bare: Any = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1))
    module, optimizer = fabric.setup(bare, torch.optim.AdamW(bare.parameters(), lr=0.01))

    def step(number: int) -> None:
        generator = torch.Generator().manual_seed(100 * dist.get_rank() + number)
        optimizer.zero_grad()
        fabric.backward(module(torch.randn(4, 4, generator=generator)).square().mean())
        optimizer.step()

    def train_on() -> None:
        for number in range(4, 10):
            step(number)
        fabric.save(directory / "model.ckpt", {"model": module, "optimizer": optimizer, "step": 10})

    for number in range(4):
        step(number)
    if dist.get_rank() == 1 and of == "weight":
        flip_bit(bare[0].weight, 5)
    elif dist.get_rank() == 1:
        flip_bit(optimizer.state[bare[0].weight]["exp_avg"], 5)
    with logged() as lines:
        error = _raised_by(train_on)
    # Rank 0 writes; the file is there when the others know that it is.
    fabric.barrier()
    return error, lines, (directory / "model.ckpt").exists()


@like_torchrun()
def accumulate_differently_in_fabric() -> list[str]:
    """Rank 1 accumulates over three micro-batches, rank 0 over one, with a check in every step; what is logged."""
    fabric = make_fabric(FabricStrategy(replica_checks=1))
    bare = nn.Linear(4, 1)
    module, optimizer = fabric.setup(bare, torch.optim.AdamW(bare.parameters()))
    with logged() as lines:
        for _ in range(6):
            optimizer.zero_grad()
            for micro_batch in reversed(range(1 + 2 * fabric.global_rank)):
                with fabric.no_backward_sync(module, enabled=micro_batch > 0):
                    fabric.backward(module(torch.randn(2, 4)).square().mean())
            optimizer.step()
    return lines
