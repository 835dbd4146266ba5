"""`bucket_cap_mb="auto"`: a plan is computed, tried and kept if it is better, on all ranks at the same backward."""

from __future__ import annotations

import re
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from lightning_bucketddp.comm.collectives import Collectives
from lightning_bucketddp.config import ReducerConfig
from lightning_bucketddp.planning.cost import Profile, simulate
from lightning_bucketddp.planning.optimal_plan import optimal_plan
from lightning_bucketddp.reducer import plan_cache
from lightning_bucketddp.reducer.bucket import BufferedBucket
from lightning_bucketddp.reducer.bucket_set import BucketSet
from lightning_bucketddp.reducer.observer import Clock
from lightning_bucketddp.reducer.plan_cache import NUM_OBSERVED, NUM_WARM_UP
from lightning_bucketddp.reducer.reducer import Reducer
from lightning_bucketddp.replicas.replicas import Replicas
from tests.strategies.test_run_lines import lines_on_terminal
from tests.support.collectives import each_all_reduce
from tests.support.jobs.models import batch
from tests.support.jobs.parity import assert_equal, assert_equal_on_all_ranks
from tests.support.ranks import device, on_ranks, run_on_ranks

WIDTH = 300


class VirtualNetwork(Clock):
    """A clock for which all-reduces take their latency and their bytes, one after the other, and all else 1 ms.

    Beside a backward they take `contention` times as long.
    """

    def __init__(self, *, latency_s: float = 1.0, s_per_byte: float = 1e-9, contention: float = 1.0) -> None:
        self.latency_s, self._s_per_byte, self._contention = latency_s, s_per_byte, contention
        self.now = self._idle_from = 0.0

    def mark(self) -> float:
        self.now += 1e-3
        return self.now

    @contextmanager
    def passes_time(self) -> Iterator[None]:
        def timed(tensor: Tensor, work: Any) -> Any:
            # What is measured alone has powers of two.
            slower = 1.0 if tensor.nbytes.bit_count() == 1 else self._contention
            seconds = slower * (self.latency_s + tensor.nbytes * self._s_per_byte)
            self._idle_from = max(self._idle_from, self.now) + seconds
            return _TimedWork(work, self, self._idle_from)

        with each_all_reduce(timed):
            yield


@dataclass(frozen=True)
class _TimedWork:
    work: dist.Work
    network: VirtualNetwork
    done_s: float

    def wait(self) -> None:
        self.work.wait()
        self.network.now = max(self.network.now, self.done_s)

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
    """How to train, ours and torch DDP's alike."""

    steps: int = 20
    micro_batches: int = 1
    set_to_none: bool = True
    leaves_out: bool = False  # a layer, on one rank in each step
    freezes_at: int | None = None  # the second layer
    slower_at: int | None = None  # a network that is ten times as slow from then on


@dataclass
class Tuned:
    """What happened on a rank."""

    plans: list[list[tuple[int, ...]]] = field(default_factory=list)
    messages: list[str] = field(default_factory=list)
    description: str = ""
    num_plans: int = 0
    profile: str | None = None
    tuning: str = ""


def train_beside_torch_ddp(training: Training) -> Tuned:
    """Train with both; weights and gradients are equal after every step."""
    torch.manual_seed(3)
    ours, bare = Layers().to(device()), Layers().to(device())
    bare.load_state_dict(ours.state_dict())
    network = VirtualNetwork()
    outcome = Tuned()
    reducer = _reducer(ours, clock=network, messages=outcome.messages)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for model in (ours, bare)]
    theirs = DistributedDataParallel(bare, find_unused_parameters=training.leaves_out)
    for step in range(training.steps):
        if step == training.freezes_at:
            for model in (ours, bare):
                model.layers[1].requires_grad_(False)
            theirs = DistributedDataParallel(bare, find_unused_parameters=training.leaves_out)
        if step == training.slower_at:
            network.latency_s *= 10
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=training.set_to_none)
        with network.passes_time():
            _backwards(ours, training, step, blocked=reducer.no_sync, marked=reducer.backward)
        outcome.plans.append(_plan(reducer))
        _backwards(theirs, training, step, blocked=theirs.no_sync, marked=nullcontext)
        assert_equal(ours, bare, 0.0, step)
        for optimizer in optimizers:
            optimizer.step()
        assert_equal_on_all_ranks(ours)
    return _ended(outcome, reducer)


