"""Training data that ends earlier on some ranks than on others, and data that all ranks read alike.

By default a rank whose data ends reports that in the next message between the ranks, and if the others go on, all of
them raise: this costs nothing per step. With `extends`, all ranks ask each other at every batch whether any has more;
one that has not repeats its last batch, with weight zero, until all have finished. So every rank runs the same steps,
with every collective of the user's code.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields, is_dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from lightning_bucketddp.comm.step_exchange import MessageKind, StepExchange
from lightning_bucketddp.data.evaluation import is_even, length_of
from lightning_bucketddp.data.sharded_iterable import is_dealt
from lightning_bucketddp.part import RunPart
from lightning_bucketddp.wording import list_some_ranks


@dataclass(eq=False)
class UnevenData:
    """Watches the training data of a fit for ranks that run out of it, or extends it there.

    With `extends`, ranks are asked every `asks_every` batches whether any has more; not at all if that is more than one
    and the lengths of all loaders are known.
    """

    exchange: StepExchange
    extends: bool
    asks_every: int = 1
    _num_own_batches: int | None = None
    _num_batches_begun: int = 0

    @property
    def is_repeating(self) -> bool:
        """Whether the batch that has begun is one that this rank has had before."""
        return self._num_own_batches is not None and self._num_batches_begun > self._num_own_batches

    def begin_batch(self) -> None:
        """Count a batch that is trained on. Loaders are ahead, so what they gave is counted apart."""
        self._num_batches_begun += 1

    def prepare(self, loader: Any, *, is_only_loader: Callable[[Any], bool]) -> Any:
        """Return a loader like `loader` that notifies the other ranks when it ends, or goes on until theirs do."""
        if is_even(loader):
            return loader
        length = self._agreed_length(loader)

        def iterate(this: Any) -> Iterator[Any]:
            # The batches that a resumed run has read before; asked before the next pass begins.
            num_read: int = getattr(loader, "num_batches_read", 0)
            batches = _remaining(iter(loader))
            if not is_only_loader(this):
                return self._one_of_several(batches)
            if not self.extends:
                return self._watched(batches, length, num_read=num_read)
            return self._extended(batches, length, num_read=num_read, begin_again=lambda: iter(loader))

        members: dict[str, Any] = {"__iter__": iterate}
        if self.extends and length != math.inf:
            members["__len__"] = lambda _: length
        return _standing_for(loader, members)

    def _agreed_length(self, loader: Any) -> float:
        """Return this rank's number of batches, or the largest of all ranks' if all are to have as many."""
        length = length_of(loader)
        if not self.extends:
            return length
        self.exchange.send(MessageKind.FETCH, weight=-1 if length == math.inf else length)
        received = self.exchange.receive()
        return math.inf if received.least.weight == -1 else int(received.greatest.weight)

    def _watched(self, batches: Iterator[Any], length: float, *, num_read: int) -> Iterator[Any]:
        has_sent = False
        for num_given, batch in enumerate(batches, start=num_read + 1):
            if num_given == length:  # no other batch will be asked for
                self.exchange.send(MessageKind.OUT_OF_DATA)
                has_sent = True
            yield batch
        if not has_sent:
            self.exchange.send(MessageKind.OUT_OF_DATA)

    def _extended(
        self, batches: Iterator[Any], length: float, *, num_read: int, begin_again: Callable[[], Iterator[Any]]
    ) -> Iterator[Any]:
        self._num_own_batches = None
        self._num_batches_begun = num_read
        nothing = object()
        batch: Any = nothing
        for num_given in itertools.count(num_read):
            following = nothing if self._num_own_batches is not None else next(batches, nothing)
            if following is not nothing:
                batch = following
            elif self._num_own_batches is None:
                self._num_own_batches = num_given
            is_first = num_given == num_read
            if self.asks_every == 1 or is_first or (length == math.inf and num_given % self.asks_every == 0):
                if not self._anyone_has(following is not nothing, is_begin=num_given == 0):
                    return
            elif num_given == length:
                return
            if batch is nothing:  # its data had ended before the run was resumed: any batch will do, with weight zero
                batch = next(begin_again())
            yield batch

    def _anyone_has(self, has_batch: bool, *, is_begin: bool) -> bool:
        """Return whether any rank has another batch. All ranks must ask this."""
        self.exchange.send(MessageKind.FETCH, weight=has_batch)
        received = self.exchange.receive()
        if is_begin and received.least.weight < received.greatest.weight:
            without = [message.weight for message in received.by_rank].index(0)
            raise ValueError(
                f"Rank {self.exchange.global_ranks[without]} has no training data at all. `uneven_data` needs at least"
                " one batch on every rank."
            )
        return bool(received.greatest.weight)

    def _one_of_several(self, batches: Iterator[Any]) -> Iterator[Any]:
        # With the first batch, not by `iter`: Lightning ends a fit properly only after that.
        if self.extends:
            raise ValueError(
                "`uneven_data` works with one training dataloader, not with several. Combine them in one dataset."
            )
        yield from batches


class _StandIn:
    """Stands for a loader that its user keeps, and may change: what is set in one is set in both."""

    def __init__(self, loader: Any) -> None:
        vars(self)["stands_for"] = loader

    __class__ = property(lambda self: type(vars(self)["stands_for"]))

    def __getattr__(self, name: str) -> Any:
        if name == "stands_for" or name.startswith("__"):  # asked for while it is copied or unpickled
            raise AttributeError(name)
        return getattr(self.stands_for, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.stands_for, name, value)


def _standing_for(loader: Any, members: dict[str, Any]) -> Any:
    """Return a `_StandIn` for `loader`; `members` replace those of its class."""
    special = [name for name in ("__len__", "__getitem__", "__next__") if hasattr(type(loader), name)]
    same = {name: lambda this, *args, _name=name: getattr(this.stands_for, _name)(*args) for name in special}
    return type(type(loader).__name__, (_StandIn,), {**same, **members})(loader)


def _remaining(batches: Iterator[Any]) -> Iterator[Any]:
    """Yield what `batches` gives, without `iter`: a loader that is its own iterator would begin again."""
    nothing = object()
    while (batch := next(batches, nothing)) is not nothing:
        yield batch


_NUM_STEPS = 3
# Limits for each batch and each of its tensors: a digest is to cost less than a step of a small model.
_MAX_TENSORS = 16
_MAX_ELEMENTS = 1024


@dataclass(eq=False)
class FirstBatches(RunPart):
    """Compares the first batches of a fit with those of the other ranks, and warns once.

    A digest travels with the message of each step. Ranks read the same data if their digests agree in the first three
    steps and change between them: data that is equal by nature (zeros, one sample) does not change from step to step. A
    step in which no two ranks agree ends the comparison.
    """

    exchange: StepExchange
    warn: Callable[[str], None]
    # Loaders that could give every rank the same, in words, and what to do about it.
    _loaders: dict[str, str] = field(default_factory=dict)
    _steps: list[list[int]] = field(default_factory=list)
    _is_decided: bool = False

    def prepare_loader(self, loader: Any, *, is_training: bool) -> Any:
        if is_training and not is_even(loader) and not is_dealt(loader):
            dataset = getattr(loader, "dataset", None)
            over = "" if dataset is None else f" over `{type(dataset).__name__}`"
            self._loaders[f"`train_dataloader` (`{type(loader).__name__}`{over})"] = _remedy(loader)
        return loader

    def inspect_batch(self, batch: Any) -> None:
        if self._is_decided or not self._loaders:
            return
        if self.exchange.batch_digests:
            self._steps.append(self.exchange.batch_digests)
            self.exchange.batch_digests = []
            self._decide()
        if not self._is_decided:
            # All micro-batches of a step have one digest.
            digest = digest_of(batch, before=self.exchange.batch_digest)
            self.exchange.batch_digest = digest
            self._is_decided = digest == 0  # such batches have nothing to compare

    def _decide(self) -> None:
        ranks_by_digests: dict[tuple[int, ...], list[int]] = defaultdict(list)
        for rank, digests in enumerate(zip(*self._steps, strict=True)):
            if all(digests):
                ranks_by_digests[digests].append(rank)
        # The largest group of ranks that have agreed in every step so far.
        same = max((ranks for ranks in ranks_by_digests.values() if len(ranks) > 1), key=len, default=[])
        self._is_decided = not same or len(self._steps) == _NUM_STEPS
        if same and self._is_decided and len({step[same[0]] for step in self._steps}) > 1:
            ranks = [self.exchange.global_ranks[rank] for rank in same]
            whose = "All ranks" if len(same) == len(self._steps[0]) else list_some_ranks(ranks).capitalize()
            loaders, remedies = " and ".join(self._loaders), " ".join(dict.fromkeys(self._loaders.values()))
            self.warn(
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
        with suppress(RuntimeError, TypeError):  # the elements of sparse, quantized and nested tensors cannot be read
            # Some elements from everywhere in the tensor, which may be a view of any kind, in one row.
            per_dim = int(_MAX_ELEMENTS ** (1 / max(tensor.dim(), 1)))
            steps = tuple(slice(None, None, max(1, math.ceil(size / per_dim))) for size in tensor.shape)
            digest.update(tensor[steps].reshape(-1).contiguous().view(torch.uint8).numpy().tobytes())
    return int.from_bytes(digest.digest(), "big")


def _tensors_of(tree: Any) -> Iterator[Tensor]:
    if isinstance(tree, Tensor):
        if tree.device.type == "cpu":
            yield tree.detach()
    elif is_dataclass(tree):
        yield from _tensors_of([getattr(tree, each.name, None) for each in fields(tree)])
    elif isinstance(tree, Mapping | list | tuple):
        for value in tree.values() if isinstance(tree, Mapping) else tree:
            yield from _tensors_of(value)
