"""Training while the plan is computed, measured and changed.

Time is virtual where a test must not depend on the machine's: it passes with each mark, and with each all-reduce as a
network of the test's choice would take. So the tuner measures that network, and is right about it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from lightning_bucketddp.comm.collectives import Collectives
from lightning_bucketddp.config import ReducerConfig
from lightning_bucketddp.planning.cost import Profile
from lightning_bucketddp.reducer import plan_cache
from lightning_bucketddp.reducer.bucket import BufferedBucket
from lightning_bucketddp.reducer.bucket_set import BucketSet
from lightning_bucketddp.reducer.observer import Clock
from lightning_bucketddp.reducer.reducer import Reducer
from lightning_bucketddp.replicas.replicas import Replicas
from tests.support.collectives import each_all_reduce
from tests.support.jobs.models import batch
from tests.support.jobs.parity import assert_equal_on_all_ranks
from tests.support.ranks import device

WIDTH = 300


class VirtualNetwork(Clock):
    """A clock for which all-reduces take their latency and their bytes, one after the other, and all else 1 ms.

    Beside a backward they take `contention` times as long.
    """

    def __init__(self, *, latency_s: float = 1.0, s_per_byte: float = 1e-9, contention: float = 1.0) -> None:
        self.latency_s = latency_s
        self.s_per_byte = s_per_byte
        self.contention = contention
        self._now = 0.0
        self._idle_from = 0.0

    def mark(self) -> float:
        self._now += 1e-3
        return self._now

    @contextmanager
    def passes_time(self) -> Iterator[None]:
        def timed(tensor: Tensor, work: Any) -> Any:
            # What is measured alone has powers of two.
            slower = 1.0 if tensor.nbytes.bit_count() == 1 else self.contention
            seconds = slower * (self.latency_s + tensor.nbytes * self.s_per_byte)
            self._idle_from = max(self._idle_from, self._now) + seconds
            return _TimedWork(work, self, self._idle_from)

        with each_all_reduce(timed):
            yield

    def wait_until(self, done_s: float) -> None:
        self._now = max(self._now, done_s)


@dataclass(frozen=True)
class _TimedWork:
    work: dist.Work
    network: VirtualNetwork
    done_s: float

    def wait(self) -> None:
        self.work.wait()
        self.network.wait_until(self.done_s)

    def get_future(self) -> Any:
        return self.work.get_future()


class Layers(nn.Module):
    """2 MiB in six layers: three buckets in the plan of 25 MiB, because the first and the last are small."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))

    def forward(self, x: Tensor, leave_out: int | None = None) -> Tensor:
        for index, layer in enumerate(self.layers):
            if index != leave_out:
                x = torch.tanh(layer(x))
        return x


@dataclass(frozen=True)
class Training:
    """How to train, ours and torch DDP's alike.

    Attributes:
        leaves_out: the layer that a rank does not use in a step; None: uses all.
        freezes_at: the step from which the second layer is frozen.
        slower_at: the step from which the network is ten times as slow.
    """

    steps: int = 30
    micro_batches: int = 1
    set_to_none: bool = True
    leaves_out: Callable[[int, int], int | None] | None = None
    freezes_at: int | None = None
    slower_at: int | None = None
    tolerance: float = 0.0


@dataclass
class Tuned:
    """What happened on a rank."""

    plans: list[list[tuple[int, ...]]] = field(default_factory=list)
    messages: list[str] = field(default_factory=list)
    description: str = ""
    num_plans: int = 0
    profile: str | None = None
    tuning: str = ""


def leaves_out_in_turns(rank: int, step: int) -> int | None:
    return step % 4 if (rank + step) % 2 else None


def train_beside_torch_ddp(training: Training) -> Tuned:
    """Train with both; weights and gradients are equal after every step."""
    torch.manual_seed(3)
    ours, bare = Layers().to(device()), Layers().to(device())
    bare.load_state_dict(ours.state_dict())
    network = VirtualNetwork()
    outcome = Tuned()
    reducer = _reducer(ours, clock=network, messages=outcome.messages)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for model in (ours, bare)]
    theirs = _ddp(bare, training)
    for step in range(training.steps):
        if step == training.freezes_at:
            for model in (ours, bare):
                model.layers[1].requires_grad_(False)
            theirs = _ddp(bare, training)
        if step == training.slower_at:
            network.latency_s *= 10
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=training.set_to_none)
        with network.passes_time():
            _backwards(ours, training, step, blocked=reducer.no_sync, run=lambda loss: _marked(reducer, loss))
        outcome.plans.append(_plan(reducer))
        _backwards(theirs, training, step, blocked=theirs.no_sync, run=lambda loss: loss.backward())
        _assert_equal_gradients(ours, bare, training, step)
        for optimizer in optimizers:
            optimizer.step()
        assert_equal_on_all_ranks(ours)
    return _ended(outcome, ours, reducer)


def _ddp(model: nn.Module, training: Training) -> DistributedDataParallel:
    return DistributedDataParallel(model, find_unused_parameters=training.leaves_out is not None)


def _marked(reducer: Reducer, loss: Tensor) -> None:
    with reducer.backward():
        loss.backward()


def _backwards(
    model: nn.Module, training: Training, step: int, *, blocked: Callable[[], Any], run: Callable[[Tensor], None]
) -> None:
    rank = dist.get_rank()
    leave_out = None if training.leaves_out is None else training.leaves_out(rank, step)
    for micro_batch in range(training.micro_batches):
        is_last = micro_batch == training.micro_batches - 1
        with nullcontext() if is_last else blocked():
            x = batch(rank, step * training.micro_batches + micro_batch, 2, WIDTH)
            run(model(x, leave_out).square().mean() / training.micro_batches)


