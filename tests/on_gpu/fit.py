"""Trainer runs on a GPU, `ddp` beside `bucketddp`; one rank per process, started by `tests.on_gpu.suite`.

Each rank is a node of its own with one device, so that two of them can share a GPU.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import pytorch_lightning as pl
import torch
import torch.distributed as dist
from pytorch_lightning.strategies import DDPStrategy
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import (
    default_hooks,
    post_localSGD_hook,
    powerSGD_hook,
    quantization_hooks,
)
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from lightning_bucketddp.bindings.trainer_pytorch_lightning import BucketDDPStrategy
from lightning_bucketddp.config import LocalSteps

# Half precision is averaged in another order of roundings than torch DDP's.
HALF_ROUNDING = 2e-2


@dataclass(frozen=True)
class Scenario:
    """How both strategies train, and how far their weights may be apart."""

    options: dict[str, Any] = field(default_factory=dict)
    ours: dict[str, Any] = field(default_factory=dict)
    theirs: dict[str, Any] | None = field(default_factory=dict)
    tolerance: float = 1e-5
    ranks_differ: bool = False
    both_raise: type[Exception] | None = None


def with_hook(hook: Any, make_state: Callable[[], Any] = lambda: None, **options: Any) -> dict[str, Any]:
    return {"ddp_comm_hook": hook, "make_state": make_state, **options}


def power_sgd() -> powerSGD_hook.PowerSGDState:
    return powerSGD_hook.PowerSGDState(
        None,
        matrix_approximation_rank=2,
        start_powerSGD_iter=2,
        min_compression_rate=0.5,
        orthogonalization_epsilon=1e-4,
    )


def local_sgd() -> post_localSGD_hook.PostLocalSGDState:
    return post_localSGD_hook.PostLocalSGDState(None, None, start_localSGD_iter=4)


HOOKS = {
    "allreduce": with_hook(default_hooks.allreduce_hook),
    "fp16": with_hook(default_hooks.fp16_compress_hook),
    "bf16": with_hook(default_hooks.bf16_compress_hook),
    "fp16 wrapper": with_hook(
        powerSGD_hook.powerSGD_hook, power_sgd, ddp_comm_wrapper=default_hooks.fp16_compress_wrapper
    ),
    "bf16 wrapper": with_hook(
        powerSGD_hook.powerSGD_hook, power_sgd, ddp_comm_wrapper=default_hooks.bf16_compress_wrapper
    ),
    "powerSGD": with_hook(powerSGD_hook.powerSGD_hook, power_sgd),
    "quantization per tensor": with_hook(quantization_hooks.quantization_pertensor_hook, lambda: dist.group.WORLD),
    "quantization per channel": with_hook(quantization_hooks.quantization_perchannel_hook, lambda: dist.group.WORLD),
    "post-localSGD": with_hook(post_localSGD_hook.post_localSGD_hook, local_sgd, model_averaging_period=2),
}

BATCHED_POWER_SGD = with_hook(powerSGD_hook.batched_powerSGD_hook, power_sgd)
# Channels begin elsewhere in our buckets, which are padded.
HOOK_TOLERANCE = {"quantization per channel": 1e-3}

SCENARIOS = {
    "32-true": Scenario({"precision": "32-true", "gradient_clip_val": 0.1}),
    "64-true": Scenario({"precision": "64-true"}),
    "bf16-mixed": Scenario({"precision": "bf16-mixed", "accumulate_grad_batches": 3}),
    "16-mixed": Scenario({"precision": "16-mixed"}),
    "bf16-true": Scenario({"precision": "bf16-true"}, tolerance=HALF_ROUNDING),
    "16-true": Scenario({"precision": "16-true"}, tolerance=HALF_ROUNDING),
    "sync_batchnorm": Scenario({"sync_batchnorm": True}),
    "bf16 wire": Scenario(ours={"reduce_dtype": "bf16"}, theirs=HOOKS["bf16"], tolerance=HALF_ROUNDING),
    "fp16 wire": Scenario(ours={"reduce_dtype": "fp16"}, theirs=HOOKS["fp16"], tolerance=HALF_ROUNDING),
    "bf16-true, fp32 wire": Scenario(
        {"precision": "bf16-true"}, ours={"reduce_dtype": "fp32"}, tolerance=HALF_ROUNDING
    ),
    "int8 wire": Scenario({"precision": "16-mixed"}, ours={"reduce_dtype": "int8"}, theirs=None),
    "int8 wire, sync_batchnorm": Scenario({"sync_batchnorm": True}, ours={"reduce_dtype": "int8"}, theirs=None),
    **{
        f"local steps, {wire} wire": Scenario(
            {"precision": "16-mixed"},
            ours={"local_steps": LocalSteps(3, "rank"), "reduce_dtype": wire},
            theirs=None,
        )
        for wire in ("fp32", "bf16", "int8")
    },
    # Some hooks treat a bucket as a whole: the same buckets for both.
    **{
        f"hook {name}": Scenario(
            {"all_used": True},
            ours={**hook, "bucket_cap_mb": [1000.0]},
            theirs={**hook, "bucket_cap_mb": 1000},
            tolerance=HOOK_TOLERANCE.get(name, 1e-5),
            ranks_differ=name == "post-localSGD",  # between two averages
        )
        for name, hook in HOOKS.items()
    },
    # What torch DDP has no equivalent for is only run: its numbers are compared on CPUs.
    "skipped steps, 16-mixed": Scenario({"precision": "16-mixed", "skips": True}, theirs=None),
    "weighted by batch size": Scenario(ours={"gradient_weight": "batch_size"}, theirs=None),
    "uneven data": Scenario({"uneven": True, "sync_batchnorm": True}, ours={"uneven_data": True}, theirs=None),
    # It fails in torch itself; the last, because nothing can be relied on after it.
    "hook batched powerSGD": Scenario(
        {"all_used": True}, ours=BATCHED_POWER_SGD, theirs=BATCHED_POWER_SGD, both_raise=AssertionError
    ),
}


class Convolutional(pl.LightningModule):
    def __init__(self, *, all_used: bool) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.Flatten(), nn.Linear(8 * 16, 4)
        )
        if not all_used:
            self.unused = nn.Linear(3, 3)

    def training_step(self, batch: list[Tensor]) -> Tensor:
        loss = nn.functional.cross_entropy(self.layers(batch[0]), batch[1])
        self.log("loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch: list[Tensor]) -> None:
        self.log("validation", nn.functional.cross_entropy(self.layers(batch[0]), batch[1]), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-2, momentum=0.9)


class Skipping(Convolutional):
    """Returns None on rank 1 in every second step, and on both ranks in every third."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor | None:  # type: ignore[override]
        loss = super().training_step(batch)
        skips = batch_idx % 3 == 2 or (self.global_rank == 1 and batch_idx % 2 == 1)
        return None if skips else loss


