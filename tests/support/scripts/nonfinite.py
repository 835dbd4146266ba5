"""Jobs in which a loss or a gradient is not finite on some rank, through the Trainer."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from lightning_bucketddp.bindings.trainer_lightning import BucketDDPStrategy
from tests.support.jobs.nonfinite import collected_warnings
from tests.support.scripts.precision import option
from tests.support.scripts.trainers import SMALL_BUCKETS_MB, like_torchrun, make_trainer

WIDTH = 4
NUM_BATCHES = 6


class BadGradient(torch.autograd.Function):
    """Nothing in the forward, and nan in the backward."""

    @staticmethod
    def forward(ctx: Any, param: Tensor) -> Tensor:
        return param.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Tensor:
        return torch.full((WIDTH,), math.nan)


@dataclass(frozen=True)
class Setting:
    """What is bad (`loss`, `gradient` or nothing) in a batch of rank 1, and how is trained."""

    bad: str = ""
    at: int = 3
    leaves_out: Sequence[int] = ()
    accumulate: int = 1
    precision: str = "32-true"
    manual: str = ""
    optimizer: str = "adamw"
    clips: bool = False
    hook: bool = False
    returns_none_on: int | None = None
    options: dict[str, Any] = field(default_factory=dict)


class Module(LightningModule):
    def __init__(self, setting: Setting) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))
        self._setting = setting
        self.automatic_optimization = not setting.manual

    def loss(self, batch: list[Tensor]) -> Tensor:
        loss = (self.layers(batch[0]) - batch[1]).square().mean()
        if self.global_rank == 1 and int(batch[2]) == self._setting.at and self._setting.bad:
            return loss + (math.nan if self._setting.bad == "loss" else BadGradient.apply(self.layers[0].bias))
        return loss

    def training_step(self, batch: list[Tensor]) -> Tensor | None:
        if not self._setting.manual:
            skips = self.global_rank == self._setting.returns_none_on and int(batch[2]) == self._setting.at
            return None if skips else self.loss(batch)
        optimizer: Any = self.optimizers()
        if self._setting.manual == "closure":

            def closure() -> Tensor:
                optimizer.zero_grad()
                loss = self.loss(batch)
                self.manual_backward(loss)
                return loss

            optimizer.step(closure)
            return None
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        optimizer.step()
        return None

    def configure_optimizers(self) -> Any:
        if self._setting.optimizer == "lbfgs":
            return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3)
        # With weight decay and momentum a parameter changes even by a gradient of zero.
        return torch.optim.AdamW(self.parameters(), lr=0.1, weight_decay=0.1)


class Batches:
    """This rank's batches, each with its number; the same at each iteration."""

    def __init__(self, leaves_out: Sequence[int]) -> None:
        generator = torch.Generator().manual_seed(dist.get_rank())
        batches = [(torch.randn(4, WIDTH, generator=generator), torch.tensor(i)) for i in range(NUM_BATCHES)]
        self._batches = [[x, x.sin().sum(1, keepdim=True), i] for x, i in batches if int(i) not in leaves_out]

    def __iter__(self) -> Iterator[list[Tensor]]:
        return iter(self._batches)


class _Observer(Callback):
    """Keeps what was logged, and whether gradients were given to an optimizer."""

    logged = 0.0
    batches_stepped: list[int]

    def __init__(self) -> None:
        self.batches_stepped = []

    def on_before_optimizer_step(self, trainer: Trainer, *_: Any) -> None:
        self.batches_stepped.append(trainer.fit_loop.batch_idx)

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        self.logged = float(trainer.logged_metrics.get("bucketddp/nonfinite_steps", 0))


@dataclass(frozen=True)
class Outcome:
    error: str
    warnings: list[str]
    weights: list[Tensor]
    optimizer_state: dict[Any, Any]
    logged: float
    batches_stepped: list[int]
    global_step: int


