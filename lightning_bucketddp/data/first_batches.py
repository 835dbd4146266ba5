"""Ranks that train on the same batches, because nothing has split their data."""

from __future__ import annotations

import hashlib
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import fields, is_dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from lightning_bucketddp.comm.step_exchange import StepExchange
from lightning_bucketddp.data.loaders import is_even
from lightning_bucketddp.data.sharded_iterable import is_dealt
from lightning_bucketddp.part import RunPart
from lightning_bucketddp.wording import list_some_ranks

_NUM_STEPS = 3
# Of a batch and of each of its tensors: a digest is to cost less than a step of a small model.
_MAX_TENSORS = 16
_MAX_ELEMENTS = 1024


class FirstBatches(RunPart):
    """Compares the first batches of a fit with those of the other ranks, and warns once.

    A digest goes with the message that a step sends in any case. Ranks are said to read the same data if their digests
    agree in the first three steps and are not the same three times: data that is equal by nature (zeros, one sample)
    does not change from step to step. A step in which no two ranks agree ends the comparison.
    """

    def __init__(self, exchange: StepExchange, *, warn: Callable[[str], None]) -> None:
        self._exchange = exchange
        self._warn = warn
        # Those that could give every rank the same, in words, and what to do about it.
        self._loaders: dict[str, str] = {}
        self._steps: list[list[int]] = []
        self._is_decided = False

    def prepare_loader(self, loader: Any, *, is_training: bool) -> Any:
        if is_training and not is_even(loader) and not is_dealt(loader):
            dataset = getattr(loader, "dataset", None)
            over = "" if dataset is None else f" over `{type(dataset).__name__}`"
            self._loaders[f"`train_dataloader` (`{type(loader).__name__}`{over})"] = _remedy(loader)
        return loader

    def see_batch(self, batch: Any) -> None:
        if self._is_decided or not self._loaders:
            return
        if self._exchange.batch_digests:
            self._steps.append(self._exchange.batch_digests)
            self._exchange.batch_digests = []
            self._decide()
        if not self._is_decided:
            # All micro-batches of a step have one digest.
            digest = digest_of(batch, before=self._exchange.batch_digest)
            self._exchange.batch_digest = digest
            self._is_decided = digest == 0  # such batches have nothing to compare

    def _decide(self) -> None:
        ranks_by_digests: dict[tuple[int, ...], list[int]] = defaultdict(list)
        for rank, digests in enumerate(zip(*self._steps, strict=True)):
            if all(digests):
                ranks_by_digests[digests].append(rank)
        # Those that have agreed in every step so far, or the most of them.
        same = max((ranks for ranks in ranks_by_digests.values() if len(ranks) > 1), key=len, default=[])
        self._is_decided = not same or len(self._steps) == _NUM_STEPS
        if same and self._is_decided and len({step[same[0]] for step in self._steps}) > 1:
            ranks = [self._exchange.global_ranks[rank] for rank in same]
            whose = "All ranks" if len(same) == len(self._steps[0]) else list_some_ranks(ranks).capitalize()
            loaders, remedies = " and ".join(self._loaders), " ".join(dict.fromkeys(self._loaders.values()))
            self._warn(
                f"bucketddp: {whose} train on the same data: {loaders} began with equal batches there. A step of"
                f" several ranks then learns no more than a step of one. {remedies}"
            )


def _remedy(loader: object) -> str:
    if not isinstance(loader, DataLoader):
        return "Give each rank a part of the data, by `trainer.global_rank` and `trainer.world_size`."
    if isinstance(loader.dataset, IterableDataset):
        return (
            "Pass `shard_iterable=True` to the strategy, which gives each rank a part of the stream, or split it in the"
            " dataset; if it is random, `rank_seeds=True` gives each rank numbers of its own."
        )
    return "Let the Trainer split it (`use_distributed_sampler=True`), or pass a `DistributedSampler` to the loader."


def digest_of(batch: Any, *, before: int = 0) -> int:
    """Return a number of 48 bits, which a float holds exactly, for `before` and the tensors of `batch`; 0: for none."""
    found = list(islice(_tensors_of(batch), _MAX_TENSORS))
    if not found:
        return before
    digest = hashlib.blake2b(str(before).encode(), digest_size=6)
    for tensor in found:
        digest.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
        with suppress(RuntimeError, TypeError):  # of a kind whose elements cannot be read: sparse, quantized, nested
            # Some elements from all over the tensor, which may be a view of any kind, in one row.
            per_dim = int(_MAX_ELEMENTS ** (1 / max(tensor.dim(), 1)))
            steps = tuple(slice(None, None, max(1, math.ceil(size / per_dim))) for size in tensor.shape)
            digest.update(tensor[steps].reshape(-1).contiguous().view(torch.uint8).numpy().tobytes())
    return int.from_bytes(digest.digest(), "big")


def _tensors_of(tree: Any) -> Iterator[Tensor]:
    if isinstance(tree, Tensor):
        if tree.device.type == "cpu":
            yield tree.detach()
    elif is_dataclass(tree):
        yield from _tensors_of([getattr(tree, field.name, None) for field in fields(tree)])
    elif isinstance(tree, Mapping | list | tuple):
        for value in tree.values() if isinstance(tree, Mapping) else tree:
            yield from _tensors_of(value)
