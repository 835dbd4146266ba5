"""The tests that need a GPU, without pytest: `python -m tests.on_gpu.suite [--share N/M] [PART OF A NAME ...]`.

Two NCCL ranks share the first GPU (each pretends to be a host of its own). Prints one line per test. `--share 1/3`,
`2/3` and `3/3` are disjoint, and may run side by side.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from tests.local_steps.test_islands import test_an_outer_step_is_one_of_sgd_with_nesterov_momentum as outer_steps
from tests.on_gpu import cuda
from tests.on_gpu.host_bound import the_limit_is_named
from tests.reducer import test_batch_weighting as weighting
from tests.reducer import test_comm_hooks as comm_hooks
from tests.reducer import test_nonfinite as nonfinite
from tests.reducer import test_quantized as quantized
from tests.reducer import test_reducer as reducing
from tests.reducer import test_unused_layers as unused
from tests.reducer import test_user_collectives as user_collectives
from tests.reducer.test_nonfinite import WAYS, Bad
from tests.replicas import test_consistency as replicas
from tests.replicas import test_sync_batchnorm as sync_batchnorm
from tests.replicas.test_replicas import test_different_modules_are_refused_on_every_rank
from tests.replicas.test_sync_batchnorm import Batches
from tests.strategies import test_cuda_graphs as graphs
from tests.strategies import test_equals_ddp as equals_ddp
from tests.strategies import test_fabric as fabric
from tests.support.jobs import sharding
from tests.support.jobs.models import CASES
from tests.support.jobs.parity import (
    Training,
    parity_with_mean,
    parity_with_quantized_mean,
    parity_with_torch_ddp,
    torch_ddp_can,
)
from tests.support.jobs.recording import CONFIGS
from tests.support.ranks import close_pools, run_on_ranks, use_gpu

# NCCL reduces no sparse tensors, so torch DDP cannot train this there.
WITHOUT_DDP_ON_NCCL = {"sparse_embedding"}
# Kernels that add in no fixed order make two runs of the same model differ by rounding.
ROUNDING = 1e-5
ROUNDED = {"tied_transformer", "sparse_embedding", "conv_batchnorm", "channels_last", "many_dtypes"}


Test = tuple[str, Callable[[], Any]]


def named(test: Callable[..., Any], **options: Any) -> Test:
    """Call `test`, which starts its ranks by itself."""
    return f"{test.__name__} {options or ''}", partial(test, **options)


def on_two(job: Callable[..., Any], **options: Any) -> Test:
    return f"{job.__name__} {options or ''}", partial(run_on_ranks, job, **options)


def tests() -> Iterator[Test]:
    """Names and tests."""
    for case in CASES:
        tolerance = ROUNDING if case in ROUNDED else 0.0
        with_ddp = torch_ddp_can(case) and case not in WITHOUT_DDP_ON_NCCL
        job = parity_with_torch_ddp if with_ddp else parity_with_mean
        for options in ({}, {"bucket_cap_mb": 0.001}, {"all_alone": True}):
            yield on_two(job, case=case, training=Training(tolerance=tolerance, **options))
    for optimizer in ("adamw_fused", "adamw_foreach"):
        training = Training(optimizer=optimizer, clip="norm", micro_batches=3, tolerance=ROUNDING)
        yield on_two(parity_with_torch_ddp, case="channels_last", training=training)
    for program in graphs.PROGRAMS:
        yield f"captured {program}", partial(graphs.compare, program, world_size=2)
    for case in CASES:
        if case not in WITHOUT_DDP_ON_NCCL:
            tolerance = ROUNDING if case in ROUNDED else 0.0
            yield f"captured model {case}", partial(graphs.compare_case, case, tolerance=tolerance)
    for program in ("plain", "accumulating", "16-mixed", "unused", "item", "synchronize"):
        yield f"captured {program} on one rank", partial(graphs.compare, program, world_size=1)
    yield "captured and resumed", graphs.compare_resumed
    for program in ("plain", "accumulating", "int8_wire", "sharded"):
        yield f"captured {program} on four ranks", partial(graphs.compare, program, world_size=4)
    yield from REDUCING
    for config in weighting.CONFIGS:
        for num_micro_batches in (1, 3):
            yield on_two(weighting.weighted_mean, config=config, num_micro_batches=num_micro_batches)
    for way in WAYS:
        for on_nonfinite in ("warn", "raise", "skip"):
            for parameter in ("2.weight", None):
                yield named(nonfinite_is_told, way=way, on_nonfinite=on_nonfinite, parameter=parameter)
    for batches in SYNC_BATCHNORM:
        layer = nn.BatchNorm2d(3, dtype=torch.promote_types(batches.dtype, torch.float32))
        yield f"sync_batchnorm {batches}", partial(run_on_ranks, sync_batchnorm.train, model=layer, batches=batches)
    yield named(sync_batchnorm.test_gradient_buckets_may_leave_in_between)
    for world_size in (1, 2):
        yield named(doctor_leaves_no_group, world_size=world_size)
    yield named(more_sockets_and_no_variables, world_size=2)
    for module in ("Small", "Large"):
        yield named(the_limit_is_named, module=module, is_host_bound=module == "Small")
    for dtype in replicas.DTYPES:
        yield on_two(replicas.every_bit_counts, dtype=dtype)
    for on_divergence in ("raise", "heal", "log"):
        yield on_two(replicas.flip_in_a_loop, on_divergence=on_divergence, on_rank=1)
    # Without overlap: NCCL would wait for ever for buckets that only one rank has launched.
    yield on_two(replicas.freeze_on_one_rank_in_mid_training, is_known=True, overlap=False)
    yield on_two(cuda.a_check_of_the_replicas_never_makes_the_host_wait)
    for options in ({}, {"moves": True}, {"overlap": False}):
        yield on_two(unused.launched_before_end, **options)
    for kept in ("nothing", "gradient", "alias"):
        yield on_two(unused.memory_is_given_back, kept=kept)
    for left_out in (unused.one_for_all, unused.one_each):
        yield on_two(unused.flags_read, left_out=left_out)
    yield on_two(cuda.gradients_from_several_streams_are_waited_for)
    yield on_two(cuda.a_step_never_makes_the_host_wait)
    for config in CONFIGS:
        yield on_two(cuda.a_recorded_step_never_makes_the_host_wait, config=config)
    yield on_two(cuda.a_recorded_step_never_makes_the_host_wait, config="plain", shard=True)
    yield on_two(cuda.a_graph_that_is_garbage_leaves_captures_alone)
    yield on_two(cuda.a_captured_step_trains_like_others)
    yield from user_collectives_tests()
    for loop in fabric.LOOPS:
        yield named(fabric.test_training_equals_ddp, loop=loop)
    for counted in ([0, 1], [1]):
        yield named(outer_steps, world_size=2, counted=counted)
    yield from sharded_tests()
    yield from quantized_tests()
    yield on_two(cuda.peak_gradient_memory)


def user_collectives_tests() -> Iterator[Test]:
    """Collectives that users have inside backwards."""
    for options in (
        {"uses_both": user_collectives.in_turns, "communicates_from": 0},
        {"uses_both": user_collectives.all_of_them, "communicates_from": 2},
        {"uses_both": user_collectives.all_of_them, "communicates_from": 2, "micro_batches": 2},
        {"uses_both": user_collectives.in_turns, "communicates_from": 0, "comm_hook": allreduce_hook},
    ):
        yield on_two(user_collectives.train, timeout_s=40, **options)
    yield on_two(user_collectives.two_modules)
    yield named(user_collectives.test_disorder_is_refused)
    yield named(equals_ddp.test_training_equals_ddp, program="contrastive")
    yield on_two(cuda.a_captured_step_trains_like_others, communicates=True)
    yield named(fabric.test_ranks_that_use_different_parts_of_two_modules_equal_ddp)
    yield named(fabric.test_a_program_may_communicate_within_backwards_of_two_modules)


def sharded_tests() -> Iterator[Test]:
    """Optimizer state that is divided among the ranks."""
    for case in CASES:
        if case != "sparse_embedding":
            yield named(sharded, case=case, optimizer="adamw", tolerance=10 * ROUNDING)
    for optimizer in sharding.OPTIMIZERS:
        for shard in (True, "parameters"):
            yield named(sharded, case="mlp", optimizer=optimizer, shard=shard, clip=0.1, tolerance=ROUNDING)
    yield named(sharded, case="mlp", optimizer="sgd")
    yield named(sharded, case="mlp", optimizer="momentum", micro_batches=3)
    for shard in (True, "parameters"):
        yield on_two(cuda.divided_buckets_hold_no_memory_between_steps, shard=shard)
        yield on_two(cuda.a_step_never_makes_the_host_wait, shard=shard)
        yield on_two(cuda.a_captured_step_trains_like_others, shard=shard)
    yield on_two(cuda.sharded_weights_reach_several_streams)


def quantized_tests() -> Iterator[Test]:
    """Gradients that travel as int8."""
    for case in CASES:
        # Where two runs differ by rounding, they round to other integers, too.
        if case not in ROUNDED and case != "buffer_in_forward":
            for options in ({}, {"bucket_cap_mb": 0.001, "micro_batches": 2}, {"all_alone": True}):
                yield on_two(parity_with_quantized_mean, case=case, training=Training(reduce_dtype="int8", **options))
    for shard in (True, "parameters"):
        yield on_two(quantized.train_sharded, case="mlp", shard=shard)
    for world_size in (2, 3):  # two ranks exchange all they have, more exchange parts
        yield named(quantized.test_every_size_arrives, world_size=world_size)
    yield named(quantized.test_a_nan_stays_one_and_stays_where_it_is, world_size=2)
    for shard in (False, True, "parameters"):
        yield on_two(cuda.a_step_never_makes_the_host_wait, shard=shard, reduce_dtype="int8")
        yield on_two(cuda.a_captured_step_trains_like_others, shard=shard, reduce_dtype="int8")


def sharded(**setting: Any) -> list[Any]:
    """Compare weights with and without sharding; how the state is divided is shown."""
    ranks = run_on_ranks(sharding.compare, **setting)
    assert sum(sharded.state_numel for _, sharded in ranks) == ranks[0][0].state_numel
    return [sharded.state_numel for _, sharded in ranks]


def nonfinite_is_told(*, way: str, on_nonfinite: str, parameter: str | None) -> list[Any]:
    """What rank 0 says of a value that is not finite on rank 1, in the second of three steps."""
    ranks = run_on_ranks(nonfinite.train, bad=Bad(parameter), on_nonfinite=on_nonfinite, **WAYS[way])
    told = ranks[0].error or ranks[0].warnings[0]
    what = "the loss on rank 1 (nan)" if parameter is None else "the gradient of `2.weight` on rank 1"
    assert f"ot finite in backward 2: {what}." in told, told
    assert [rank.steps_withheld for rank in ranks] == [[1] if on_nonfinite == "skip" else []] * 2
    return [told]


REDUCING = [
    named(reducing.test_no_sync_around_backward_alone_is_enough),
    named(reducing.test_backwards_that_torch_ddp_does_not_synchronise_are),
    named(reducing.test_known_plans_are_kept_until_they_are_no_longer_used),
    named(reducing.test_a_late_gradient_is_refused_and_without_overlap_none_is_late),
    named(reducing.test_half_precision_gradients_do_not_overflow),
    named(reducing.test_gradients_live_in_the_buckets),
    named(reducing.test_a_large_gradient_stays_where_it_is),
    named(reducing.test_a_bucket_keeps_its_memory_as_long_as_no_gradient_is_kept),
    named(reducing.test_gradients_in_other_memory_or_another_order_are_reduced),
    named(reducing.test_strides_follow_the_parameter),
    named(reducing.test_weights_and_buffers_come_from_rank_zero),
    *(on_two(comm_hooks.check_distance, hook_name=name) for name in ("allreduce", "bf16")),
    named(reducing.test_gradients_travel_in_the_dtype_asked_for, world_size=2),
    named(test_different_modules_are_refused_on_every_rank),
]


SYNC_BATCHNORM = [
    Batches(split=split, dtype=dtype, layout=layout)
    for split in ((5, 3), (7, 1), (8, 0))
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16)
    for layout in ("contiguous", "channels_last")
]


TRAINER_RUNS = [
    "tests.on_gpu.fit",
    "tests.on_gpu.resuming",
    "tests.on_gpu.compiling",
    "tests.on_gpu.evaluating",
    "tests.on_gpu.batch_sizes",
    "tests.on_gpu.sharding",
]


def doctor_leaves_no_group(world_size: int) -> None:
    """NCCL warns of a process group that was not destroyed when the process ends."""
    place = {"WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29713", "LOCAL_RANK": "0"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "lightning_bucketddp.cli", "doctor", "--json"],
            env={**os.environ, **place, "RANK": str(rank), "NCCL_HOSTID": f"host{rank}", "NCCL_SOCKET_IFNAME": "lo"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(world_size)
    ]
    for said, errors in [rank.communicate(timeout=200) for rank in ranks]:
        assert "destroy_process_group" not in errors, errors
        assert "cannot talk" not in said, said


def more_sockets_and_no_variables(world_size: int) -> None:
    """NCCL has read its numbers of sockets, in a second group, too; they are not in the environment any more."""
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29714", "LOCAL_RANK": "0", "NCCL_SOCKET_IFNAME": "lo"}
    debug = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,NET"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.on_gpu.sockets"],
            env={**os.environ, **place, **debug, "NODE_RANK": str(rank), "NCCL_HOSTID": f"host{rank}"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(world_size)
    ]
    for said in [rank.communicate(timeout=200)[0] for rank in ranks]:
        assert "no variable is left" in said, said
        assert said.count("Using 2 threads and 4 sockets per thread") >= 2, said


def trainer_runs(module: str) -> None:
    """Run `module`, which prints its own lines, on two ranks."""
    close_pools()  # it may use all of the GPU's memory
    port = str(29740 + TRAINER_RUNS.index(module))
    environment = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "NCCL_SOCKET_IFNAME": "lo"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", module],
            env={**environment, "NODE_RANK": str(rank), "LOCAL_RANK": "0", "NCCL_HOSTID": f"host{rank}"},
        )
        for rank in range(2)
    ]
    assert [rank.wait(timeout=300) for rank in ranks] == [0, 0]


def main() -> int:
    """Run everything; the exit status says whether all passed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", help="of names of tests (default: all tests)")
    parser.add_argument("--share", default="1/1", help="which part of the tests runs (default: %(default)s)")
    args = parser.parse_args()
    number, num_shares = map(int, args.share.split("/"))
    everything: list[Test] = [
        *tests(),
        *((f"Trainer {module}", partial(trainer_runs, module)) for module in TRAINER_RUNS),
    ]
    chosen = [(name, test) for name, test in everything if not args.parts or any(part in name for part in args.parts)]
    chosen = chosen[number - 1 :: num_shares]
    use_gpu()
    failed = 0
    for name, test in chosen:
        start = time.monotonic()
        try:
            result = test()
        except Exception:
            failed += 1
            print(f"FAILED {name}\n{traceback.format_exc()}", flush=True)
        else:
            has_nothing = result is None or (isinstance(result, list) and all(value is None for value in result))
            print(
                f"passed {name} ({time.monotonic() - start:.1f} s) {'' if has_nothing else str(result)[:300]}",
                flush=True,
            )
    close_pools()
    print(f"{len(chosen) - failed} passed, {failed} failed")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
