"""Training with and without `shard_optimizer`, without Lightning."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_bucketddp.comm.collectives import Collectives
from lightning_bucketddp.config import ReducerConfig
from lightning_bucketddp.reducer.reducer import Reducer
from lightning_bucketddp.replicas.replicas import Replicas
from lightning_bucketddp.sharding.bucket import ShardedBucket, flat
from lightning_bucketddp.sharding.gradient import ShardedGradient
from lightning_bucketddp.sharding.shards import ShardOption, Shards
from tests.support.jobs.models import CASES
from tests.support.ranks import device

NUM_STEPS = 4


class Muonlike(Optimizer):
    """Looks at a whole matrix: makes its gradient more orthogonal."""

    per_parameter = True

    def __init__(self, params: Iterable[Any], lr: float = 0.05) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                momentum = state.setdefault("momentum", torch.zeros_like(param)).mul_(0.9).add_(param.grad)
                update = momentum
                if param.dim() == 2:
                    update = momentum / (momentum.norm() + 1e-7)
                    update = 1.5 * update - 0.5 * update @ update.T @ update
                param.add_(update, alpha=-group["lr"])


class Lamblike(torch.optim.Adam):
    """Scales each step by the norm of its whole parameter."""

    per_parameter = True

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        with torch.enable_grad():
            loss = None if closure is None else closure()
        before = [[param.clone() for param in group["params"]] for group in self.param_groups]
        super().step()
        for group, copies in zip(self.param_groups, before, strict=True):
            for param, old in zip(group["params"], copies, strict=True):
                param.copy_(old + (param - old) * old.norm().clamp(0.1, 10))
        return loss


def _lamb(params: Iterable[Any]) -> Optimizer:
    # Once there has been one, torch calls hooks around the step that is called within, too.
    torch.optim.Adam([nn.Parameter(torch.zeros(1))])
    return Lamblike(params, lr=0.01)


class Signs(Optimizer):
    """A user's class that says that it works element by element, and has state of more than one kind."""

    elementwise = True

    def __init__(self, params: Iterable[Any]) -> None:
        super().__init__(params, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    state = self.state[param]
                    state["count"] = state.get("count", 0) + 1
                    mean = state.setdefault("mean", torch.zeros_like(param)).lerp_(param.grad, 0.1)
                    # The sign of a complex number is another thing.
                    param.sub_(mean / (mean.abs() + 1e-3), alpha=group["lr"] / state["count"])


OPTIMIZERS: dict[str, Callable[[Iterable[Any]], Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True),
    "adam": lambda params: torch.optim.Adam(params, lr=0.01, amsgrad=True),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01),
    "nadam": lambda params: torch.optim.NAdam(params, lr=0.01),
    "radam": lambda params: torch.optim.RAdam(params, lr=0.01),
    "adamax": lambda params: torch.optim.Adamax(params, lr=0.01),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=0.01),
    "adadelta": lambda params: torch.optim.Adadelta(params),
    "rmsprop": lambda params: torch.optim.RMSprop(params, lr=0.01, momentum=0.9),
    "rprop": lambda params: torch.optim.Rprop(params, lr=0.01),
    "asgd": lambda params: torch.optim.ASGD(params, lr=0.01),
    "fused_adamw": lambda params: torch.optim.AdamW(params, lr=0.01, fused=True),
    "capturable_adam": lambda params: torch.optim.Adam(params, lr=torch.tensor(0.01), foreach=False),
    "signs": Signs,
    "for_loop_adamw": lambda params: torch.optim.AdamW(params, lr=0.01, foreach=False),
}

WHOLE_TENSOR_OPTIMIZERS: dict[str, Callable[[Iterable[Any]], Optimizer]] = {
    "muon": Muonlike,
    "lamb": _lamb,
    "adafactor": lambda params: torch.optim.Adafactor(params, lr=0.01),
}


@dataclass(frozen=True)
class Outcome:
    """What a training has left on this rank.

    Attributes:
        norms: what clipping has found, by step.
        state_numel: elements of optimizer state.
        ranges: which elements of each parameter this rank steps.
    """

    weights: dict[str, Tensor]
    norms: list[float] = field(default_factory=list)
    state_numel: int = 0
    ranges: dict[str, tuple[int, int]] = field(default_factory=dict)


