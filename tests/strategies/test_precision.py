"""Every precision of the Trainer, and gradients that travel in another dtype than their own."""

from __future__ import annotations

from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from torch import Tensor

from lightning_bucketddp.bindings.trainer_lightning import BucketDDPStrategy
from tests.support.cases import for_each
from tests.support.collectives import all_reduced
from tests.support.ranks import run_on_ranks
from tests.support.scripts import models
from tests.support.scripts.trainers import SMALL_BUCKETS_MB, like_torchrun, make_trainer, ours_and_ddp


class ScaledLoss(Precision):
    """A user's plugin: scales the loss up for backward, and the gradients down before they are used."""

    def pre_backward(self, tensor: Tensor, module: LightningModule) -> Tensor:  # type: ignore[override]
        return super().pre_backward(tensor * 1024, module)

    def _after_closure(self, model: LightningModule, optimizer: Any) -> None:
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.div_(1024)
        super()._after_closure(model, optimizer)


def option(precision: str) -> dict[str, Any]:
    """How a Trainer is told."""
    plugins = {
        "plugin": ScaledLoss,
        # What 16-mixed is on a GPU.
        "scaler": lambda: MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu")),
    }
    return {"plugins": plugins[precision]()} if precision in plugins else {"precision": precision}


class Squares(models.Regression):
    """With a loss that every version can compute in half precision on a CPU."""

    def loss(self, batch: list[Tensor]) -> Tensor:
        return (self.layers(batch[0]) - batch[1]).square().mean()


class _Dtypes(Callback):
    """The dtypes of gradients at the optimizer's step."""

    def __init__(self) -> None:
        self.seen: set[str] = set()

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        self.seen |= {str(p.grad.dtype) for p in pl_module.parameters() if p.grad is not None}


@like_torchrun()
def train(
    *, precision: str, reduce_dtype: Literal["fp32", "bf16", "fp16", "int8"] | None = None, strategy: str = "bucketddp"
) -> dict[str, Any]:
    """The weights at the end, and which dtypes the gradients had and travelled as."""
    torch.manual_seed(dist.get_rank())
    ours = BucketDDPStrategy(bucket_cap_mb=SMALL_BUCKETS_MB, reduce_dtype=reduce_dtype)
    used = "ddp" if strategy == "ddp" else ours
    module = Squares()
    dtypes = _Dtypes()
    trainer = make_trainer(used, max_epochs=2, gradient_clip_val=0.1, callbacks=dtypes, **option(precision))
    with all_reduced() as reduced:
        trainer.fit(module, models.loader())
    # The many small reductions of metrics and counters are none of ours.
    travelled = {str(tensor.dtype) for tensor in reduced if tensor.numel() > 1}
    return {
        "weights": {name: value.tolist() for name, value in module.state_dict().items()},
        "gradients": sorted(dtypes.seen),
        "travelled": sorted(travelled),
    }


# On CPUs Lightning turns 16-mixed into bf16-mixed, unless it is given a GradScaler.
GRADIENTS_OF = {
    "32-true": "torch.float32",
    "64-true": "torch.float64",
    "16-mixed": "torch.float32",
    "bf16-mixed": "torch.float32",
    "bf16-true": "torch.bfloat16",
    "16-true": "torch.float16",
    "scaler": "torch.float32",
    "plugin": "torch.float32",
}


@pytest.mark.parametrize(
    "precision",
    [
        "bf16-true",
        "scaler",
        *(pytest.param(one, marks=pytest.mark.long) for one in ("32-true", "bf16-mixed", "16-true")),
    ],
)
def test_every_precision_trains_with_8_bits_on_the_wire(precision: str) -> None:
    ranks = run_on_ranks(train, precision=precision, reduce_dtype="int8")
    exact = run_on_ranks(train, precision=precision)
    for rank in ranks:
        assert rank["gradients"] == [GRADIENTS_OF[precision]]
        assert rank["weights"] == ranks[0]["weights"] != exact[0]["weights"]


@pytest.mark.parametrize("precision", GRADIENTS_OF)
@pytest.mark.sampled(4)
def test_training_equals_ddp(precision: str) -> None:
    ours, ddp = ours_and_ddp(train, precision=precision)
    for rank in ours:
        assert rank["weights"] == ddp[0]["weights"]
        assert rank["gradients"] == rank["travelled"] == [GRADIENTS_OF[precision]]


@for_each(
    ("precision", "reduce_dtype", "travels_as"),
    [
        ("bf16-true", "fp32", "torch.float32"),
        ("16-true", "fp32", "torch.float32"),
        ("32-true", "bf16", "torch.bfloat16"),
        ("bf16-mixed", "fp16", "torch.float16"),
    ],
)
def test_gradients_travel_in_the_dtype_asked_for(precision: str, reduce_dtype: str, travels_as: str) -> None:
    ranks = run_on_ranks(train, precision=precision, reduce_dtype=reduce_dtype)
    for rank in ranks:
        assert rank["travelled"] == [travels_as]
        assert rank["gradients"] == [GRADIENTS_OF[precision]]
        assert rank["weights"] == ranks[0]["weights"]
