"""Trains a drawn program on one rank, with torch DDP or with us."""

from __future__ import annotations

import io
import logging
import sys
import traceback
import warnings
from contextlib import nullcontext, redirect_stderr
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_bucketddp.bindings.fabric_lightning import BucketDDPStrategy as FabricBucketDDP
from lightning_bucketddp.bindings.trainer_lightning import BucketDDPStrategy as TrainerBucketDDP
from tests.fuzz.events import EVENTS
from tests.fuzz.models import MODELS, WIDTH
from tests.fuzz.program import BEFORE_SETUP, NUM_EPOCHS, Program
from tests.support.ranks import device
from tests.support.scripts.trainers import devices, like_torchrun, make_trainer

LEARNING_RATES = {"sgd": 0.1, "momentum": 0.1, "adam": 0.01}


@dataclass
class Outcome:
    """What a rank has at the end of a program, or when that raised."""

    error: str = ""
    kinds: tuple[str, ...] = ()
    raised_in: str = ""
    is_partial: bool = False  # the strategy knows that the weights are not those of any step
    values: dict[str, Any] = field(default_factory=dict)
    trajectory: list[dict[str, Any]] = field(default_factory=list)


class Run:
    """The state of one rank's training, which events read and change."""

    def __init__(self, program: Program, rank: int, *, seed: int, keeps_trajectory: bool = False) -> None:
        torch.manual_seed(seed)
        self.program = program
        self.net = MODELS[program.model]().to(device())
        self.rank = rank
        self.x = torch.empty(0)
        self.batch = BEFORE_SETUP
        self.closes_window = False
        self.leaves_out_step = False
        self.is_alone = False
        self.ema: nn.Module | None = None
        self.handles: list[Any] = []
        self.losses: list[float] = []
        self.trajectory: list[dict[str, Any]] | None = [weights_of(self.net)] if keeps_trajectory else None
        self.happen("setup")

    def happen(self, place: str, value: Any = None) -> Any:
        """Have all events happen that are due at this place of this batch."""
        for event in self.program.events:
            kind = EVENTS[event.what]
            if kind.place == place and event.at == self.batch and event.rank in (None, self.rank):
                value = kind.act(self, value)
        return value

    def begin_batch(self, batch: int) -> None:
        self.batch = batch
        self.x = inputs(self.rank, batch)
        self.closes_window = self.program.closes_window(batch)
        self.leaves_out_step = False
        self.happen("setup")
        self.happen("start")

    def loss(self, net: Any) -> Tensor:
        """Return the loss of this batch, with all that happens to it; `net` may be wrapped."""
        loss = self.happen("loss", self._loss_of(net))
        self.losses.append(loss.item())
        return loss

    def again(self) -> Tensor:
        """Return the loss of this batch, computed again without Lightning."""
        return self._loss_of(self.net)

    def _loss_of(self, net: Any) -> Any:
        turn = self.batch + (self.rank if self.program.model == "branches_by_rank" else 0)
        return net(self.x, turn).float().square().mean()

    def end_batch(self) -> None:
        self.happen("end")
        if self.trajectory is not None:
            self.trajectory.append(weights_of(self.net))

    def optimizers(self) -> list[Optimizer]:
        params = list(self.net.parameters())
        half = len(params) // 2
        parts = [params] if self.program.num_optimizers == 1 else [params[:half], params[half:]]
        lr = LEARNING_RATES[self.program.optimizer]
        if self.program.optimizer == "adam":
            return [torch.optim.Adam(part, lr=lr) for part in parts]
        momentum = 0.9 if self.program.optimizer == "momentum" else 0.0
        return [torch.optim.SGD(part, lr=lr, momentum=momentum) for part in parts]


def inputs(rank: int, batch: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * rank + batch)
    return torch.randn(4, WIDTH, generator=generator).to(device())


def scheduler_of(optimizer: Optimizer) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)


def weights_of(net: nn.Module, prefix: str = "weight") -> dict[str, Any]:
    return {f"{prefix} {name}": param.detach().float().tolist() for name, param in net.named_parameters()}


def values_of(run: Run, states: list[dict[str, Any]]) -> dict[str, Any]:
    """Return all that is compared; `states` are those of the optimizers."""
    values = weights_of(run.net)
    values |= {f"buffer {name}": buffer.tolist() for name, buffer in run.net.named_buffers()}
    values |= {} if run.ema is None else weights_of(run.ema, "ema")
    values |= {f"loss {index}": loss for index, loss in enumerate(run.losses)}
    for number, state in enumerate(states):
        for group in state.get("param_groups", []):
            values[f"optimizer {number} lr"] = group["lr"]
        for index, parts in state.get("state", {}).items():
            for name, part in parts.items():
                value = part.tolist() if isinstance(part, Tensor) else part
                values[f"optimizer {number} {name} of {index}"] = value
    return values


