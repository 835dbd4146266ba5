"""JSON among the ranks, and in how many collectives."""

from __future__ import annotations

import torch.distributed as dist

from lightning_bucketddp.comm.collectives import Collectives
from tests.support.ranks import device


class _Counting(Collectives):
    num_operations = 0

    def gather(self, tensor):  # type: ignore[no-untyped-def]
        self.num_operations += 1
        return super().gather(tensor)

    def _broadcast(self, tensor, source):  # type: ignore[no-untyped-def]
        self.num_operations += 1
        super()._broadcast(tensor, source)


def share_texts(num_chars: list[list[int]]) -> list[tuple[list[str], str, list[int]]]:
    """Gather, and broadcast from rank 1, texts of `num_chars[i][rank]` characters: what came, and in how many."""
    collectives = _Counting(device())
    shared = []
    for sizes in num_chars:
        counts = [0]
        own = str(dist.get_rank()) * sizes[dist.get_rank()]
        gathered = collectives.gather_json(own)
        counts.append(collectives.num_operations)
        broadcast = collectives.broadcast_json(own, source=1)
        counts.append(collectives.num_operations)
        shared.append((gathered, broadcast, [counts[1], counts[2] - counts[1]]))
        collectives.num_operations = 0
    return shared
