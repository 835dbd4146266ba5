"""Whatever a program does around its steps, on two processes `bucketddp` gives the numbers that `ddp` gives.

tests/fuzz draws programs of the common blocks. Here is what users do beside those.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer, callbacks
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities import grad_norm
from torch import Tensor, nn
from torch.utils.data import default_collate

from lightning_bucketddp import BucketDDPStrategy
from lightning_bucketddp.config import ReplicaChecks
from tests.strategies.comparison import Program, compare, ours
from tests.support.cases import for_each
from tests.support.ranks import on_ranks
from tests.support.scripts.models import (
    WIDTH,
    IdleRank,
    LBFGSRegression,
    ManualRegression,
    RankZeroBuffer,
    Regression,
    SpareLayer,
    loader,
)
from tests.support.scripts.trainers import like_torchrun, make_trainer

NUM_BATCHES = 10
UNUSED = "ddp_find_unused_parameters_true"


# --- Modules that optimize by themselves


class Manual(Regression):
    """Steps by itself after `differentiate`, which calls backward."""

    def __init__(self, differentiate: Callable[[Any, list[Tensor]], None]) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.seen: list[Any] = []
        self._differentiate = differentiate

    def training_step(self, batch: list[Tensor]) -> None:  # type: ignore[override]
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self._differentiate(self, batch)
        optimizer.step()


def other_loss(module: Any, batch: list[Tensor]) -> Tensor:
    return module.layers(batch[0]).abs().mean()


def two_losses(module: Any, batch: list[Tensor], *, first_stays_here: bool = False) -> None:
    with module.trainer.strategy.block_backward_sync() if first_stays_here else nullcontext():
        module.manual_backward(module.loss(batch))
    module.manual_backward(other_loss(module, batch))


def same_graph_twice(module: Any, batch: list[Tensor]) -> None:
    loss = module.loss(batch)
    module.manual_backward(loss, retain_graph=True)
    module.manual_backward(loss)


def kept_gradients(module: Any, batch: list[Tensor], *, keep: Callable[[Any], Any] = lambda grad: grad) -> None:
    """Combine the gradients of two losses, which are kept without a copy."""
    gradients = []
    for loss in (module.loss(batch), other_loss(module, batch)):
        module.zero_grad()
        module.manual_backward(loss)
        gradients.append([keep(param.grad) for param in module.parameters()])
    for param, a, b in zip(module.parameters(), *gradients, strict=True):
        param.grad = a + 2 * b


def graph_of_backward(module: Any, batch: list[Tensor]) -> None:
    """Ask for a graph of the gradients, and accumulate into them."""
    module.manual_backward(module.loss(batch), create_graph=True)
    module.manual_backward(other_loss(module, batch))


class LineSearch(Regression):
    """LBFGS that evaluates the closure as often as its line search needs; all ranks must give it the same loss."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.seen: list[float] = []

    def training_step(self, batch: list[Tensor]) -> None:  # type: ignore[override]
        optimizer: Any = self.optimizers()

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = self.loss(batch)
            self.manual_backward(loss)
            mean = self.trainer.strategy.reduce(loss.detach().clone())
            self.seen.append(mean.item())
            return mean

        optimizer.step(closure)

    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), max_iter=3, line_search_fn="strong_wolfe")


