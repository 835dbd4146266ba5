"""What the Trainer does about losses, gradients and weights that are not finite."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn

from lightning_bucketddp.bindings.trainer_lightning import BucketDDPStrategy
from tests.strategies.test_precision import option
from tests.support.cases import for_each
from tests.support.ranks import raised_by, run_on_ranks
from tests.support.scripts.trainers import SMALL_BUCKETS_MB, like_torchrun, lines_logged, make_trainer, unwrapped

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

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = self.loss(batch)
            self.manual_backward(loss)
            return loss

        if self._setting.manual == "closure":
            optimizer.step(closure)
        else:
            closure()
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

    def __init__(self) -> None:
        self.logged = 0.0
        self.batches_stepped: list[int] = []

    def on_before_optimizer_step(self, trainer: Trainer, *_: Any) -> None:
        self.batches_stepped.append(trainer.fit_loop.batch_idx)

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        self.logged = float(trainer.logged_metrics.get("bucketddp/nonfinite_steps", 0))


@dataclass(frozen=True)
class Outcome:
    error: str
    warnings: list[str]
    of_checkpoints: list[str]
    weights: list[Tensor]
    optimizer_state: dict[Any, Any]
    logged: float
    batches_stepped: list[int]
    global_step: int


@like_torchrun()
def fit(*, setting: Setting, saves: ModelCheckpoint | None = None, ckpt_path: str | None = None) -> Outcome:
    """One epoch."""
    module = Module(setting)
    observer = _Observer()
    trainer = make_trainer(
        BucketDDPStrategy(bucket_cap_mb=SMALL_BUCKETS_MB, **setting.options),
        max_epochs=1,
        accumulate_grad_batches=setting.accumulate,
        gradient_clip_val=0.1 if setting.clips else None,
        use_distributed_sampler=False,
        log_every_n_steps=1,
        callbacks=[observer, *([] if saves is None else [saves])],
        enable_checkpointing=saves is not None,
        **option(setting.precision),
    )
    with lines_logged("lightning_bucketddp") as messages:
        error, warned = outcome_of(lambda: trainer.fit(module, Batches(setting.leaves_out), ckpt_path=ckpt_path))
    return Outcome(
        error,
        messages,
        warned,
        [param.detach() for param in module.parameters()],
        trainer.optimizers[0].state_dict()["state"] if trainer.optimizers else {},
        observer.logged,
        observer.batches_stepped,
        trainer.global_step,
    )


def outcome_of(call: Callable[[], Any]) -> tuple[str, list[str]]:
    """The error and the warnings of ours."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        error = raised_by(call)
    texts = [unwrapped(str(warning.message)) for warning in caught]
    return error, [text for text in texts if text.startswith("bucketddp:")]


def spoil(module: nn.Module, name: str) -> None:
    """Make a value infinite or nan in what is called so."""
    with torch.no_grad():
        for tensor_name, tensor in module.state_dict().items():
            if tensor_name.startswith(name):
                tensor.view(-1)[0] = math.inf if tensor_name.endswith("weight") else math.nan


# In `Setting` rank 1's fourth batch is bad.
WHERE = "step 3 (epoch 0, batch 3)"
WHAT = {"loss": "the loss on rank 1 (nan)", "gradient": "the gradient of `layers.0.bias` on rank 1"}
WHAT_HELPS = "To find the cause, look at the data of that rank, clip gradients or lower the learning rate"


def trained(
    bad: str = "", on_nonfinite: str | None = "skip", saves: ModelCheckpoint | None = None, **setting: Any
) -> list[Outcome]:
    options = {"on_nonfinite": on_nonfinite, **setting.pop("options", {})}
    return run_on_ranks(fit, setting=Setting(bad, options=options, **setting), saves=saves)


def assert_same(a: Outcome, b: Outcome) -> None:
    assert all(torch.equal(ours, other) for ours, other in zip(a.weights, b.weights, strict=True))
    torch.testing.assert_close(a.optimizer_state, b.optimizer_state, rtol=0, atol=0)


def is_finite(tensors: list[torch.Tensor]) -> bool:
    return all(bool(tensor.isfinite().all()) for tensor in tensors)


# --- Warn


@for_each("bad", WHAT)
def test_by_default_rank_zero_warns_and_training_goes_on(bad: str) -> None:
    rank_zero, rank_one = run_on_ranks(fit, setting=Setting(bad))
    assert rank_zero.warnings == [
        f"bucketddp: not finite in {WHERE}: {WHAT[bad]}. It goes into the weights of all ranks; `on_nonfinite='raise'`"
        f" or `on_nonfinite='skip'` prevents that. {WHAT_HELPS}."
    ]
    assert rank_one.warnings == []
    for rank in (rank_zero, rank_one):
        assert rank.error == ""
        assert rank.global_step == 6
        # A loss that is nan by a constant does no harm, and is no longer so in the steps that follow.
        assert rank.logged == (1 if bad == "loss" else 3)


