"""Jobs that try something on all ranks, and fail on some."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from lightning_bucketddp.comm.collectives import Collectives
from lightning_bucketddp.comm.trial import Trials
from tests.support.ranks import device

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


def attempt(*, kinds: list[str]) -> dict[tuple[str, str], str]:
    """What is raised here by the trials that fail on rank 1, by how they fail and what rank 0 waits in."""
    collectives = Collectives(device())
    trials = Trials(collectives, is_out_of_memory=_is_out_of_memory)
    _FURTHER[:] = [dist.new_group()]
    outcomes = {}
    for kind in kinds:
        for name, collective in COLLECTIVES.items():
            try:
                with trials.attempt():
                    dist.barrier()
                    if dist.get_rank() == 1:
                        _raise(kind)
                    collective(torch.ones(2, device=device()))
                    dist.barrier()
            except Exception as error:
                outcomes[kind, name] = f"{type(error).__name__}: {error}"
            # Nothing is half done.
            with trials.attempt():
                ones = torch.ones(1, device=device())
                dist.all_reduce(ones)
            assert ones.item() == 2
    dist.destroy_process_group(_FURTHER.pop())
    collectives.close_host_groups()
    return outcomes
