"""However a LightningModule optimizes, on two processes `bucketddp` gives the weights that `ddp` gives."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities import grad_norm
from torch import Tensor, nn

from lightning_bucketddp.bindings.trainer_lightning import BucketDDPStrategy
from tests.support.cases import for_each
from tests.support.collectives import all_reduced
from tests.support.ranks import on_ranks, run_on_ranks
from tests.support.scripts.models import WIDTH, Regression, loader
from tests.support.scripts.trainers import SMALL_BUCKETS_MB, like_torchrun, make_trainer, ours_and_ddp


class Manual(Regression):
    """One optimizer that the module steps by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor]) -> None:  # type: ignore[override]
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.differentiate(batch)
        optimizer.step()

    def differentiate(self, batch: list[Tensor]) -> None:
        self.manual_backward(self.loss(batch))


class TwoLosses(Manual):
    """Two backwards before each step; the first is kept on this rank or not."""

    def __init__(self, *, first_stays_here: bool) -> None:
        super().__init__()
        self._first_stays_here = first_stays_here

    def differentiate(self, batch: list[Tensor]) -> None:
        strategy: Any = self.trainer.strategy
        with strategy.block_backward_sync() if self._first_stays_here else nullcontext():
            self.manual_backward(self.loss(batch))
        self.manual_backward(self.layers(batch[0]).abs().mean())


class SameGraphTwice(Manual):
    def differentiate(self, batch: list[Tensor]) -> None:
        loss = self.loss(batch)
        self.manual_backward(loss, retain_graph=True)
        self.manual_backward(loss)


class KeptGradients(Manual):
    """Combines the gradients of two losses, each computed for itself; keeps them as they are or as copies."""

    def __init__(self, *, copies: bool) -> None:
        super().__init__()
        self._copies = copies

    def differentiate(self, batch: list[Tensor]) -> None:
        first = self._gradients(self.loss(batch))
        self.zero_grad()
        second = self._gradients(self.layers(batch[0]).abs().mean())
        for param, a, b in zip(self.parameters(), first, second, strict=True):
            param.grad = a + 2 * b

    def _gradients(self, loss: Tensor) -> list[Any]:
        self.manual_backward(loss)
        gradients: list[Any] = [param.grad for param in self.parameters()]
        return [gradient.clone() if self._copies else gradient for gradient in gradients]


class GraphOfBackward(Manual):
    """Asks for a graph of the gradients, and accumulates into them."""

    def differentiate(self, batch: list[Tensor]) -> None:
        self.manual_backward(self.loss(batch), create_graph=True)
        self.manual_backward(self.layers(batch[0]).abs().mean())


class LineSearch(Manual):
    """LBFGS that evaluates the closure as often as its line search needs; all ranks must give it the same loss."""

    def __init__(self) -> None:
        super().__init__()
        self.evaluations: list[float] = []

    def training_step(self, batch: list[Tensor]) -> None:  # type: ignore[override]
        optimizer: Any = self.optimizers()

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = self.loss(batch)
            self.manual_backward(loss)
            mean = self.trainer.strategy.reduce(loss.detach().clone())
            self.evaluations.append(mean.item())
            return mean

        optimizer.step(closure)

    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), max_iter=3, line_search_fn="strong_wolfe")


class GradientHooks(Regression):
    """Reads gradients where Lightning lets a module see them, and adds noise there, the same on all ranks."""

    def __init__(self, *, in_place: bool) -> None:
        super().__init__()
        self.norms: list[dict[str, float]] = []
        self._in_place = in_place

    def on_after_backward(self) -> None:
        noise = torch.Generator().manual_seed(len(self.norms))
        for param in self.parameters():
            assert param.grad is not None
            change = 0.1 * torch.randn(param.shape, generator=noise)
            if self._in_place:
                param.grad += change
            else:
                param.grad = param.grad + change

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.norms.append({name: float(norm) for name, norm in grad_norm(self, norm_type=2).items()})
        self.layers[0].weight.grad.mul_(0.5)


class ManualClipping(Manual):
    def differentiate(self, batch: list[Tensor]) -> None:
        super().differentiate(batch)
        optimizer: Any = self.optimizers()
        self.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="norm")


class OwnClipping(Regression):
    """Clips the first layer only."""

    def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
        torch.nn.utils.clip_grad_norm_(self.layers[0].parameters(), 0.01)


class WeightPenalty(Regression):
    """Punishes the gradient with respect to the parameters."""

    def training_step(self, batch: list[Tensor]) -> Tensor:
        loss = self.loss(batch)
        gradients = torch.autograd.grad(loss, list(self.parameters()), create_graph=True)
        return loss + 0.1 * sum(gradient.square().sum() for gradient in gradients)


@dataclass(frozen=True)
class Style:
    """A module, how it is trained, and what torch DDP needs for it."""

    module: Callable[[], LightningModule]
    ddp_module: Callable[[], LightningModule] | None = None
    accumulate: int = 1


