"""When the reducer communicates, what it leaves behind, and how it fails."""

from __future__ import annotations

import copy
import pickle
import weakref
from collections import Counter
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_bucketddp.reducer.bucket import BufferedBucket, LateGradientError
from lightning_bucketddp.reducer.reducer import Reducer
from tests.support.cases import for_each
from tests.support.collectives import all_reduced
from tests.support.jobs.models import WIDTH, Branches, Checkpointed, batch, mlp, partly_frozen
from tests.support.jobs.parity import assert_mean, build_reducer
from tests.support.ranks import device, on_ranks, run_on_ranks


def _model() -> Any:
    torch.manual_seed(3)
    return mlp().to(device())


def _backward(reducer: Reducer, loss: Tensor) -> None:
    with reducer.backward():
        loss.backward()


class _Counted(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def operations_added(num_layers: int, num_buckets: int) -> dict[str, int]:
    """What a step with the reducer calls more often than one without, when there is a plan."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(num_layers)]).to(device())
    alone = nn.Sequential(*[nn.Linear(8, 8) for _ in range(num_layers)]).to(device())
    num_bytes = sum(param.nbytes for param in model.parameters())
    reducer = build_reducer(model, bucket_cap_mb=[num_bytes / max(num_buckets, 1) * 1.01 / 2**20])
    added = Counter[str]()
    for step in range(3):
        for trained, sign in ((model, 1), (alone, -1)):
            loss = trained(torch.ones(2, 8, device=device())).square().mean()
            trained.zero_grad()
            with _Counted() as counted, reducer.backward() if trained is model else nullcontext():
                loss.backward()
            if step == 2:
                added.update({name: sign * count for name, count in counted.counts.items()})
    assert num_buckets == (0 if reducer.bucket_set is None else len(reducer.bucket_set.buckets))
    reducer.close()
    dist.barrier()
    return {name: count for name, count in added.items() if count}


@on_ranks()
def test_no_sync_around_backward_alone_is_enough() -> None:
    """torch DDP reads the flag in forward and synchronises here."""
    model = _model()
    reducer = build_reducer(model)
    loss = model(batch(dist.get_rank(), 0)).square().mean()
    expected = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
    with all_reduced() as reduced, reducer.no_sync():
        _backward(reducer, loss)
    assert all(torch.equal(param.grad, other) for param, other in zip(model.parameters(), expected, strict=True))
    assert not reduced


def calls_a_submodule(model: Any, backward: Any, no_sync: Any) -> None:
    """torch DDP arms itself in the wrapper's forward and does nothing here."""
    with backward():
        model[0](batch(dist.get_rank(), 0)).square().mean().backward()


def differentiates_twice(model: Any, backward: Any, no_sync: Any) -> None:
    """torch DDP leaves the second backward unsynchronised."""
    loss = model(batch(dist.get_rank(), 0)).square().mean()
    for retain_graph in (True, False):
        with backward():
            loss.backward(retain_graph=retain_graph)


def uses_a_branch_in_an_earlier_micro_batch_only(model: Any, backward: Any, no_sync: Any) -> None:
    """torch DDP never synchronises it."""
    x = batch(dist.get_rank(), 0)
    with no_sync(), backward():
        model(x, left=True, right=False).backward()
    with backward():
        model(x, left=False, right=True).backward()


def unfreezes_what_was_frozen_at_setup(model: Any, backward: Any, no_sync: Any) -> None:
    """torch DDP has no hooks on it."""
    model.requires_grad_(False)
    model[0].requires_grad_(True)
    with backward():
        model(batch(dist.get_rank(), 0)).square().mean().backward()


@for_each(
    ("make", "run", "tolerance"),
    [
        (mlp, calls_a_submodule, 0.0),
        (mlp, differentiates_twice, 1e-6),
        (Branches, uses_a_branch_in_an_earlier_micro_batch_only, 0.0),
        (partly_frozen, unfreezes_what_was_frozen_at_setup, 0.0),
    ],
)
@on_ranks()
def test_backwards_that_torch_ddp_does_not_synchronise_are(make: Any, run: Any, tolerance: float) -> None:
    torch.manual_seed(3)
    model = make().to(device())
    reducer = build_reducer(model)
    for _ in range(3):
        assert_mean(model, reducer, run, tolerance=tolerance)
    reducer.close()


@on_ranks()
def test_half_precision_gradients_do_not_overflow() -> None:
    """The sum of these is beyond what fp16 can hold, their mean is not."""
    model = nn.Linear(2, 2, bias=False).to(device(), torch.float16)
    reducer = build_reducer(model)
    _backward(reducer, (model.weight * (40_000.0 if dist.get_rank() == 0 else 50_000.0)).sum())
    assert torch.equal(model.weight.grad, torch.full_like(model.weight, 45_000.0))  # type: ignore[arg-type]


@on_ranks()
def test_gradients_live_in_the_buckets() -> None:
    """After a synchronised backward, and while micro-batches are accumulated, `.grad` is a view of the buffer."""
    model = _model()
    reducer = build_reducer(model)

    def assert_views() -> None:
        assert reducer.bucket_set is not None
        buckets: Any = reducer.bucket_set.buckets
        buffers = [bucket.buffer for bucket in buckets]
        for name, param in model.named_parameters():
            start = param.grad.data_ptr()
            assert any(b.data_ptr() <= start < b.data_ptr() + b.nbytes for b in buffers), name

    for number, accumulates in enumerate((False, True, False)):
        if accumulates:
            model.zero_grad()
        with reducer.no_sync() if accumulates else nullcontext():
            _backward(reducer, model(batch(0, number)).sum())
        assert_views()


@for_each("may_be_resized", [False, True])
def test_a_bucket_keeps_its_memory_as_long_as_no_gradient_is_kept(may_be_resized: bool) -> None:
    shapes = [(3, 4), (0, 4), (5,), ()]
    params = [nn.Parameter(torch.zeros(shape, device=device())) for shape in shapes]
    params.append(nn.Parameter(torch.zeros(2, 3, 4, 5, device=device()).to(memory_format=torch.channels_last)))
    bucket = BufferedBucket(params, num_flags=2, device=device(), may_be_resized=may_be_resized)
    kept: list[tuple[Tensor, Tensor]] = []
    for step in range(6):
        before = bucket.wire.data_ptr()
        for param in params:
            param.grad = torch.full_like(param, step)
        assert bucket.collect() == []
        assert (bucket.wire.data_ptr() == before) == (step not in (3, 5))
        assert all(param.grad is view for param, view in zip(params, bucket.views, strict=True))
        assert all(torch.equal(param.grad, torch.full_like(param, step)) for param in params)  # type: ignore[arg-type]
        gradient = params[3].grad
        assert gradient is not None
        if step in (2, 4):
            kept.append((gradient if step == 2 else gradient.detach(), gradient.clone()))
        del gradient
    assert all(torch.equal(gradient, copy) for gradient, copy in kept)


def _move(module: nn.Module) -> None:
    module._apply(torch.clone)


def _turn(module: nn.Module) -> None:
    for param in module.parameters():
        assert param.grad is not None
        is_square = param.ndim == 2 and param.shape[0] == param.shape[1]
        param.grad = param.grad.t() if is_square else param.grad.detach()  # over the same memory


@for_each("change", [_move, _turn])
@on_ranks()
def test_gradients_in_other_memory_or_another_order_are_reduced(change: Any) -> None:
    """Between two micro-batches: `module.to` gives the gradient objects other memory, and a user may replace them."""

    def run(module: Any, backward: Any, no_sync: Any) -> None:
        with no_sync(), backward():
            module(batch(dist.get_rank(), 1)).sum().backward()
        change(module)
        with backward():
            module(batch(dist.get_rank(), 2)).sum().backward()

    model = _model()
    reducer = build_reducer(model)
    for _ in range(2):
        assert_mean(model, reducer, run)


@on_ranks()
def test_a_large_gradient_stays_where_it_is() -> None:
    """It is reduced where autograd has put it, and freed when the user sets it to None."""
    model = nn.Linear(1024, 1024).to(device())
    seen: list[int] = []
    model.weight.register_post_accumulate_grad_hook(lambda param: seen.append(param.grad.data_ptr()))
    # As large as that is on a host; on a GPU it would be a small one.
    reducer = build_reducer(model, bucket_cap_mb=1, all_alone=device().type == "cuda")
    for step in range(3):
        x = batch(dist.get_rank(), step, 4, 1024)
        expected = torch.autograd.grad(model(x).square().mean(), model.weight)[0]
        dist.all_reduce(expected)
        _backward(reducer, model(x).square().mean())
        assert model.weight.grad is not None
        assert torch.equal(model.weight.grad, expected / dist.get_world_size())
        assert model.weight.grad.data_ptr() == seen[-1]
        kept = weakref.ref(model.weight.grad)
        model.zero_grad()
        assert kept() is None
    reducer.close()


@on_ranks()
def test_strides_follow_the_parameter() -> None:
    conv = nn.Conv2d(3, 4, 3).to(device()).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    reducer = build_reducer(conv)
    _backward(reducer, conv(batch(0, 0, 2, 3, 5, 5).to(memory_format=torch.channels_last)).sum())
    assert conv.weight.grad is not None
    assert conv.weight.grad.stride() == conv.weight.stride()


@on_ranks()
def test_copies_and_the_module_of_a_closed_reducer_carry_nothing_of_ours() -> None:
    model = _model()
    reducer = build_reducer(model)
    _backward(reducer, model(batch(0, 0)).sum())
    for module in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), model):
        if module is model:
            reducer.close()
        with all_reduced() as reduced:
            module(batch(0, 1)).sum().backward()
        assert not reduced
        assert not any(param._post_accumulate_grad_hooks for param in module.parameters())


