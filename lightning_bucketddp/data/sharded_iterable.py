"""Sharding of streams: each rank and each worker takes its part of an `IterableDataset`.

Note: dealing
    Every process reads the whole stream, which has to be the same everywhere: shuffled by a seed, if at all. Sample i
    goes to rank i % world_size; of the samples of a rank, as many in a row as make a batch go to one worker, the next
    ones to the next worker. So a rank gets the same batches in the same order with any number of workers, `len` is
    right, and only its last batch may be incomplete. For evaluation the batches of one process are dealt out
    (Note: rounds). Where a resumed run begins: Note: position.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sized
from dataclasses import dataclass, field
from inspect import unwrap
from itertools import islice
from types import CodeType, FunctionType
from typing import Any, cast

import torch.utils.data
from torch.utils.data import DataLoader, IterableDataset

from lightning_bucketddp.data.evaluation import Part, Rounds, changed_loader
from lightning_bucketddp.part import RunPart
from lightning_bucketddp.wording import list_names

# Names by which code asks which part of the data is its own: in a worker, or on a rank.
_OF_WORKERS = {"get_worker_info"}
_OF_RANKS = {
    *("get_rank", "get_world_size", "global_rank", "world_size", "num_replicas", "DistributedSampler"),
    *("RANK", "WORLD_SIZE"),
}


class ShardedIterable(IterableDataset[Any]):
    """The part of `dataset` that this process reads (Note: dealing). Attributes are those of `dataset`."""

    def __init__(self, dataset: IterableDataset[Any], *, rank: int, world_size: int, batch_size: int) -> None:
        self.dataset = dataset
        # How many samples of the whole stream the next pass leaves out at its beginning.
        self.num_read = 0
        self._rank = rank
        self._world_size = world_size
        self._batch_size = batch_size

    def __iter__(self) -> Iterator[Any]:
        # For one pass. A worker may live longer, and has a copy of its own.
        start, self.num_read = self.num_read + self._rank, 0
        own = islice(self.dataset, start, None, self._world_size)
        worker = torch.utils.data.get_worker_info()
        if worker is None:
            return own
        num_workers, number, size = worker.num_workers, worker.id, self._batch_size
        return (sample for index, sample in enumerate(own) if index // size % num_workers == number)

    def __len__(self) -> int:
        return len(range(self._rank, len(cast(Sized, self.dataset)), self._world_size))

    def __getattr__(self, name: str) -> Any:
        if name == "dataset" or name.startswith("__"):  # asked for while it is copied or unpickled
            raise AttributeError(name)
        return getattr(self.dataset, name)


@dataclass(kw_only=True, eq=False)
class IterableSharding(RunPart):
    """Deals out the streams of a run (Note: dealing)."""

    rank: int
    world_size: int
    warn: Callable[[str], None]
    _warnings: set[str] = field(default_factory=set)

    def prepare_loader(self, loader: Any, *, is_training: bool) -> Any:
        if not isinstance(loader, DataLoader) or not isinstance(loader.dataset, IterableDataset):
            return loader
        if (reason := _why_dealt_already(loader.dataset)) is not None:
            self._warn_once(f"bucketddp: `shard_iterable=True` leaves a dataset as it is: {reason}")
            return loader
        if names := _rank_names_in(loader):
            self._warn_once(
                f"bucketddp: `{type(loader.dataset).__name__}` asks by {list_names(names)} which samples to read, and"
                " `shard_iterable=True` deals out what it reads. If it takes a part of the samples by itself, the rest"
                " is never used: let it read all of them, or leave `shard_iterable` out."
            )
        members: dict[str, Any] = {}
        rank, world_size = (self.rank, self.world_size) if is_training else (0, 1)
        if not is_training:
            original, rounds = type(loader), Rounds(Part(self.rank, self.world_size, seed=0), has_last_apart=True)
            members = {
                "rounds": rounds,
                "__iter__": lambda this: rounds.deal(original.__iter__(this)),
                "__len__": lambda this: rounds.number_of(original.__len__(this)),
            }
        dataset = ShardedIterable(loader.dataset, rank=rank, world_size=world_size, batch_size=loader.batch_size or 1)
        return changed_loader(loader, members, dataset=dataset)

    def _warn_once(self, text: str) -> None:
        if text not in self._warnings:
            self._warnings.add(text)
            self.warn(text)


def is_dealt(loader: object) -> bool:
    """Return whether each rank has its own part of what `loader` reads."""
    return isinstance(getattr(loader, "dataset", None), ShardedIterable)


def _why_dealt_already(dataset: object) -> str | None:
    """Return who gives each rank and worker its own part of `dataset` already; None: nobody is known to."""
    # torch is going to remove it.
    if isinstance(dataset, getattr(torch.utils.data, "IterDataPipe", ())):
        return (
            "`DataLoader` itself deals out an `IterDataPipe`, at its `sharding_filter`. One that has none is read in"
            " full by every rank."
        )
    # Hugging Face's, which is not imported for this.
    if getattr(dataset, "_distributed", None) is not None:
        return f"`split_by_node` has given each rank its part of this `{type(dataset).__name__}`."
    return None


def _rank_names_in(loader: DataLoader[Any]) -> list[str]:
    """Return the names by which the code that reads samples seems to find out which ones are its own."""
    used = _names_used_by(loader.worker_init_fn, owner=object)
    datasets: list[Any] = [loader.dataset]
    for dataset in datasets:
        used |= _names_used_by(type(dataset).__iter__, owner=type(dataset))
        # Those that it reads from: one, or several (`ChainDataset`).
        for value in getattr(dataset, "__dict__", {}).values():
            inner = value if isinstance(value, list | tuple) else [value]
            datasets += [one for one in inner if isinstance(one, IterableDataset) and one not in datasets]
    # Without workers nothing depends on `get_worker_info`.
    return sorted(used & (_OF_RANKS | _OF_WORKERS if loader.num_workers > 0 else _OF_RANKS))


def _names_used_by(function: object, *, owner: type) -> set[str]:
    """Return the names in the code of `function` and of what it calls: methods of `owner`, functions of its module."""
    names: set[str] = set()
    functions = [function]
    for one in functions:
        one = getattr(one, "func", getattr(one, "__func__", one))  # of a `partial`, of a static or bound method
        if not isinstance(one, FunctionType):
            continue
        code = unwrap(one)
        found = _names_in(code.__code__) - names
        names |= found
        for name in found:
            functions += [vars(cls)[name] for cls in owner.__mro__ if name in vars(cls)]
            called = code.__globals__.get(name)
            functions += [called] if getattr(called, "__module__", None) == code.__module__ else []
    return names


def _names_in(code: CodeType) -> set[str]:
    """Return the names of variables and attributes, and the strings, among which are those of the environment."""
    inner = [const for const in code.co_consts if isinstance(const, CodeType)]
    strings = [const for const in code.co_consts if isinstance(const, str)]
    return {*code.co_names, *code.co_freevars, *strings}.union(*map(_names_in, inner))