STYLES = {
    "two_losses": Style(lambda: TwoLosses(first_stays_here=False)),
    "two_losses_one_reduction": Style(lambda: TwoLosses(first_stays_here=True)),
    "same_graph_twice": Style(SameGraphTwice),
    "kept_gradients": Style(lambda: KeptGradients(copies=True)),
    "gradients_kept_without_a_copy": Style(lambda: KeptGradients(copies=False)),
    # torch DDP raises there: it writes into gradients that have a graph.
    "graph_of_backward": Style(GraphOfBackward, lambda: TwoLosses(first_stays_here=False)),
    "line_search": Style(LineSearch),
    "gradients_changed_in_place": Style(lambda: GradientHooks(in_place=True)),
    "gradients_replaced": Style(lambda: GradientHooks(in_place=False)),
    # The hooks see gradients of this rank only, and what they add is averaged.
    "gradients_changed_while_accumulating": Style(lambda: GradientHooks(in_place=True), accumulate=3),
    "gradients_replaced_while_accumulating": Style(lambda: GradientHooks(in_place=False), accumulate=3),
    "manual_clipping": Style(ManualClipping),
    "own_clipping": Style(OwnClipping),
    "weight_penalty": Style(WeightPenalty),
}


@like_torchrun()
def train_in_style(*, style: str, strategy: str = "bucketddp") -> dict[str, Any]:
    """Train in `style`, with torch DDP or with us and several buckets."""
    how = STYLES[style]
    torch.manual_seed(dist.get_rank())  # rank 0's weights are those that count
    module = (how.ddp_module if strategy == "ddp" and how.ddp_module else how.module)()
    ours = BucketDDPStrategy(bucket_cap_mb=SMALL_BUCKETS_MB)
    trainer = make_trainer("ddp" if strategy == "ddp" else ours, max_epochs=1, accumulate_grad_batches=how.accumulate)
    trainer.fit(module, loader())
    return {
        "weights": {name: value.tolist() for name, value in module.state_dict().items()},
        "norms": getattr(module, "norms", None),
        "evaluations": getattr(module, "evaluations", None),
        "synchronised_backwards": ours.reducer and ours.reducer.stats.num_backwards,
    }


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
        members = sorted(name_of[param] for tensor in reduced for param in bucket_of[tensor.data_ptr()].params)
        self.turns.append(
            {
                "members": members,
                "bytes": sum(tensor.nbytes for tensor in reduced),
                "bytes_by_stats": reducer.stats.bytes_sent - before,
                "num_collectives": len(reduced),
            }
        )


NUM_BATCHES = 10
GENERATOR = [f"layers.generator.{layer}.{kind}" for layer in (0, 2) for kind in ("bias", "weight")]
DISCRIMINATOR = [name.replace("generator", "discriminator") for name in GENERATOR]

# Added after the oldest Lightning that we support.
needs_toggled_optimizer = pytest.mark.skipif(
    not hasattr(LightningModule, "toggled_optimizer"), reason="this Lightning has no `toggled_optimizer`"
)


@pytest.mark.parametrize("style", list(STYLES))
@pytest.mark.sampled(6)
def test_training_equals_ddp(style: str) -> None:
    ours, ddp = ours_and_ddp(train_in_style, style=style)
    for rank, expected in zip(ours, ddp, strict=True):
        assert rank["weights"] == ddp[0]["weights"]
        assert rank["norms"] == expected["norms"]
        assert rank["evaluations"] == expected["evaluations"]


@for_each(
    ("style", "per_batch"),
    [("two_losses", 2), ("two_losses_one_reduction", 1), ("same_graph_twice", 2), ("weight_penalty", 1)],
)
def test_each_backward_that_is_not_blocked_synchronises_once(style: str, per_batch: int) -> None:
    for rank in run_on_ranks(train_in_style, style=style):
        assert rank["synchronised_backwards"] == per_batch * NUM_BATCHES


def test_a_line_search_evaluates_several_times_per_step() -> None:
    for rank in run_on_ranks(train_in_style, style="line_search"):
        assert len(rank["evaluations"]) == rank["synchronised_backwards"] > 2 * NUM_BATCHES


@pytest.mark.parametrize(
    "gan",
    [pytest.param(gan, marks=needs_toggled_optimizer if gan == "toggled_optimizer" else ()) for gan in GANS],
)
@pytest.mark.sampled(3)
def test_two_networks_that_take_turns_equal_ddp(gan: str) -> None:
    ours = run_on_ranks(train_gan, gan=gan, strategy="bucketddp")
    ddp = run_on_ranks(train_gan, gan=gan, strategy="ddp_find_unused_parameters_true")
    assert ours == [ddp[0]] * 2


@for_each(("switching", "discriminator_every"), [("toggle_optimizer", 2), ("toggle_model", 1), ("nothing", 1)])
@on_ranks()
@like_torchrun()
def test_a_network_that_is_toggled_off_is_not_communicated(switching: str, discriminator_every: int) -> None:
    module = _WatchedGan(switching=switching, discriminator_every=discriminator_every)
    make_trainer(BucketDDPStrategy(bucket_cap_mb=SMALL_BUCKETS_MB), max_epochs=1).fit(module, loader())
    expected = [
        # One that is only left alone is communicated.
        sorted(GENERATOR + DISCRIMINATOR) if switching == "nothing" else members
        for batch in range(NUM_BATCHES)
        for members in ([GENERATOR, DISCRIMINATOR] if batch % discriminator_every == 0 else [GENERATOR])
    ]
    assert [turn["members"] for turn in module.turns] == expected
    for turn in module.turns:
        assert turn["num_collectives"] > 1
        assert turn["bytes"] == turn["bytes_by_stats"]
