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
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_bucketddp.reducer.bucket import LateGradientError
from lightning_bucketddp.reducer.reducer import Reducer
from lightning_bucketddp.replicas.replicas import ReplicaMismatchError
from tests.support.cases import for_each
from tests.support.collectives import all_reduced
from tests.support.jobs.models import WIDTH, Branches, Checkpointed, batch, mlp
from tests.support.jobs.parity import assert_equal_on_all_ranks, average_by_hand, build_reducer
from tests.support.ranks import device, on_ranks, run_on_ranks


def _model_and_copy() -> tuple[Any, Any]:
    torch.manual_seed(3)
    model = mlp().to(device())
    return model, copy.deepcopy(model)


def _backward(reducer: Reducer, loss: Tensor) -> None:
    with reducer.backward():
        loss.backward()


def _assert_same_gradients(model: nn.Module, reference: nn.Module) -> None:
    for (name, param), other in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert (param.grad is None) == (other.grad is None), name
        assert param.grad is None or torch.equal(param.grad, other.grad), name  # type: ignore[arg-type]


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
    model, reference = _model_and_copy()
    reducer = build_reducer(model)
    x = batch(dist.get_rank(), 0)
    loss = model(x).square().mean()
    with all_reduced() as reduced, reducer.no_sync(), reducer.backward():
        loss.backward()
    reference(x).square().mean().backward()
    _assert_same_gradients(model, reference)
    assert not reduced


@on_ranks()
def test_calling_a_submodule_synchronises() -> None:
    """torch DDP arms itself in the wrapper's forward and silently does nothing here."""
    model, reference = _model_and_copy()
    reducer = build_reducer(model)
    x = batch(dist.get_rank(), 0)
    _backward(reducer, model[0](x).square().mean())
    reference[0](x).square().mean().backward()
    average_by_hand(reference)
    _assert_same_gradients(model, reference)


@on_ranks()
def test_second_backward_on_one_forward_synchronises() -> None:
    """torch DDP leaves the second one unsynchronised."""
    model, reference = _model_and_copy()
    reducer = build_reducer(model)
    x = batch(dist.get_rank(), 0)
    loss = model(x).square().mean()
    with reducer.backward():
        loss.backward(retain_graph=True)
    _backward(reducer, loss)
    (2 * reference(x).square().mean()).backward()
    average_by_hand(reference)
    for param, other in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(param.grad, other.grad, rtol=1e-6, atol=1e-8)
    assert_equal_on_all_ranks(model)


@on_ranks()
def test_parameter_used_only_in_an_earlier_micro_batch_is_reduced() -> None:
    """torch DDP never synchronises it."""
    torch.manual_seed(3)
    model = Branches().to(device())
    reference = copy.deepcopy(model)
    reducer = build_reducer(model)
    for step in range(3):
        x = batch(dist.get_rank(), step)
        model.zero_grad()
        with reducer.no_sync(), reducer.backward():
            model(x, left=True, right=False).backward()
        _backward(reducer, model(x, left=False, right=True))
        reference.zero_grad()
        reference(x, left=True, right=False).backward()
        reference(x, left=False, right=True).backward()
        average_by_hand(reference)
        _assert_same_gradients(model, reference)


@on_ranks()
def test_parameter_that_was_frozen_at_setup_synchronises_alone() -> None:
    model, reference = _model_and_copy()
    for module in (model, reference):
        module[0].requires_grad_(False)
    reducer = build_reducer(model)
    for module in (model, reference):
        module.requires_grad_(False)
        module[0].requires_grad_(True)
        with reducer.backward() if module is model else nullcontext():
            module(batch(dist.get_rank(), 0)).square().mean().backward()
    average_by_hand(reference)
    _assert_same_gradients(model, reference)


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
    model, _ = _model_and_copy()
    reducer = build_reducer(model)

    def assert_views() -> None:
        assert reducer.bucket_set is not None
        buckets: Any = reducer.bucket_set.buckets
        buffers = [bucket.buffer for bucket in buckets]
        for name, param in model.named_parameters():
            assert param.grad is not None
            start = param.grad.data_ptr()
            assert any(b.data_ptr() <= start < b.data_ptr() + b.nbytes for b in buffers), name

    _backward(reducer, model(batch(0, 0)).sum())
    assert_views()
    model.zero_grad(set_to_none=True)
    with reducer.no_sync(), reducer.backward():
        model(batch(0, 1)).sum().backward()
    assert_views()
    _backward(reducer, model(batch(0, 2)).sum())
    assert_views()


