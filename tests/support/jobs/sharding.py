"""Training with and without `shard_optimizer`, without Lightning."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.dlpack import from_dlpack

from lightning_bucketddp.comm.collectives import Collectives
from lightning_bucketddp.config import ReducerConfig
from lightning_bucketddp.reducer.reducer import Reducer
from lightning_bucketddp.replicas.replicas import Replicas
from lightning_bucketddp.sharding.bucket import ShardedBucket, flat
from lightning_bucketddp.sharding.gradient import ShardedGradient
from lightning_bucketddp.sharding.optimizer import gather_optimizer_state
from lightning_bucketddp.sharding.shards import ShardOption, Shards
from tests.support.collectives import all_reduced
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
        pieces: which elements of each parameter this rank steps.
    """

    weights: dict[str, Tensor]
    norms: list[float] = field(default_factory=list)
    state_numel: int = 0
    pieces: dict[str, tuple[int, int]] = field(default_factory=dict)


def train(
    *,
    case: str,
    optimizer: str,
    shard: ShardOption,
    clip: float | None = None,
    norm_type: float = 2.0,
    num_steps: int = NUM_STEPS,
    micro_batches: int = 1,
    bucket_cap_mb: float = 0.0005,
) -> Outcome:
    """Train a model of the parity suite on this rank's data."""
    collectives = Collectives(device())
    torch.manual_seed(0)
    model = CASES[case].build().to(device())
    shards = Shards(collectives, whole_parameters=shard == "parameters") if shard else None
    reducer = Reducer(Replicas(model, collectives), ReducerConfig(bucket_cap_mb=bucket_cap_mb), maker=shards)
    inner = {**OPTIMIZERS, **WHOLE_TENSOR_OPTIMIZERS}[optimizer](model.parameters())
    if shards is not None:
        shards.add(inner)
    norms = []
    for step in range(num_steps):
        CASES[case].on_step(model, step)
        inner.zero_grad()
        for micro_batch in range(micro_batches):
            loss = CASES[case].loss(model, collectives.rank, step * micro_batches + micro_batch)
            if micro_batch < micro_batches - 1:
                with reducer.no_sync(), reducer.backward():
                    loss.backward()
            else:
                with reducer.backward():
                    loss.backward()
        if clip is not None:
            norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), clip, norm_type=norm_type)))
        inner.step()
    weights = {name: param.detach().clone() for name, param in model.named_parameters()}
    reducer.close()
    values = [value for state in inner.state.values() for value in state.values() if isinstance(value, Tensor)]
    pieces = {s.name: s.own for s in shards.optimizers[0].shards.values()} if shards is not None else {}
    return Outcome(weights, norms, sum(value.numel() for value in values if value.dim() > 0), pieces)


def assert_equal_on_ranks(weight: Tensor, name: str) -> None:
    # As real numbers, because older versions of gloo know no others.
    own = torch.view_as_real(weight) if weight.is_complex() else weight
    on_rank_zero = own.clone()
    dist.broadcast(on_rank_zero, src=0)
    assert torch.equal(own, on_rank_zero), name


@contextmanager
def foreign_parts_spoiled() -> Iterator[None]:
    """Leave nothing useful of the gradients that are others', as NCCL does: gloo gives every rank all of them."""
    keep_share = ShardedBucket._keep_share

    def spoil(bucket: ShardedBucket) -> None:
        for shard in bucket.shards:
            gradient = shard.param.grad
            if gradient is not None:
                numbers = flat(gradient.plain() if isinstance(gradient, ShardedGradient) else gradient)
                numbers[: shard.own[0]], numbers[shard.own[1] :] = float("nan"), float("nan")
        keep_share(bucket)

    ShardedBucket._keep_share = spoil  # type: ignore[assignment,method-assign]
    try:
        yield
    finally:
        ShardedBucket._keep_share = keep_share  # type: ignore[method-assign]


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
    with foreign_parts_spoiled(), numbers_of(torch.float64) if is_double else nullcontext():
        whole, sharded = (train(shard=option, **setting) for option in (False, shard))
    for name, expected in whole.weights.items():
        torch.testing.assert_close(sharded.weights[name], expected, rtol=tolerance, atol=tolerance)
        assert_equal_on_ranks(sharded.weights[name], name)
    torch.testing.assert_close(sharded.norms, whole.norms, rtol=1e-6, atol=1e-6)
    return whole, sharded


