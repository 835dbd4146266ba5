"""Which operations of torch the reducer adds to a backward."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.jobs.parity import build_reducer
from tests.support.ranks import device


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