@on_ranks()
def test_weights_and_buffers_come_from_rank_zero() -> None:
    torch.manual_seed(dist.get_rank())
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).to(device())
    model.register_buffer("table", torch.randn(3, device=device()))
    model[1].running_mean.normal_()  # type: ignore[operator]
    build_reducer(model)
    for tensor in model.state_dict().values():
        reference = tensor.clone()
        dist.broadcast(reference, src=0)
        assert torch.equal(reference, tensor)


@on_ranks()
def test_ignored_names_are_left_alone() -> None:
    """Also at the root of the module, where torch DDP cannot ignore by name."""
    torch.manual_seed(dist.get_rank())
    model: Any = nn.Module()
    model.local = nn.Parameter(torch.randn(3, device=device()))
    model.register_buffer("mine", torch.randn(3, device=device()))
    model.linear = nn.Linear(3, 3, device=device())
    model._ddp_params_and_buffers_to_ignore = ["local", "mine"]
    local, mine = model.local.detach().clone(), model.mine.clone()
    reducer = build_reducer(model)
    _backward(reducer, model.linear(model.local).sum() * (1 + dist.get_rank()))
    assert torch.equal(model.local, local)
    assert torch.equal(model.mine, mine)
    summed = model.local.grad.clone()
    dist.all_reduce(summed)
    assert not torch.equal(summed, 2 * model.local.grad)