@like_torchrun()
def fit(
    *, setting: Setting, callbacks: Sequence[Callback] = (), ckpt_path: str | None = None, **trainer_options: Any
) -> Outcome:
    """One epoch."""
    module = Module(setting)
    observer = _Observer()
    hook: dict[str, Any] = {"ddp_comm_hook": default_hooks.allreduce_hook} if setting.hook else {}
    trainer = make_trainer(
        BucketDDPStrategy(bucket_cap_mb=SMALL_BUCKETS_MB, **hook, **setting.options),
        max_epochs=1,
        accumulate_grad_batches=setting.accumulate,
        gradient_clip_val=0.1 if setting.clips else None,
        use_distributed_sampler=False,
        log_every_n_steps=1,
        callbacks=[observer, *callbacks],
        **option(setting.precision),
        **trainer_options,
    )
    error = ""
    with collected_warnings() as messages:
        try:
            trainer.fit(module, Batches(setting.leaves_out), ckpt_path=ckpt_path)
        except Exception as raised:
            error = f"{type(raised).__name__}: {raised}"
    return Outcome(
        error,
        messages,
        [param.detach() for param in module.parameters()],
        trainer.optimizers[0].state_dict()["state"] if trainer.optimizers else {},
        observer.logged,
        observer.batches_stepped,
        trainer.global_step,
    )


def fit_and_save_each_step(*, setting: Setting, directory: Path) -> str:
    """The error of a fit that saves after each step."""
    each_step = ModelCheckpoint(directory, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    return fit(setting=setting, callbacks=[each_step], enable_checkpointing=True).error


# --- Checkpoints


def fit_and_keep_one(
    *, setting: Setting, directory: Path, save_last: Any, ckpt_path: str | None = None
) -> tuple[Outcome, list[str]]:
    """A fit that saves after each step and keeps what it saved last; its outcome, and warnings about checkpoints."""
    newest = ModelCheckpoint(directory, filename="{step}", every_n_train_steps=1, save_top_k=1, save_last=save_last)
    with collected_of_ours() as messages:
        outcome = fit(setting=setting, callbacks=[newest], enable_checkpointing=True, ckpt_path=ckpt_path)
    return outcome, messages


class WithBuffers(LightningModule):
    """What may be infinite in a state dict on purpose, and what may not."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.norm = nn.BatchNorm1d(2)
        self.register_buffer("mask", torch.full((2, 2), -math.inf).triu(1))
        self.register_buffer("best", torch.tensor(math.nan))
        self.bias = nn.Parameter(torch.tensor([0.0, -math.inf]), requires_grad=False)

    def training_step(self, batch: Tensor) -> Tensor:
        return self.norm(self.linear(batch)).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def spoil(module: nn.Module, name: str) -> None:
    """Make a value infinite or nan in what is called so."""
    with torch.no_grad():
        for tensor_name, tensor in module.state_dict().items():
            if tensor_name.startswith(name):
                tensor.view(-1)[0] = math.inf if tensor_name.endswith("weight") else math.nan


@like_torchrun()
def save(
    *, path: Path, spoiled: str | None, on_nonfinite: Literal["warn", "raise", "skip"], weights_only: bool = False
) -> tuple[str, list[str]]:
    """Save, make a weight bad, and save again: the error and the warnings of that."""
    module = WithBuffers()
    trainer = make_trainer(BucketDDPStrategy(on_nonfinite=on_nonfinite), max_epochs=1)
    samples: Any = torch.randn(8, 2)
    trainer.fit(module, torch.utils.data.DataLoader(samples, batch_size=4))
    trainer.save_checkpoint(path)
    if spoiled is not None:
        spoil(module, spoiled)
    return outcome_of(lambda: trainer.save_checkpoint(path, weights_only=weights_only))


def outcome_of(call: Any) -> tuple[str, list[str]]:
    """The error and the warnings of ours."""
    error = ""
    with collected_of_ours() as messages:
        try:
            call()
        except Exception as raised:
            error = f"{type(raised).__name__}: {raised}"
    return error, messages


@contextmanager
def collected_of_ours() -> Iterator[list[str]]:
    """The warnings of ours that are raised inside, when it ends."""
    messages: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield messages
    messages += [text for warning in caught if (text := str(warning.message)).startswith("bucketddp:")]
