"""Ranks are warned if they train on the same data, and only then."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from lightning_bucketddp.bindings.trainer_lightning import BucketDDPStrategy
from lightning_bucketddp.data.uneven_data import FirstBatches, digest_of
from lightning_bucketddp.wording import wrap
from tests.support.cases import for_each
from tests.support.ranks import run_on_ranks
from tests.support.scripts.trainers import like_torchrun, make_trainer


class Numbers(IterableDataset[Tensor]):
    """Numbers from `start` on, or random ones."""

    def __init__(self, start: int | None = 0) -> None:
        self._start = start

    def __iter__(self) -> Iterator[Tensor]:
        for number in range(40):
            yield torch.rand(3) if self._start is None else torch.full((3,), float(self._start + number))


class Batches:
    """A loader that is no `DataLoader`."""

    def __iter__(self) -> Iterator[Tensor]:
        return iter(Numbers())


class Texts(Dataset[str]):
    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> str:
        return f"text {index}"


def rows(values: Tensor) -> Any:
    return TensorDataset(values.expand(20, 3) if values.dim() == 1 else values)


def loader_of(kind: str) -> Any:
    rank = dist.get_rank()
    different_rows = torch.arange(60.0).reshape(20, 3)
    loaders: dict[str, Any] = {
        "rows": DataLoader(rows(different_rows), batch_size=2),
        "shuffled rows": DataLoader(rows(different_rows), batch_size=2, shuffle=True),
        "stream": DataLoader(Numbers(), batch_size=2),
        "no DataLoader": Batches(),
        "random stream": DataLoader(Numbers(None), batch_size=2),
        "several loaders": {"a": DataLoader(rows(different_rows), batch_size=2), "b": DataLoader(Numbers())},
        "equal on two of three ranks": DataLoader(Numbers(100 if rank == 1 else 0), batch_size=2),
        "equal in the first step only": DataLoader(rows(torch.cat([torch.zeros(2, 3), torch.rand(18, 3) + rank])), 2),
        "another stream on each rank": DataLoader(Numbers(100 * rank), batch_size=2),
        "zeros": DataLoader(rows(torch.zeros(3)), batch_size=2),
        "one sample": DataLoader(rows(torch.tensor([1.0, 2.0, 3.0])), batch_size=2),
        "texts": DataLoader(Texts(), batch_size=2),
    }
    return loaders[kind]


class Module(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))

    def training_step(self, batch: Any) -> Tensor:
        return self.weight.square()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@like_torchrun()
def fit(*, kind: str, options: dict[str, Any] | None = None, **trainer_options: Any) -> tuple[list[str], int]:
    """Return the warnings of this rank, and in how many steps it has compared its data."""
    torch.manual_seed(0)
    trainer = make_trainer(
        BucketDDPStrategy(**options or {}),
        **{"max_epochs": 2, "use_distributed_sampler": False, "limit_train_batches": 8, **trainer_options},
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(Module(), loader_of(kind))
    strategy: Any = trainer.strategy
    compared = strategy._state.first_batches
    assert not isinstance(compared, FirstBatches) or compared._is_decided or not compared._loaders  # at no more cost
    num_steps = len(compared._steps) if isinstance(compared, FirstBatches) else 0
    return [str(one.message) for one in caught if "same data" in str(one.message)], num_steps


SPLIT_ROWS = "Let the Trainer split it (`use_distributed_sampler=True`), or pass a `DistributedSampler` to the loader."
SPLIT_STREAM = (
    "Pass `shard_iterable=True` to the strategy, which gives each rank a part of the stream, or split it in the"
    " dataset; if it is random, `rank_seeds=True` gives each rank numbers of its own."
)
SPLIT_BATCHES = "Give each rank a part of the data, by `trainer.global_rank` and `trainer.world_size`."


def warning(who: str, loaders: str, remedy: str) -> str:
    return wrap(
        f"bucketddp: {who} train on the same data: {loaders} began with equal batches there. A step of several ranks"
        f" then learns no more than a step of one. {remedy}"
    )


ROWS = "`train_dataloader` (`DataLoader` over `TensorDataset`)"
STREAM = "`train_dataloader` (`DataLoader` over `Numbers`)"


@for_each(
    ("kind", "loaders", "remedy"),
    [
        ("rows", ROWS, SPLIT_ROWS),
        ("shuffled rows", ROWS, SPLIT_ROWS),
        ("stream", STREAM, SPLIT_STREAM),
        ("random stream", STREAM, SPLIT_STREAM),
        ("no DataLoader", "`train_dataloader` (`Batches`)", SPLIT_BATCHES),
        ("several loaders", f"{ROWS} and {STREAM}", f"{SPLIT_ROWS} {SPLIT_STREAM}"),
    ],
)
def test_the_same_data_on_all_ranks_is_warned_of_once(kind: str, loaders: str, remedy: str) -> None:
    expected = warning("All ranks", loaders, remedy)
    assert run_on_ranks(fit, kind=kind) == [([expected], 3), ([], 3)]


@for_each(
    "options",
    [{"accumulate_grad_batches": 2}, {"options": {"gradient_weight": "batch_size", "uneven_data": True}}],
)
def test_it_is_noticed_in_other_exchanges_too(options: dict[str, Any]) -> None:
    (texts, _), _ = run_on_ranks(fit, kind="stream", **options)
    assert texts == [warning("All ranks", STREAM, SPLIT_STREAM)]


def test_the_ranks_with_the_same_data_are_named() -> None:
    (texts, _), *_ = run_on_ranks(fit, world_size=3, kind="equal on two of three ranks")
    assert texts == [warning("Ranks 0, 2", STREAM, SPLIT_STREAM)]


@for_each(
    ("kind", "options", "num_steps"),
    [
        # equal by nature
        ("zeros", {}, 3),
        ("one sample", {}, 3),
        ("equal in the first step only", {}, 2),
        # different, as the first step shows
        ("another stream on each rank", {}, 1),
        # nothing to compare
        ("texts", {}, 0),
        # split, or meant to be the same
        ("rows", {"use_distributed_sampler": True}, 0),
        ("stream", {"options": {"shard_iterable": True}}, 0),
        ("rows", {"overfit_batches": 4}, 0),
        # no other rank
        ("rows", {"world_size": 1, "options": {"gradient_weight": "batch_size"}}, 0),
    ],
)
def test_nothing_is_said_of_other_data(kind: str, options: dict[str, Any], num_steps: int) -> None:
    for outcome in run_on_ranks(fit, kind=kind, **options):
        assert outcome == ([], num_steps)


# --- Digests


@dataclass(slots=True)
class Pair:
    first: Any
    second: Any


# Batches whose tensors hold numbers from `n` on.
BATCHES: dict[str, Callable[[int], Any]] = {
    "large": lambda n: (torch.arange(4 * 3 * 64 * 64.0) + n).reshape(4, 3, 64, 64),
    "long": lambda n: torch.arange(5000) + n,
    "a view": lambda n: (torch.arange(1000.0) + n).reshape(10, 100).t()[::3],
    "expanded": lambda n: (torch.arange(3.0) + n).expand(5000, 3),
    "bfloat16": lambda n: (torch.arange(9.0) + n).bfloat16(),
    "bool": lambda n: torch.arange(n, n + 2) > 0,
    "a number": lambda n: torch.tensor(3 + n),
    "nested": lambda n: {"a": [torch.arange(3), (torch.arange(2) + n, "text")], "b": None},
    "dataclass": lambda n: Pair(torch.arange(3) + n, 5),
}


@for_each("kind", BATCHES)
def test_a_digest_is_of_the_content_and_fits_in_a_float(kind: str) -> None:
    batch = BATCHES[kind](0)
    digest = digest_of(batch)
    assert digest == digest_of(BATCHES[kind](0)) == int(float(digest)) > 0
    assert digest not in (digest_of(BATCHES[kind](1)), digest_of(batch, before=1))


@for_each("batch", [torch.eye(3).to_sparse(), torch.ones(3, dtype=torch.complex64).conj(), torch.ones(3, 0)])
def test_a_tensor_that_cannot_be_read_is_no_error(batch: Tensor) -> None:
    assert digest_of(batch) == digest_of(batch)


@for_each("batch", ["text", 5, None, ["a", 1], torch.ones(3, device="meta")])
def test_a_batch_without_tensors_has_no_digest(batch: Any) -> None:
    assert digest_of(batch) == 0
    assert digest_of(batch, before=7) == 7
