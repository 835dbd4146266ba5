"""Steps that are replayed give what the same steps give without graphs, and what cannot be replayed is not.

On a CPU there are no graphs: in their place stands something that runs a captured step again.
"""

from __future__ import annotations

import copy
import random
import re
import tempfile
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from lightning.pytorch import Callback, LightningDataModule, LightningModule
from lightning.pytorch.callbacks import EarlyStopping, GradientAccumulationScheduler, LambdaCallback, ModelCheckpoint
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Subset, TensorDataset
from torchmetrics import MeanSquaredError

from lightning_bucketddp import BucketDDPMonitor, BucketDDPStrategy
from lightning_bucketddp.comm.collectives import Collectives
from lightning_bucketddp.commands.report import page_content, typical_step_of
from lightning_bucketddp.config import LocalSteps
from lightning_bucketddp.graphs.replay import GradientMemory
from lightning_bucketddp.recording.schema import find_folder, read_run
from lightning_bucketddp.recording.summary import Summary
from lightning_bucketddp.reducer import bucket, bucket_set, nonfinite
from lightning_bucketddp.reducer.plan_cache import _ALONE_FROM_BYTES
from lightning_bucketddp.sharding.gradient import ShardedGradient
from lightning_bucketddp.strategies import fit_state
from tests.support.jobs import models
from tests.support.jobs.models import CASES, Case
from tests.support.ranks import device, raised_by, run_on_ranks
from tests.support.scripts.models import WIDTH, loader
from tests.support.scripts.trainers import SMALL_BUCKETS_MB, like_torchrun, make_trainer


def attributes_of(root: nn.Module) -> list[tuple[dict[str, Any], str, Any]]:
    """Return what the user's code has set on modules, other than tensors and modules."""
    return [
        (vars(module), key, value)
        for module in root.modules()
        for key, value in vars(module).items()
        if not key.startswith("_") and not isinstance(value, Tensor | nn.Module)
    ]


class RunAgain:
    """Stands for a graph: runs what was captured again, and writes what comes out where it was the first time.

    Attributes of `module` have the values then that they had when it was captured: a graph knows no others. What Python
    knows of buckets and gradients stays what it is. Their memory must be where it was.
    """

    def __init__(self, module: Any) -> None:
        self._module = module
        self._has_run = False

    def capture(self, body: Callable[[], Any]) -> Any:
        self._body, self._step = body, body()
        self._addresses = self._addresses_of_gradients()
        # A function stays what it is, and so does what a method belongs to.
        memo = {id(value): value for _, _, value in attributes_of(self._module) if callable(value)}
        self._attributes = [(own, key, copy.deepcopy(it, memo)) for own, key, it in attributes_of(self._module)]
        self._has_run = True
        return self._step

    def replay(self) -> None:
        # A graph does nothing while it is captured.
        if self._has_run:
            self._has_run = False
            return
        assert self._addresses_of_gradients() == self._addresses
        now = attributes_of(self._module)
        for own, key, value in self._attributes:
            own[key] = value
        for param, gradient in zip(self._step.params, self._step.before, strict=True):
            param.grad = None if gradient is None else gradient()
        with self._python_kept(), torch.enable_grad():
            step = self._body()
        for own, key, value in now:
            own[key] = value
        pairs = [*zip(self._step.values.tensors, step.values.tensors, strict=True)]
        pairs += zip(self._step.gradients.tensors(), step.gradients.tensors(), strict=True)
        with torch._C.DisableTorchFunctionSubclass():
            for before, now in pairs:
                if before is not None:
                    before.data.copy_(now)

    def _addresses_of_gradients(self) -> list[int]:
        with torch._C.DisableTorchFunctionSubclass():
            return [0 if one is None else one.data_ptr() for one in self._step.gradients.tensors()]

    @contextmanager
    def _python_kept(self) -> Iterator[None]:
        reducer: Any = self._module.trainer.strategy.reducer
        captured = self._step.backward.bucket_set
        buckets = [] if captured is None else captured.buckets
        before = [(one, dict(vars(one))) for one in (reducer, reducer.finiteness, *buckets)]
        # Buckets take other memory if we hold their views.
        gradients = self._step.gradients.tensors()
        sharded: list[Any] = [weakref.ref(one) for one in gradients if isinstance(one, ShardedGradient)]
        states = [one().state for one in sharded]
        del gradients
        yield
        for one, known in before:
            vars(one).clear()
            vars(one).update(known)
        for one, state in zip(sharded, states, strict=True):
            one().state = state


