"""Every precision of the Trainer, and gradients that travel in another dtype than their own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from torch import Tensor

from tests.strategies.comparison import Program, Trained, assert_equal, ours, train
from tests.support.collectives import all_reduced
from tests.support.ranks import on_ranks
from tests.support.scripts import models
from tests.support.scripts.trainers import like_torchrun


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
    """Return what a Trainer is given."""
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


class Dtypes(Callback):
    """The dtypes of gradients at the optimizer's step."""

    def __init__(self) -> None:
        self.seen: set[torch.dtype] = set()

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        self.seen |= {p.grad.dtype for p in pl_module.parameters() if p.grad is not None}


def program_of(precision: str) -> Program:
    options = {"max_epochs": 2, "gradient_clip_val": 0.1}
    return Program(Squares, lambda: {**options, "callbacks": Dtypes(), **option(precision)})


def assert_equal_on_ranks(trained: Trained) -> None:
    for weight in trained.params.values():
        of_rank_zero = weight.clone()
        dist.broadcast(of_rank_zero, src=0)
        assert torch.equal(weight, of_rank_zero)


# On CPUs Lightning turns 16-mixed into bf16-mixed, unless it is given a GradScaler.
GRADIENTS_OF = {
    "32-true": torch.float32,
    "64-true": torch.float64,
    "16-mixed": torch.float32,
    "bf16-mixed": torch.float32,
    "bf16-true": torch.bfloat16,
    "16-true": torch.float16,
    "scaler": torch.float32,
    "plugin": torch.float32,
}
TRAVELS = [
    *((precision, None) for precision in GRADIENTS_OF),
    *(("bf16-true", "fp32"), ("16-true", "fp32"), ("32-true", "bf16"), ("bf16-mixed", "fp16")),
]


@pytest.mark.parametrize(("precision", "reduce_dtype"), TRAVELS)
@pytest.mark.sampled(6)
@on_ranks()
@like_torchrun()
def test_training_equals_ddp_and_gradients_travel_in_the_dtype_asked_for(
    precision: str, reduce_dtype: str | None
) -> None:
    program = program_of(precision)
    with all_reduced() as reduced:
        trained = ours(program, reduce_dtype=reduce_dtype)
    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, None: GRADIENTS_OF[precision]}
    # The many small reductions of metrics and counters are none of ours.
    assert {tensor.dtype for tensor in reduced if tensor.numel() > 1} == {dtypes[reduce_dtype]}
    assert {GRADIENTS_OF[precision]} in trained.seen
    assert_equal_on_ranks(trained)
    if reduce_dtype is None:
        assert_equal(trained, train(program, "ddp"))


@pytest.mark.parametrize("precision", ["bf16-true", "scaler", "32-true", "bf16-mixed", "16-true"])
@pytest.mark.sampled(2)
@on_ranks()
@like_torchrun()
def test_every_precision_trains_with_8_bits_on_the_wire(precision: str) -> None:
    trained, exact = (ours(program_of(precision), reduce_dtype=dtype) for dtype in ("int8", None))
    assert {GRADIENTS_OF[precision]} in trained.seen
    assert any(not torch.equal(trained.params[name], weight) for name, weight in exact.params.items())
    assert_equal_on_ranks(trained)
