"""What Fabric does about losses, gradients and weights that are not finite."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F  # noqa: N812
from lightning.fabric.plugins.precision import MixedPrecision
from torch import Tensor, nn

from lightning_bucketddp.bindings.fabric_lightning import BucketDDPStrategy
from tests.strategies.test_nonfinite_trainer import WHAT, WIDTH, BadGradient, Batches, is_finite, outcome_of, spoil
from tests.support.cases import for_each
from tests.support.ranks import raised_by, run_on_ranks
from tests.support.scripts.fabrics import make_fabric
from tests.support.scripts.trainers import SMALL_BUCKETS_MB, like_torchrun


@like_torchrun()
def save(*, path: Path, on_nonfinite: Literal["warn", "raise", "skip"]) -> tuple[str, list[str]]:
    """Save, make the bias bad, and save again: the error and the warnings of that."""
    fabric = make_fabric(BucketDDPStrategy(on_nonfinite=on_nonfinite))
    linear = nn.Linear(2, 2)
    wrapped, optimizer = fabric.setup(linear, torch.optim.SGD(linear.parameters(), lr=0.1))
    state = {"model": wrapped, "optimizer": optimizer, "step": 1}
    fabric.save(path, state)
    spoil(linear, "bias")
    return outcome_of(lambda: fabric.save(path, state))


@like_torchrun()
def train(
    *,
    on_nonfinite: Literal["warn", "raise", "skip"],
    bad: str = "",
    loop: str = "backward",
    leaves_out: Sequence[int] = (),
) -> tuple[str, list[Tensor]]:
    """The error of some steps with Fabric, of which rank 1's third is bad, and the weights."""
    strategy = BucketDDPStrategy(bucket_cap_mb=SMALL_BUCKETS_MB, on_nonfinite=on_nonfinite)
    fabric = make_fabric(strategy, **({"plugins": _scaler()} if loop == "scaler" else {}))
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))
    wrapped, optimizer = fabric.setup(module, torch.optim.AdamW(module.parameters(), lr=0.1))

    def loss_of(batch: list[Tensor]) -> Tensor:
        loss = F.mse_loss(wrapped(batch[0]).float(), batch[1])
        if fabric.global_rank == 1 and int(batch[2]) == 3 and bad:
            return loss + (math.nan if bad == "loss" else BadGradient.apply(module[0].bias))
        return loss

    def take_steps() -> None:
        for batch in Batches(leaves_out):

            def closure() -> Tensor:
                optimizer.zero_grad()
                loss = loss_of(batch)  # noqa: B023
                fabric.backward(loss)
                return loss

            if loop == "closure":
                optimizer.step(closure)
                continue
            closure()
            if loop == "scaler":
                fabric.clip_gradients(module, optimizer, max_norm=0.1)
            optimizer.step()

    return raised_by(take_steps), [param.detach() for param in module.parameters()]


def _scaler() -> Any:
    return MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu", init_scale=8.0))


@for_each(("loop", "bad"), [("backward", "loss"), ("backward", "gradient"), ("closure", "gradient")])
def test_fabric_raises_on_every_rank(loop: str, bad: str) -> None:
    for error, weights in run_on_ranks(train, on_nonfinite="raise", bad=bad, loop=loop):
        assert error.startswith(f"NonFiniteError: Not finite in backward 4: {WHAT[bad].replace('layers.', '')}.")
        assert is_finite(weights)


@for_each(("loop", "bad"), [("backward", "loss"), ("backward", "gradient"), ("closure", "loss"), ("scaler", "loss")])
def test_fabric_skips_the_step(loop: str, bad: str) -> None:
    expected = run_on_ranks(train, on_nonfinite="skip", loop=loop, leaves_out=[3])
    for error, weights in run_on_ranks(train, on_nonfinite="skip", bad=bad, loop=loop):
        assert error == ""
        assert all(torch.equal(ours, other) for ours, other in zip(weights, expected[0][1], strict=True))


def test_fabric_refuses_to_write_bad_weights(tmp_path: Path) -> None:
    path = tmp_path / "model.ckpt"
    rank_zero, rank_one = run_on_ranks(save, path=path, on_nonfinite="raise")
    assert "is not written, because weights are not finite: `bias`." in rank_zero[0]
    assert rank_one[0] == f"{rank_zero[0]} (on rank 0)"
    assert is_finite([torch.load(path, weights_only=False)["model"]["bias"]])


def test_fabric_writes_bad_weights_beside(tmp_path: Path) -> None:
    path = tmp_path / "model.ckpt"
    rank_zero, rank_one = run_on_ranks(save, path=path, on_nonfinite="warn")
    assert rank_one == ("", [])
    assert rank_zero == (
        "",
        [
            f"bucketddp: weights have become infinite or nan: `bias`. Checkpoint `{path}` is written as"
            f" `{tmp_path}/nonfinite/model.ckpt`, and further ones likewise; earlier ones are neither replaced nor"
            f" removed. Resume from `{path}`."
        ],
    )
    assert is_finite([torch.load(path)["model"]["bias"]])
    assert not is_finite([torch.load(tmp_path / "nonfinite" / "model.ckpt")["model"]["bias"]])
