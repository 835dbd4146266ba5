"""Jobs that evaluate, and tell which samples each rank has seen and what was logged."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import BatchSampler, Dataset, IterableDataset

NUM_CLASSES = 3


class Numbered(Dataset[tuple[int, float, int]]):
    """Samples that tell their number."""

    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples

    def __getitem__(self, index: int) -> tuple[int, float, int]:
        return index, float(index * index % 97), index % NUM_CLASSES

    def __len__(self) -> int:
        return self.num_samples


class Stream(IterableDataset[Any]):
    def __init__(self, num_samples: int) -> None:
        self.samples = Numbered(num_samples)

    def __iter__(self) -> Iterator[Any]:
        return (self.samples[index] for index in range(len(self.samples)))


class ByParity(BatchSampler):
    """Batches of even numbers, and then of odd ones: as a sampler does that puts what is alike together."""

    def __iter__(self) -> Iterator[list[int]]:
        indices = list(self.sampler)
        for parity in (0, 1):
            some = [index for index in indices if index % 2 == parity]
            yield from (some[at : at + self.batch_size] for at in range(0, len(some), self.batch_size))

    def __len__(self) -> int:
        sizes = [len([index for index in self.sampler if index % 2 == parity]) for parity in (0, 1)]
        return sum(-(-size // self.batch_size) for size in sizes)