# --- Gradients and weights between steps


@dataclass
class Run:
    """A model in training, with divided state if it shall be."""

    case: str = "mlp"
    optimizer: str = "adamw"
    shard: ShardOption = True
    bucket_cap_mb: float = 0.0005

    def __post_init__(self) -> None:
        self.collectives = Collectives(device())
        torch.manual_seed(0)
        self.model = CASES[self.case].build().to(device())
        self.shards = Shards(self.collectives, whole_parameters=self.shard == "parameters") if self.shard else None
        config = ReducerConfig(bucket_cap_mb=self.bucket_cap_mb)
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


def raised_by(call: Callable[[], Any]) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


NORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "norm": lambda gradient: gradient.norm(),
    "norm of all": lambda gradient: gradient.norm(p=3),
    "largest": lambda gradient: gradient.norm(float("inf")),
    "number": lambda gradient: torch.linalg.vector_norm(gradient, 0),
    "torch.norm": lambda gradient: torch.norm(gradient, p=1),
    "fro": lambda gradient: torch.norm(gradient),
    "vector_norm": lambda gradient: torch.linalg.vector_norm(gradient, ord=2, dtype=torch.float64),
    "data": lambda gradient: gradient.data.norm(2),
    "detached": lambda gradient: gradient.detach().norm(),
    "_foreach_norm": lambda gradient: torch._foreach_norm([gradient, torch.ones(3)], 2)[0],
    "total": lambda gradient: (
        nn.utils.get_total_norm([gradient]) if hasattr(nn.utils, "get_total_norm") else gradient.norm()
    ),
}

READS: dict[str, Callable[[Tensor], Any]] = {
    "mean": lambda gradient: gradient.mean(),
    "double": lambda gradient: gradient.double(),
    "tolist": lambda gradient: gradient.tolist(),
    "clone": lambda gradient: gradient.clone(),
    "__getitem__": lambda gradient: gradient[0],
    "mul": lambda gradient: 2 * gradient,
    "isfinite": lambda gradient: gradient.isfinite(),
    "numpy": lambda gradient: gradient.numpy(),
    "stack": lambda gradient: torch.stack([gradient, gradient]),
    "add_": lambda gradient: torch.zeros(gradient.shape).add_(gradient),
    "_foreach_add_": lambda gradient: torch._foreach_add_([torch.zeros(gradient.shape)], [gradient]),
    "norm": lambda gradient: gradient.norm(dim=0),
    "norm -1.0": lambda gradient: gradient.norm(-1),
    "cumsum_": lambda gradient: gradient.cumsum_(0),
    "transpose_": lambda gradient: gradient.transpose_(0, 1),
    "deepcopy": copy.deepcopy,
    "pickle": pickle.dumps,
    "adam": lambda gradient: torch.optim.Adam([_with_gradient(gradient)], foreach=False).step(),
}


def _with_gradient(gradient: Tensor) -> nn.Parameter:
    param = nn.Parameter(torch.zeros(gradient.shape))
    param.grad = gradient
    return param


def keep_a_gradient() -> list[str]:
    """Return what reading a gradient raises that was kept over a backward, and what stepping and adding to it do."""
    run = Run(optimizer="sgd").train(range(1))
    run.differentiate(1)
    kept = [param.grad for param in run.model.parameters()]
    run.inner.step()
    run.inner.zero_grad()
    run.differentiate(2)
    errors = [raised_by(lambda one=one: one.mean()) for one in kept]  # type: ignore[misc]
    errors += [raised_by(lambda one=one: one.norm()) for one in kept]  # type: ignore[misc]
    for param, gradient in zip(run.model.parameters(), kept, strict=True):
        param.grad = gradient
    return [*errors, raised_by(run.inner.step), raised_by(lambda: run.differentiate(3))]