class Stream(IterableDataset[Any]):
    """Ends earlier on rank 1."""

    def __init__(self, data: TensorDataset) -> None:
        self._data = data

    def __iter__(self) -> Iterator[Any]:
        for index in range(0, 40 - 16 * dist.get_rank()):
            yield self._data[index]


def make_strategy(cls: type, options: dict[str, Any]) -> Any:
    """A strategy with a hook state of its own."""
    options = dict(options)
    # The quantization hooks take the process group for their state, which is there only later.
    make_state = options.pop("make_state", lambda: None)
    strategy = cls(**options)
    set_up = strategy.setup_distributed

    def set_up_and_make_state() -> None:
        set_up()
        state = make_state()
        strategy._ddp_comm_state = state
        if hasattr(strategy, "config"):
            strategy.config = replace(strategy.config, comm_state=state)

    strategy.setup_distributed = set_up_and_make_state
    return strategy


def fit(strategy: Any, options: dict[str, Any]) -> tuple[dict[str, Tensor], pl.Trainer]:
    options = dict(options)
    pl.seed_everything(1)
    generator = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(64, 3, 8, 8, generator=generator), torch.randint(0, 4, (64,), generator=generator))
    kind = Skipping if options.pop("skips", False) else Convolutional
    model = kind(all_used=options.pop("all_used", False))
    train_data = Stream(data) if options.pop("uneven", False) else data
    trainer = pl.Trainer(
        accelerator="gpu",
        devices=1,
        num_nodes=2,
        strategy=strategy,
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        deterministic="warn",
        **options,
    )
    trainer.fit(model, DataLoader(train_data, batch_size=8), DataLoader(data, batch_size=8))
    return {**model.state_dict(), "validation": trainer.callback_metrics["validation"]}, trainer


def distance(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    return max(float((ours[key].double().cpu() - theirs[key].double().cpu()).abs().max()) for key in theirs)


def distance_between_ranks(state: dict[str, Tensor]) -> float:
    """How far any rank is from rank 0; the same number everywhere."""
    flat = torch.cat([value.double().flatten().cuda() for value in state.values()])
    first = flat.clone()
    dist.broadcast(first, src=0)
    apart = (flat - first).abs().max()
    dist.all_reduce(apart, op=dist.ReduceOp.MAX)
    return float(apart)


def compare(scenario: Scenario) -> tuple[bool, str]:
    """Whether all is well, and what was seen."""
    ours, trainer = fit(make_strategy(BucketDDPStrategy, scenario.ours), scenario.options)
    between_ranks = distance_between_ranks(ours)
    good = (between_ranks > 0) == scenario.ranks_differ and all(bool(value.isfinite().all()) for value in ours.values())
    seen = f"ranks at most {between_ranks:.1e} apart"
    if scenario.theirs is not None:
        theirs, _ = fit(make_ddp(scenario), scenario.options)
        from_ddp = distance(ours, theirs)
        good &= from_ddp <= scenario.tolerance and ours.keys() == theirs.keys()
        seen += f", at most {from_ddp:.1e} from ddp"
    return good, f"{seen}; {trainer.strategy.reducer.describe()}"


def compare_errors(scenario: Scenario) -> tuple[bool, str]:
    """Whether both fail in the same way."""
    errors = [
        error_of(make_strategy(BucketDDPStrategy, scenario.ours), scenario),
        error_of(make_ddp(scenario), scenario),
    ]
    return errors == [scenario.both_raise] * 2, f"both raise {errors}"


def error_of(strategy: Any, scenario: Scenario) -> type[Exception] | None:
    try:
        fit(strategy, scenario.options)
    except Exception as error:
        return type(error)
    return None


def make_ddp(scenario: Scenario) -> Any:
    # With the flag, torch DDP never puts parameters into the order in which their gradients arrive.
    flag = {"find_unused_parameters": not scenario.options.get("all_used", False)}
    return make_strategy(DDPStrategy, {**(scenario.theirs or {}), **flag})


def main() -> None:
    failed = 0
    for name, scenario in SCENARIOS.items():
        good, seen = compare(scenario) if scenario.both_raise is None else compare_errors(scenario)
        failed += not good
        if dist.get_rank() == 0:
            print(f"\n{'passed' if good else 'FAILED'} Trainer {name}: {seen}", flush=True)
    sys.exit(failed)


if __name__ == "__main__":
    main()
