"""Jobs that train with `local_steps`, on two or four ranks."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, Trainer, callbacks
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_bucketddp import BucketDDPMonitor
from lightning_bucketddp.bindings.trainer_lightning import BucketDDPStrategy
from lightning_bucketddp.comm.trial import _COLLECTIVES
from lightning_bucketddp.config import LocalSteps
from tests.support.jobs.nonfinite import collected_warnings
from tests.support.scripts.models import Regression, loader
from tests.support.scripts.participation import make_loader
from tests.support.scripts.trainers import like_torchrun, make_trainer

PLAIN: dict[str, Any] = {"outer_lr": 1.0, "outer_momentum": 0.0}
DECAY = 0.75
Weights = dict[str, Any]


def weights_of(module: nn.Module) -> Weights:
    return {name: tensor.tolist() for name, tensor in module.state_dict().items()}


class Adaptive(Regression):
    """With an optimizer that has a state, a schedule, and a layer that has buffers."""

    def __init__(self, *, has_schedule: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1))
        self._has_schedule = has_schedule

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.5)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}] if self._has_schedule else []


class Wide(Adaptive):
    """With enough weights for scales to be few among them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 512), nn.Tanh(), nn.Linear(512, 1))


class Dyadic(Regression):
    """Numbers of so few digits that nothing is rounded."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2, 1, bias=False))
        nn.init.constant_(self.layers[0].weight, 0.5)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.125)


class Rounded(Regression):
    """An ordinary model, with an optimizer that makes of a mean of gradients what it makes of them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Taught(Rounded):
    """With a mean teacher, which follows the weights and is not trained, and something large that stays as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = copy.deepcopy(self.layers).requires_grad_(False)
        self.backbone = nn.Parameter(torch.ones(1000), requires_grad=False)

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)
        for mine, student in zip(self.teacher.parameters(), self.layers.parameters(), strict=True):
            mine.data.mul_(DECAY).add_(student.data, alpha=1 - DECAY)


def dyadic_loader() -> DataLoader[Any]:
    inputs = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0], [1.0, -1.0]] * 4)
    targets = torch.tensor([[1.0], [0.5], [-1.0], [2.0]] * 4)
    return DataLoader(TensorDataset(inputs, targets), batch_size=2)


class Witness(Callback):
    """Writes down what this rank has at each place, and what it has sent to others in each batch."""

    def __init__(self) -> None:
        self.after_batches: list[Weights] = []
        self.at_validation: list[Weights] = []
        self.at_epoch_end: list[Weights] = []
        self.learning_rates: list[float] = []
        self.calls: list[list[int]] = [[]]

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, *_: Any) -> None:
        self.after_batches.append({name: param.tolist() for name, param in pl_module.named_parameters()})
        self.learning_rates.append(trainer.optimizers[0].param_groups[0]["lr"])
        self.calls.append([])

    def on_validation_start(self, trainer: Trainer, pl_module: Any) -> None:
        self.at_validation.append(weights_of(pl_module))

    def on_train_epoch_end(self, trainer: Trainer, pl_module: Any) -> None:
        self.at_epoch_end.append(weights_of(pl_module))

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Note the bytes of each collective of this process, by batch."""
        group_class: Any = dist.ProcessGroup
        members = vars(group_class)
        originals = {name: members[name] for name in _COLLECTIVES if name in members}

        def noted(name: str) -> Any:
            def call(group: Any, *args: Any, **kwargs: Any) -> Any:
                tensors = args[0] if args and isinstance(args[0], list) else args[:1]
                self.calls[-1].append(sum(t.nbytes for t in tensors if isinstance(t, Tensor)))
                return originals[name](group, *args, **kwargs)

            return call

        for name in originals:
            setattr(group_class, name, noted(name))
        try:
            yield
        finally:
            for name, original in originals.items():
                setattr(group_class, name, original)


class Corrupts(Callback):
    """Flips a weight of one rank behind the back of everybody, when an outer step has made all equal."""

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        chunk = trainer.strategy._state.local_steps._outer._chunks[0]  # type: ignore[attr-defined]
        if trainer.global_step == 2 and trainer.global_rank == 1:
            chunk.weights[0] += 1


