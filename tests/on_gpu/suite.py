"""The tests that need a GPU, without pytest: `python -m tests.on_gpu.suite [PART OF A NAME ...]`.

Two NCCL ranks share the first GPU (each pretends to be a host of its own). Prints one line per test.
"""

from __future__ import annotations

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

from tests.reducer import test_reducer as reducing
from tests.reducer import test_unused_layers as unused
from tests.reducer import test_user_collectives as user_collectives
from tests.replicas.test_replicas import test_different_modules_are_refused_on_every_rank
from tests.strategies import test_cuda_graphs as graphs
from tests.strategies import test_user_code as user_code
from tests.support.jobs import cuda, nonfinite, quantized, replicas, sharding, sync_batchnorm, weighting
from tests.support.jobs.models import CASES
from tests.support.jobs.nonfinite import WAYS, Bad
from tests.support.jobs.outer_steps import step_beside_sgd
from tests.support.jobs.parity import (
    Training,
    parity_with_mean,
    parity_with_quantized_mean,
    parity_with_torch_ddp,
    torch_ddp_can,
)
from tests.support.jobs.recording import CONFIGS
from tests.support.jobs.sync_batchnorm import Batches
from tests.support.ranks import close_pools, run_on_ranks, use_gpu

# NCCL reduces no sparse tensors, so torch DDP cannot train this there.
WITHOUT_DDP_ON_NCCL = {"sparse_embedding"}
# Kernels that add in no fixed order make two runs of the same model differ by rounding.
ROUNDING = 1e-5
ROUNDED = {"tied_transformer", "sparse_embedding", "conv_batchnorm", "channels_last", "many_dtypes"}


def tests() -> Iterator[tuple[str, Callable[[], Any]]]:
    """Names and tests."""
    for case in CASES:
        tolerance = ROUNDING if case in ROUNDED else 0.0
        with_ddp = torch_ddp_can(case) and case not in WITHOUT_DDP_ON_NCCL
        job = parity_with_torch_ddp if with_ddp else parity_with_mean
        for training in (
            Training(tolerance=tolerance),
            Training(tolerance=tolerance, bucket_cap_mb=0.001),
            Training(tolerance=tolerance, all_alone=True),
        ):
            yield f"{job.__name__} {case} {training}", partial(run_on_ranks, job, case=case, training=training)
    for optimizer in ("adamw_fused", "adamw_foreach"):
        training = Training(optimizer=optimizer, clip="norm", micro_batches=3, tolerance=ROUNDING)
        yield (
            f"channels_last {optimizer}",
            partial(run_on_ranks, parity_with_torch_ddp, case="channels_last", training=training),
        )
    for program in graphs.PROGRAMS:
        yield f"captured {program}", partial(graphs.compare, program, world_size=2)
    for program in ("plain", "accumulating", "16-mixed", "unused", "item", "synchronize"):
        yield f"captured {program} on one rank", partial(graphs.compare, program, world_size=1)
    yield from REDUCING
    for config in weighting.CONFIGS:
        for num_micro_batches in (1, 3):
            yield (
                f"weighted_mean {config} {num_micro_batches}",
                partial(run_on_ranks, weighting.weighted_mean, config=config, num_micro_batches=num_micro_batches),
            )
    for way in WAYS:
        for on_nonfinite in ("warn", "raise", "skip"):
            for parameter in ("2.weight", None):
                options: dict[str, Any] = {"way": way, "on_nonfinite": on_nonfinite, "parameter": parameter}
                yield f"nonfinite {options}", partial(nonfinite_is_told, **options)
    for batches in SYNC_BATCHNORM:
        layer = nn.BatchNorm2d(3, dtype=torch.promote_types(batches.dtype, torch.float32))
        yield f"sync_batchnorm {batches}", partial(run_on_ranks, sync_batchnorm.train, model=layer, batches=batches)
    for world_size in (1, 2):
        yield f"doctor of {world_size}", partial(doctor_leaves_no_group, world_size)
    yield "sockets", partial(more_sockets_and_no_variables, 2)
    yield "sync_batchnorm beside buckets", partial(run_on_ranks, sync_batchnorm.train_beside_gradient_bucket)
    for dtype in replicas.DTYPES:
        yield f"every bit counts {dtype}", partial(run_on_ranks, replicas.every_bit_counts, dtype=dtype)
    for on_divergence in ("raise", "heal", "log"):
        yield (
            f"replicas that drift {on_divergence}",
            partial(run_on_ranks, replicas.flip_in_a_loop, on_divergence=on_divergence, on_rank=1),
        )
    # Without overlap: NCCL would wait for ever for buckets that only one rank has launched.
    yield (
        "frozen on one rank",
        partial(run_on_ranks, replicas.freeze_on_one_rank_in_mid_training, is_known=True, overlap=False),
    )
    yield "checks without waiting", partial(run_on_ranks, cuda.a_check_of_the_replicas_never_makes_the_host_wait)
    for moves in (False, True):
        yield f"order changes, moved {moves}", partial(run_on_ranks, unused.launched_before_end, moves=moves)
    for kept in ("nothing", "gradient", "alias"):
        yield f"memory given back, {kept} kept", partial(run_on_ranks, unused.memory_is_given_back, kept=kept)
    for left_out in (unused.one_for_all, unused.one_each):
        yield f"unused layers {left_out.__name__}", partial(run_on_ranks, unused.flags_read, left_out=left_out)
    yield "several streams", partial(run_on_ranks, cuda.gradients_from_several_streams_are_waited_for)
    yield "no host synchronisation", partial(run_on_ranks, cuda.a_step_never_makes_the_host_wait)
    for config in CONFIGS:
        yield (
            f"recorded steps without waiting {config}",
            partial(run_on_ranks, cuda.a_recorded_step_never_makes_the_host_wait, config=config),
        )
    yield (
        "recorded steps without waiting sharded",
        partial(run_on_ranks, cuda.a_recorded_step_never_makes_the_host_wait, config="plain", shard=True),
    )
    yield "captured step", partial(run_on_ranks, cuda.a_captured_step_trains_like_others)
    yield from user_collectives_tests()
    for counted in ([0, 1], [1]):
        options = {"num_islands": 2, "counted": counted, "chunk_numbers": 8}
        yield f"outer steps {counted}", partial(run_on_ranks, step_beside_sgd, **options)
    yield from sharded_tests()
    yield from quantized_tests()
    yield "peak gradient memory", partial(run_on_ranks, cuda.peak_gradient_memory)


