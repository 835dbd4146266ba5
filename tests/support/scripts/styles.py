"""Jobs that train in the styles of optimization that a LightningModule allows, with torch DDP or with us."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities import grad_norm
from torch import Tensor

from lightning_bucketddp.bindings.trainer_lightning import BucketDDPStrategy
from tests.support.scripts.models import Regression, loader
from tests.support.scripts.trainers import SMALL_BUCKETS_MB, like_torchrun, make_trainer


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


class Closure(Manual):
    """Differentiates when the optimizer asks."""

    def training_step(self, batch: list[Tensor]) -> None:  # type: ignore[override]
        optimizer: Any = self.optimizers()

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = self.loss(batch)
            self.manual_backward(loss)
            return loss

        optimizer.step(closure)


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


class InputPenalty(Regression):
    """Punishes the gradient with respect to the input, as WGAN-GP does."""

    def training_step(self, batch: list[Tensor]) -> Tensor:
        inputs = batch[0].requires_grad_()
        [slope] = torch.autograd.grad(self.layers(inputs).sum(), inputs, create_graph=True)
        return self.loss(batch) + (slope.norm(dim=1) - 1).square().mean()


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
    "closure": Style(Closure),
    "line_search": Style(LineSearch),
    "gradients_changed_in_place": Style(lambda: GradientHooks(in_place=True)),
    "gradients_replaced": Style(lambda: GradientHooks(in_place=False)),
    # The hooks see gradients of this rank only, and what they add is averaged.
    "gradients_changed_while_accumulating": Style(lambda: GradientHooks(in_place=True), accumulate=3),
    "gradients_replaced_while_accumulating": Style(lambda: GradientHooks(in_place=False), accumulate=3),
    "manual_clipping": Style(ManualClipping),
    "own_clipping": Style(OwnClipping),
    "input_penalty": Style(InputPenalty),
    "weight_penalty": Style(WeightPenalty),
}


@like_torchrun()
def train_in_style(*, style: str, like_ddp: bool) -> dict[str, Any]:
    """Train in `style`, with torch DDP or with us and several buckets."""
    how = STYLES[style]
    torch.manual_seed(dist.get_rank())  # rank 0's weights are those that count
    module = (how.ddp_module if like_ddp and how.ddp_module else how.module)()
    strategy: Any = "ddp" if like_ddp else BucketDDPStrategy(bucket_cap_mb=SMALL_BUCKETS_MB)
    trainer = make_trainer(strategy, max_epochs=1, accumulate_grad_batches=how.accumulate)
    trainer.fit(module, loader())
    return {
        "weights": {name: value.tolist() for name, value in module.state_dict().items()},
        "norms": getattr(module, "norms", None),
        "evaluations": getattr(module, "evaluations", None),
        "synchronised_backwards": None if like_ddp else strategy.reducer.stats.num_backwards,
    }