class Module(LightningModule):
    """Optimizes as Lightning does, or by itself."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        self.net = run.net
        self.run = run
        self.states: list[dict[str, Any]] = []
        self.automatic_optimization = run.program.loop == "automatic"

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor | None:
        run, program = self.run, self.run.program
        loss = run.loss(self.net)
        self.log("loss", loss.detach(), on_step=False, on_epoch=True, sync_dist=True, batch_size=len(batch))
        if program.loop == "automatic":
            return None if run.leaves_out_step else loss
        strategy: Any = self.trainer.strategy
        with nullcontext() if program.exchanges(run.batch) else strategy.block_backward_sync():
            self.manual_backward(loss)
        if run.closes_window and not run.leaves_out_step:
            self.step()
        return None

    def step(self) -> None:
        program = self.run.program
        optimizers: Any = self.optimizers(use_pl_optimizer=True)
        schedulers: Any = self.lr_schedulers()
        for index, optimizer in enumerate(optimizers if isinstance(optimizers, list) else [optimizers]):
            if program.clip is not None:
                self.clip_gradients(optimizer, gradient_clip_val=0.05, gradient_clip_algorithm=program.clip)
            optimizer.step()
            optimizer.zero_grad()
            if program.has_scheduler:
                (schedulers[index] if isinstance(schedulers, list) else schedulers).step()

    def on_after_backward(self) -> None:
        self.run.happen("backward")

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        if self.run.closes_window:
            self.run.happen("step")

    def on_train_end(self) -> None:
        self.states = [self.trainer.strategy.optimizer_state(optimizer) for optimizer in self.trainer.optimizers]

    def configure_optimizers(self) -> Any:
        optimizers = self.run.optimizers()
        if not self.run.program.has_scheduler:
            return optimizers
        return optimizers, [{"scheduler": scheduler_of(optimizer), "interval": "step"} for optimizer in optimizers]


class Batches(Callback):
    """What happens around batches."""

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        pl_module.run.begin_batch(trainer.current_epoch * pl_module.run.program.num_batches + batch_idx)

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        pl_module.run.end_batch()


def _fit(run: Run, strategy: Any, *, max_epochs: int, checkpoint: str | None) -> tuple[Trainer, Module]:
    program, module = run.program, Module(run)
    clip = 0.05 if program.clip is not None and program.loop == "automatic" else None
    trainer = make_trainer(
        strategy,
        max_epochs=max_epochs,
        accumulate_grad_batches=program.accumulate if program.loop == "automatic" else 1,
        precision=program.precision,
        gradient_clip_val=clip,
        gradient_clip_algorithm=program.clip if clip else None,
        callbacks=[Batches()],
        use_distributed_sampler=False,
    )
    data = [torch.full((4,), run.rank) for _ in range(program.num_batches)]
    loader: Any = torch.utils.data.DataLoader(data, batch_size=None)  # type: ignore[arg-type]
    trainer.fit(module, loader, ckpt_path=checkpoint)
    return trainer, module


def _with_trainer(run: Run, strategy: Any, directory: Path) -> dict[str, Any]:
    checkpoint = None
    if run.program.resumes:
        trainer, _ = _fit(run, strategy(), max_epochs=1, checkpoint=None)
        checkpoint = str(directory / "checkpoint.ckpt")
        trainer.save_checkpoint(checkpoint)
        other = Run(run.program, run.rank, seed=7)
        other.losses, run.net, run.handles = run.losses, other.net, other.handles
        run.batch = BEFORE_SETUP
    trainer, module = _fit(run, strategy(), max_epochs=NUM_EPOCHS, checkpoint=checkpoint)
    logged = {f"logged {name}": float(value) for name, value in trainer.callback_metrics.items() if "/" not in name}
    return values_of(run, module.states) | logged


def _with_fabric(run: Run, strategy: Any) -> dict[str, Any]:
    program = run.program
    fabric = Fabric(strategy=strategy(), precision=program.precision, **devices())  # type: ignore[arg-type]
    fabric.launch()
    net, *optimizers = fabric.setup(run.net, *run.optimizers())
    schedulers = [scheduler_of(optimizer.optimizer) for optimizer in optimizers] if program.has_scheduler else []
    for batch in range(NUM_EPOCHS * program.num_batches):
        run.begin_batch(batch)
        with fabric.no_backward_sync(net, enabled=not program.exchanges(batch)):
            loss = run.loss(net)
            fabric.backward(loss)
        run.happen("backward")
        if run.closes_window and not run.leaves_out_step:
            for optimizer in optimizers:
                if program.clip is not None:
                    how: Any = {"max_norm": 0.05} if program.clip == "norm" else {"clip_val": 0.05}
                    fabric.clip_gradients(net, optimizer, **how)
                run.happen("step")
                optimizer.step()
                optimizer.zero_grad()
            for scheduler in schedulers:
                scheduler.step()
        run.end_batch()
    strategy_of: Any = fabric.strategy
    states = [strategy_of.get_optimizer_state(optimizer.optimizer) for optimizer in optimizers]
    return values_of(run, states)


@like_torchrun()
def train(*, program: Program, strategy: str, directory: Path) -> Outcome:
    """Train on this rank; an error is told, and not raised."""
    for name in ("lightning", "lightning.pytorch", "lightning.fabric", "lightning_bucketddp"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    rank = dist.get_rank()
    run = Run(program, rank, seed=rank, keeps_trajectory=strategy != "bucketddp")
    made: list[Any] = []

    def make_strategy() -> Any:
        kind = FabricBucketDDP if program.loop == "fabric" else TrainerBucketDDP
        made.append(kind(**program.all_options) if strategy == "bucketddp" else strategy)
        return made[-1]

    outcome = Outcome(trajectory=run.trajectory or [])
    with warnings.catch_warnings(), redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        try:
            if program.loop == "fabric":
                outcome.values = _with_fabric(run, make_strategy)
            else:
                outcome.values = _with_trainer(run, make_strategy, directory)
        except BaseException as error:
            outcome.error = traceback.format_exc()
            outcome.kinds = tuple(kind.__name__ for kind in type(error).__mro__)
            outcome.raised_in = traceback.extract_tb(error.__traceback__)[-1].filename
            # As it would end a program. Of Fabric nothing else tells the other ranks.
            if program.loop == "fabric":
                sys.excepthook(type(error), error, error.__traceback__)
            outcome.is_partial = bool(made) and getattr(made[-1], "has_partial_weights", False)
            outcome.values = weights_of(run.net)
    return outcome
