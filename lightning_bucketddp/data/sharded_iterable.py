"""Sharding of streams: each rank and each worker takes its part of an `IterableDataset`.

Note: dealing
    Every process reads the whole stream, which has to be the same everywhere: shuffled by a seed, if at all. Sample i
    goes to rank i % world_size; of the samples of a rank, as many in a row as make a batch go to one worker, the next
    ones to the next worker. So a rank gets the same batches in the same order with any number of workers, `len` is
    right, and only its last batch may be incomplete. For evaluation the batches of one process are dealt out
    (Note: rounds).

    A checkpoint holds how many samples of the stream all ranks together have trained on, by the training loop's count,
    because loaders are ahead of it. A run that is resumed begins its first pass behind them, on another number of ranks
    perhaps a few before, so that all ranks have as many left. A loader that is shorter than another one beside it, and
    has begun again within the epoch, begins once more.
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
        # Samples of the whole stream that are left out at the beginning of the next pass.
        self.num_read = 0
        # Those left out of this pass, and how many batches the training loop counts before it.
        self.begun = (0, 0)
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
    num_batches_trained: Callable[[], int | None]  # returns None if the epoch is over
    _warnings: set[str] = field(default_factory=set)

    def prepare_loader(self, loader: Any, *, is_training: bool) -> Any:
        loader = getattr(loader, "dealt_from", loader)  # one that was prepared before
        if not isinstance(loader, DataLoader) or not isinstance(loader.dataset, IterableDataset):
            return loader
        if (reason := _why_dealt_already(loader.dataset)) is not None:
            self._warn_once(f"bucketddp: `shard_iterable=True` leaves a dataset as it is: {reason}")
            return loader
        if names := _asks_for_its_part(loader):
            self._warn_once(
                f"bucketddp: `{type(loader.dataset).__name__}` asks by {list_names(names)} which samples to read, and"
                " `shard_iterable=True` deals out what it reads. If it takes a part of the samples by itself, the rest"
                " is never used: let it read all of them, or leave `shard_iterable` out."
            )
        original, batch_size = type(loader), loader.batch_size or 1
        if is_training:
            rank, world_size = self.rank, self.world_size
            members = _stateful(original, self.num_batches_trained, batch_size=batch_size, num_ranks=world_size)
        else:
            rank, world_size = 0, 1
            members = _in_rounds(original, Part(self.rank, self.world_size, seed=0))
        dealt = ShardedIterable(loader.dataset, rank=rank, world_size=world_size, batch_size=batch_size)
        return changed_loader(loader, members, dataset=dealt, dealt_from=loader)

    def _warn_once(self, text: str) -> None:
        if text not in self._warnings:
            self._warnings.add(text)
            self.warn(text)


def _in_rounds(original: Any, part: Part) -> dict[str, Any]:
    """Return the members of a loader that deals out the batches of `original` (Note: rounds)."""
    rounds = Rounds(part, has_last_apart=True)
    return {
        "rounds": rounds,
        "__iter__": lambda this: rounds.deal(original.__iter__(this)),
        "__len__": lambda this: rounds.number_of(original.__len__(this)),
    }


def _stateful(
    original: Any, num_batches_trained: Callable[[], int | None], *, batch_size: int, num_ranks: int
) -> dict[str, Any]:
    """Return the members by which Lightning saves and restores the position of a loader (Note: dealing)."""
    samples_per_batch = batch_size * num_ranks

    def iterate(this: Any) -> Iterator[Any]:
        if this.dataset.num_read == 0:
            this.dataset.begun = (0, 0)
        batches: Iterator[Any] = original.__iter__(this)
        this.dataset.num_read = 0  # workers have copies
        return batches

    def state_dict(this: Any) -> dict[str, int]:
        num_samples, num_batches = this.dataset.begun
        trained = num_batches_trained()
        return {"num_samples": 0 if trained is None else num_samples + (trained - num_batches) * samples_per_batch}

    def load_state_dict(this: Any, state: dict[str, int]) -> None:
        # So that each rank has as many left.
        this.dataset.num_read = state.get("num_samples", 0) // num_ranks * num_ranks
        this.dataset.begun = this.dataset.num_read, num_batches_trained() or 0

    return {
        "__iter__": iterate,
        "state_dict": state_dict,
        "load_state_dict": load_state_dict,
        "num_batches_read": property(lambda this: this.dataset.num_read // samples_per_batch),
    }


def is_dealt(loader: object) -> bool:
    """Return whether each rank has its own part of what `loader` reads."""
    return isinstance(getattr(loader, "dataset", None), ShardedIterable)


def _why_dealt_already(dataset: object) -> str | None:
    """Return who gives each rank and worker its own part of `dataset` already; None: nobody is known to."""
    # torch will not have it for ever.
    if isinstance(dataset, getattr(torch.utils.data, "IterDataPipe", ())):
        return (
            "`DataLoader` itself deals out an `IterDataPipe`, at its `sharding_filter`. One that has none is read in"
            " full by every rank."
        )
    # Hugging Face's, which is not imported for this.
    if getattr(dataset, "_distributed", None) is not None:
        return f"`split_by_node` has given each rank its part of this `{type(dataset).__name__}`."
    return None


def _asks_for_its_part(loader: DataLoader[Any]) -> list[str]:
    """Return the names by which the code that reads samples seems to find out which ones are its own."""
    # Nobody is a worker where there are none.
    wanted = _OF_RANKS | _OF_WORKERS if loader.num_workers > 0 else _OF_RANKS
    used = _names_used_by(loader.worker_init_fn, owner=object)
    datasets: list[Any] = [loader.dataset]
    for dataset in datasets:
        used |= _names_used_by(type(dataset).__iter__, owner=type(dataset))
        # Those that it reads from: one, or several (`ChainDataset`).
        for value in getattr(dataset, "__dict__", {}).values():
            inner = value if isinstance(value, list | tuple) else [value]
            datasets += [one for one in inner if isinstance(one, IterableDataset) and one not in datasets]
    return sorted(used & wanted)


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
