"""What the Trainer and Fabric do about losses, gradients and weights that are not finite."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from lightning.fabric.plugins.precision import MixedPrecision
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn

from lightning_bucketddp.bindings.fabric_lightning import BucketDDPStrategy as FabricStrategy
from lightning_bucketddp.bindings.trainer_lightning import BucketDDPStrategy
from lightning_bucketddp.reducer.nonfinite import NonFiniteError
from tests.strategies.test_precision import option
from tests.support.cases import for_each
from tests.support.ranks import on_ranks, raised_by
from tests.support.scripts.fabrics import make_fabric
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


class Module(LightningModule):
    """Has something bad (`loss`, `gradient` or nothing) in a batch of rank 1.

    Args:
        how: it optimizes: by `step` or `closure` of its own, with `lbfgs`, without a loss on rank 0 (`none`), or with
            all gradients in one buffer, in which it changes them (`flat`).
    """

    def __init__(self, bad: str = "", *, at: int = 3, how: str = "") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))
        self._bad, self._at, self._how = bad, at, how
        self.automatic_optimization = how not in ("step", "closure")

    def loss(self, batch: list[Tensor]) -> Tensor:
        loss = (self.layers(batch[0]) - batch[1]).square().mean()
        if self.global_rank == 1 and int(batch[2]) == self._at and self._bad:
            return loss + (math.nan if self._bad == "loss" else BadGradient.apply(self.layers[0].bias))
        return loss

    def training_step(self, batch: list[Tensor]) -> Tensor | None:
        if self.automatic_optimization:
            has_none = self._how == "none" and self.global_rank == 0 and int(batch[2]) == self._at
            return None if has_none else self.loss(batch)
        optimizer: Any = self.optimizers()

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = self.loss(batch)
            self.manual_backward(loss)
            return loss

        if self._how == "closure":
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()
        return None

    def on_train_start(self) -> None:
        if self._how == "flat":
            params = list(self.parameters())
            self._flat = torch.zeros(sum(param.numel() for param in params))
            for param, part in zip(params, self._flat.split([param.numel() for param in params]), strict=True):
                param.grad = part.view_as(param)

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        optimizer.zero_grad(set_to_none=self._how != "flat")

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if self._how == "flat":
            self._flat.clamp_(-0.01, 0.01)

    def configure_optimizers(self) -> Any:
        if self._how == "lbfgs":
            return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3)
        # With weight decay and momentum a parameter changes even by a gradient of zero.
        return torch.optim.AdamW(self.parameters(), lr=0.1, weight_decay=0.1)


class Batches:
    """This rank's batches, each with its number; the same at each iteration."""

    def __init__(self, leaves_out: Sequence[int] = ()) -> None:
        generator = torch.Generator().manual_seed(dist.get_rank())
        batches = [(torch.randn(4, WIDTH, generator=generator), torch.tensor(i)) for i in range(NUM_BATCHES)]
        self._batches = [[x, x.sin().sum(1, keepdim=True), i] for x, i in batches if int(i) not in leaves_out]

    def __iter__(self) -> Iterator[list[Tensor]]:
        return iter(self._batches)


class Observer(Callback):
    """Notes the number of steps that was logged, and the batches after which an optimizer was given gradients."""

    def __init__(self) -> None:
        self.logged = 0.0
        self.batches_stepped: list[int] = []

    def on_before_optimizer_step(self, trainer: Trainer, *_: Any) -> None:
        self.batches_stepped.append(trainer.fit_loop.batch_idx)

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        self.logged = float(trainer.logged_metrics.get("bucketddp/nonfinite_steps", 0))


@dataclass(frozen=True)
class Fit:
    """What an epoch has left on this rank."""

    error: str
    messages: list[str]
    of_checkpoints: list[str]
    trainer: Trainer
    weights: list[Tensor]
    observer: Observer


def fit(
    module: Module,
    *callbacks: Callback,
    leaves_out: Sequence[int] = (),
    strategy: dict[str, Any] | None = None,
    precision: str = "32-true",
    ckpt_path: str | None = None,
    **options: Any,
) -> Fit:
    observer = Observer()
    trainer = make_trainer(
        BucketDDPStrategy(
            bucket_cap_mb=SMALL_BUCKETS_MB, **({"on_nonfinite": "skip"} if strategy is None else strategy)
        ),
        max_epochs=1,
        use_distributed_sampler=False,
        log_every_n_steps=1,
        callbacks=[observer, *callbacks],
        enable_checkpointing=bool(callbacks),
        **option(precision),
        **options,
    )
    with lines_logged("lightning_bucketddp") as messages:
        error, warned = outcome_of(lambda: trainer.fit(module, Batches(leaves_out), ckpt_path=ckpt_path))
    dist.barrier()  # what rank 0 has written is there
    return Fit(error, messages, warned, trainer, [param.detach() for param in module.parameters()], observer)


