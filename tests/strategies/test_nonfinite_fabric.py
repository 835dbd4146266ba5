"""What Fabric does about losses, gradients and weights that are not finite."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from lightning.fabric.plugins.precision import MixedPrecision
from torch import Tensor, nn

from lightning_bucketddp.bindings.fabric_lightning import BucketDDPStrategy
from lightning_bucketddp.reducer.nonfinite import NonFiniteError
from tests.strategies.test_nonfinite_trainer import WIDTH, BadGradient, Batches, is_finite, outcome_of, spoil
from tests.support.cases import for_each
from tests.support.ranks import on_ranks
from tests.support.scripts.fabrics import make_fabric
from tests.support.scripts.trainers import SMALL_BUCKETS_MB, like_torchrun

OnNonfinite = Literal["warn", "raise", "skip"]


def train(
    module: nn.Module, on_nonfinite: OnNonfinite, loop: str, *, bad: str = "", leaves_out: Sequence[int] = ()
) -> list[Tensor]:
    """Take some steps with Fabric, of which rank 1's fourth is bad; return the weights."""
    scaler: dict[str, Any] = {
        "plugins": MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu", init_scale=8.0))
    }
    strategy = BucketDDPStrategy(bucket_cap_mb=SMALL_BUCKETS_MB, on_nonfinite=on_nonfinite)
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


WHAT = {"loss": r"the loss on rank 1 \(nan\)", "gradient": "the gradient of `0.bias` on rank 1"}


@for_each(("loop", "bad"), [("backward", "loss"), ("closure", "gradient")])
@on_ranks()
@like_torchrun()
def test_fabric_raises_on_every_rank(loop: str, bad: str) -> None:
    module = new_module()
    with pytest.raises(NonFiniteError, match=rf"^Not finite in backward 4: {WHAT[bad]}\."):
        train(module, "raise", loop, bad=bad)
    assert is_finite(list(module.parameters()))


@for_each(("loop", "bad"), [("backward", "gradient"), ("closure", "loss"), ("scaler", "loss")])
@on_ranks()
@like_torchrun()
def test_fabric_skips_the_step(loop: str, bad: str) -> None:
    expected = train(new_module(), "skip", loop, leaves_out=[3])
    torch.testing.assert_close(train(new_module(), "skip", loop, bad=bad), expected, rtol=0, atol=0)


@for_each("on_nonfinite", ["raise", "warn"])
@on_ranks()
@like_torchrun()
def test_fabric_refuses_to_write_bad_weights_or_writes_them_beside(on_nonfinite: OnNonfinite, tmp_path: Path) -> None:
    path, beside = (tmp_path / on_nonfinite / name for name in ("model.ckpt", "nonfinite/model.ckpt"))
    fabric = make_fabric(BucketDDPStrategy(on_nonfinite=on_nonfinite))
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