@on_ranks()
def test_retained_graph_survives_the_buffer_broadcast() -> None:
    """A buffer that the graph saved is overwritten with rank 0's between two backwards of it."""
    torch.manual_seed(dist.get_rank())
    model = nn.Linear(WIDTH, WIDTH).to(device())
    model.register_buffer("scale", torch.rand(WIDTH, device=device()))
    reducer = build_reducer(model)
    loss = (model(batch(dist.get_rank(), 0)) * model.scale).sum()
    with reducer.backward():
        loss.backward(retain_graph=True)
    reducer.replicas.broadcast_buffers()
    _backward(reducer, loss)


@on_ranks()
def test_known_plans_are_kept_until_they_are_no_longer_used() -> None:
    model = _model()
    reducer = build_reducer(model)
    num_plans: list[int] = []
    for frozen, times in ((0, 1), (2, 1), (0, 1), (2, 66), (4, 1), (0, 1)):
        model.requires_grad_(True)
        model[frozen].requires_grad_(False)
        for step in range(times):
            _backward(reducer, model(batch(dist.get_rank(), step)).square().mean())
            model.zero_grad()
        num_plans.append(reducer.stats.num_plans)
    assert num_plans == [1, 2, 2, 2, 3, 4]


@pytest.mark.parametrize("num_buckets", [1, 4])
def test_a_step_does_nothing_per_parameter(num_buckets: int) -> None:
    few, many = [run_on_ranks(operations_added, num_layers=n, num_buckets=num_buckets)[0] for n in (8, 40)]
    assert few == many
    assert few["_foreach_copy_"] == few["allreduce_"] == num_buckets
    assert sum(few.values()) <= 4 + 7 * num_buckets


