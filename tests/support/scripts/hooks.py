"""Communication hooks through the Trainer, with us and with `ddp`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, post_localSGD_hook, powerSGD_hook

from lightning_bucketddp.bindings.trainer_lightning import BucketDDPStrategy
from tests.support.scripts import models
from tests.support.scripts.trainers import like_torchrun, make_trainer


class DDPWithHooksOnCPU(DDPStrategy):
    """Lightning registers hooks on a GPU only."""

    def _register_ddp_hooks(self) -> None:
        hook: Any = self._ddp_comm_wrapper(self._ddp_comm_hook) if self._ddp_comm_wrapper else self._ddp_comm_hook

        # Wrapped, because torch DDP refuses the bf16 hooks on a CPU by their names.
        model: Any = self.model
        model.register_comm_hook(self._ddp_comm_state, lambda state, bucket: hook(state, bucket))


class PlainSGD(models.Regression):
    """Without momentum, which each rank has of its own as long as gradients stay local."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05)


def power_sgd() -> powerSGD_hook.PowerSGDState:
    return powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2, min_compression_rate=0.5)


def post_local_sgd() -> post_localSGD_hook.PostLocalSGDState:
    subgroups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    return post_localSGD_hook.PostLocalSGDState(None, subgroups[dist.get_rank()], start_localSGD_iter=4)


HOOKS: dict[str, Callable[[], dict[str, Any]]] = {
    "allreduce": lambda: {"ddp_comm_hook": default_hooks.allreduce_hook},
    "fp16": lambda: {"ddp_comm_hook": default_hooks.fp16_compress_hook},
    "bf16": lambda: {"ddp_comm_hook": default_hooks.bf16_compress_hook},
    "power_sgd": lambda: {"ddp_comm_hook": powerSGD_hook.powerSGD_hook, "ddp_comm_state": power_sgd()},
    "fp16_power_sgd": lambda: {
        "ddp_comm_hook": powerSGD_hook.powerSGD_hook,
        "ddp_comm_state": power_sgd(),
        "ddp_comm_wrapper": default_hooks.fp16_compress_wrapper,
    },
    "bf16_allreduce": lambda: {
        "ddp_comm_hook": default_hooks.allreduce_hook,
        "ddp_comm_wrapper": default_hooks.bf16_compress_wrapper,
    },
    # Averages after the 5th, 10th, 15th... step.
    "post_local_sgd": lambda: {
        "ddp_comm_hook": post_localSGD_hook.post_localSGD_hook,
        "ddp_comm_state": post_local_sgd(),
        "model_averaging_period": 5,
    },
}


@like_torchrun()
def train_with_hook(*, hook: str, max_steps: int, strategy: str = "bucketddp") -> dict[str, Any]:
    """The weights of this rank."""
    module = PlainSGD()
    made = (DDPWithHooksOnCPU if strategy == "ddp" else BucketDDPStrategy)(**HOOKS[hook]())
    make_trainer(made, max_epochs=2, max_steps=max_steps).fit(module, models.loader())
    return {name: value.tolist() for name, value in module.state_dict().items()}
