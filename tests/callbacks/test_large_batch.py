"""`ScaleLearningRate`: every step is made with what the scheduler set, times a factor that warms up."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningDataModule, Trainer
from lightning.pytorch.callbacks import (
    GradientAccumulationScheduler,
    LambdaCallback,
    LearningRateMonitor,
    ModelCheckpoint,
)
from lightning.pytorch.loggers.logger import DummyLogger
from torch import Tensor
from torch.optim import lr_scheduler
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler

from lightning_bucketddp.bindings.trainer_lightning import BucketDDPStrategy, ScaleLearningRate
from tests.support.cases import for_each
from tests.support.ranks import on_ranks, raised_by, run_on_ranks
from tests.support.scripts import models
from tests.support.scripts.trainers import like_torchrun, make_trainer, said_about

# Small, and powers of two times it stay exact.
RATE = 2.0**-6
# Once an Adam was made, torch calls the hooks of a subclass twice: around its `step` and around that of Adam within.
torch.optim.Adam([torch.zeros(1)])


class Recording(torch.optim.Adam):
    """Writes down the learning rates that it steps with."""

    def __init__(self, params: Any, lr: Any, used: list[Any]) -> None:
        super().__init__(params, lr, foreach=False)
        self.used = used
        self.tensors: list[Tensor] = []

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        output = super().step(closure)
        self.used.append([float(group["lr"]) for group in self.param_groups])
        for rate in (group["lr"] for group in self.param_groups):
            if isinstance(rate, Tensor) and not any(rate is tensor for tensor in self.tensors):
                self.tensors.append(rate)
        return output


class Scheduled(models.Regression):
    """Has the optimizers and schedulers of a schedule, or sets the learning rates of its steps by itself."""

    def __init__(self, schedule: str, used: list[Any]) -> None:
        super().__init__()
        self._schedule = schedule
        self._used = used

    def optimizer(self, lr: Any = RATE, params: Any = None) -> Recording:
        return Recording(self.parameters() if params is None else params, lr, self._used)

    def configure_optimizers(self) -> Any:
        return SCHEDULES[self._schedule](self)

    def training_step(self, batch: list[Tensor]) -> Tensor:
        if self._schedule == "set within the step":
            for group in self.trainer.optimizers[0].param_groups:
                group["lr"] = RATE * 0.5**self.global_step
        self.log("constant", 1.0)  # on a plateau from the start
        return self.loss(batch)


class Manual(Scheduled):
    """Two optimizers, of which the second steps twice; steps the schedulers by itself."""

    def __init__(self, used: list[Any]) -> None:
        super().__init__("two_optimizers", used)
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor]) -> None:  # type: ignore[override]
        optimizers: Any = self.optimizers()
        schedulers: Any = self.lr_schedulers()
        first, second = optimizers
        for optimizer in (first, second, second):
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            optimizer.step()
        for scheduler in schedulers:
            scheduler.step()


def _each_step(make: Callable[..., Any], *, lr: Any = RATE, groups: bool = False, **options: Any) -> Any:
    def configure(module: Scheduled) -> Any:
        layers = [
            {"params": module.layers[0].parameters(), "lr": RATE},
            {"params": module.layers[2].parameters(), "lr": RATE / 2},
        ]
        optimizer = module.optimizer(lr=lr, params=layers if groups else None)
        return [optimizer], [{"scheduler": make(optimizer, **options), "interval": "step", "monitor": "constant"}]

    return configure


def _two_optimizers(module: Scheduled) -> Any:
    first, second = module.optimizer(), module.optimizer(lr=RATE / 8)
    return [first, second], [lr_scheduler.ExponentialLR(first, 0.9), lr_scheduler.StepLR(second, 3)]


SCHEDULES: dict[str, Callable[[Scheduled], Any]] = {
    "groups": _each_step(
        lr_scheduler.LambdaLR, groups=True, lr_lambda=[lambda step: 0.9**step, lambda step: 1 / (1 + step)]
    ),
    "constant": lambda module: module.optimizer(),
    "plateau": _each_step(lr_scheduler.ReduceLROnPlateau, patience=1, min_lr=RATE / 50),
    "set within the step": lambda module: module.optimizer(),
    "step": _each_step(lr_scheduler.StepLR, step_size=4, gamma=0.5),
    "tensor": lambda module: _each_step(lr_scheduler.ExponentialLR, lr=torch.tensor(RATE), gamma=0.5)(module),
    "two_optimizers": _two_optimizers,
}


def module_with(schedule: str, used: list[Any]) -> Scheduled:
    return Manual(used) if schedule == "two_optimizers" else Scheduled(schedule, used)


@dataclass(frozen=True)
class Rates:
    """Learning rates by step and parameter group, or by optimizer and step where there are several."""

    of_steps: list[Any]
    in_monitor: dict[str, Any]
    at_the_end: list[Any]
    num_tensors: int
    weights: dict[str, Any]
    lines: list[str]


@like_torchrun()
def train(
    *,
    schedule: str = "constant",
    scaling: dict[str, Any] | None = None,
    strategy: str = "bucketddp",
    max_epochs: int = 2,
    accumulate: int | dict[int, int] = 1,
    precision: str = "32-true",
    monitor_interval: Literal["step", "epoch"] = "step",
    directory: Path | None = None,
    save_every: int = 10,
    resume_from: Path | None = None,
    reload_every: int = 0,
) -> Rates:
    """Train with `ScaleLearningRate(**scaling)`, or without it."""
    used: list[Any] = []
    module = module_with(schedule, used)
    monitor = LearningRateMonitor(logging_interval=monitor_interval)
    # After the monitor: the order must not matter.
    callbacks: list[Callback] = [monitor, *([] if scaling is None else [ScaleLearningRate(**scaling)])]
    if isinstance(accumulate, dict):
        callbacks.append(GradientAccumulationScheduler(accumulate))
    if directory is not None:
        callbacks.append(ModelCheckpoint(directory, filename="{step}", save_top_k=-1, every_n_train_steps=save_every))
    options: dict[str, Any] = {} if isinstance(accumulate, dict) else {"accumulate_grad_batches": accumulate}
    trainer = make_trainer(
        strategy,
        max_epochs=max_epochs,
        logger=DummyLogger(),
        log_every_n_steps=1,
        callbacks=callbacks,
        enable_checkpointing=directory is not None,
        precision=precision,
        reload_dataloaders_every_n_epochs=reload_every,
        **options,
    )
    lines: list[str] = []
    with said_about("ScaleLearningRate", lines):
        trainer.fit(module, _Growing() if reload_every else models.loader(), ckpt_path=resume_from)
    optimizers: list[Any] = trainer.optimizers
    return Rates(
        of_steps=used,
        in_monitor={name: [float(rate) for rate in rates] for name, rates in monitor.lrs.items()},
        at_the_end=_rates(trainer),
        num_tensors=sum(len(optimizer.tensors) for optimizer in optimizers),
        weights={name: value.tolist() for name, value in module.state_dict().items()},
        lines=lines,
    )


class _Growing(LightningDataModule):
    """Batches of four in the first epoch, of eight in the second."""

    def train_dataloader(self) -> Any:
        assert self.trainer is not None
        return models.loader(batch_size=4 * (1 + self.trainer.current_epoch))


def _rates(trainer: Trainer) -> list[float]:
    return [float(group["lr"]) for optimizer in trainer.optimizers for group in optimizer.param_groups]


# Two ranks with batches of four: twice that.
BASE = 4


def scaled(rates: list[Any], *, factor: float = 2, warmup_steps: int = 8) -> list[Any]:
    steps = range(len(rates))
    multipliers = [1 + (factor - 1) * step / warmup_steps if step < warmup_steps else factor for step in steps]
    return [[rate * multiplier for rate in groups] for multiplier, groups in zip(multipliers, rates, strict=True)]


@pytest.mark.parametrize("schedule", ["groups", "plateau", "set within the step"])
def test_each_step_is_made_with_the_scheduled_rate_times_the_multiplier(schedule: str) -> None:
    plain = run_on_ranks(train, schedule=schedule)
    ours = run_on_ranks(train, schedule=schedule, scaling={"base_batch_size": BASE, "warmup_steps": 8})
    for rank in ours:
        assert len(rank.of_steps) == 20
        assert rank.of_steps == scaled(plain[0].of_steps)
        assert rank.at_the_end == plain[0].at_the_end
        assert rank.weights == ours[0].weights


def test_a_rate_in_a_tensor_is_scaled_in_place() -> None:
    plain = run_on_ranks(train, schedule="tensor")[0]
    for rank in run_on_ranks(train, schedule="tensor", scaling={"base_batch_size": BASE, "warmup_steps": 8}):
        expected = torch.tensor(scaled(plain.of_steps))
        torch.testing.assert_close(torch.tensor(rank.of_steps), expected, rtol=1e-6, atol=0)
        assert rank.at_the_end == plain.at_the_end
        assert rank.num_tensors == 1


@on_ranks()
@like_torchrun()
def test_a_fit_after_the_evaluation_of_a_checkpoint_warms_up(tmp_path: Path) -> None:
    module, used = module_with("constant", []), scaled([[RATE]] * 10)
    scaling = ScaleLearningRate(base_batch_size=BASE, warmup_steps=8)
    trainer = make_trainer("bucketddp", max_epochs=1, callbacks=[scaling])
    trainer.fit(module, models.loader())
    trainer.save_checkpoint(tmp_path / "trained.ckpt")
    trainer.validate(module, models.loader(), ckpt_path=tmp_path / "trained.ckpt", verbose=False)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, models.loader())
    assert module._used == used + used


@on_ranks()
@like_torchrun()
def test_schedules_go_on_from_their_rate_after_a_step_that_was_withheld() -> None:
    def spoil(trainer: Trainer, module: Any, batch: list[Tensor], batch_idx: int) -> None:
        if batch_idx == 3:  # `StepLR` halves the rate after it
            batch[0].fill_(torch.nan)

    module = module_with("step", [])
    callbacks = [ScaleLearningRate(base_batch_size=BASE, warmup_steps=0), LambdaCallback(on_train_batch_start=spoil)]
    trainer = make_trainer(BucketDDPStrategy(on_nonfinite="skip"), max_epochs=1, callbacks=callbacks)
    trainer.fit(module, models.loader())
    assert module._used == [[2 * RATE]] * 3 + [[RATE]] * 4 + [[RATE / 2]] * 2
    assert _rates(trainer) == [RATE / 4]


def test_each_optimizer_warms_up_by_its_own_steps() -> None:
    plain = run_on_ranks(train, schedule="two_optimizers", max_epochs=1)[0].of_steps
    scaling = {"base_batch_size": BASE, "warmup_steps": 8}
    for rank in run_on_ranks(train, schedule="two_optimizers", max_epochs=1, scaling=scaling):
        first, second = rank.of_steps[::3], [rates for i, rates in enumerate(rank.of_steps) if i % 3]
        assert first == scaled(plain[::3])
        assert second == scaled([rates for i, rates in enumerate(plain) if i % 3])


@pytest.mark.parametrize(
    ("world_size", "options"),
    [
        (2, {"strategy": "ddp"}),
        (1, {"strategy": "auto"}),
        (2, {"precision": "bf16-mixed"}),
    ],
)
def test_it_works_with_any_strategy_and_precision(world_size: int, options: dict[str, Any]) -> None:
    options = {"world_size": world_size, "schedule": "step", "max_epochs": 1, **options}
    ours = run_on_ranks(train, scaling={"base_batch_size": BASE * world_size / 2, "warmup_steps": 8}, **options)
    plain = run_on_ranks(train, **options)
    assert [rank.of_steps for rank in ours] == [scaled(rank.of_steps) for rank in plain]


@for_each(
    ("scaling", "accumulate", "batch", "factor", "warmup_steps"),
    [
        ({"base_batch_size": 8, "warmup_steps": 5}, 4, "2 x 4 x 4 = 32", 4, 5),
        # Ten batches are three steps; five epochs by default.
        ({"base_batch_size": 8}, 4, "2 x 4 x 4 = 32", 4, 15),
        ({"base_batch_size": 2, "rule": "sqrt", "warmup_epochs": 0.5}, 1, "2 x 4 x 1 = 8", 2, 5),
        ({"base_batch_size": 16}, 1, "2 x 4 x 1 = 8", 0.5, 0),
        ({"base_batch_size": 10, "warmup_steps": 1, "batch_size_per_rank": 20}, 1, "2 x 20 x 1 = 40", 4, 1),
    ],
)
def test_the_batch_and_the_factor_are_said_in_one_line(
    scaling: dict[str, Any], accumulate: int, batch: str, factor: float, warmup_steps: int
) -> None:
    rank_zero, rank_one = run_on_ranks(train, max_epochs=1, scaling=scaling, accumulate=accumulate)
    line = f"global batch {batch}, base {scaling['base_batch_size']}: learning rate x {factor:g}"
    warm_up = f", warmed up over {warmup_steps} steps" if warmup_steps else ""
    assert rank_zero.lines == [f"ScaleLearningRate: {line}{warm_up}"]
    assert rank_one.lines == []
    expected = scaled([[RATE]] * 3, factor=factor, warmup_steps=warmup_steps)
    assert rank_zero.of_steps[:3] == rank_one.of_steps[:3] == expected


@for_each(("options", "samples"), [({"accumulate": {0: 1, 1: 2}}, "4 x 2"), ({"reload_every": 1}, "8 x 1")])
def test_the_factor_follows_the_accumulation_and_reloaded_data(options: dict[str, Any], samples: str) -> None:
    rank_zero, rank_one = run_on_ranks(train, scaling={"base_batch_size": BASE, "warmup_steps": 0}, **options)
    assert rank_zero.of_steps == rank_one.of_steps == [[2 * RATE]] * 10 + [[4 * RATE]] * 5
    assert rank_zero.lines == [
        "ScaleLearningRate: global batch 2 x 4 x 1 = 8, base 4: learning rate x 2",
        f"ScaleLearningRate: global batch 2 x {samples} = 16, base 4: learning rate x 4",
    ]


@on_ranks()
@like_torchrun()
def test_batches_of_different_sizes_are_added_up() -> None:
    lines: list[str] = []
    trainer = make_trainer("bucketddp", max_steps=2, callbacks=[ScaleLearningRate(base_batch_size=2, warmup_steps=0)])
    with said_about("ScaleLearningRate", lines):
        trainer.fit(Scheduled("constant", []), models.loader(batch_size=4 + dist.get_rank()))
    line = "ScaleLearningRate: global batch 9 on 2 ranks x 1 = 9, base 2: learning rate x 4.5"
    assert lines == ([line] if dist.get_rank() == 0 else [])


@pytest.mark.parametrize(("schedule", "interval", "every"), [("groups", "step", 1), ("step", "epoch", 10)])
def test_the_monitor_shows_what_steps_are_made_with(schedule: str, interval: str, every: int) -> None:
    scaling = {"base_batch_size": BASE, "warmup_steps": 15}
    for rank in run_on_ranks(train, schedule=schedule, scaling=scaling, monitor_interval=interval):
        assert [list(groups) for groups in zip(*rank.in_monitor.values(), strict=True)] == rank.of_steps[::every]


@pytest.mark.parametrize("schedule", ["tensor", "two_optimizers"])
def test_a_run_resumed_within_the_warm_up_equals_an_uninterrupted_one(schedule: str, tmp_path: Path) -> None:
    scaling = {"base_batch_size": BASE, "warmup_steps": 15}
    whole = run_on_ranks(train, schedule=schedule, scaling=scaling, directory=tmp_path)
    steps = 10 if schedule != "two_optimizers" else 30
    resumed = run_on_ranks(train, schedule=schedule, scaling=scaling, resume_from=tmp_path / f"step={steps}.ckpt")
    for rank, expected in zip(resumed, whole, strict=True):
        assert rank.of_steps == expected.of_steps[steps:]
        assert rank.weights == expected.weights


@on_ranks()
@like_torchrun()
def test_checkpoints_of_a_step_hold_the_scheduled_rate_and_a_fit_that_fails_leaves_everything_as_it_was(
    tmp_path: Path,
) -> None:
    def save_and_fail(trainer: Trainer, *_: Any) -> None:
        if trainer.global_step == 3:
            trainer.save_checkpoint(tmp_path / "within.ckpt")  # as a signal may ask for
            raise RuntimeError("within a step")

    monitor, fails = LearningRateMonitor(), LambdaCallback(on_before_optimizer_step=save_and_fail)
    callbacks = [monitor, ScaleLearningRate(base_batch_size=4, warmup_steps=0), fails]
    trainer = make_trainer("bucketddp", max_epochs=1, callbacks=callbacks, logger=DummyLogger())
    raised = raised_by(lambda: trainer.fit(Scheduled("tensor", []), models.loader()))
    assert raised == "RuntimeError: within a step"
    saved = torch.load(tmp_path / "within.ckpt", weights_only=True)
    assert saved["optimizer_states"][0]["param_groups"][0]["lr"] == RATE / 8
    assert _rates(trainer) == [RATE / 8]
    assert [len(optimizer._optimizer_step_pre_hooks) for optimizer in trainer.optimizers] == [0]
    assert [name for name in vars(monitor) if name.startswith("on_")] == []


def test_a_checkpoint_resumes_with_another_global_batch_and_without_the_callback(tmp_path: Path) -> None:
    run_on_ranks(train, max_epochs=1, scaling={"base_batch_size": BASE, "warmup_steps": 4}, directory=tmp_path)
    for scaling, factor in (({"base_batch_size": 2, "warmup_steps": 4}, 4), (None, 1)):
        for rank in run_on_ranks(train, scaling=scaling, resume_from=tmp_path / "step=10.ckpt"):
            assert rank.of_steps == [[factor * RATE]] * 10


UNKNOWN_SIZE = "cannot tell the batch size of the training data, a `{}`. Pass `batch_size_per_rank`, the samples in one"


class _Endless(IterableDataset[Any]):
    def __iter__(self) -> Any:
        while True:
            yield torch.ones(models.WIDTH), torch.ones(1)


class _ByTokens(BatchSampler):
    """A user's own, with a meaning of its own for `batch_size`."""