def user_collectives_tests() -> Iterator[tuple[str, Callable[[], Any]]]:
    """Names and tests, of collectives that users have inside backwards."""
    train = partial(run_on_ranks, user_collectives.train, timeout_s=40)
    in_turns, all_of_them = user_collectives.in_turns, user_collectives.all_of_them
    yield "user collectives, other parameters used", partial(train, uses_both=in_turns, communicates_from=0)
    yield "user collectives, later", partial(train, uses_both=all_of_them, communicates_from=2)
    yield (
        "user collectives, not synchronised",
        partial(train, uses_both=all_of_them, communicates_from=2, micro_batches=2),
    )
    yield "user collectives, hook", partial(train, uses_both=in_turns, communicates_from=0, comm_hook=allreduce_hook)
    yield "user collectives, two modules", partial(run_on_ranks, user_collectives.two_modules)
    yield "user collectives, refused", user_collectives.test_disorder_is_refused
    yield "user collectives, like ddp", partial(user_code.test_training_equals_ddp, "contrastive")
    yield (
        "user collectives, captured",
        partial(run_on_ranks, cuda.a_captured_step_trains_like_others, communicates=True),
    )


def sharded_tests() -> Iterator[tuple[str, Callable[[], Any]]]:
    """Names and tests, of optimizer state that is divided among the ranks."""
    for case in CASES:
        if case != "sparse_embedding":
            setting: dict[str, Any] = {"case": case, "optimizer": "adamw", "tolerance": 10 * ROUNDING}
            yield f"sharded {case}", partial(sharded, **setting)
    for optimizer in sharding.OPTIMIZERS:
        for shard in (True, "parameters"):
            setting = {"case": "mlp", "optimizer": optimizer, "shard": shard, "clip": 0.1, "tolerance": ROUNDING}
            yield f"sharded {optimizer} {shard}", partial(sharded, **setting)
    yield "sharded sgd, exactly", partial(sharded, case="mlp", optimizer="sgd")
    yield "sharded, accumulated", partial(sharded, case="mlp", optimizer="momentum", micro_batches=3)
    for shard in (True, "parameters"):
        yield (
            f"sharded {shard}, memory between steps",
            partial(run_on_ranks, cuda.divided_buckets_hold_no_memory_between_steps, shard=shard),
        )
        yield (
            f"no host synchronisation, sharded {shard}",
            partial(run_on_ranks, cuda.a_step_never_makes_the_host_wait, shard=shard),
        )
        yield (
            f"captured step, sharded {shard}",
            partial(run_on_ranks, cuda.a_captured_step_trains_like_others, shard=shard),
        )
    yield "several streams, sharded", partial(run_on_ranks, cuda.sharded_weights_reach_several_streams)