# --- Raise


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "64-true", "16-true"])
@pytest.mark.sampled(2)
def test_every_rank_raises_before_the_weights_change_and_the_newest_checkpoint_is_finite(
    precision: str, tmp_path: Path
) -> None:
    expected = run_on_ranks(fit, setting=Setting(leaves_out=[3, 4, 5], precision=precision))
    for bad, what in WHAT.items():
        each_step = ModelCheckpoint(tmp_path / bad, filename="{step}", every_n_train_steps=1, save_top_k=-1)
        for rank in trained(bad, "raise", precision=precision, saves=each_step):
            assert rank.error == (
                f"NonFiniteError: Not finite in {WHERE}: {what}. No optimizer has used it, the weights are as they"
                f" were. {WHAT_HELPS}; or pass `on_nonfinite='skip'` to the strategy to leave such steps out."
            )
            assert rank.global_step == 3
            assert_same(rank, expected[0])
        files = sorted((tmp_path / bad).iterdir())
        assert [path.name for path in files] == ["step=1.ckpt", "step=2.ckpt", "step=3.ckpt"]
        assert is_finite(weights_in(files[-1]))


# --- Skip


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"precision": "bf16-mixed"},
        {"precision": "16-true"},
        {"clips": True},
        {"manual": "step"},
        {"manual": "closure"},
        {"optimizer": "lbfgs"},
        {"returns_none_on": 0},
        {"options": {"gradient_weight": "batch_size"}},
    ],
    ids=str,
)
@pytest.mark.sampled(3)
def test_a_skipped_step_leaves_no_trace(how: dict[str, Any]) -> None:
    expected = trained(leaves_out=[3], **how)
    for rank, other in [pair for bad in WHAT for pair in zip(trained(bad, **how), expected, strict=True)]:
        assert rank.error == ""
        assert_same(rank, other)
        assert rank.logged == 1
        assert 3 not in rank.batches_stepped


@for_each(("at", "bad"), [(3, "loss"), (5, "gradient")])
def test_a_bad_micro_batch_skips_the_step_of_all(at: int, bad: str) -> None:
    expected = trained(leaves_out=[3, 4, 5], accumulate=3)
    for rank in trained(bad, accumulate=3, at=at):
        assert_same(rank, expected[0])
        assert rank.logged == 1
        assert rank.global_step == 2


def test_a_grad_scaler_is_left_alone() -> None:
    expected = trained(leaves_out=[3], precision="scaler")
    for rank in trained("loss", precision="scaler"):
        assert_same(rank, expected[0])
        assert rank.logged == 1
    rank_zero, _ = trained("loss", "warn", precision="scaler")
    assert "The GradScaler skips the step if gradients are not finite, either." in rank_zero.warnings[0]


@for_each("on_nonfinite", ["warn", "raise", "skip"])
def test_gradients_are_left_to_a_grad_scaler(on_nonfinite: str) -> None:
    for rank in trained("gradient", on_nonfinite, precision="scaler"):
        assert (rank.error, rank.warnings, rank.logged) == ("", [], 0)
        assert is_finite(rank.weights)


# --- Checkpoints


@pytest.mark.parametrize(
    ("save_last", "options"),
    [(True, {}), ("link", {}), (True, {"async_checkpoints": True})],
    ids=["plain", "link", "in_background"],
)
def test_by_default_the_newest_finite_checkpoint_is_kept(
    save_last: Any, options: dict[str, Any], tmp_path: Path
) -> None:
    newest = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=1, save_top_k=1, save_last=save_last)
    rank_zero, rank_one = run_on_ranks(fit, setting=Setting("gradient", options=options), saves=newest)
    assert rank_zero.error == rank_one.error == ""
    assert rank_zero.global_step == 6
    resume_from = "last.ckpt" if save_last is True else "step=3.ckpt"
    assert rank_zero.of_checkpoints == [
        "bucketddp: weights have become infinite or nan by step 4: `layers.0.bias`."
        f" Checkpoint `{tmp_path}/step=4.ckpt` is written as `{tmp_path}/nonfinite/step=4.ckpt`, and further ones"
        f" likewise; earlier ones are neither replaced nor removed. Resume from `{tmp_path}/{resume_from}`."
    ]
    assert rank_one.of_checkpoints == []
    # What was saved last, but not finite, is there too, and no more than one of each kind.
    links = {"step=6.ckpt"} if save_last == "link" else set()
    beside = {"step=6.ckpt"} if save_last == "link" else {"step=6.ckpt", "last.ckpt"}
    assert {path.name for path in tmp_path.iterdir()} == {"last.ckpt", "step=3.ckpt", "nonfinite"} | links
    assert {path.name for path in (tmp_path / "nonfinite").iterdir()} == beside
    assert not is_finite(weights_in(tmp_path / "nonfinite" / "step=6.ckpt"))
    for path in (tmp_path / "last.ckpt", tmp_path / "step=3.ckpt"):
        assert is_finite(weights_in(path))
        assert torch.load(path, weights_only=False)["global_step"] == 3
    # Without the bad batch, training goes on from there, with all batches of the epoch.
    resumed, _ = run_on_ranks(fit, setting=Setting(options=options), saves=newest, ckpt_path="last")
    assert (resumed.error, resumed.of_checkpoints) == ("", [])
    assert resumed.global_step == 3 + 6
    assert is_finite(resumed.weights)
    assert is_finite(weights_in(tmp_path / "last.ckpt"))


def weights_in(path: Path) -> list[torch.Tensor]:
    return list(torch.load(path, weights_only=False)["state_dict"].values())