class Gan(Regression):
    """A generator and a discriminator that take turns; each turn runs through both and trains one.

    Args:
        switching: how the other network is kept out of a turn.
        discriminator_every: batches between turns of the discriminator.
        micro_batches: backwards of each turn; gradients are reduced in the last one.
    """

    def __init__(self, switching: str, *, discriminator_every: int = 1, micro_batches: int = 1) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.layers = nn.ModuleDict(
            {
                name: nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, num_outputs))
                for name, num_outputs in (("generator", WIDTH), ("discriminator", 1))
            }
        )
        self._switching, self._every, self._micro_batches = switching, discriminator_every, micro_batches

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:  # type: ignore[override]
        for optimizer, sign, every in zip(self.optimizers(), (-1, 1), (1, self._every), strict=True):
            if batch_idx % every:
                continue
            optimizer.zero_grad()
            for position, real in enumerate(batch[0].chunk(self._micro_batches), start=1):
                with self._turn(optimizer, is_last=position == self._micro_batches):
                    fake, score = self.layers["generator"](real), self.layers["discriminator"]
                    self.manual_backward(sign * (score(fake) - score(real)).mean())
            optimizer.step()

    @contextmanager
    def _turn(self, optimizer: Any, *, is_last: bool) -> Iterator[None]:
        if self._switching == "toggle_model":
            with optimizer.toggle_model(sync_grad=is_last):
                yield
        elif self._switching == "toggled_optimizer":
            with self.toggled_optimizer(optimizer):
                yield
        elif self._switching == "toggle_optimizer":
            self.toggle_optimizer(optimizer)
            yield
            self.untoggle_optimizer(optimizer)
        else:
            yield

    def configure_optimizers(self) -> Any:
        return [torch.optim.Adam(self.layers[name].parameters(), lr=0.01) for name in ("generator", "discriminator")]


# --- Modules that Lightning optimizes, and callbacks


class GradientHooks(Regression):
    """Notes gradients where Lightning lets a module see them, and adds noise there, the same on all ranks."""

    def __init__(self, *, in_place: bool) -> None:
        super().__init__()
        self.seen: list[dict[str, float]] = []
        self._in_place = in_place

    def on_after_backward(self) -> None:
        self._note_norms()
        noise = torch.Generator().manual_seed(len(self.seen))
        for param in self.parameters():
            assert param.grad is not None
            change = 0.1 * torch.randn(param.shape, generator=noise)
            if self._in_place:
                param.grad += change
            else:
                param.grad = param.grad + change

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self._note_norms()
        self.layers[0].weight.grad.mul_(0.5)

    def _note_norms(self) -> None:
        self.seen.append({name: float(norm) for name, norm in grad_norm(self, norm_type=2).items()})


class FlatGradients(Regression):
    """Has all gradients in one buffer of its own, which it reads, changes and zeroes at once."""

    def on_train_start(self) -> None:
        self.seen: list[float] = []
        params = list(self.parameters())
        self.flat = torch.zeros(sum(param.numel() for param in params))
        for param, part in zip(params, self.flat.split([param.numel() for param in params]), strict=True):
            param.grad = part.view_as(param)

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.seen.append(float(self.flat.norm()))
        self.flat *= 0.5

    def optimizer_zero_grad(self, *_: Any) -> None:
        self.flat.zero_()


class GradientsOfHooks(Regression):
    """Reads and changes the gradients that a hook was given with their parameter."""

    def on_train_start(self) -> None:
        self.seen: list[list[float]] = []
        self.noted: dict[Tensor, Tensor] = {}
        for param in self.parameters():
            param.register_post_accumulate_grad_hook(self.note)

    def note(self, param: Tensor) -> None:
        assert param.grad is not None
        self.noted[param] = param.grad
        if param is self.layers[0].weight and self.global_step > 2:
            self.layers[-1].weight.grad = None  # it is on its way

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.seen.append([float(gradient.norm()) for gradient in self.noted.values()])
        for gradient in self.noted.values():
            gradient *= 0.5


class OwnClipping(Regression):
    """Clips the first layer only."""

    def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
        torch.nn.utils.clip_grad_norm_(self.layers[0].parameters(), 0.01)


class Network(LightningModule):
    """Two layers with normalisation between them, and a head that `step` may leave out."""

    def __init__(self, step: Callable[[Any, list[Tensor]], Any] | None = None, norm: nn.Module | None = None) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 8)
        self.norm = norm or nn.BatchNorm1d(8)
        self.last = nn.Linear(8, 1)
        self.extra = nn.Linear(8, 1)
        self._step = step or Network.loss

    def forward(self, inputs: Tensor) -> Tensor:
        return self.norm(self.first(inputs))

    def loss(self, batch: list[Tensor]) -> Tensor:
        return self.loss_of(self(batch[0]), batch[1])

    def loss_of(self, hidden: Tensor, targets: Tensor, *, has_extra: bool = True) -> Tensor:
        return F.mse_loss(self.last(hidden) + self.extra(hidden) if has_extra else self.last(hidden), targets)

    def training_step(self, batch: list[Tensor]) -> Any:
        return self._step(self, batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)