def _backwards(model: nn.Module, training: Training, step: int, *, blocked: Any, marked: Any) -> None:
    rank = dist.get_rank()
    leave_out = step % 4 if training.leaves_out and (rank + step) % 2 else None
    for micro_batch in range(training.micro_batches):
        is_last = micro_batch == training.micro_batches - 1
        x = batch(rank, step * training.micro_batches + micro_batch, 2, WIDTH)
        with nullcontext() if is_last else blocked():
            loss = model(x, leave_out).square().mean() / training.micro_batches
            with marked():
                loss.backward()


def train_with(
    *, virtual: bool = True, network: dict[str, float] | None = None, deterministic: bool = False, **options: Any
) -> Tuned:
    """Train ours alone, by the clock of a network or by that of the machine."""
    torch.manual_seed(3)
    model = Layers().to(device())
    clock = VirtualNetwork(**(network or {}))
    outcome = Tuned()
    torch.use_deterministic_algorithms(deterministic)
    try:
        with clock.passes_time() if virtual else nullcontext():
            reducer = _reducer(model, clock=clock if virtual else None, messages=outcome.messages, **options)
            for step in range(20):
                _step(reducer, model, model, step)
                outcome.plans.append(_plan(reducer))
    finally:
        torch.use_deterministic_algorithms(False)
    return _ended(outcome, reducer)


def _reducer(model: nn.Module, *, clock: VirtualNetwork | None, messages: list[str], **options: Any) -> Reducer:
    replicas = Replicas(model, Collectives(device()))
    replicas.agree()
    replicas.broadcast()
    return Reducer(replicas, ReducerConfig(**options), clock=clock, report=messages.append)


def _step(reducer: Reducer, model: nn.Module, layers: nn.Module, step: int) -> None:
    """Differentiate `layers`, a part of `model`, on the batch of this rank."""
    model.zero_grad()
    with reducer.backward():
        layers(batch(dist.get_rank(), step, 2, WIDTH)).square().mean().backward()


def _plan(reducer: Reducer) -> list[tuple[int, ...]]:
    assert reducer.bucket_set is not None
    return [bucket.members for bucket in reducer.bucket_set.plan]


def _ended(outcome: Tuned, reducer: Reducer) -> Tuned:
    outcome.description = reducer.describe().partition(";")[0]
    outcome.num_plans = reducer.stats.num_plans
    outcome.profile = None if reducer.profile is None else reducer.profile.to_json()
    outcome.tuning = reducer.plans.tuning
    reducer.close()
    return outcome


# The first backward has no plan; then come those of the first plan, and those of the computed one.
CHANGED_AT = 1 + NUM_WARM_UP + NUM_OBSERVED
SETTLED_AT = CHANGED_AT + NUM_WARM_UP + NUM_OBSERVED
NUM_PARAMS = 12


def num_buckets(rank: Tuned) -> list[int]:
    return [len(plan) for plan in rank.plans]


# --- Results are those of torch DDP, whatever the plan does


@pytest.mark.parametrize(
    "training",
    [
        Training(leaves_out=True, micro_batches=2),
        Training(set_to_none=False),
        Training(slower_at=CHANGED_AT, set_to_none=False, micro_batches=2),
    ],
    ids=["unused", "zeroed", "falling_back"],
)
def test_training_across_changes_equals_torch_ddp_and_the_better_plan_stays(training: Training) -> None:
    ranks = run_on_ranks(train_beside_torch_ddp, training=training)
    stays = training.slower_at is None
    computed = len(ranks[0].plans[CHANGED_AT])
    assert computed < 3 if training.leaves_out else computed == 1
    for rank in ranks:
        assert rank.plans == ranks[0].plans
        tried = [3] * CHANGED_AT + [computed] * (SETTLED_AT - CHANGED_AT)
        assert num_buckets(rank) == tried + [computed if stays else 3] * (training.steps - SETTLED_AT)
        assert rank.plans[-1] == rank.plans[CHANGED_AT if stays else 0]
        for plan in rank.plans:
            assert sorted(i for bucket in plan for i in bucket) == list(range(NUM_PARAMS))
        assert rank.description.endswith("computed") == stays
        assert rank.num_plans == (2 if stays else 3)
    assert [len(rank.messages) for rank in ranks] == [1, 0]
    assert re.fullmatch(
        rf"bucketddp: {computed} buckets? instead of 3: backward with reductions predicted to take \d+\.\d\d instead of"
        rf" \d+\.\d\d ms, measured \d+\.\d\d instead of \d+\.\d\d ms; {'they stay' if stays else 'back to 3'}\.",
        ranks[0].messages[0],
    )
    if computed == 1 and stays:
        assert ranks[0].description == "12 parameter tensors in 1 bucket (2.07 MiB), computed"