def clip(*, foreach: bool | None) -> int:
    """Return how many all-reduces it takes to clip the gradients of several parameters."""
    run = Run(shard=True)
    run.differentiate(0)
    with all_reduced() as reduced:
        nn.utils.clip_grad_norm_(run.model.parameters(), 0.1, foreach=foreach)
        return len(reduced)


def look_at_gradients(*, shard: ShardOption) -> dict[str, Any]:
    """Look at gradients after a backward, in all ways that work and that do not; return the errors of the latter."""
    whole, sharded = Run(shard=False), Run(shard=shard)
    with sharded.reducer.no_sync():
        sharded.differentiate(0)
    # Gradients of this rank alone: they can be read, and are a part of the average later.
    of_rank = {name: param.grad.tolist() for name, param in sharded.model.named_parameters() if param.grad is not None}
    assert len(of_rank) == len(list(sharded.model.parameters()))
    sharded.inner.zero_grad()
    for run in (whole, sharded):
        run.differentiate(1)
    gradient = sharded.model[2].weight.grad  # type: ignore[index]
    expected = whole.model[2].weight.grad  # type: ignore[index]
    assert sharded.shards is not None
    for mine, others in zip(sharded.model.parameters(), whole.model.parameters(), strict=True):
        torch.testing.assert_close(sharded.shards.full_gradient(mine), others.grad, rtol=0, atol=0)
        for name, norm in NORMS.items():
            torch.testing.assert_close(norm(mine.grad), norm(others.grad), msg=name)  # type: ignore[arg-type]
    assert (gradient.shape, gradient.dtype, len(gradient)) == (expected.shape, expected.dtype, len(expected))
    errors = {name: raised_by(partial(read, gradient)) for name, read in READS.items()}
    return {**errors, "repr": repr(gradient)}


ACCESSES: dict[str, Callable[[Any, Tensor], Any]] = {
    "state_dict": lambda model, _: model.state_dict()["2.weight"],
    "deepcopy": lambda model, _: copy.deepcopy(model)[2].weight,
    "copy": lambda _, param: copy.copy(param),
    "pickle": lambda _, param: pickle.loads(pickle.dumps(param)),
    "save": lambda model, _: _saved_and_loaded(model.state_dict())["2.weight"],
    "data": lambda _, param: param.data,
    "detach": lambda _, param: param.detach(),
    "numpy": lambda _, param: torch.from_numpy(param.detach().numpy()),
    "array": lambda _, param: torch.from_numpy(np.asarray(param.requires_grad_(False))),
    "dlpack": lambda _, param: from_dlpack(param.requires_grad_(False)),
    "tolist": lambda _, param: torch.tensor(param.tolist()),
    "functional": lambda _, param: nn.functional.linear(torch.eye(len(param)), param).t(),
    "operator": lambda _, param: torch.ops.aten.clone(param),
    "foreach": lambda _, param: torch._foreach_mul([param], 1.0)[0],
    "stack": lambda _, param: torch.stack([param])[0],
    "keyword": lambda _, param: torch.add(input=torch.zeros(()), other=param),
    "rows": lambda _, param: torch.cat([param[:1], param[1:]]),
    "vector": lambda model, param: nn.utils.parameters_to_vector([param]).view(param.shape),
    "storage": lambda _, param: torch.empty(0).set_(param.untyped_storage()).view(param.shape),
    "functional_call": lambda model, param: torch.func.functional_call(model[2], {}, torch.eye(len(param))).t(),
    "compared": lambda _, param: (param == param) * param.view_as(param),
    "in place": lambda _, param: param.data.mul_(1.0),
    "layer": lambda model, param: model[2](torch.eye(len(param))).t(),
    "scripted": lambda model, param: torch.jit.script(model[2])(torch.eye(len(param))).t(),
}