@contextmanager
def graphs_to_run(module: nn.Module, graph: type[RunAgain] = RunAgain) -> Iterator[None]:
    """Have something in the place of graphs of `module`, where there are none."""
    on_cpu = patch.object(fit_state, "new_graph", lambda _: partial(graph, module))
    with on_cpu if device().type == "cpu" else nullcontext():
        yield


@contextmanager
def like_large_buckets_on_a_gpu() -> Iterator[None]:
    """Have buckets give their memory back inside, and no group hold tensors, as those of gloo do."""
    is_taken = GradientMemory.is_taken

    def is_taken_for_good(memory: GradientMemory) -> bool:
        deadline = time.monotonic() + 1  # gloo's threads drop tensors a moment after an operation has ended
        while (result := is_taken(memory)) and time.monotonic() < deadline:
            time.sleep(0.001)
        return result

    with (
        patch.object(bucket_set, "_GIVE_BACK_ON", (device().type,)),
        patch.object(bucket, "_GIVE_BACK_FROM_BYTES", 0),
        patch.object(Collectives, "_hold", lambda _, *tensors: tensors),
        patch.object(GradientMemory, "is_taken", is_taken_for_good),
    ):
        yield


class Network(LightningModule):
    """Has what the tests are about: normalisation, dropout, values that it logs and returns."""

    def __init__(self, *, dropout: float = 0.2, has_norm: bool = True) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 8)
        self.norm: nn.Module = nn.BatchNorm1d(8) if has_norm else nn.Identity()
        self.dropout = nn.Dropout(dropout)
        self.last = nn.Linear(8, 1)
        self.temperature = 1.0

    def forward(self, inputs: Tensor) -> Tensor:
        output: Tensor = self.last(self.dropout(self.norm(self.first(inputs)).tanh()))
        return output * self.temperature

    def loss(self, batch: list[Tensor]) -> Tensor:
        return F.mse_loss(self(batch[0]), batch[1])

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        self.log_dict({"largest": batch[0].amax(), "constant": 3.0}, sync_dist=True)
        return {"loss": loss, "inputs": batch[0].sum()}

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 2)]


class Numbered(Network):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        return self.loss(batch) * (2 if batch_idx % 2 else 1)


class Annealed(Network):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        return self.loss(batch) * min(1.0, self.global_step / 10)


class ByLength(Network):
    """Scales its loss by the number of batches in an epoch."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        return self.loss(batch) * self.trainer.num_training_batches


class ShrinkingData(LightningDataModule):
    """Has fewer batches in each epoch."""

    def train_dataloader(self) -> Any:
        assert self.trainer is not None
        return DataLoader(Subset(loader().dataset, range(80 - 16 * self.trainer.current_epoch)), batch_size=4)


class Counting(Network):
    def __init__(self) -> None:
        super().__init__()
        self.num_calls = 0

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        self.num_calls += 1
        return self.loss(batch) / self.num_calls


class Measuring(Network):
    def __init__(self) -> None:
        super().__init__()
        self.error = MeanSquaredError()  # unlike others, it does not wait for the device

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        output = self(batch[0])
        self.error(output, batch[1])
        self.log("error", self.error, on_step=True, on_epoch=True)
        return F.mse_loss(output, batch[1])


class Gambling(Network):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        return self.loss(batch) * (0.5 if random.random() < 0.5 else 1.0)


class Looking(Network):
    """Waits for the device, and does one thing or another."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        loss = self.loss(batch)
        return loss if loss.item() > 0.5 else 2 * loss