def outcome_of(call: Callable[[], Any]) -> tuple[str, list[str]]:
    """Return the error and our warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        error = raised_by(call)
    texts = [unwrapped(str(warning.message)) for warning in caught]
    return error, [text for text in texts if text.startswith("bucketddp:")]


def spoil(module: nn.Module, name: str) -> None:
    """Make a value of a parameter nan."""
    with torch.no_grad():
        module.get_parameter(name).view(-1)[0] = math.nan


# By default rank 1's fourth batch is bad.
WHERE = "step 3 (epoch 0, batch 3)"
WHAT = {"loss": "the loss on rank 1 (nan)", "gradient": "the gradient of `layers.0.bias` on rank 1"}
WHAT_HELPS = "To find the cause, look at the data of that rank, clip gradients or lower the learning rate"


def assert_same(one: Fit, other: Fit) -> None:
    torch.testing.assert_close(one.weights, other.weights, rtol=0, atol=0)
    states = [fit.trainer.optimizers[0].state_dict()["state"] for fit in (one, other)]
    torch.testing.assert_close(*states, rtol=0, atol=0)


def is_finite(tensors: list[Tensor]) -> bool:
    return all(bool(tensor.isfinite().all()) for tensor in tensors)


def weights_in(path: Path) -> list[Tensor]:
    return list(torch.load(path, weights_only=False)["state_dict"].values())


@for_each("bad", WHAT)
@on_ranks()
@like_torchrun()
def test_by_default_rank_zero_warns_and_training_goes_on(bad: str) -> None:
    done = fit(Module(bad), strategy={})
    text = (
        f"bucketddp: not finite in {WHERE}: {WHAT[bad]}. It goes into the weights of all ranks; `on_nonfinite='raise'`"
        f" or `on_nonfinite='skip'` prevents that. {WHAT_HELPS}."
    )
    assert done.messages == ([text] if dist.get_rank() == 0 else [])
    assert (done.error, done.trainer.global_step) == ("", 6)
    # A loss that is nan by a constant does no harm, and is no longer so in the steps that follow.
    assert done.observer.logged == (1 if bad == "loss" else 3)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "64-true", "16-true"])
@pytest.mark.sampled(2)
@on_ranks()
@like_torchrun()
def test_every_rank_raises_before_the_weights_change_and_the_newest_checkpoint_is_finite(
    precision: str, tmp_path: Path
) -> None:
    expected = fit(Module(), leaves_out=[3, 4, 5], precision=precision)
    for bad, what in WHAT.items():
        each_step = ModelCheckpoint(tmp_path / bad, filename="{step}", every_n_train_steps=1, save_top_k=-1)
        done = fit(Module(bad), each_step, strategy={"on_nonfinite": "raise"}, precision=precision)
        assert done.error == (
            f"NonFiniteError: Not finite in {WHERE}: {what}. No optimizer has used it, the weights are as they"
            f" were. {WHAT_HELPS}; or pass `on_nonfinite='skip'` to the strategy to leave such steps out."
        )
        assert done.trainer.global_step == 3
        assert_same(done, expected)
        files = sorted((tmp_path / bad).iterdir())
        assert [path.name for path in files] == ["step=1.ckpt", "step=2.ckpt", "step=3.ckpt"]
        assert is_finite(weights_in(files[-1]))


@pytest.mark.parametrize(
    ("how", "options"),
    [
        ("", {}),
        ("", {"precision": "bf16-mixed"}),
        ("", {"precision": "16-true"}),
        ("", {"gradient_clip_val": 0.1}),
        ("step", {}),
        ("closure", {}),
        ("lbfgs", {}),
        ("none", {}),
        ("flat", {}),
        ("flat", {"strategy": {"on_nonfinite": "skip", "gradient_weight": "batch_size"}}),
        ("", {"strategy": {"on_nonfinite": "skip", "gradient_weight": "batch_size"}}),
    ],
    ids=str,
)
@pytest.mark.sampled(3)
@on_ranks()
@like_torchrun()
def test_a_skipped_step_leaves_no_trace(how: str, options: dict[str, Any]) -> None:
    # All batches have the same weight.
    expected = fit(Module(how=how), leaves_out=[3], **{**options, "strategy": {}})
    for bad in WHAT:
        done = fit(Module(bad, how=how), **options)
        assert (done.error, done.observer.logged) == ("", 1)
        assert_same(done, expected)
        assert 3 not in done.observer.batches_stepped


@for_each(("at", "bad"), [(3, "loss"), (5, "gradient")])
@on_ranks()
@like_torchrun()
def test_a_bad_micro_batch_skips_the_step_of_all(at: int, bad: str) -> None:
    expected = fit(Module(), leaves_out=[3, 4, 5], accumulate_grad_batches=3)
    done = fit(Module(bad, at=at), accumulate_grad_batches=3)
    assert_same(done, expected)
    assert (done.observer.logged, done.trainer.global_step) == (1, 2)


@on_ranks()
@like_torchrun()
def test_gradients_are_left_to_a_grad_scaler_and_losses_are_not() -> None:
    done = fit(Module("loss"), precision="scaler")
    assert_same(done, fit(Module(), leaves_out=[3], precision="scaler"))
    assert done.observer.logged == 1
    done = fit(Module("loss"), strategy={"on_nonfinite": "warn"}, precision="scaler")
    text = "The GradScaler skips the step if gradients are not finite, either."
    assert [text in message for message in done.messages] == [True] * (dist.get_rank() == 0)
    for on_nonfinite in ("warn", "raise", "skip"):
        done = fit(Module("gradient"), strategy={"on_nonfinite": on_nonfinite}, precision="scaler")
        assert (done.error, done.messages, done.observer.logged) == ("", [], 0)
        assert is_finite(done.weights)


@pytest.mark.parametrize(
    ("save_last", "strategy"),
    [(True, {}), ("link", {}), (True, {"async_checkpoints": True})],
    ids=["plain", "link", "in_background"],
)
@on_ranks()
@like_torchrun()
def test_by_default_the_newest_finite_checkpoint_is_kept(
    save_last: Any, strategy: dict[str, Any], tmp_path: Path
) -> None:
    def newest() -> ModelCheckpoint:
        return ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=1, save_top_k=1, save_last=save_last)

    done = fit(Module("gradient"), newest(), strategy=strategy)
    assert (done.error, done.trainer.global_step) == ("", 6)
    resume_from = "last.ckpt" if save_last is True else "step=3.ckpt"
    text = (
        "bucketddp: weights have become infinite or nan by step 4: `layers.0.bias`."
        f" Checkpoint `{tmp_path}/step=4.ckpt` is written as `{tmp_path}/nonfinite/step=4.ckpt`, and further ones"
        f" likewise; earlier ones are neither replaced nor removed. Resume from `{tmp_path}/{resume_from}`."
    )
    assert done.of_checkpoints == ([text] if dist.get_rank() == 0 else [])
    # What was saved last, but not finite, is there too, and no more than one of each kind.
    links = {"step=6.ckpt"} if save_last == "link" else set()
    beside = {"step=6.ckpt"} if save_last == "link" else {"step=6.ckpt", "last.ckpt"}
    assert {path.name for path in tmp_path.iterdir()} == {"last.ckpt", "step=3.ckpt", "nonfinite"} | links
    assert {path.name for path in (tmp_path / "nonfinite").iterdir()} == beside
    assert not is_finite(weights_in(tmp_path / "nonfinite" / "step=6.ckpt"))
    for path in (tmp_path / "last.ckpt", tmp_path / "step=3.ckpt"):
        assert is_finite(weights_in(path))
        assert torch.load(path, weights_only=False)["global_step"] == 3
    dist.barrier()  # both have looked
    # Without the bad batch, training goes on from there, with all batches of the epoch.
    resumed = fit(Module(), newest(), strategy=strategy, ckpt_path="last")
    assert (resumed.error, resumed.of_checkpoints, resumed.trainer.global_step) == ("", [], 3 + 6)
    assert is_finite(resumed.weights)
    assert is_finite(weights_in(tmp_path / "last.ckpt"))


# --- Fabric

OnNonfinite = Literal["warn", "raise", "skip"]


def train_with_fabric(
    module: nn.Module, on_nonfinite: OnNonfinite, loop: str, *, bad: str = "", leaves_out: Sequence[int] = ()
) -> list[Tensor]:
    """Take some steps with Fabric, of which rank 1's fourth is bad; return the weights."""
    scaler: dict[str, Any] = {
        "plugins": MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu", init_scale=8.0))
    }
    strategy = FabricStrategy(bucket_cap_mb=SMALL_BUCKETS_MB, on_nonfinite=on_nonfinite)
    fabric = make_fabric(strategy, **(scaler if loop == "scaler" else {}))
    wrapped, optimizer = fabric.setup(module, torch.optim.AdamW(module.parameters(), lr=0.1))
    for batch in Batches(leaves_out):

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = F.mse_loss(wrapped(batch[0]).float(), batch[1])  # noqa: B023
            if fabric.global_rank == 1 and int(batch[2]) == 3 and bad:  # noqa: B023
                loss = loss + (math.nan if bad == "loss" else BadGradient.apply(module[0].bias))  # type: ignore[index]
            fabric.backward(loss)
            return loss

        if loop == "closure":
            optimizer.step(closure)
            continue
        closure()
        if loop == "scaler":
            fabric.clip_gradients(module, optimizer, max_norm=0.1)
        optimizer.step()
    return [param.detach() for param in module.parameters()]