def quantized_tests() -> Iterator[tuple[str, Callable[[], Any]]]:
    """Names and tests, of gradients that travel as int8."""
    for case in CASES:
        # Where two runs differ by rounding, they round to other integers, too.
        if case not in ROUNDED and case != "buffer_in_forward":
            for training in (
                Training(reduce_dtype="int8"),
                Training(reduce_dtype="int8", bucket_cap_mb=0.001, micro_batches=2),
                Training(reduce_dtype="int8", all_alone=True),
            ):
                setting: dict[str, Any] = {"case": case, "training": training}
                yield f"int8 {case} {training}", partial(run_on_ranks, parity_with_quantized_mean, **setting)
    for shard in (True, "parameters"):
        yield f"int8 sharded {shard}", partial(run_on_ranks, quantized.train_sharded, case="mlp", shard=shard)
    for world_size in (2, 3):  # two ranks exchange all they have, more exchange parts
        yield (
            f"int8 of all sizes, {world_size} ranks",
            partial(run_on_ranks, quantized.buckets_of_all_sizes, world_size=world_size),
        )
    yield "int8 nan", nan_stays
    for shard in (False, True, "parameters"):
        setting = {"shard": shard, "reduce_dtype": "int8"}
        yield f"int8 without waiting {shard}", partial(run_on_ranks, cuda.a_step_never_makes_the_host_wait, **setting)
        yield f"int8 captured {shard}", partial(run_on_ranks, cuda.a_captured_step_trains_like_others, **setting)


def nan_stays() -> None:
    """A NaN of one rank becomes no number on any."""
    for finite in run_on_ranks(quantized.nan_of_rank_one):
        assert [name for name, is_finite in finite.items() if not is_finite] == ["0.bias"]


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


def named(test: Callable[..., None], **options: Any) -> tuple[str, Callable[[], None]]:
    return f"{test.__name__} {options or ''}", partial(test, **options)


REDUCING = [
    named(reducing.test_no_sync_around_backward_alone_is_enough),
    named(reducing.test_calling_a_submodule_synchronises),
    named(reducing.test_second_backward_on_one_forward_synchronises),
    named(reducing.test_parameter_used_only_in_an_earlier_micro_batch_is_reduced),
    named(reducing.test_unfrozen_parameters_are_reduced_and_known_plans_kept),
    named(reducing.test_a_network_that_is_toggled_off_is_not_communicated),
    named(reducing.test_a_late_gradient_is_refused_and_without_overlap_none_is_late),
    named(reducing.test_buckets_leave_while_backward_runs_unless_overlap_is_off),
    named(reducing.test_half_precision_gradients_do_not_overflow),
    named(reducing.test_gradients_live_in_the_buckets),
    named(reducing.test_a_large_gradient_stays_where_it_is),
    named(reducing.test_strides_follow_the_parameter),
    named(reducing.test_weights_and_buffers_come_from_rank_zero),
    named(reducing.test_torch_communication_hooks_run, hook_name="allreduce_hook"),
    named(reducing.test_torch_communication_hooks_run, hook_name="bf16_compress_hook"),
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


def trainer_runs(module: str) -> bool:
    """Whether `module` exits well on two ranks; it prints its own lines."""
    environment = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29712", "NCCL_SOCKET_IFNAME": "lo"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", module],
            env={**environment, "NODE_RANK": str(rank), "LOCAL_RANK": "0", "NCCL_HOSTID": f"host{rank}"},
        )
        for rank in range(2)
    ]
    return [rank.wait(timeout=300) for rank in ranks] == [0, 0]


def main() -> int:
    """Run everything; the exit status says whether all passed."""
    use_gpu()
    failed = 0
    num_tests = 0
    wanted = sys.argv[1:]
    for name, test in tests():
        if wanted and not any(part in name for part in wanted):
            continue
        num_tests += 1
        start = time.monotonic()
        try:
            result = test()
        except Exception:
            failed += 1
            print(f"FAILED {name}\n{traceback.format_exc()}", flush=True)
        else:
            shown = result if result and any(value is not None for value in result) else ""
            print(f"passed {name} ({time.monotonic() - start:.1f} s) {str(shown)[:300]}", flush=True)
    close_pools()
    for module in TRAINER_RUNS:
        if wanted and not any(part in module for part in wanted):
            continue
        num_tests += 1
        failed += not trainer_runs(module)
    print(f"{num_tests - failed} passed, {failed} failed")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