class Waiting(Network):
    """Waits for the device in a way that torch does not warn of."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        loss = self.loss(batch)
        torch.cuda.synchronize()
        return loss


class Hooked(Network):
    def on_after_backward(self) -> None:
        for param in self.parameters():
            assert param.grad is not None
            param.grad.mul_(0.5)


class Elsewhere(Network):
    """Trains a parameter that no module knows of."""

    def __init__(self) -> None:
        super().__init__()
        self.others = [nn.Parameter(torch.ones(()))]

    def on_fit_start(self) -> None:
        self.others[0].data = self.others[0].data.to(self.device)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        return self.loss(batch) * self.others[0]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([*self.parameters(), *self.others], lr=0.01)


class Zeroing(Network):
    """Has an optimizer that counts in its own `zero_grad`, and steps less and less."""

    def configure_optimizers(self) -> Any:
        class CountingSGD(torch.optim.SGD):
            def zero_grad(self, set_to_none: bool = True) -> None:
                self.param_groups[0]["lr"] *= 0.9
                super().zero_grad(set_to_none)

        return CountingSGD(self.parameters(), lr=0.1)


class Unused(Network):
    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Linear(3, 3)


class Images(Network):
    """Convolutions, channels last."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 8, 1).to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def forward(self, inputs: Tensor) -> Tensor:
        images = inputs[:, None, None].to(memory_format=torch.channels_last)
        features: Tensor = self.norm(self.first(images).mean((2, 3)))
        return self.last(self.dropout(features.tanh()))


class Heating(Callback):
    """Changes an attribute that the forward reads, once an epoch."""

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        pl_module.temperature = 1.0 + trainer.current_epoch


class Factors(Network):
    """Multiplies its loss by numbers that are in all kinds of things."""

    def __init__(self) -> None:
        super().__init__()
        self.factors = SimpleNamespace(by_name={"loss": 1.0})
        self.config = {"losses": [{"mse": {"weights": {"all": 1.0}}}]}
        self.names: set[str] = set()
        self.array = np.ones(2)

    def loss(self, batch: list[Tensor]) -> Tensor:
        factor = self.factors.by_name["loss"] * self.config["losses"][0]["mse"]["weights"]["all"] * self.array[1]
        return super().loss(batch) * float(factor) * (1 + len(self.names))


def set_item(container: Any, key: Any, value: Any) -> None:
    container[key] = value


CHANGES: list[Callable[[Any], None]] = [
    lambda it: set_item(it.factors.by_name, "loss", 2.0),
    lambda it: setattr(it, "factors", SimpleNamespace(by_name={"loss": 3.0})),
    lambda it: setattr(it.factors, "by_name", {"loss": 4.0}),
    lambda it: set_item(it.config["losses"][0]["mse"]["weights"], "all", 5.0),
    lambda it: setattr(it, "temperature", np.float32(6)),
    lambda it: it.names.add("seven"),
    lambda it: set_item(it.array, 1, 8.0),
]


class Changing(Callback):
    """Changes one of them after each epoch."""

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        for change in CHANGES[trainer.current_epoch :][:1]:
            change(pl_module)


class Rated(Network):
    """Logs its learning rate."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        self.log("rate", self.optimizers().param_groups[0]["lr"])  # type: ignore[union-attr]
        return self.loss(batch)


class Scheduled(Network):
    """Holds the scheduler, and scales its loss by what that says."""

    def configure_optimizers(self) -> Any:
        [optimizer], [self.scheduler] = super().configure_optimizers()
        return [optimizer], [self.scheduler]

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        return self.loss(batch) * self.scheduler.get_last_lr()[0]


class OwnNumbers(Network):
    """Has random numbers of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = np.random.default_rng(3)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        return self.loss(batch) * self.numbers.random()