def adversarial(module: Any, batch: list[Tensor]) -> Tensor:
    """Look for worse inputs, with more backwards on some ranks than on others."""
    inputs = batch[0].clone().requires_grad_()
    for _ in range(1 + module.global_rank * module.trainer.fit_loop.batch_idx):
        module.loss([inputs, batch[1]]).backward()
        assert inputs.grad is not None
        inputs = (inputs + 0.1 * inputs.grad.sign()).detach().requires_grad_()
    module.zero_grad()
    return module.loss([inputs.detach(), batch[1]])


def contrastive(module: Any, batch: list[Tensor]) -> Tensor:
    """Gather from all ranks in the middle of the network, with gradients; only some ranks use the head behind that."""
    hidden = module(batch[0])
    hidden = hidden + module.all_gather(hidden, sync_grads=True).mean(dim=(0, 1))
    has_extra = (module.global_rank + module.trainer.fit_loop.batch_idx) % 2 == 0
    return module.loss_of(hidden, batch[1], has_extra=has_extra)


class CountsCalls(Regression):
    """Changes with each call, by a hook, as a parameter of its own does under `torch.nn.utils.spectral_norm`."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []
        self.register_forward_pre_hook(lambda _, inputs: self.seen.append(len(inputs)))

    def training_step(self, batch: list[Tensor]) -> Tensor:
        return self.loss(batch) * len(self.seen)


class FrozenLate(Network):
    """Freezes a layer when its graph is there already, as networks that take turns do."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:  # type: ignore[override]
        optimizer: Any = self.optimizers()
        loss = self.loss(batch)
        self.first.requires_grad_(batch_idx % 2 == 0)
        optimizer.zero_grad()
        self.manual_backward(loss)
        self.first.requires_grad_(True)
        optimizer.step()


class Renormalised(nn.BatchNorm1d):
    """Normalises by the running statistics in training, too."""

    def forward(self, inputs: Tensor) -> Tensor:
        super().forward(inputs.detach())
        assert self.running_mean is not None
        assert self.running_var is not None
        normalised = (inputs - self.running_mean.clone()) / (self.running_var.clone() + self.eps).sqrt()
        return normalised * self.weight + self.bias


class Picture(Callback):
    """Differentiates on rank 0 alone, for a picture of what the network looks at."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_rank == 0:
            was_training = pl_module.norm.training
            pl_module.norm.eval()
            torch.autograd.backward(pl_module(batch[0]).square().sum())
            pl_module.norm.train(was_training)


class Masks(Callback):
    """Masks gradients by hooks that are registered when training has begun."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        for param in pl_module.parameters():
            param.register_post_accumulate_grad_hook(mask)


def mask(param: Tensor) -> None:
    assert param.grad is not None
    param.grad.mul_((torch.arange(param.numel(), device=param.device) % 2).view_as(param))


