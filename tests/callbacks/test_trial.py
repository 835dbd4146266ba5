"""Trials: what fails on one rank fails on all, whatever the others wait in, and leaves the process group as it was."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
import torch.distributed as dist

from lightning_bucketddp.callbacks.batch_size_finder import Trials
from lightning_bucketddp.comm.collectives import Collectives
from tests.support.ranks import device, on_ranks, raised_by

COLLECTIVES: dict[str, Callable[[torch.Tensor], object]] = {
    "all_reduce": dist.all_reduce,
    "async": lambda tensor: dist.all_reduce(tensor, async_op=True).wait(),
    "broadcast": lambda tensor: dist.broadcast(tensor, src=0),
    "all_gather": lambda tensor: dist.all_gather([torch.empty_like(tensor) for _ in range(2)], tensor),
    "into_tensor": lambda tensor: dist.all_gather_into_tensor(torch.cat([tensor, tensor]), tensor),
    "object": lambda tensor: dist.all_gather_object([None, None], tensor.tolist()),
    "barrier": lambda _: dist.barrier(),
    "further_group": lambda tensor: dist.all_reduce(tensor, group=_FURTHER[0]),
    "end": lambda _: None,
}
_FURTHER: list[dist.ProcessGroup] = []


def _is_out_of_memory(error: BaseException) -> bool:
    return isinstance(error, RuntimeError) and "out of memory" in str(error)


def _raise(kind: str) -> None:
    if kind == "memory":
        raise RuntimeError("out of memory")
    if kind == "hidden":
        try:
            raise RuntimeError("out of memory")
        finally:
            assert False, "while that was handled"  # noqa: B011, PT015
    raise KeyError(kind)


@on_ranks()
def test_a_trial_fails_on_all_ranks_or_on_none() -> None:
    """Rank 1 fails in some way, and rank 0 waits in some collective."""
    rank, collectives = dist.get_rank(), Collectives(device())
    trials = Trials(collectives, is_out_of_memory=_is_out_of_memory)
    _FURTHER[:] = [dist.new_group()]
    told = "RuntimeError: CUDA out of memory, or that of the host, on rank 1."
    failed = "RuntimeError: Rank 1 has failed in what all ranks were trying. Its own error says why."
    expected = {
        "memory": (told, "RuntimeError: out of memory"),
        "hidden": (told, told),
        "other": (failed, "KeyError: 'other'"),
    }
    for kind, name in itertools.product(expected, COLLECTIVES):

        def attempt(kind: str = kind, name: str = name) -> None:
            with trials.attempt():
                dist.barrier()
                if rank == 1:
                    _raise(kind)
                COLLECTIVES[name](torch.ones(2, device=device()))
                dist.barrier()

        assert raised_by(attempt) == expected[kind][rank], name
        # Nothing is half done.
        with trials.attempt():
            ones = torch.ones(1, device=device())
            dist.all_reduce(ones)
        assert ones.item() == 2
    dist.destroy_process_group(_FURTHER.pop())
    collectives.close_host_groups()