class Poison(Callback):
    """Gives rank 1 something that is not finite in two late steps; what is only warned of is read late, as on a GPU."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        finiteness = trainer.strategy.reducer.finiteness
        finiteness.reads_late = trainer.strategy.config.on_nonfinite == "warn"

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step in (9, 13) and trainer.global_rank == trainer.world_size - 1:
            batch[0].fill_(torch.nan)


class Rooted(Network):
    """Has one gradient that is not finite, with a finite loss, for a batch of zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def loss(self, batch: list[Tensor]) -> Tensor:
        return super().loss(batch) * (1 + (self.scale * batch[0].abs().amax()).sqrt())


class Zeroes(Poison):
    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == 9 and trainer.global_rank == trainer.world_size - 1:
            batch[0].zero_()


class Checkpointed(Network):
    """Computes activations again in the backward."""

    preserves_random_numbers = False

    def forward(self, inputs: Tensor) -> Tensor:
        def features(inputs: Tensor) -> Tensor:
            return self.norm(self.first(inputs)).tanh()

        hidden = checkpoint(features, inputs, use_reentrant=False, preserve_rng_state=self.preserves_random_numbers)
        output: Tensor = self.last(self.dropout(hidden))
        return output


class CheckpointedDropout(Checkpointed):
    preserves_random_numbers = True


class Compiled(Network):
    def configure_model(self) -> None:
        if not isinstance(self.first, torch._dynamo.eval_frame.OptimizedModule):
            self.first = torch.compile(self.first)  # type: ignore[assignment]


class FreezesInWindows(Callback):
    """Freezes a layer in the last of three batches whose gradients are added up, once steps are replayed."""

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        pl_module.first.requires_grad_(trainer.current_epoch < 3 or batch_idx % 3 != 2)


class KeepsGradients(Callback):
    """Adds the gradients of the step before, which it has kept without a copy, in some steps."""

    def __init__(self, keep: Callable[[Tensor], Tensor]) -> None:
        self._keep = keep
        self._kept: dict[str, Tensor] = {}

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        before, self._kept = self._kept, {}
        for name, param in pl_module.named_parameters():
            if trainer.global_step in (6, 7, 9):
                self._kept[name] = self._keep(param.grad)
            if name in before:
                param.grad = param.grad + before[name]


class Outputs(Callback):
    """Keeps what each batch gives."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        outputs = outputs if isinstance(outputs, dict) else {"loss": outputs}
        # As text: a nan equals no other.
        self.seen.append([(name, str(float(one))) for name, one in {**outputs, **trainer.callback_metrics}.items()])


def unequal_batches() -> DataLoader[Any]:
    """The last batch is smaller."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(76, WIDTH, generator=generator)
    return DataLoader(TensorDataset(inputs, inputs.sin().sum(dim=1, keepdim=True)), batch_size=4)


def hook_first(trainer: Any, pl_module: Any) -> None:
    pl_module.first.register_forward_hook(lambda module, args, output: output * 2)


def hook_root(trainer: Any, pl_module: Any) -> None:
    pl_module.register_forward_pre_hook(torch._assert)  # of torch, as those of `spectral_norm`; it does nothing here


def weight_of_rank(batch: list[Tensor]) -> float:
    return 1.0 + 4 * dist.get_rank()


@dataclass(frozen=True)
class Program:
    """A program, and what becomes of it: how many steps are replayed at least, or why none is."""

    module: Callable[[], LightningModule] = Network
    trainer: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    callbacks: Callable[[], list[Callback]] = list
    data: Callable[[], Any] = loader
    num_replayed: int = 10
    reason: str = ""
    needs_gpu: bool = False
    is_alike: bool = False  # on a CPU, where others show as much
    of_several_ranks: bool = False
    all_alone: bool = False  # each gradient is treated as a large one
    gives_back: bool = False  # buckets have memory only for gradients, as large ones do on a GPU


def line_in(module: type[LightningModule]) -> str:
    """Return where the first line of a `training_step` is."""
    return f"{__file__}:{module.training_step.__code__.co_firstlineno + 1}."