def _assert_equal_gradients(ours: nn.Module, theirs: nn.Module, training: Training, step: int) -> None:
    for (name, our_param), their_param in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        where = f"{name}, step {step}, rank {dist.get_rank()}"
        assert (our_param.grad is None) == (their_param.grad is None), where
        if our_param.grad is not None and their_param.grad is not None:
            difference = (our_param.grad - their_param.grad).abs().max()
            assert difference <= training.tolerance, f"{where}: {difference}"


# --- Without a reference


def train_with(
    steps: int = 20,
    *,
    virtual: bool = True,
    network: dict[str, float] | None = None,
    deterministic: bool = False,
    **options: Any,
) -> Tuned:
    """Train ours alone."""
    torch.manual_seed(3)
    model = Layers().to(device())
    clock = VirtualNetwork(**(network or {}))
    if "comm_hook" in options:
        options["comm_hook"] = getattr(default_hooks, options["comm_hook"])
    outcome = Tuned()
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(deterministic)
    try:
        reducer = _reducer(model, clock=clock if virtual else None, messages=outcome.messages, **options)
        with clock.passes_time() if virtual else nullcontext():
            for step in range(steps):
                model.zero_grad()
                _marked(reducer, model(batch(dist.get_rank(), step, 2, WIDTH)).square().mean())
                outcome.plans.append(_plan(reducer))
    finally:
        torch.use_deterministic_algorithms(before)
    return _ended(outcome, model, reducer)


def train_alone() -> Tuned:
    """Each rank in a world of its own."""
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    torch.manual_seed(3)
    model = Layers().to(device())
    collectives = Collectives(device(), group=groups[dist.get_rank()])
    # With the default a rank that is alone would have no plan at all.
    config = ReducerConfig(on_nonfinite="raise")
    reducer = Reducer(Replicas(model, collectives), config, clock=VirtualNetwork())
    outcome = Tuned()
    for step in range(20):
        model.zero_grad()
        _marked(reducer, model(batch(0, step, 2, WIDTH)).square().mean())
        outcome.plans.append(_plan(reducer))
    return _ended(outcome, model, reducer)


def keep_gradients_across_changes() -> list[bool]:
    """Somebody keeps the gradients of each step. Whether they are what they were."""
    torch.manual_seed(3)
    model, network = Layers().to(device()), VirtualNetwork()
    reducer = _reducer(model, clock=network)
    kept: list[tuple[Tensor, Tensor]] = []
    with network.passes_time():
        for step in range(20):
            model.zero_grad()
            _marked(reducer, model(batch(dist.get_rank(), step, 2, WIDTH)).square().mean())
            gradients = [param.grad for param in model.parameters() if param.grad is not None]
            kept += [(gradient, gradient.clone()) for gradient in gradients]
    reducer.close()
    return [torch.equal(gradient, copy) for gradient, copy in kept]


def let_go_of_old_buffers() -> list[int]:
    """How many of the buffers that ever were are still there when the next ones are about to be made."""
    model, network = Layers().to(device()), VirtualNetwork()
    reducer = _reducer(model, clock=network)
    ever: list[weakref.ref[Tensor]] = []
    alive: list[int] = []

    def placement_is_made(*args: Any, **options: Any) -> BucketSet:
        alive.append(sum(wire() is not None for wire in ever))
        bucket_set = BucketSet(*args, **options)
        ever.extend(weakref.ref(bucket.wire) for bucket in bucket_set.buckets if isinstance(bucket, BufferedBucket))
        return bucket_set

    names: Any = plan_cache
    names.BucketSet = placement_is_made
    try:
        with network.passes_time():
            for step in range(20):
                model.zero_grad()
                _marked(reducer, model(batch(dist.get_rank(), step, 2, WIDTH)).square().mean())
    finally:
        names.BucketSet = BucketSet
    reducer.close()
    return alive


def train_in_turns() -> list[tuple[int, int]]:
    """Two sets of parameters in turns, as with two optimizers. By step: parameters and buckets in use."""
    torch.manual_seed(3)
    model, network = nn.ModuleList([Layers(), Layers()]).to(device()), VirtualNetwork()
    reducer = _reducer(model, clock=network)
    sizes: list[tuple[int, int]] = []
    with network.passes_time():
        for step in range(44):
            for part, layers in enumerate(model):
                layers.requires_grad_(step % 2 == part)
            model.zero_grad()
            x = batch(dist.get_rank(), step, 2, WIDTH)
            _marked(reducer, model[step % 2](x).square().mean())
            plan = _plan(reducer)
            sizes.append((sum(map(len, plan)), len(plan)))
            assert_equal_on_all_ranks(model)
    reducer.close()
    return sizes


def _reducer(
    model: nn.Module, *, clock: VirtualNetwork | None, messages: list[str] | None = None, **options: Any
) -> Reducer:
    replicas = Replicas(model, Collectives(device()))
    replicas.agree()
    replicas.broadcast()
    return Reducer(replicas, ReducerConfig(**options), clock=clock, say=([] if messages is None else messages).append)


def _plan(reducer: Reducer) -> list[tuple[int, ...]]:
    assert reducer.bucket_set is not None
    return [bucket.members for bucket in reducer.bucket_set.plan]


def _ended(outcome: Tuned, model: nn.Module, reducer: Reducer) -> Tuned:
    outcome.description = reducer.describe().partition(";")[0]
    outcome.num_plans = reducer.stats.num_plans
    profile: Profile | None = reducer.profile
    outcome.profile = None if profile is None else profile.to_json()
    outcome.tuning = reducer.tuning
    reducer.close()
    return outcome
