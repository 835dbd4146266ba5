"""Which gradients will come in a backward, asked of its graph when the first one comes.

Note: foreseen gradients
    A bucket waits for all its members, and those behind it wait for it. When layers are left out, one that never comes
    would have all of them wait until backward ends. The autograd engine knows at the first gradient which nodes it will
    execute, so a bucket need not wait for the others.

    What runs in a graph of its own inside of another one (reentrant checkpointing) the engine does not know of at that
    time. So what the graph tells is first compared with what comes, in one backward in which nothing depends on it,
    and then in each: if it was wrong, it is not asked again. A gradient for which its bucket has not waited is an
    error that names it, as always.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch.autograd.graph import Node

from lightning_bucketddp.reducer.bucket_set import BucketSet


class NoForesight:
    """Nothing is asked: all gradients are waited for."""

    is_due = False

    def look(self) -> None:
        """Ask the graph of the backward that runs, and have its buckets wait for what will come."""

    def verify(self, missing: Sequence[int]) -> None:
        """Compare what was foreseen with what is `missing` when the backward ends."""


class Foresight(NoForesight):
    """Of one backward that begins without gradients (Note: foreseen gradients).

    `is_due` until it has looked.
    """

    def __init__(self, bucket_set: BucketSet, nodes: Mapping[int, Node]) -> None:
        self.is_due = True
        self._bucket_set = bucket_set
        self._nodes = nodes
        self._missing: list[int] | None = None

    def look(self) -> None:
        self.is_due = False
        indices = self._bucket_set.index_of_bucket
        self._missing = [i for i in indices if not torch._C._will_engine_execute_node(self._nodes[i])]
        for bucket in self._bucket_set.buckets:
            bucket.arrivals.begin()
        if self._bucket_set.graph_was_right:
            for i in self._missing:
                arrivals = self._bucket_set.buckets[indices[i]].arrivals
                arrivals.pending -= max(self._bucket_set.num_firings.get(i, 0), 1)

    def verify(self, missing: Sequence[int]) -> None:
        if self._missing is not None:
            self._bucket_set.graph_was_right = sorted(missing) == sorted(self._missing)


NO_FORESIGHT = NoForesight()


def foresee(bucket_set: BucketSet, nodes: Mapping[int, Node]) -> NoForesight:
    """Return what tells which gradients will not come in a backward that begins.

    Args:
        bucket_set: whose gradients they are.
        nodes: what adds up the gradient, by parameter.
    """
    if bucket_set.graph_was_right is False or not nodes.keys() >= bucket_set.index_of_bucket.keys():
        return NO_FORESIGHT
    has_gradients = any(param.grad is not None for bucket in bucket_set.buckets for param in bucket.params)
    return NO_FORESIGHT if has_gradients else Foresight(bucket_set, nodes)