PROGRAMS = {
    "plain": Program(),
    "without_dropout": Program(lambda: Network(dropout=0.0), is_alike=True),
    "accumulating": Program(trainer={"accumulate_grad_batches": 3, "max_epochs": 5}, num_replayed=5),
    # The last step of an epoch has two batches instead of four.
    "global_batch_size": Program(options={"global_batch_size": 32}, trainer={"max_epochs": 6}, num_replayed=5),
    "frozen_while_accumulating": Program(
        trainer={"accumulate_grad_batches": 3, "max_epochs": 4}, callbacks=lambda: [FreezesInWindows()], num_replayed=5
    ),
    "clipped": Program(trainer={"gradient_clip_val": 0.1}, is_alike=True),
    "bf16-mixed": Program(trainer={"precision": "bf16-mixed"}),
    "16-mixed": Program(trainer={"precision": "16-mixed"}, needs_gpu=True),
    "sync_batchnorm": Program(trainer={"sync_batchnorm": True}),
    "channels_last": Program(Images, is_alike=True),
    "bf16_wire": Program(options={"reduce_dtype": "bf16"}, is_alike=True),
    "int8_wire": Program(options={"reduce_dtype": "int8"}),
    "weighted": Program(options={"gradient_weight": "batch_size"}, data=unequal_batches),
    "skipping_nonfinite": Program(options={"on_nonfinite": "skip"}, callbacks=lambda: [Poison()]),
    "warning_of_nonfinite": Program(options={"on_nonfinite": "warn"}, callbacks=lambda: [Poison()]),
    "naming_nonfinite": Program(
        Rooted, options={"on_nonfinite": "warn", "bucket_cap_mb": 1}, callbacks=lambda: [Zeroes()]
    ),
    "skipping_nonfinite_of_unequal_batches": Program(
        options={"on_nonfinite": "skip"}, callbacks=lambda: [Poison()], data=unequal_batches, is_alike=True
    ),
    "keeping_gradients": Program(callbacks=lambda: [KeepsGradients(lambda gradient: gradient)], num_replayed=5),
    "keeping_aliases_of_gradients": Program(
        callbacks=lambda: [KeepsGradients(Tensor.detach)], num_replayed=5, is_alike=True
    ),
    "keeping_gradients_alone": Program(
        callbacks=lambda: [KeepsGradients(Tensor.detach)], num_replayed=5, all_alone=True
    ),
    "raising_nonfinite": Program(options={"on_nonfinite": "raise"}, callbacks=lambda: [Poison()], num_replayed=3),
    "checkpointed": Program(Checkpointed),
    "checkpointed_dropout": Program(CheckpointedDropout, needs_gpu=True),
    "compiled": Program(Compiled, needs_gpu=True),
    "not_looking_for_nonfinite": Program(options={"on_nonfinite": None}),
    "unequal_batches": Program(data=unequal_batches, is_alike=True),
    "giving_back": Program(gives_back=True, data=unequal_batches),
    "giving_back_sharded": Program(options={"shard_optimizer": True}, gives_back=True, data=unequal_batches),
    "giving_back_accumulating": Program(
        trainer={"accumulate_grad_batches": 3, "max_epochs": 5},
        gives_back=True,
        data=unequal_batches,
        num_replayed=5,
        is_alike=True,
    ),
    "heated": Program(callbacks=lambda: [Heating()]),
    "local_steps": Program(options={"local_steps": LocalSteps(3, "rank")}),
    "sharded": Program(options={"shard_optimizer": True}, trainer={"gradient_clip_val": 0.1}),
    "sharded_alone": Program(options={"shard_optimizer": True}, all_alone=True),
    "weighted_by_rank": Program(options={"gradient_weight": weight_of_rank}, is_alike=True),
    "weighted_alone": Program(options={"gradient_weight": weight_of_rank}, all_alone=True),
    "sharded_parameters": Program(options={"shard_optimizer": "parameters"}),
    "sharded_accumulating": Program(
        options={"shard_optimizer": True}, trainer={"accumulate_grad_batches": 3, "max_epochs": 4}, num_replayed=5
    ),
    "sharded_16-mixed": Program(options={"shard_optimizer": True}, trainer={"precision": "16-mixed"}, needs_gpu=True),
    "sharded_int8_wire": Program(options={"shard_optimizer": True, "reduce_dtype": "int8"}),
    "monitored": Program(callbacks=lambda: [BucketDDPMonitor(every_n_steps=1, dirpath=tempfile.mkdtemp())]),
    "accumulating_more": Program(callbacks=lambda: [GradientAccumulationScheduler({0: 1, 1: 2})], num_replayed=5),
    "stopped_early": Program(
        callbacks=lambda: [EarlyStopping("loss_epoch", mode="max", patience=1)], trainer={"max_epochs": 9}
    ),
    "changing": Program(
        Factors, callbacks=lambda: [Changing()], trainer={"max_epochs": len(CHANGES) + 1, "limit_train_batches": 5}
    ),
    "learning_rate": Program(Rated, reason=f"reads `LightningAdam.param_groups` at {line_in(Rated)}"),
    "scheduler": Program(Scheduled, reason=f"reads `StepLR.get_last_lr` at {line_in(Scheduled)}"),
    "random_of_its_own": Program(OwnNumbers, reason="`training_step` changes `numbers`"),
    "number_of_batch": Program(Numbered, reason=f"uses the number of the batch at {line_in(Numbered)}"),
    "number_of_step": Program(Annealed, reason=f"reads `trainer.global_step` at {line_in(Annealed)}"),
    "number_of_batches": Program(
        ByLength,
        trainer={"reload_dataloaders_every_n_epochs": 1, "max_epochs": 3},
        data=ShrinkingData,
        reason=f"reads `trainer.num_training_batches` at {line_in(ByLength)}",
    ),
    "counting": Program(Counting, reason="`training_step` changes `num_calls`"),
    "metric": Program(Measuring, reason="metric"),
    "random_on_host": Program(Gambling, reason="draws random numbers on the CPU"),
    "item": Program(Looking, reason=f"waits for the device at {__file__}", needs_gpu=True),
    "synchronize": Program(Waiting, reason="capturing raised at ", needs_gpu=True),
    "hook_in_closure": Program(Hooked, reason="`Hooked.on_after_backward` runs within it"),
    "hook_of_lambda": Program(
        callbacks=lambda: [LambdaCallback(on_after_backward=lambda trainer, pl_module: None)],
        reason="`LambdaCallback.on_after_backward` runs within it",
    ),
    "parameter_elsewhere": Program(Elsewhere, reason="the optimizer has parameters that the module has not"),
    "own_zero_grad": Program(Zeroing, reason="`CountingSGD.zero_grad` may do more"),
    "unused": Program(Unused, reason="got no gradient", of_several_ranks=True),
    "hook_on_module": Program(
        callbacks=lambda: [LambdaCallback(on_train_start=hook_first)], reason="`first` has a hook"
    ),
    "hook_on_root": Program(
        callbacks=lambda: [LambdaCallback(on_train_start=hook_root)], reason="` has a hook, `_assert`"
    ),
}