class Talkative(Regression):
    """Uses torch.distributed by itself: in a step, inside its backward, and between steps."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def on_fit_start(self) -> None:
        self._group = dist.new_group()

    def training_step(self, batch: list[Tensor]) -> Tensor:
        total = batch[0].sum()
        dist.all_reduce(total, group=self._group)
        outputs = self.layers[1](self.layers[0](batch[0]))
        outputs.register_hook(self._average)
        gathered: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, {"rank": self.global_rank, "step": self.global_step})
        self.seen.append((total.item(), gathered))
        return F.mse_loss(self.layers[2](outputs), batch[1])

    def _average(self, gradient: Tensor) -> Tensor:
        """Average over the ranks in the middle of backward, when buckets may be on their way."""
        gradient = gradient.clone()
        dist.all_reduce(gradient)
        return gradient / dist.get_world_size()

    def on_train_batch_end(self, *_: Any) -> None:
        dist.barrier()
        told = [self.global_step if self.global_rank == 1 else None]
        dist.broadcast_object_list(told, src=1)
        self.seen.append(told)

    def on_fit_end(self) -> None:
        dist.destroy_process_group(self._group)


# --- Loops of the Trainer


class GrowingBatches(LightningDataModule):
    """Gives larger batches each time that it is asked."""

    size = 3

    def train_dataloader(self) -> Any:
        self.size += 1
        return loader(batch_size=self.size)


class Watching(Regression):
    """Notes what it is given, and in which mode; trains, and validates, with a mean of that, a buffer of each rank."""

    mean: Tensor

    def __init__(self, schedule: str = "") -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(()), persistent=False)
        self.seen: list[Any] = []
        self._schedule = schedule

    def training_step(self, batch: list[Tensor]) -> Tensor:
        self.seen.append(batch[0].sum().item())
        self.mean = 0.9 * self.mean + 0.1 * batch[0].mean()
        return super().training_step(batch) * (1 + self.mean)

    def validation_step(self, batch: list[Tensor]) -> None:
        super().validation_step(batch)
        self.seen.append((self.global_step, float(self.mean), torch.is_inference_mode_enabled()))

    def on_train_batch_end(self, *_: Any) -> None:
        self.seen.append(self.trainer.optimizers[0].param_groups[0]["lr"])

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        schedulers = torch.optim.lr_scheduler
        if self._schedule == "one_cycle":
            steps = int(self.trainer.estimated_stepping_batches)
            scheduler: Any = schedulers.OneCycleLR(optimizer, max_lr=0.1, total_steps=steps)
            return [optimizer], [{"scheduler": scheduler, "interval": "step"}]
        if self._schedule == "plateau":
            scheduler = schedulers.ReduceLROnPlateau(optimizer, patience=0, threshold=0.5)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "loss"}}
        return optimizer


class OwnLoader:
    """A loader of a program's own, and its own iterator, which shuffles by an epoch that the program sets."""

    epoch = num_passes = 0

    def __iter__(self) -> Iterator[Any]:
        self.num_passes += 1
        batches = list(loader())
        order = torch.randperm(len(batches), generator=torch.Generator().manual_seed(self.epoch))
        self._left = iter([batches[number] for number in order.tolist()[dist.get_rank() :: dist.get_world_size()]])
        return self

    def __next__(self) -> Any:
        return next(self._left)

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


class LoaderAround:
    """A loader around another one, whose attributes it has. It cannot be copied, and has no place for others."""

    __slots__ = ("inner",)

    def __init__(self, inner: OwnLoader) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def __iter__(self) -> Iterator[Any]:
        yield from self.inner


class SetsEpochs(Watching):
    """Tells a loader that it keeps which epoch begins."""

    def __init__(self, own: Any) -> None:
        super().__init__()
        self.own = own

    def train_dataloader(self) -> Any:
        return self.own

    def on_train_epoch_start(self) -> None:
        self.own.set_epoch(self.current_epoch)
        self.seen.append((self.own.num_passes, isinstance(self.trainer.train_dataloader, type(self.own))))


class SwapsCollation(Watching):
    """Makes batches in another way from the second epoch on."""

    def train_dataloader(self) -> Any:
        self.own = loader()
        return self.own

    def on_train_epoch_end(self) -> None:
        self.own.collate_fn = lambda samples: [2 * values for values in default_collate(samples)]


def loops(module: Callable[[], LightningModule] = Watching, **options: Any) -> Program:
    return Program(module, lambda: {"max_epochs": 2, **options}, validates=True)


# --- Callbacks of Lightning


class RisingMetric(Regression):
    """Logs a metric that falls until it rises, in the third epoch on rank 1, and on rank 0 in the fifth."""

    def __init__(self, *, shared: bool) -> None:
        super().__init__()
        self._shared = shared

    def validation_step(self, batch: list[Tensor]) -> None:
        is_worse_here = self.current_epoch >= (2 if self.global_rank == 1 else 4)
        # It falls so fast that one rank cannot make the mean rise.
        metric = float(self.current_epoch) if is_worse_here else -(10.0**self.current_epoch)
        self.log("metric", metric, sync_dist=self._shared)