def new_module() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))


@for_each(("loop", "bad"), [("backward", "loss"), ("closure", "gradient")])
@on_ranks()
@like_torchrun()
def test_fabric_raises_on_every_rank(loop: str, bad: str) -> None:
    module = new_module()
    with pytest.raises(
        NonFiniteError, match=rf"^Not finite in backward 4: {re.escape(WHAT[bad].replace('layers.', ''))}\."
    ):
        train_with_fabric(module, "raise", loop, bad=bad)
    assert is_finite(list(module.parameters()))


@for_each(("loop", "bad"), [("backward", "gradient"), ("closure", "loss"), ("scaler", "loss")])
@on_ranks()
@like_torchrun()
def test_fabric_skips_the_step(loop: str, bad: str) -> None:
    expected = train_with_fabric(new_module(), "skip", loop, leaves_out=[3])
    torch.testing.assert_close(train_with_fabric(new_module(), "skip", loop, bad=bad), expected, rtol=0, atol=0)


@on_ranks()
@like_torchrun()
def test_fabric_skips_no_step_of_another_module() -> None:
    """The loss of the first of two modules is bad in one step, in which the second one trains, too."""
    weights = []
    for bad_step in (-1, 1):
        fabric, trained = make_fabric(FabricStrategy(on_nonfinite="skip")), []
        for _ in range(2):
            module = new_module()
            trained.append(fabric.setup(module, torch.optim.SGD(module.parameters(), lr=0.1)))
        for step, batch in enumerate(Batches()):
            for index, (module, optimizer) in enumerate(trained):
                optimizer.zero_grad()
                is_bad = (fabric.global_rank, index, step) == (1, 0, bad_step)
                fabric.backward(F.mse_loss(module(batch[0]), batch[1]) * (math.nan if is_bad else 1))
                optimizer.step()
        weights.append([list(module.parameters()) for module, _ in trained])
    (first, second), (skipping, other) = weights
    torch.testing.assert_close(other, second, rtol=0, atol=0)
    assert is_finite(skipping)
    assert not torch.equal(skipping[0], first[0])