def num_replayed(strategy: BucketDDPStrategy) -> int:
    graphs = strategy._state.graphs
    return 0 if graphs is None else graphs.num_replayed


@like_torchrun()
def train(*, program: str, captures: bool) -> dict[str, Any]:
    """Train, and return all that can be seen of it."""
    known = PROGRAMS[program]
    torch.manual_seed(1)
    random.seed(1)
    module, outputs = known.module(), Outputs()
    lines: list[str] = []
    warnings: list[str] = []
    strategy = BucketDDPStrategy(**{"bucket_cap_mb": SMALL_BUCKETS_MB, "cuda_graphs": captures, **known.options})
    trainer = make_trainer(
        strategy,
        **{"max_epochs": 2 if device().type == "cpu" else 4, **known.trainer},
        callbacks=[*known.callbacks(), outputs],
    )
    with (
        graphs_to_run(module),
        like_large_buckets_on_a_gpu() if known.gives_back else nullcontext(),
        patch.dict(_ALONE_FROM_BYTES, dict.fromkeys(_ALONE_FROM_BYTES if known.all_alone else (), 0)),
        patch.object(fit_state, "rank_zero_info", lines.append),
        patch.object(nonfinite.log, "warning", warnings.append),
    ):
        error = raised_by(lambda: trainer.fit(module, known.data()))
    assert not error or "NonFiniteError" in error, error
    return {
        "state": {name: str(value.tolist()) for name, value in module.state_dict().items()},
        "optimizer": [list(map(str, state.values())) for state in trainer.optimizers[0].state.values()],
        "seen": outputs.seen,
        "num_replayed": num_replayed(strategy),
        "lines": lines,
        "ended": (trainer.global_step, error, warnings),
    }


