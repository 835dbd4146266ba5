"""Jobs that train two networks against each other, and tell what was communicated in each turn."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_bucketddp.bindings.trainer_lightning import BucketDDPStrategy
from tests.support.collectives import all_reduced
from tests.support.scripts.models import WIDTH, Regression, loader
from tests.support.scripts.trainers import SMALL_BUCKETS_MB, like_torchrun, make_trainer


class Gan(Regression):
    """A generator and a discriminator that take turns; each turn runs through both and trains one.

    Args:
        switching: how the other network is kept out of a turn.
        discriminator_every: batches between turns of the discriminator.
    """

    def __init__(self, *, switching: str, discriminator_every: int = 1) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.layers = nn.ModuleDict(
            {
                "generator": nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, WIDTH)),
                "discriminator": nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, 1)),
            }
        )
        self._switching = switching
        self._discriminator_every = discriminator_every

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:  # type: ignore[override]
        optimizers: Any = self.optimizers()
        generator_optimizer, discriminator_optimizer = optimizers
        with self._turn(generator_optimizer):
            generator_optimizer.zero_grad()
            self._differentiate(batch[0], sign=-1)
            generator_optimizer.step()
        if batch_idx % self._discriminator_every == 0:
            with self._turn(discriminator_optimizer):
                discriminator_optimizer.zero_grad()
                self._differentiate(batch[0], sign=1)
                discriminator_optimizer.step()

    def _differentiate(self, real: Tensor, *, sign: int) -> None:
        fake = self.layers["generator"](real)
        score = self.layers["discriminator"]
        self.manual_backward(sign * (score(fake) - score(real)).mean())

    @contextmanager
    def _turn(self, optimizer: Any) -> Iterator[None]:
        if self._switching == "toggle_model":
            with optimizer.toggle_model(sync_grad=True):
                yield
        elif self._switching == "toggled_optimizer":
            with self.toggled_optimizer(optimizer):
                yield
        elif self._switching == "toggle_optimizer":
            self.toggle_optimizer(optimizer)
            yield
            self.untoggle_optimizer(optimizer)
        else:
            yield

    def configure_optimizers(self) -> Any:
        return [torch.optim.Adam(self.layers[name].parameters(), lr=0.01) for name in ("generator", "discriminator")]


class AccumulatingGan(Gan):
    """Reduces only in the second of two backwards of each turn, by `toggle_model`."""

    def __init__(self) -> None:
        super().__init__(switching="")

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:  # type: ignore[override]
        for optimizer, sign in zip(self.optimizers(), (-1, 1), strict=True):
            optimizer.zero_grad()
            for position, real in enumerate(batch[0].chunk(2)):
                with optimizer.toggle_model(sync_grad=position == 1):
                    self._differentiate(real, sign=sign)
            optimizer.step()


GANS = {
    "toggle_optimizer": lambda: Gan(switching="toggle_optimizer"),
    "toggled_optimizer": lambda: Gan(switching="toggled_optimizer"),
    "toggle_model": lambda: Gan(switching="toggle_model"),
    "accumulating": AccumulatingGan,
    "discriminator_every_second_batch": lambda: Gan(switching="toggle_optimizer", discriminator_every=2),
    # Each turn leaves gradients in the other network, which its own turn clears.
    "nothing_switched_off": lambda: Gan(switching="nothing"),
}


@like_torchrun()
def train_gan(*, gan: str, strategy: str) -> dict[str, Any]:
    torch.manual_seed(dist.get_rank())
    module = GANS[gan]()
    make_trainer(strategy, max_epochs=2).fit(module, loader())
    return {name: value.tolist() for name, value in module.state_dict().items()}


class _WatchedGan(Gan):
    """Notes whose gradients are reduced in each turn, and how many bytes."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.turns: list[dict[str, Any]] = []

    @contextmanager
    def _turn(self, optimizer: Any) -> Iterator[None]:
        strategy: Any = self.trainer.strategy
        reducer = strategy.reducer
        before = reducer.stats.bytes_sent
        with all_reduced() as reduced, super()._turn(optimizer):
            yield
        name_of = {param: name for name, param in self.named_parameters()}
        bucket_of = {bucket.wire.data_ptr(): bucket for bucket in reducer.bucket_set.buckets}
        self.turns.append(
            {
                "members": sorted(
                    name_of[param] for tensor in reduced for param in bucket_of[tensor.data_ptr()].params
                ),
                "bytes": sum(tensor.nbytes for tensor in reduced),
                "bytes_by_stats": reducer.stats.bytes_sent - before,
                "num_collectives": len(reduced),
            }
        )


@like_torchrun()
def watch_turns(*, switching: str, discriminator_every: int) -> list[dict[str, Any]]:
    """What was reduced in each turn of an epoch."""
    module = _WatchedGan(switching=switching, discriminator_every=discriminator_every)
    trainer = make_trainer(BucketDDPStrategy(bucket_cap_mb=SMALL_BUCKETS_MB), max_epochs=1)
    trainer.fit(module, loader())
    return module.turns