@on_ranks()
@like_torchrun()
def test_data_that_does_not_tell_is_refused() -> None:
    by_tokens = _ByTokens(RandomSampler(range(models.NUM_SAMPLES)), 4, drop_last=False)
    endless = "cannot tell how many steps 5 epochs are: the training data has no length. Pass `warmup_st"
    refused: list[tuple[Any, str]] = [
        (DataLoader(models.loader().dataset, batch_sampler=by_tokens), UNKNOWN_SIZE.format("DataLoader")),
        ([models.loader(), models.loader()], UNKNOWN_SIZE.format("list")),
        (DataLoader(_Endless(), batch_size=4), endless),
    ]
    for data, text in refused:
        trainer = make_trainer("bucketddp", max_steps=2, callbacks=[ScaleLearningRate(base_batch_size=4)])
        raised = raised_by(partial(trainer.fit, Scheduled("constant", []), data))
        assert raised.startswith(f"ValueError: `ScaleLearningRate` {text}")


@for_each(
    ("options", "text"),
    [
        ({"base_batch_size": 0}, "`base_batch_size` is 0; it must be at least 1."),
        ({"rule": "cubic"}, "`rule` is 'cubic'; it must be 'linear' or 'sqrt'."),
        (
            {"warmup_epochs": 1, "warmup_steps": 1},
            "`warmup_epochs` and `warmup_steps` say the same thing. Pass one of them.",
        ),
        ({"warmup_steps": -1}, "A warm-up of -1 is not possible; pass 0 for none."),
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        ScaleLearningRate(**{"base_batch_size": 1, **options})