def _saved_and_loaded(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    return torch.load(io.BytesIO(file.getvalue()))


def look_at_weights(*, shard: ShardOption) -> None:
    """Use weights after a step, in all ways, also in those made before the first, and assert that they are the new."""
    run = Run(shard=shard)
    whole = Run(shard=False)
    param = run.model[2].weight  # type: ignore[index]
    aliases = [
        param.data,
        param.detach(),
        param.detach().view(-1).view(param.shape),
        run.model.state_dict()["2.weight"],
    ]
    for step, (name, access) in enumerate(ACCESSES.items()):
        whole.train([step])
        run.train([step])
        expected = whole.model[2].weight.detach()  # type: ignore[index]
        for alias in aliases:
            torch.testing.assert_close(alias, expected, rtol=1e-5, atol=1e-5, msg=name)
        seen = access(run.model, param)
        torch.testing.assert_close(seen.detach(), expected, rtol=1e-5, atol=1e-5, msg=name)
        param.requires_grad_(True)
    torch.testing.assert_close(run.weights, whole.weights, rtol=1e-5, atol=1e-5)


# --- State


def save_and_load(*, case: str, optimizer: str, shard: ShardOption, tolerance: float) -> None:
    """Gather the state in the middle of a training and load it at several times; all go on like an undivided one."""
    whole, sharded = (Run(case, optimizer, shard=option).train(range(3)) for option in (False, shard))
    of_whole = whole.inner.state_dict()
    assert sharded.shards is not None
    gathered = gather_optimizer_state(sharded.shards.optimizers[0])
    if sharded.collectives.rank == 0:
        torch.testing.assert_close(gathered, of_whole, rtol=tolerance, atol=tolerance, check_stride=True)
        assert gathered["state"].keys() == of_whole["state"].keys()
    else:
        assert gathered == {}
    weights = {name: value.clone() for name, value in whole.model.state_dict().items()}
    saved = copy.deepcopy(of_whole)
    whole.train(range(3, 5))
    for steps_before in (0, 1, 2):
        run = Run(case, optimizer, shard=shard).train(range(10, 10 + steps_before))
        run.model.load_state_dict(weights)
        run.inner.load_state_dict(copy.deepcopy(saved))  # torch keeps the tensors, too
        run.train(range(3, 5))
        torch.testing.assert_close(run.weights, whole.weights, rtol=tolerance, atol=tolerance)


def refuse_to_save() -> tuple[str, dict[int, Any]]:
    """What `state_dict` raises once the state is divided; what it has before."""
    run = Run()
    before = run.inner.state_dict()["state"]
    run.train([0])
    return raised_by(run.inner.state_dict), before


# --- Which optimizers


def share_a_parameter() -> str:
    """What is raised when two optimizers have one parameter."""
    run = Run()
    assert run.shards is not None
    run.shards.add(torch.optim.SGD(run.model[0].parameters(), lr=0.1))  # type: ignore[index]
    return raised_by(lambda: run.train([0]))


def step_after_one_that_raised() -> dict[str, Tensor]:
    """Train on after an optimizer has raised in a step, as without sharding."""
    whole, sharded = (Run(optimizer="lamb", shard=option).train(range(2)) for option in (False, True))
    for run in (whole, sharded):
        run.inner.zero_grad()
        run.differentiate(2)
        of_group = run.inner.param_groups[0].pop("eps")
        assert raised_by(run.inner.step).startswith("KeyError")
        run.inner.param_groups[0]["eps"] = of_group
        run.train(range(3, 5))
    torch.testing.assert_close(sharded.weights, whole.weights, rtol=1e-6, atol=1e-6)
    return sharded.weights


def compile_steps(*, of: str, shard: ShardOption) -> int:
    """Train with a step that dynamo compiles, and assert that weights are equal; return how much it has compiled."""
    import torch._dynamo

    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    try:
        with numbers_of(torch.float64):  # compiled optimizers round otherwise
            whole, run = Run(shard=False).train(range(4)), Run(shard=shard)
            if of == "method":
                inner: Any = run.inner
                inner.step = torch.compile(inner.step, backend="eager")
                run.train(range(4))
            else:
                step = torch.compile(lambda: run.inner.step(), backend="eager")
                for number in range(4):
                    run.inner.zero_grad()
                    run.differentiate(number)
                    step()
            torch.testing.assert_close(run.weights, whole.weights, rtol=1e-7, atol=1e-7)
        return int(torch._dynamo.utils.counters["frames"]["ok"])
    finally:
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