@on_ranks()
def test_gradients_that_were_moved_with_the_module_are_reduced() -> None:
    """As by `module.to`, between two micro-batches: torch gives gradients other memory, and leaves the objects."""
    model, reference = _model_and_copy()
    reducer = build_reducer(model)
    rank = dist.get_rank()
    _backward(reducer, model(batch(rank, 0)).sum())
    model.zero_grad()
    with reducer.no_sync(), reducer.backward():
        model(batch(rank, 1)).sum().backward()
    model._apply(torch.clone)
    _backward(reducer, model(batch(rank, 2)).sum())
    for step in (1, 2):
        reference(batch(rank, step)).sum().backward()
    average_by_hand(reference)
    _assert_same_gradients(model, reference)


@on_ranks()
def test_a_large_gradient_stays_where_it_is() -> None:
    """It is reduced where autograd has put it, and nobody keeps it when the user lets it go."""
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
    model, _ = _model_and_copy()
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
    _backward(reducer, loss)


@on_ranks()
def test_unfrozen_parameters_are_reduced_and_known_plans_kept() -> None:
    """torch DDP leaves it unsynchronised."""
    model, reference = _model_and_copy()
    for module in (model, reference):
        module[0].requires_grad_(False)
    reducer = build_reducer(model)
    for step, frozen in enumerate([True, True, False, False, True, False]):
        for module in (model, reference):
            module.zero_grad()
            module[0].requires_grad_(not frozen)
            with reducer.backward() if module is model else nullcontext():
                module(batch(dist.get_rank(), step)).square().mean().backward()
        average_by_hand(reference)
        _assert_same_gradients(model, reference)
    # Two sets of trainable parameters, each planned once although training comes back to both.
    assert reducer.stats.num_plans == 2


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


@on_ranks()
def test_a_plan_that_is_no_longer_used_is_forgotten() -> None:
    model, _ = _model_and_copy()
    reducer = build_reducer(model)
    num_plans: list[int] = []
    for frozen, times in ((0, 1), (2, 66), (4, 1), (0, 1)):
        model.requires_grad_(True)
        model[frozen].requires_grad_(False)
        for step in range(times):
            _backward(reducer, model(batch(dist.get_rank(), step)).square().mean())
            model.zero_grad()
        num_plans.append(reducer.stats.num_plans)
    assert num_plans == [1, 2, 3, 4]


@pytest.mark.parametrize("hook_name", ["allreduce_hook", "fp16_compress_hook"])
@on_ranks()
def test_torch_communication_hooks_run(hook_name: str) -> None:
    """torch's own communication hooks see our buckets as DDP's."""
    model, reference = _model_and_copy()
    reducer = build_reducer(model, comm_hook=getattr(default_hooks, hook_name), bucket_cap_mb=0.001)
    for step in range(3):
        x = batch(dist.get_rank(), step)
        for module in (model, reference):
            module.zero_grad()
            with reducer.backward() if module is model else nullcontext():
                module(x).square().mean().backward()
        average_by_hand(reference)
        tolerance = 0.0 if hook_name == "allreduce_hook" else 1e-2
        for param, other in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(param.grad, other.grad, rtol=tolerance, atol=tolerance * 0.1)
    assert reducer.bucket_set is not None
    assert len(reducer.bucket_set.buckets) > 1


@pytest.mark.parametrize("num_buckets", [1, 4])
def test_a_step_does_nothing_per_parameter(num_buckets: int) -> None:
    few, many = [run_on_ranks(operations_added, num_layers=n, num_buckets=num_buckets)[0] for n in (8, 40)]
    assert few == many
    assert few["_foreach_copy_"] == few["allreduce_"] == num_buckets
    assert sum(few.values()) <= 4 + 7 * num_buckets


