"""Jobs that train in each precision, with whatever strategy they are given."""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from torch import Tensor

from lightning_bucketddp.bindings.trainer_lightning import BucketDDPStrategy
from tests.support.collectives import all_reduced
from tests.support.scripts import models
from tests.support.scripts.trainers import SMALL_BUCKETS_MB, like_torchrun, make_trainer


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
    *, precision: str, like_ddp: bool, reduce_dtype: Literal["fp32", "bf16", "fp16", "int8"] | None = None
) -> dict[str, Any]:
    """The weights at the end, and which dtypes the gradients had and travelled as."""
    torch.manual_seed(dist.get_rank())
    strategy = "ddp" if like_ddp else BucketDDPStrategy(bucket_cap_mb=SMALL_BUCKETS_MB, reduce_dtype=reduce_dtype)
    module = Squares()
    dtypes = _Dtypes()
    trainer = make_trainer(strategy, max_epochs=2, gradient_clip_val=0.1, callbacks=dtypes, **option(precision))
    with all_reduced() as reduced:
        trainer.fit(module, models.loader())
    # The many small reductions of metrics and counters are none of ours.
    travelled = {str(tensor.dtype) for tensor in reduced if tensor.numel() > 1}
    return {
        "weights": {name: value.tolist() for name, value in module.state_dict().items()},
        "gradients": sorted(dtypes.seen),
        "travelled": sorted(travelled),
    }