def test_one_rank_is_left_alone() -> None:
    assert run_on_ranks(operations_added, world_size=1, num_layers=8, num_buckets=0) == [{}]


@pytest.mark.parametrize("world_size", [2, 4])
@for_each(
    ("own", "travels_as"),
    [
        (torch.float32, "bf16"),
        (torch.float32, "fp16"),
        (torch.bfloat16, "fp32"),
        (torch.float16, "fp32"),
        (torch.float32, "fp32"),
    ],
)
@on_ranks()
def test_gradients_travel_in_the_dtype_asked_for(own: torch.dtype, travels_as: str, world_size: int) -> None:
    """The result must be the mean of what was sent, in the gradients' own dtype."""
    model: Any = mlp().to(device(), own)
    reducer = build_reducer(model, reduce_dtype=travels_as)
    wire = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[travels_as]
    seen: set[torch.dtype] = set()
    for step in range(3):
        x = batch(dist.get_rank(), step).to(own)
        reference = copy.deepcopy(model)
        reference(x).square().mean().backward()
        model.zero_grad()
        with all_reduced() as tensors, reducer.backward():
            model(x).square().mean().backward()
        seen.update(tensor.dtype for tensor in tensors)
        for param, local in zip(model.parameters(), reference.parameters(), strict=True):
            expected = local.grad.to(wire).double()
            dist.all_reduce(expected)
            expected = (expected / dist.get_world_size()).to(own)
            epsilon = max(torch.finfo(wire).eps, torch.finfo(own).eps)
            torch.testing.assert_close(param.grad, expected, rtol=epsilon, atol=epsilon * 1e-2)
    reducer.close()
    assert seen == {wire}


@on_ranks()
def test_a_late_gradient_is_refused_and_without_overlap_none_is_late() -> None:
    """A block is used once in the first backward and twice in a later one, by reentrant checkpointing."""

    def differentiate(module: Any, backward: Any, no_sync: Any) -> None:
        with backward():
            module(batch(dist.get_rank(), 1)).square().mean().backward()

    for overlap in (True, False):
        torch.manual_seed(3)
        model = Checkpointed(reentrant=True, shared=True).to(device())
        reducer = build_reducer(model, bucket_cap_mb=1e-6, overlap=overlap)
        blocks = model.blocks
        model.blocks = blocks[:1]
        _backward(reducer, model(batch(dist.get_rank(), 0)).square().mean())
        model.blocks = blocks
        if overlap:
            text = rf"Gradient of `blocks\.0\.0\..* had left \(rank {dist.get_rank()}\).* Pass `overlap=False`"
            with pytest.raises(LateGradientError, match=text):
                assert_mean(model, reducer, differentiate)
        else:
            assert_mean(model, reducer, differentiate)


@on_ranks()
def test_a_sparse_weight_that_something_else_uses_is_refused() -> None:
    embedding = nn.Embedding(5, 4, sparse=True, device=device())
    reducer = build_reducer(embedding)
    with pytest.raises(ValueError, match=r"of shape \(5, 4\), has a dense gradient.*Pass `sparse=False`"):
        _backward(reducer, (embedding(torch.arange(5, device=device())) @ embedding.weight.T).sum())


@on_ranks()
def test_a_network_that_is_toggled_off_is_not_communicated() -> None:
    """As by `toggle_optimizer`; nothing is planned again."""
    torch.manual_seed(3)
    model = nn.ModuleDict({"g": nn.Linear(WIDTH, WIDTH), "d": nn.Linear(WIDTH, 2)}).to(device())
    reducer = build_reducer(model)
    num_reduced: list[int] = []
    for step in range(6):
        on, off = ("g", "d") if step % 2 == 0 else ("d", "g")
        model[on].requires_grad_(True)
        model[off].requires_grad_(False)
        before = reducer.stats.bytes_sent
        _backward(reducer, model["d"](model["g"](batch(dist.get_rank(), step))).square().mean())
        num_reduced.append(reducer.stats.bytes_sent - before)
    assert reducer.stats.num_plans == 2
    assert num_reduced[0] != num_reduced[1]
    assert num_reduced == num_reduced[:2] * 3