def test_one_rank_is_left_alone() -> None:
    assert run_on_ranks(operations_added, world_size=1, num_layers=8, num_buckets=0) == [{}]


@on_ranks()
def test_a_backward_of_a_few_parameters_synchronises() -> None:
    """Also after one that left its only bucket incomplete, because it used few parameters, too."""
    params = nn.ParameterList(torch.ones(2) for _ in range(4)).to(device())
    reducer = build_reducer(params)
    for indices in ([0, 1, 2, 3], [3], [3]):
        params.zero_grad()
        loss = torch.stack([(params[i] * (1.0 + dist.get_rank())).sum() for i in indices]).sum()
        _backward(reducer, loss)
    assert params[3].grad is not None
    assert torch.equal(params[3].grad, torch.full_like(params[3], 1.5))
    reducer.close()


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
    model = mlp().to(device(), own)
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
            assert param.grad is not None
            assert local.grad is not None
            assert param.grad.dtype == own
            sent = local.grad.to(wire).double()
            dist.all_reduce(sent)
            expected = sent / dist.get_world_size()
            epsilon = max(torch.finfo(wire).eps, torch.finfo(own).eps)
            torch.testing.assert_close(param.grad.double(), expected, rtol=epsilon, atol=epsilon * 1e-2)
    reducer.close()
    assert seen == {wire}


@on_ranks()
def test_a_late_gradient_is_refused_and_without_overlap_none_is_late() -> None:
    """A block is used once in the first backward and twice in a later one, by reentrant checkpointing."""
    for overlap in (True, False):
        torch.manual_seed(3)
        model = Checkpointed(reentrant=True, shared=True).to(device())
        reducer = build_reducer(model, bucket_cap_mb=1e-6, overlap=overlap)
        blocks = model.blocks
        model.blocks = blocks[:1]
        _backward(reducer, model(batch(dist.get_rank(), 0)).square().mean())
        model.zero_grad()
        model.blocks = blocks
        with pytest.raises(LateGradientError) if overlap else nullcontext() as late, reducer.backward():
            model(batch(dist.get_rank(), 1)).square().mean().backward()
        if late is not None:
            assert "Gradient of `blocks.0.0." in str(late.value)
            assert f"had left (rank {dist.get_rank()})" in str(late.value)
            assert "Pass `overlap=False`" in str(late.value)
    reference = Checkpointed(reentrant=True, shared=True).to(device())
    reference.load_state_dict(model.state_dict(), strict=False)
    reference(batch(dist.get_rank(), 1)).square().mean().backward()
    average_by_hand(reference)
    for (name, param), other in zip(model.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(param.grad, other.grad, msg=name)


@for_each("overlap", [True, False])
@on_ranks()
def test_buckets_leave_while_backward_runs_unless_overlap_is_off(overlap: bool) -> None:
    torch.manual_seed(3)
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(6)]).to(device())
    reducer = build_reducer(model, bucket_cap_mb=1e-6, overlap=overlap)
    left_before_the_end = 0

    def first_layer_begins(grad: Tensor) -> None:
        nonlocal left_before_the_end
        left_before_the_end = reducer.stats.num_reductions - before

    for step in range(2):
        before = reducer.stats.num_reductions
        hidden = model[0](batch(dist.get_rank(), step))
        hidden.register_hook(first_layer_begins)
        _backward(reducer, model[1:](hidden).square().mean())
        model.zero_grad()
    assert reducer.bucket_set is not None
    # All but the first layer's weight and bias.
    assert left_before_the_end == (len(reducer.bucket_set.buckets) - 2 if overlap else 0)


@on_ranks()
def test_freezing_on_one_rank_only_is_refused() -> None:
    model, _ = _model_and_copy()
    reducer = build_reducer(model)
    model[2].weight.requires_grad_(dist.get_rank() != 1)
    expected = "`2.weight` has requires_grad True on rank 0 but False on rank 1."
    with pytest.raises(ReplicaMismatchError, match=expected), reducer.backward():
        model(batch(0, 0)).sum().backward()