def compare(program: str, *, world_size: int) -> list[str]:
    """Compare a program with and without graphs; return what the log of rank 0 says of them."""
    known = PROGRAMS[program]
    is_captured = not known.reason or (known.of_several_ranks and world_size == 1)
    captured = run_on_ranks(train, world_size=world_size, program=program, captures=True)
    eager = run_on_ranks(train, world_size=world_size, program=program, captures=False)
    lines = [line for line in captured[0]["lines"] if "CUDA graphs" in line]
    for ours, theirs in zip(captured, eager, strict=True):
        for what in ("state", "optimizer", "seen", "ended"):
            assert ours[what] == theirs[what], what
        assert (ours["num_replayed"] >= known.num_replayed) == is_captured, lines
    assert len(lines) == (not is_captured), lines
    assert is_captured or known.reason in lines[0], lines
    return lines


class OfParitySuite(LightningModule):
    """A model of the parity suite, with the batches that its loss makes there."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self._case = case
        self.model = case.build()

    def batches(self, number: int) -> list[list[Tensor]]:
        made: list[list[Tensor]] = []

        def note(make: Callable[..., Tensor], *args: int) -> Tensor:
            made[-1].append(make(*args))
            return made[-1][-1]

        for step in range(number):
            made.append([])
            makes: dict[str, Any] = {name: partial(note, getattr(models, name)) for name in ("batch", "tokens")}
            with patch.multiple(models, **makes):
                self._case.loss(self.model, dist.get_rank(), step)
        return made

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self._case.on_step(self.model, self.global_step)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        inputs = iter(batch)
        with patch.multiple(models, batch=lambda *_: next(inputs), tokens=lambda *_: next(inputs)):
            return self._case.loss(self.model, self._rank, 0)

    def on_fit_start(self) -> None:
        self._rank = self.global_rank

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


@like_torchrun()
def train_case(*, case: str, captures: bool) -> tuple[dict[str, Tensor], int]:
    torch.manual_seed(3)
    module = OfParitySuite(CASES[case]).to(device())
    batches: Any = module.batches(12)
    strategy = BucketDDPStrategy(bucket_cap_mb=SMALL_BUCKETS_MB, cuda_graphs=captures)
    with graphs_to_run(module):
        make_trainer(strategy, max_epochs=2).fit(module, DataLoader(batches, batch_size=None))
    return {name: value.cpu() for name, value in module.state_dict().items()}, num_replayed(strategy)


# In these some rank misses a gradient, or has a sparse one, or a buffer that forward replaces.
NOT_CAPTURED = {name for name in CASES if "unused" in name} | {"sparse_embedding", "buffer_in_forward"}


def compare_case(case: str, *, tolerance: float = 0.0) -> int:
    """Compare a model of the parity suite with and without graphs; return how many steps were replayed."""
    captured = run_on_ranks(train_case, case=case, captures=True)
    eager = run_on_ranks(train_case, case=case, captures=False)
    for (ours, num_replayed), (theirs, _) in zip(captured, eager, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)
        assert (num_replayed > 3) == (case not in NOT_CAPTURED)
    return num_replayed


@pytest.mark.parametrize("case", list(CASES))
@pytest.mark.sampled(2)
def test_models_of_the_parity_suite_train_the_same_with_graphs(case: str) -> None:
    compare_case(case)


@like_torchrun()
def train_and_resume(*, captures: bool, directory: str) -> tuple[Any, list[int]]:
    """Train, keep the best checkpoint, and go on from there; what that gives, and how many steps were replayed."""
    torch.manual_seed(1)
    path, replayed = None, []
    for max_epochs in (2, 4):
        module, best = Network(), ModelCheckpoint(directory, monitor="loss_epoch")
        strategy = BucketDDPStrategy(bucket_cap_mb=SMALL_BUCKETS_MB, cuda_graphs=captures)
        trainer = make_trainer(strategy, max_epochs=max_epochs, enable_checkpointing=True, callbacks=[best])
        with graphs_to_run(module):
            trainer.fit(module, loader(), ckpt_path=path)
        replayed.append(num_replayed(strategy))
        path = best.best_model_path
    state = {name: str(value.tolist()) for name, value in module.state_dict().items()}
    return (state, str(best.best_model_score), Path(best.best_model_path).name), replayed


def compare_resumed() -> None:
    with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as other:
        captured = run_on_ranks(train_and_resume, world_size=2, captures=True, directory=one)
        eager = run_on_ranks(train_and_resume, world_size=2, captures=False, directory=other)
    for (ours, replayed), (theirs, _) in zip(captured, eager, strict=True):
        assert ours == theirs
        assert min(replayed) > 5


def test_a_resumed_run_replays_steps_and_has_the_best_checkpoint_of_one_without_graphs() -> None:
    compare_resumed()


@like_torchrun()
def train_recorded(*, directory: str) -> int:
    """Train, recording each step; return how many batches were replayed."""
    strategy = BucketDDPStrategy(bucket_cap_mb=SMALL_BUCKETS_MB, cuda_graphs=True)
    monitor = BucketDDPMonitor(every_n_steps=1, dirpath=directory)
    module = Network()
    with graphs_to_run(module):
        make_trainer(strategy, max_epochs=2, callbacks=[monitor]).fit(module, loader())
    return num_replayed(strategy)


def test_a_recording_tells_which_steps_were_replayed(tmp_path: Path) -> None:
    replayed, _ = run_on_ranks(train_recorded, directory=str(tmp_path))
    record = read_run(find_folder(tmp_path))
    steps = [step for _, step in sorted(record.ranks[0].steps.items())]
    assert sum(step.num_replayed for step in steps) == replayed > 10
    assert [step.num_replayed for step in steps[:3]] == [0, 0, 0]
    assert page_content(record)["history"]["replayed"] == [step.num_replayed > 0 for step in steps]
    summary = Summary.of(typical_step_of(record), suggestions=[])
    assert any(re.match(r"CUDA graphs: \d+ of \d+ recorded steps were replayed\.", line) for line in summary.lines)


@pytest.mark.parametrize(
    "program",
    [
        pytest.param(name, marks=pytest.mark.long if known.is_alike else ())
        for name, known in PROGRAMS.items()
        if not known.needs_gpu
    ],
)
def test_steps_with_graphs_are_those_without(program: str) -> None:
    compare(program, world_size=2)


def test_one_process_alone_replays_steps() -> None:
    compare("plain", world_size=1)


@like_torchrun()
def train_aborted_in_proof() -> int:
    """Train, letting go of all graphs when the first one is replayed to be compared; return of how many."""
    released: list[RunAgain] = []

    class Graph(RunAgain):
        def replay(self) -> None:
            if self._has_run:
                strategy.release_graphs()
            super().replay()

        def release(self) -> None:
            released.append(self)

    strategy, module = BucketDDPStrategy(cuda_graphs=True), Network()
    with graphs_to_run(module, Graph):
        make_trainer(strategy, max_epochs=2).fit(module, loader())
    return len(released)


def test_an_abort_lets_go_of_a_graph_that_is_being_proved() -> None:
    assert run_on_ranks(train_aborted_in_proof, world_size=1) == [1]