@pytest.mark.parametrize("freezes_at", [CHANGED_AT - 2, CHANGED_AT, SETTLED_AT + 1])
def test_a_layer_that_is_frozen_meanwhile_begins_anew(freezes_at: int) -> None:
    steps = freezes_at + CHANGED_AT + 2
    ranks = run_on_ranks(train_beside_torch_ddp, training=Training(steps=steps, freezes_at=freezes_at))
    assert ranks[0].plans == ranks[1].plans
    members = [sorted(i for bucket in plan for i in bucket) for plan in ranks[0].plans]
    still_trained = [i for i in range(NUM_PARAMS) if i not in (2, 3)]
    assert members == [list(range(NUM_PARAMS))] * freezes_at + [still_trained] * (steps - freezes_at)
    assert num_buckets(ranks[0])[freezes_at:] == [3] * CHANGED_AT + [1] * (steps - freezes_at - CHANGED_AT)


@on_ranks()
def test_kept_gradients_stay_as_they_are() -> None:
    torch.manual_seed(3)
    model, network = Layers().to(device()), VirtualNetwork()
    reducer = _reducer(model, clock=network, messages=[])
    kept: list[tuple[Tensor, Tensor]] = []
    with network.passes_time():
        for step in range(20):
            _step(reducer, model, model, step)
            gradients = [param.grad for param in model.parameters() if param.grad is not None]
            gradients = gradients if step % 2 else [gradient.detach() for gradient in gradients]
            kept += [(gradient, gradient.clone()) for gradient in gradients]
    reducer.close()
    assert [torch.equal(gradient, copy) for gradient, copy in kept] == [True] * (20 * NUM_PARAMS)


@on_ranks()
def test_old_buffers_are_gone_before_there_are_new_ones() -> None:
    model, network = Layers().to(device()), VirtualNetwork()
    reducer = _reducer(model, clock=network, messages=[])
    ever: list[weakref.ref[Tensor]] = []
    alive: list[int] = []

    def placement_is_made(*args: Any, **options: Any) -> BucketSet:
        alive.append(sum(wire() is not None for wire in ever))
        bucket_set = BucketSet(*args, **options)
        ever.extend(weakref.ref(bucket.wire) for bucket in bucket_set.buckets if isinstance(bucket, BufferedBucket))
        return bucket_set

    with patch.object(plan_cache, "BucketSet", placement_is_made), network.passes_time():
        for step in range(20):
            _step(reducer, model, model, step)
    reducer.close()
    assert alive == [0, 0]


@on_ranks()
def test_sets_that_take_turns_are_tuned_each_for_itself() -> None:
    """Two sets of parameters, as with two optimizers."""
    torch.manual_seed(3)
    model, network = nn.ModuleList([Layers(), Layers()]).to(device()), VirtualNetwork()
    reducer = _reducer(model, clock=network, messages=[])
    sizes: list[tuple[int, int]] = []  # by step: parameters and buckets in use
    with network.passes_time():
        for step in range(44):
            for part, layers in enumerate(model):
                layers.requires_grad_(step % 2 == part)
            _step(reducer, model, model[step % 2], step)
            plan = _plan(reducer)
            sizes.append((sum(map(len, plan)), len(plan)))
            assert_equal_on_all_ranks(model)
    reducer.close()
    assert sizes == [(NUM_PARAMS, 3)] * (2 * CHANGED_AT) + [(NUM_PARAMS, 1)] * (44 - 2 * CHANGED_AT)


# --- Decisions


def test_what_promises_nothing_is_not_tried() -> None:
    ranks = run_on_ranks(train_with, network={"latency_s": 0, "s_per_byte": 0})
    for rank in ranks:
        assert num_buckets(rank) == [3] * 20
        assert rank.num_plans == 1
    assert ranks[0].messages == ["bucketddp: 3 buckets of up to 25 MiB stay, no other plan promises to be faster."]