class StopsOnRankOne(Callback):
    """Is made to stop by one rank's data; the ranks agree through the strategy."""

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        wants_to = trainer.global_rank == 1 and trainer.global_step >= 7
        trainer.should_stop |= trainer.strategy.reduce_boolean_decision(wants_to, all=False)


class NotesOrder(callbacks.LambdaCallback):
    def __init__(self) -> None:
        self.seen: list[str] = []
        super().__init__(
            on_before_zero_grad=lambda *_: self.seen.append("zero"),
            on_before_optimizer_step=lambda *_: self.seen.append("step"),
        )


class NotesNames(DummyLogger):
    """Notes the names of what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[list[str]] = []

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        self.seen.append(sorted(metrics))


def under(*make: Callable[[], Callback], **options: Any) -> Program:
    """Return a program with callbacks."""
    return Program(
        trainer=lambda: {
            "callbacks": [one() for one in make],
            "logger": NotesNames(),
            "log_every_n_steps": 5,
            "max_epochs": 2,
            **options,
        },
        validates=True,
    )


def stopped_early(*, shared: bool) -> Program:
    return Program(
        lambda: RisingMetric(shared=shared),
        lambda: {"max_epochs": 8, "callbacks": callbacks.EarlyStopping("metric", patience=0)},
        validates=True,
    )


STYLES = {
    "two_losses": Program(lambda: Manual(two_losses)),
    "two_losses_one_reduction": Program(lambda: Manual(partial(two_losses, first_stays_here=True))),
    "same_graph_twice": Program(lambda: Manual(same_graph_twice)),
    "gradients_kept_without_a_copy": Program(lambda: Manual(kept_gradients)),
    "gradients_kept_detached": Program(lambda: Manual(partial(kept_gradients, keep=Tensor.detach))),
    "rows_of_gradients_kept": Program(lambda: Manual(partial(kept_gradients, keep=lambda grad: grad.data[:]))),
    # torch DDP raises there: it writes into gradients that have a graph.
    "graph_of_backward": Program(lambda: Manual(graph_of_backward), ddp_module=lambda: Manual(two_losses)),
    "micro_batches": Program(ManualRegression),
    "line_search": Program(LineSearch),
    "lbfgs": Program(LBFGSRegression),
    "gradients_changed_in_place": Program(lambda: GradientHooks(in_place=True)),
    "gradients_replaced": Program(lambda: GradientHooks(in_place=False)),
    # The hooks see gradients of this rank only, and what they add is averaged.
    "gradients_changed_while_accumulating": Program(
        lambda: GradientHooks(in_place=True), lambda: {"accumulate_grad_batches": 3}
    ),
    "gradients_replaced_while_accumulating": Program(
        lambda: GradientHooks(in_place=False), lambda: {"accumulate_grad_batches": 3}
    ),
    "flat_gradients": Program(FlatGradients),
    "flat_gradients_while_accumulating": Program(FlatGradients, lambda: {"accumulate_grad_batches": 3}),
    "gradients_of_hooks": Program(GradientsOfHooks),
    "own_clipping": Program(OwnClipping),
    "clip_value": Program(
        Regression,
        lambda: {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value", "accumulate_grad_batches": 4},
    ),
}
GANS = {
    "toggle_optimizer": Program(lambda: Gan("toggle_optimizer"), ddp=UNUSED),
    "toggled_optimizer": Program(lambda: Gan("toggled_optimizer"), ddp=UNUSED),
    "toggle_model": Program(lambda: Gan("toggle_model"), ddp=UNUSED),
    "gan_that_accumulates": Program(lambda: Gan("toggle_model", micro_batches=2), ddp=UNUSED),
    "discriminator_every_second_batch": Program(lambda: Gan("toggle_optimizer", discriminator_every=2), ddp=UNUSED),
    # Each turn leaves gradients in the other network, which its own turn clears.
    "nothing_switched_off": Program(lambda: Gan("nothing"), ddp=UNUSED),
}
USER_CODE = {
    "buffer_in_step": Program(lambda: RankZeroBuffer(changes_in="training_step")),
    "buffer_after_step": Program(lambda: RankZeroBuffer(changes_in="on_train_batch_end")),
    "unused_on_rank_0": Program(lambda: SpareLayer(used_on=(1,)), ddp=UNUSED),
    "idle_rank": Program(
        lambda: IdleRank(uses_parameters=False), ddp_module=lambda: IdleRank(uses_parameters=True), ddp=UNUSED
    ),
    "picture": Program(Network, lambda: {"callbacks": Picture()}),
    "picture_while_accumulating": Program(Network, lambda: {"callbacks": Picture(), "accumulate_grad_batches": 2}),
    "adversarial": Program(lambda: Network(adversarial)),
    "manual_adversarial": Program(lambda: Manual(lambda it, batch: it.manual_backward(adversarial(it, batch)))),
    "contrastive": Program(lambda: Network(contrastive), ddp=UNUSED),
    "masks": Program(Network, lambda: {"callbacks": Masks()}),
    "masks_while_accumulating": Program(Network, lambda: {"callbacks": Masks(), "accumulate_grad_batches": 2}),
    "renormalised": Program(lambda: Network(norm=Renormalised(8))),
    "hook_on_the_module": Program(CountsCalls, validates=True),
    "frozen_late": Program(FrozenLate, ddp=UNUSED),
    "talkative": Program(Talkative),
}
LOOPS = {
    "overfit_batches": loops(overfit_batches=3),
    "fast_dev_run": loops(fast_dev_run=3),
    "limits": loops(limit_train_batches=0.5, limit_val_batches=2),
    "max_steps": loops(max_steps=13),
    "min_epochs": loops(max_epochs=None, min_epochs=2, max_steps=25),
    "validation_within_epochs": loops(val_check_interval=3, accumulate_grad_batches=2),
    "new_loaders_each_epoch": Program(
        Watching, lambda: {"max_epochs": 2, "reload_dataloaders_every_n_epochs": 1}, data=GrowingBatches
    ),
    "own_loader": Program(lambda: SetsEpochs(OwnLoader()), lambda: {"max_epochs": 3}, data=lambda: None),
    "loader_around_another": Program(
        lambda: SetsEpochs(LoaderAround(OwnLoader())), lambda: {"max_epochs": 3}, data=lambda: None
    ),
    "loader_changed": Program(
        SwapsCollation,
        lambda: {"max_epochs": 3, "use_distributed_sampler": False},
        strategy={"shard_iterable": True},  # by which the position in an epoch is known
        data=lambda: None,
    ),
    # Prints nothing, logs nothing, and refuses what the quiet Trainer of the tests says anyway.
    "barebones": loops(barebones=True),
    "detect_anomaly": loops(detect_anomaly=True),
    "advanced_profiler": loops(profiler="advanced"),
    "deterministic": loops(deterministic=True),
    "no_inference_mode": loops(inference_mode=False),
    "no_distributed_sampler": loops(use_distributed_sampler=False),
    "one_cycle": loops(lambda: Watching("one_cycle"), accumulate_grad_batches=4),
    "plateau": loops(lambda: Watching("plateau"), max_epochs=4),
}
CALLBACKS = {
    "learning_rate_monitor": under(lambda: callbacks.LearningRateMonitor(log_momentum=True)),
    "device_stats": under(lambda: callbacks.DeviceStatsMonitor(cpu_stats=True)),
    "timer_and_lambda": under(lambda: callbacks.Timer(duration={"hours": 1}), NotesOrder),
    "stops_by_itself": under(StopsOnRankOne),
    "stopped_early_by_one_rank": stopped_early(shared=False),
    "stopped_early_by_all": stopped_early(shared=True),
}
PROGRAMS = {**STYLES, **GANS, **USER_CODE, **LOOPS, **CALLBACKS}
# The others show more in less time, or the same as one of these.
FEW = {
    *("two_losses_one_reduction", "gradients_kept_detached", "graph_of_backward", "line_search"),
    *(
        "gradients_changed_in_place",
        "gradients_replaced_while_accumulating",
        "flat_gradients_while_accumulating",
        "gradients_of_hooks",
        "toggle_optimizer",
        "gan_that_accumulates",
    ),
    *("nothing_switched_off", "buffer_after_step", "idle_rank", "unused_on_rank_0"),
    *("picture_while_accumulating", "adversarial", "contrastive", "masks_while_accumulating", "renormalised"),
    *("frozen_late", "talkative", "max_steps", "validation_within_epochs", "new_loaders_each_epoch", "barebones"),
    *("no_distributed_sampler", "plateau", "learning_rate_monitor", "timer_and_lambda", "stops_by_itself"),
    "stopped_early_by_all",
}


def marks_of(program: str) -> list[pytest.MarkDecorator]:
    marks = [] if program in FEW else [pytest.mark.long]
    if program == "toggled_optimizer" and not hasattr(LightningModule, "toggled_optimizer"):
        marks.append(pytest.mark.skip(reason="this Lightning has no `toggled_optimizer`"))
    return marks


@pytest.mark.parametrize("program", [pytest.param(name, marks=marks_of(name)) for name in PROGRAMS])
@on_ranks()
def test_training_equals_ddp(program: str) -> None:
    try:
        compare(PROGRAMS[program], replica_checks=1)  # no program of these makes replicas differ
    finally:
        torch.use_deterministic_algorithms(False)  # what `deterministic=True` leaves behind


@for_each(
    ("program", "per_batch"),
    [
        *(("two_losses", 2), ("two_losses_one_reduction", 1), ("same_graph_twice", 2), ("micro_batches", 1)),
        ("line_search", None),  # as often as the search needs
    ],
)
@on_ranks()
@like_torchrun()
def test_each_backward_that_is_not_blocked_synchronises_once(program: str, per_batch: int | None) -> None:
    trained = ours(PROGRAMS[program])
    strategy: Any = trained.trainer.strategy
    num_evaluations = len(trained.seen[0] or [])
    assert per_batch or num_evaluations > 2 * NUM_BATCHES
    assert strategy.reducer.stats.num_backwards == (per_batch * NUM_BATCHES if per_batch else num_evaluations)


# --- Backwards of which the strategy is not told


def own_backward(module: Any, batch: list[Tensor]) -> None:
    module.loss(batch).backward()


@on_ranks()
@like_torchrun()
def test_a_step_with_gradients_that_nobody_averaged_is_told_once() -> None:
    strategy = BucketDDPStrategy(replica_checks=ReplicaChecks(on_divergence="log"))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        make_trainer(strategy, max_epochs=1).fit(Manual(own_backward), loader())
    told = [text for warning in caught if "not averaged" in (text := " ".join(str(warning.message).split()))]
    assert len(told) == (dist.get_rank() == 0)
    assert all("of `layers.0.weight`, `layers.0.bias`" in text for text in told)
    assert all("Call `self.manual_backward(loss)`" in text for text in told)


@on_ranks()
@like_torchrun()
def test_a_divided_optimizer_refuses_gradients_that_nobody_averaged() -> None:
    with pytest.raises(RuntimeError, match="were not averaged over the ranks"):
        make_trainer(BucketDDPStrategy(shard_optimizer=True), max_epochs=1).fit(Manual(own_backward), loader())


class OwnBuffer(Regression):
    """Multiplies its loss by a buffer that is another one on each rank, and an adjacency matrix that is sparse."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.tensor(1.0 + dist.get_rank()))
        self.register_buffer("adjacency", torch.eye(2).to_sparse())

    def training_step(self, batch: list[Tensor]) -> Tensor:
        return self.scale * self.loss(batch)


@on_ranks()
@like_torchrun()
def test_without_broadcast_buffers_each_rank_begins_with_its_own() -> None:
    weights = []
    for strategy in (DDPStrategy(broadcast_buffers=False), BucketDDPStrategy(broadcast_buffers=False)):
        torch.manual_seed(0)
        module = OwnBuffer()
        make_trainer(strategy, max_epochs=1).fit(module, loader())
        assert module.scale == 1 + dist.get_rank()
        weights.append(torch.nn.utils.parameters_to_vector(module.parameters()).detach())
    assert torch.equal(*weights)
