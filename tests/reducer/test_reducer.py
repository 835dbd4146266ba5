"""When the reducer communicates, what it leaves behind, and how it fails."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.cases import for_each
from tests.support.jobs import reducing
from tests.support.jobs.parity import build_reducer
from tests.support.ranks import device, run_on_ranks


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


def test_no_sync_around_backward_alone_is_enough() -> None:
    assert run_on_ranks(reducing.no_sync_around_backward_alone_is_enough) == [0, 0]


@pytest.mark.parametrize(
    "job",
    [
        reducing.calling_a_submodule_synchronises,
        reducing.second_backward_on_one_forward_synchronises,
        reducing.parameter_used_only_in_an_earlier_micro_batch_is_reduced,
        reducing.parameter_that_was_frozen_at_setup_synchronises_alone,
        reducing.half_precision_gradients_do_not_overflow,
        reducing.gradients_live_in_the_buckets,
        reducing.gradients_that_were_moved_with_the_module_are_reduced,
        reducing.a_large_gradient_stays_where_it_is,
        reducing.strides_follow_the_parameter,
        reducing.copies_carry_nothing_of_ours,
        reducing.weights_and_buffers_come_from_rank_zero,
        reducing.ignored_names_are_left_alone,
        reducing.retained_graph_survives_the_buffer_broadcast,
    ],
    ids=lambda job: job.__name__,
)
def test_reducer(job: Callable[[], None]) -> None:
    run_on_ranks(job)


def test_unfrozen_parameters_are_reduced_and_known_plans_kept() -> None:
    # Two sets of trainable parameters, each planned once although training comes back to both.
    assert run_on_ranks(reducing.parameter_unfrozen_after_setup_is_reduced) == [2, 2]


def test_a_network_that_is_toggled_off_is_not_communicated() -> None:
    for num_plans, bytes_by_step in run_on_ranks(reducing.alternating_networks_keep_their_plans):
        assert num_plans == 2
        assert len(set(bytes_by_step)) == 2
        assert bytes_by_step == bytes_by_step[:2] * 3


def test_a_plan_that_is_no_longer_used_is_forgotten() -> None:
    assert run_on_ranks(reducing.plans_are_forgotten_after_a_while) == [[1, 2, 3, 4]] * 2


@for_each("world_size", [2, 4])
@for_each(
    ("own", "travels_as", "dtype"),
    [
        (torch.float32, "bf16", "torch.bfloat16"),
        (torch.float32, "fp16", "torch.float16"),
        (torch.bfloat16, "fp32", "torch.float32"),
        (torch.float16, "fp32", "torch.float32"),
        (torch.float32, "fp32", "torch.float32"),
    ],
)
def test_gradients_travel_in_the_dtype_asked_for(
    own: torch.dtype, travels_as: str, dtype: str, world_size: int
) -> None:
    job = reducing.gradients_travel_in_another_dtype
    ranks = run_on_ranks(job, world_size=world_size, own=own, travels_as=travels_as)
    assert ranks == [[dtype]] * world_size


def test_late_gradient_names_parameter_bucket_rank_and_remedy() -> None:
    for rank, error in enumerate(run_on_ranks(reducing.late_gradient, overlap=True)):
        assert "Gradient of `blocks.0.0." in error
        assert f"had left (rank {rank})" in error
        assert "Pass `overlap=False`" in error


def test_without_overlap_no_gradient_is_late() -> None:
    assert run_on_ranks(reducing.late_gradient, overlap=False) == ["no error", "no error"]


def test_buckets_leave_while_backward_runs() -> None:
    for left_early, num_buckets in run_on_ranks(reducing.buckets_leave_while_backward_runs, overlap=True):
        assert left_early == num_buckets - 2  # all but the first layer's weight and bias


def test_without_overlap_buckets_leave_at_the_end() -> None:
    for left_early, _ in run_on_ranks(reducing.buckets_leave_while_backward_runs, overlap=False):
        assert left_early == 0


def test_a_closed_reducer_does_nothing() -> None:
    assert run_on_ranks(reducing.closed_reducer_does_nothing) == [0, 0]


@pytest.mark.parametrize(
    ("build", "expected"),
    [
        (reducing.other_width, "`1.weight` has shape [4, 4] on rank 0 but [5, 4] on rank 1."),
        (reducing.other_dtype, "`1.weight` has dtype torch.float32 on rank 0 but torch.float64 on rank 1."),
        (reducing.other_requires_grad, "`bias` has requires_grad True on rank 0 but False on rank 1."),
        (reducing.other_layers, "`2.weight` exists on rank 0 but not on rank 1."),
        (reducing.other_strides, "`weight` has stride [27, 9, 3, 1] on rank 0 but [27, 1, 9, 3] on rank 1."),
        (reducing.other_buffer, "`table` has shape [3] on rank 0 but [4] on rank 1."),
        (
            reducing.other_order,
            "The ranks register their parameters or buffers in different order: number 0 is `a.weight` on rank 0 but"
            " `b.weight` on rank 1.",
        ),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_different_modules_are_refused_on_every_rank(build: Callable[[int], nn.Module], expected: str) -> None:
    errors = run_on_ranks(reducing.replica_error, build=build)
    assert all(error.startswith(expected) for error in errors), errors


def test_the_differing_ranks_are_listed() -> None:
    errors = run_on_ranks(reducing.replica_error, world_size=4, build=reducing.other_layers)
    assert all(e.startswith("`2.weight` exists on rank 0 but not on ranks 1, 2, 3.") for e in errors), errors


def test_freezing_on_one_rank_only_is_refused() -> None:
    errors = run_on_ranks(reducing.freeze_on_one_rank_only)
    assert all("`2.weight` has requires_grad True on rank 0 but False on rank 1." in error for error in errors), errors


@pytest.mark.parametrize("hook_name", ["allreduce_hook", "fp16_compress_hook"])
def test_torch_communication_hooks_run(hook_name: str) -> None:
    run_on_ranks(reducing.comm_hook_runs, hook_name=hook_name)


@pytest.mark.parametrize("num_buckets", [1, 4])
def test_a_step_does_nothing_per_parameter(num_buckets: int) -> None:
    few, many = [run_on_ranks(operations_added, num_layers=n, num_buckets=num_buckets)[0] for n in (8, 40)]
    assert few == many
    assert few["_foreach_copy_"] == few["allreduce_"] == num_buckets
    assert sum(few.values()) <= 4 + 6 * num_buckets


def test_one_rank_is_left_alone() -> None:
    assert run_on_ranks(operations_added, world_size=1, num_layers=8, num_buckets=0) == [{}]


def test_a_backward_of_a_few_parameters_synchronises() -> None:
    run_on_ranks(reducing.a_backward_of_a_few_parameters_synchronises)