@like_torchrun()
def corrupt() -> str:
    strategy = BucketDDPStrategy(local_steps=LocalSteps(2, "rank"), replica_checks=4)
    try:
        make_trainer(strategy, max_epochs=1, callbacks=[Corrupts()]).fit(Adaptive(), loader())
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"
    return ""


class Thaws(Callback):
    """Trains the first layer from the second epoch on."""

    def on_train_epoch_start(self, trainer: Trainer, pl_module: Any) -> None:
        if trainer.current_epoch == 1:
            pl_module.layers[0].requires_grad_(True)


@like_torchrun()
def train(
    *,
    model: str = "adaptive",
    strategy: str | None = None,
    thaws: bool = False,
    directory: Path | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Train ten batches on two ranks, five on four; what each rank had at each place."""
    module = {"adaptive": Adaptive, "dyadic": Dyadic, "rounded": Rounded, "taught": Taught, "wide": Wide}[model]()
    if thaws:
        module.layers[0].requires_grad_(False)
    witness = Witness()
    of_trainer = {name: options.pop(name) for name in ("val_check_interval", "sync_batchnorm") if name in options}
    also: list[Callback] = [Thaws()] if thaws else []
    if directory is not None:
        also.append(BucketDDPMonitor(every_n_steps=1, dirpath=directory))
    trainer = make_trainer(
        strategy or BucketDDPStrategy(**options),
        max_epochs=1 + thaws,
        callbacks=[witness, *also],
        num_sanity_val_steps=0,
        **of_trainer,
    )
    with witness.counting():
        trainer.fit(
            module,
            dyadic_loader() if model == "dyadic" else loader(),
            loader() if "val_check_interval" in of_trainer else None,
        )
    stats = getattr(getattr(trainer.strategy, "reducer", None), "stats", None)
    return {
        "after_batches": witness.after_batches,
        "at_validation": witness.at_validation,
        "at_epoch_end": witness.at_epoch_end,
        "learning_rates": witness.learning_rates,
        "calls": witness.calls,
        "final": weights_of(module),
        "num_outer_steps": getattr(stats, "num_outer_steps", None),
        "outer_bytes": getattr(stats, "outer_bytes", None),
        "num_bytes": sum(param.nbytes for param in module.parameters()),
    }


def same_batches() -> DataLoader[Any]:
    """Five batches, each rank's all the same: wherever an epoch is resumed, the data is the same."""
    inputs = torch.randn(8, 4, generator=torch.Generator().manual_seed(dist.get_rank())).repeat(5, 1)
    return DataLoader(TensorDataset(inputs, inputs.sum(dim=1, keepdim=True)), batch_size=8)


class SavesAt(Callback):
    def __init__(self, step: int, path: Path) -> None:
        self._step, self._path = step, path

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step == self._step:
            trainer.save_checkpoint(self._path)


class _AtStart(Callback):
    """The state of the optimizer when training begins."""

    def __init__(self) -> None:
        self.moments: list[float] = []

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        states = [state["exp_avg"] for state in trainer.optimizers[0].state.values()]
        self.moments = [float(moment.sum()) for moment in states]


@like_torchrun()
def save_and_resume(
    *,
    path: Path,
    resume: bool,
    strategy: str | None = None,
    with_scaler: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """Save after 7 steps of training, within a round; or go on from there."""
    # Between two batches Lightning saves before it steps schedules, so that a run that is resumed is a step behind.
    module = Adaptive(has_schedule=False)
    at_start = _AtStart()
    plugins: list[Any] = []
    if with_scaler:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** (8 + dist.get_rank()), growth_interval=4)
        plugins = [MixedPrecision("16-mixed", "cpu", scaler=scaler)]
    trainer = make_trainer(
        strategy or BucketDDPStrategy(**options),
        max_epochs=3,
        use_distributed_sampler=False,
        plugins=plugins,
        callbacks=[at_start, *([] if resume else [SavesAt(7, path)])],
    )
    trainer.fit(module, same_batches(), ckpt_path=path if resume else None)
    return {
        "final": weights_of(module),
        "moments": at_start.moments,
        "steps": trainer.global_step,
        "scale": scaler.get_scale() if with_scaler else None,
    }


class Spoiled(Adaptive):
    """Has infinite weights and moments on one rank at the end of the second round."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)
        if batch_idx == 5 and self.global_rank == 1:
            bias = self.layers[3].bias
            for tensor in (bias.data, optimizer.state[bias]["exp_avg"]):
                tensor.fill_(torch.inf)


@like_torchrun()
def spoil(*, on_nonfinite: Literal["warn", "raise", "skip"]) -> dict[str, Any]:
    module = Spoiled()
    strategy = BucketDDPStrategy(local_steps=LocalSteps(3, "rank"), on_nonfinite=on_nonfinite)
    trainer = make_trainer(strategy, max_epochs=1)
    with collected_warnings() as messages:
        try:
            trainer.fit(module, loader())
        except Exception as error:
            messages.append(f"{type(error).__name__}: {error}")
    return {"messages": messages, "final": weights_of(module)}


@like_torchrun()
def train_unevenly(*, num_batches: list[int], kind: str, uneven_data: bool, **options: Any) -> dict[str, Any]:
    torch.manual_seed(dist.get_rank())
    batches: Any = [(torch.randn(4, 4), torch.randn(4, 1)) for _ in range(num_batches[dist.get_rank()])]
    module = Adaptive()
    witness = Witness()
    strategy = BucketDDPStrategy(uneven_data=uneven_data, **options)
    trainer = make_trainer(strategy, max_epochs=2, use_distributed_sampler=False, callbacks=[witness])
    try:
        trainer.fit(module, make_loader(kind, batches))
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    return {
        "final": weights_of(module),
        "steps": trainer.global_step,
        "at_epoch_end": witness.at_epoch_end,
        "after_batches": witness.after_batches,
    }


class _Averages(Callback):
    """The same moving average as `EMAWeightAveraging` keeps, of what this rank has after each step."""

    def __init__(self) -> None:
        self.mean: list[Tensor] = []

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, *_: Any) -> None:
        weights = [param.detach().clone() for param in pl_module.parameters()]
        if trainer.global_step == 1:
            self.mean = weights
        self.mean = [DECAY * mean + (1 - DECAY) * weight for mean, weight in zip(self.mean, weights, strict=True)]


@like_torchrun()
def average_exponentially() -> dict[str, Any]:
    """What `EMAWeightAveraging` ends with, and the mean over the ranks of averages that each keeps alone."""
    module, own = Adaptive(), _Averages()
    ema = callbacks.EMAWeightAveraging(decay=DECAY)
    trainer = make_trainer(
        BucketDDPStrategy(local_steps=LocalSteps(4, "rank")),
        max_epochs=1,
        callbacks=[ema, own],
        val_check_interval=5,
        num_sanity_val_steps=0,
    )
    trainer.fit(module, loader(), loader())
    for mean in own.mean:
        dist.all_reduce(mean)
    return {
        "averaged": [param.tolist() for param in module.parameters()],
        "expected": [(mean / dist.get_world_size()).tolist() for mean in own.mean],
    }


class SyncedByHand(Adaptive):
    def __init__(self) -> None:
        super().__init__()
        self.layers[1] = nn.SyncBatchNorm(8)


@like_torchrun()
def refusals(*, cases: list[dict[str, Any]]) -> list[str]:
    """What each case is refused by, or warned of."""
    answers = []
    for case in cases:
        options = dict(case)
        of_trainer = {name: options.pop(name) for name in ("sync_batchnorm",) if name in options}
        module = SyncedByHand() if options.pop("by_hand", False) else Adaptive()
        trainer = make_trainer(BucketDDPStrategy(**options), max_epochs=1, limit_train_batches=1, **of_trainer)
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            try:
                trainer.fit(module, loader())
                answers.append(next((text for one in warned if "bucketddp" in (text := str(one.message))), ""))
            except ValueError as error:
                answers.append(str(error))
    return answers