def test_the_profile_has_the_costs_that_the_plan_was_computed_for() -> None:
    """Whoever simulates other plans with it finds none that is better, and expects of this one what was expected."""
    network = {"latency_s": 1e-3, "s_per_byte": 4e-9, "contention": 3.0}
    [rank, _] = run_on_ranks(train_with, network=network)
    assert rank.profile is not None
    profile = Profile.from_json(rank.profile)
    assert profile.cost is not None
    assert profile.cost.seconds(10**6) == pytest.approx(3 * 5e-3, rel=0.1)
    names = [name for name, _ in Layers().named_parameters()]
    tried = [{names[i] for i in bucket} for bucket in rank.plans[CHANGED_AT]]
    best = optimal_plan(profile)
    assert [{profile.specs[i].name for i in bucket.members} for bucket in best] == tried != [set(names)]
    [message] = rank.messages
    assert f"predicted to take {1e3 * simulate(profile, best, profile.cost).end_s:.2f} instead of " in message
    assert message == f"bucketddp: {rank.tuning}."


def test_plans_that_must_not_depend_on_time_do_not_and_a_deterministic_one_is_that_of_25_mib() -> None:
    first_plans = []
    for options in (
        {"deterministic": True},
        {"bucket_cap_mb": 25},
        {"overlap": False},
        {"comm_hook": default_hooks.allreduce_hook},
        {"bucket_cap_mb": None},
        {"bucket_cap_mb": [1.0, 5.0]},
    ):
        for rank in run_on_ranks(train_with, **options):
            assert rank.plans == [rank.plans[0]] * 20, options
            assert (rank.num_plans, rank.profile, rank.messages) == (1, None, []), options
        first_plans.append(rank.plans[0])
    assert first_plans[0] == first_plans[1]


@on_ranks()
def test_a_rank_alone_has_nothing_to_tune() -> None:
    """Each rank in a world of its own."""
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    model = Layers().to(device())
    collectives = Collectives(device(), group=groups[dist.get_rank()])
    # With the default a rank that is alone would have no plan at all.
    config = ReducerConfig(on_nonfinite="raise")
    reducer = Reducer(Replicas(model, collectives), config, clock=VirtualNetwork())
    for step in range(20):
        _step(reducer, model, model, step)
        assert len(_plan(reducer)) == 3
    assert (reducer.stats.num_plans, reducer.profile) == (1, None)
    reducer.close()


# --- With the clock of the machine


@pytest.mark.parametrize("reduce_dtype", [None, pytest.param("bf16", marks=pytest.mark.long)])
@pytest.mark.parametrize("world_size", [2, 3])
def test_real_measurements_settle_in_time(world_size: int, reduce_dtype: str | None) -> None:
    ranks = run_on_ranks(train_with, world_size=world_size, virtual=False, reduce_dtype=reduce_dtype)
    for rank in ranks:
        assert rank.plans == ranks[0].plans
        assert rank.plans[SETTLED_AT:] == [rank.plans[SETTLED_AT]] * (20 - SETTLED_AT) != []
    assert len(ranks[0].messages) == 1
    assert [rank.profile is None for rank in ranks] == [False] + [True] * (world_size - 1)
    profile = Profile.from_json(ranks[0].profile)
    assert {spec.name for spec in profile.specs} == {name for name, _ in Layers().named_parameters()}
    assert list(profile.ready_s) == sorted(profile.ready_s)
    assert 0 < profile.ready_s[0] < profile.ready_s[-1] <= profile.backward_s < 60
    assert (profile.num_ranks, profile.reduce_dtype) == (world_size, reduce_dtype)
    assert profile.cost is not None
    assert profile.cost.seconds(0) >= 0
    assert profile.cost.seconds(2**20) > 0


@pytest.mark.parametrize("root", ["lightning.pytorch", "pytorch_lightning", "lightning.fabric", "lightning_fabric"])
def test_what_was_decided_is_shown_to_who_has_configured_no_logging(root: str, tmp_path: Path) -> None:
    lines, on_rank_one = run_on_ranks(lines_on_terminal, root=root, directory=str(tmp_path))
    start, decision = lines
    has_trainer = "fabric" not in root
    gradients = "; 3 buckets planned for 2.07 MiB of gradients, sent as fp32" if has_trainer else ""
    assert start == f"bucketddp: 2 ranks (gloo){gradients}."
    # A fit logs it in its last line; Fabric does not know when a run is over.
    done = r"20 optimizer steps; \d+\.\d MiB sent per rank in \d+ reductions; (last plan: \d+ buckets?; )?"
    decided = r"(.*; (they stay|back to 3)|3 buckets of up to 25 MiB stay, .*)"
    expected = f"bucketddp: {done}{decided}" if has_trainer else f"bucketddp: {decided}"
    assert re.fullmatch(rf"{expected}\.", decision)
    assert on_rank_one == []