@for_each("on_nonfinite", ["raise", "warn"])
@on_ranks()
@like_torchrun()
def test_fabric_refuses_to_write_bad_weights_or_writes_them_beside(on_nonfinite: OnNonfinite, tmp_path: Path) -> None:
    path, beside = (tmp_path / on_nonfinite / name for name in ("model.ckpt", "nonfinite/model.ckpt"))
    fabric = make_fabric(FabricStrategy(on_nonfinite=on_nonfinite))
    linear = nn.Linear(2, 2)
    wrapped, optimizer = fabric.setup(linear, torch.optim.SGD(linear.parameters(), lr=0.1))
    state: dict[str, Any] = {"model": wrapped, "optimizer": optimizer, "step": 1}
    fabric.save(path, state)
    spoil(linear, "bias")
    error, warned = outcome_of(lambda: fabric.save(path, state))
    fabric.barrier()
    if on_nonfinite == "raise":
        assert "is not written, because weights are not finite: `bias`." in error
        assert error.endswith(" (on rank 0)") == (dist.get_rank() == 1)
    else:
        text = (
            f"bucketddp: weights have become infinite or nan: `bias`. Checkpoint `{path}` is written as `{beside}`, and"
            f" further ones likewise; earlier ones are neither replaced nor removed. Resume from `{path}`."
        )
        assert (error, warned) == ("", [text] if dist.get_rank() == 0 else [])
        assert not is_finite([torch.load(beside)["model"]["bias"]])
    assert is_finite([torch.load(path)["model"]["bias"]])
