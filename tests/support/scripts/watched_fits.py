"""Fits in which hooks are left out."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from lightning_bucketddp import BucketDDPStrategy
from lightning_bucketddp.reducer import grad_hooks
from tests.support.scripts import models
from tests.support.scripts.trainers import like_torchrun, make_trainer

SMALL_BUCKETS_MB = 0.0005


@like_torchrun()
def fit(*, like_ddp: bool, manual: bool = False, accumulate: int = 1) -> dict[str, Any]:
    """The weights at the end, and whether hooks were left out then."""
    torch.manual_seed(dist.get_rank())
    with patch.object(grad_hooks, "_FIRST_COUNTED", 1):
        strategy: Any = "ddp" if like_ddp else BucketDDPStrategy(bucket_cap_mb=SMALL_BUCKETS_MB)
        trainer = make_trainer(strategy, max_epochs=3, accumulate_grad_batches=1 if manual else accumulate)
        module = models.ManualRegression(through_lightning=True) if manual else models.Regression()
        watching: list[bool] = []
        if not like_ddp:
            end = module.on_train_batch_end

            def on_train_batch_end(*args: Any, **kwargs: Any) -> None:
                watching.append(strategy.reducer._hooks.is_watching)
                end(*args, **kwargs)

            module.on_train_batch_end = on_train_batch_end  # type: ignore[method-assign]
        trainer.fit(module, models.loader())
    weights = {name: value.tolist() for name, value in module.state_dict().items()}
    return {"weights": weights, "is_watching": watching[-1] if watching else None}