@dataclass
class Run:
    """A model of the parity suite in training on this rank's data, with divided state if it shall be."""

    case: str = "mlp"
    optimizer: str = "adamw"
    shard: ShardOption = True
    reduce_dtype: str | None = None

    def __post_init__(self) -> None:
        self.collectives = Collectives(device())
        torch.manual_seed(0)
        self.model = CASES[self.case].build().to(device())
        self.shards = Shards(self.collectives, whole_parameters=self.shard == "parameters") if self.shard else None
        config = ReducerConfig(bucket_cap_mb=0.0005, reduce_dtype=self.reduce_dtype)
        self.reducer = Reducer(Replicas(self.model, self.collectives), config, maker=self.shards)
        self.inner = {**OPTIMIZERS, **WHOLE_TENSOR_OPTIMIZERS}[self.optimizer](self.model.parameters())
        if self.shards is not None:
            self.shards.add(self.inner)

    def differentiate(self, step: int) -> None:
        with self.reducer.backward():
            CASES[self.case].loss(self.model, self.collectives.rank, step).backward()

    def train(self, steps: Iterable[int]) -> Run:
        for step in steps:
            self.inner.zero_grad()
            self.differentiate(step)
            self.inner.step()
        return self

    @property
    def weights(self) -> dict[str, Tensor]:
        return {name: param.detach().clone() for name, param in self.model.named_parameters()}


def train(*, clip: float | None = None, norm_type: float = 2.0, micro_batches: int = 1, **setting: Any) -> Outcome:
    """Train a `Run` of this setting for some steps."""
    run = Run(**setting)
    norms = []
    for step in range(NUM_STEPS):
        CASES[run.case].on_step(run.model, step)
        run.inner.zero_grad()
        for micro_batch in range(micro_batches):
            with run.reducer.no_sync() if micro_batch < micro_batches - 1 else nullcontext():
                run.differentiate(step * micro_batches + micro_batch)
        if clip is not None:
            norms.append(float(nn.utils.clip_grad_norm_(run.model.parameters(), clip, norm_type=norm_type)))
        run.inner.step()
    weights = run.weights
    run.reducer.close()
    values = [value for state in run.inner.state.values() for value in state.values() if isinstance(value, Tensor)]
    ranges = {one.name: one.own for one in run.shards.optimizers[0].members.values()} if run.shards is not None else {}
    return Outcome(weights, norms, sum(value.numel() for value in values if value.dim() > 0), ranges)


def assert_equal_on_ranks(weight: Tensor, name: str) -> None:
    # As real numbers, because older versions of gloo know no others.
    own = torch.view_as_real(weight) if weight.is_complex() else weight
    on_rank_zero = own.clone()
    dist.broadcast(on_rank_zero, src=0)
    assert torch.equal(own, on_rank_zero), name


@contextmanager
def foreign_shards_spoiled() -> Iterator[None]:
    """Overwrite the shards of other ranks, as NCCL does: gloo gives every rank all of them."""
    divide_gradients = ShardedBucket._divide_gradients

    def spoil(bucket: ShardedBucket) -> None:
        for member in bucket.members:
            gradient = member.param.grad
            if gradient is not None:
                numbers = flat(gradient.plain() if isinstance(gradient, ShardedGradient) else gradient)
                numbers[: member.own[0]], numbers[member.own[1] :] = float("nan"), float("nan")
        divide_gradients(bucket)

    ShardedBucket._divide_gradients = spoil  # type: ignore[assignment,method-assign]
    try:
        yield
    finally:
        ShardedBucket._divide_gradients = divide_gradients  # type: ignore[method-assign]


@contextmanager
def numbers_of(dtype: torch.dtype) -> Iterator[None]:
    """Make models and data of `dtype`."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def compare(*, tolerance: float = 0.0, is_double: bool = False, **setting: Any) -> tuple[Outcome, Outcome]:
    """Train without and with sharding, and assert that weights are equal; return both outcomes."""
    shard = setting.pop("shard", True)
    with foreign_shards_spoiled(), numbers_of(torch.float64) if is_double else nullcontext():
        whole, sharded = (train(shard=option, **setting) for option in (False, shard))
    for name, expected in whole.weights.items():
        torch.testing.assert_close(sharded.weights[name], expected, rtol=tolerance, atol=tolerance)
        assert_equal_on_ranks(sharded.weights[name], name)
    torch.testing.assert_close(sharded.norms, whole.norms, rtol=1e-6, atol=1e-6)
    return whole, sharded
