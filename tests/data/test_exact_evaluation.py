"""Validation, test and prediction on several ranks see every sample once, and log what one process logs."""

from __future__ import annotations

import functools
import itertools
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.callbacks import BasePredictionWriter
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, SequentialSampler, SubsetRandomSampler
from torchmetrics import MeanMetric

from lightning_bucketddp import BucketDDPStrategy
from lightning_bucketddp.comm.collectives import Collectives
from lightning_bucketddp.strategies.exact_evaluation import gather_predictions
from tests.support.cases import for_each
from tests.support.programs import SCRIPTS, run
from tests.support.ranks import RankFailed, on_ranks, raised_by, run_on_ranks
from tests.support.scripts.evaluations import ByParity, Numbered, Stream
from tests.support.scripts.fabrics import make_fabric
from tests.support.scripts.trainers import like_torchrun, make_trainer


class Batched(Numbered):
    """Gives batches of one by itself, so that the loader makes none."""

    def __getitem__(self, index: int) -> Any:
        return [torch.tensor([value]) for value in super().__getitem__(index)]


@dataclass(frozen=True)
class Case:
    """What is evaluated: loaders of so many samples, and how."""

    num_samples: tuple[int, ...]
    batch_size: int | None = 4
    kind: str = "plain"
    shuffle: bool = False
    mode: Literal["min_size", "max_size_cycle", "max_size", "sequential"] = "sequential"
    exact: bool = True
    trainer: dict[str, Any] = field(default_factory=dict)

    def loaders(self) -> Any:
        loaders = [self._loader(num_samples) for num_samples in self.num_samples]
        return CombinedLoader(loaders, self.mode) if self.mode != "sequential" else loaders

    def _loader(self, num_samples: int) -> DataLoader[Any]:
        dataset: Any = Numbered(num_samples)
        if self.batch_size is None:
            return DataLoader(Batched(num_samples), batch_size=None)
        if self.kind == "stream":
            return DataLoader(Stream(num_samples), batch_size=self.batch_size)
        if self.kind == "custom batches":
            return DataLoader(dataset, batch_sampler=ByParity(range(num_samples), self.batch_size, False))
        options: dict[str, Any] = {"batch_size": self.batch_size}
        if self.kind == "subset":
            return DataLoader(dataset, sampler=SubsetRandomSampler(range(0, num_samples, 2)), **options)
        if self.kind == "half":
            return DataLoader(dataset, sampler=SequentialSampler(range(num_samples // 2)), **options)
        if self.kind == "half, in batches":
            half = SubsetRandomSampler(range(num_samples // 2))
            return DataLoader(dataset, batch_sampler=BatchSampler(half, self.batch_size, drop_last=False))
        if self.kind == "distributed":
            return DataLoader(dataset, sampler=DistributedSampler(dataset, shuffle=False), **options)
        return DataLoader(dataset, shuffle=self.shuffle, **options)


class Counting(LightningModule):
    """Logs in every way that is synchronised, and meets the other ranks in every step."""

    def __init__(self, *, is_combined: bool = False) -> None:
        super().__init__()
        self.is_combined = is_combined
        self.layer = nn.Linear(1, 1)
        self.mean = MeanMetric()
        self.seen: list[list[int]] = []
        self.num_steps = 0

    def training_step(self, batch: list[Tensor]) -> Tensor:
        return self.layer(batch[1].float()[:, None]).mean()

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        # In a combined loader's batch, one for each loader; None: it has ended.
        for number, part in enumerate([batch] if isinstance(batch[0], Tensor) else batch):
            if part is not None:
                self._count(f"{number}", *part)
        # Hangs, or adds up steps of different numbers, if the ranks do not take the same steps.
        steps = torch.tensor([batch_idx, 1])
        dist.all_reduce(steps)
        assert steps.tolist() == [batch_idx * dist.get_world_size(), dist.get_world_size()]
        self.num_steps += 1

    def _count(self, name: str, indices: Tensor, values: Tensor, _labels: Tensor) -> None:
        self.seen.append(indices.tolist())
        values = values.float()
        epoch: dict[str, Any] = {"on_epoch": True, "on_step": False, "sync_dist": True}
        if not self.is_combined:  # then Lightning cannot tell the size of a batch
            self.log(f"value{name}", values.mean(), **epoch)
            self.log(f"stepped{name}", values.mean(), on_step=True, on_epoch=True, sync_dist=True)
        self.log(f"sized{name}", values.mean(), batch_size=len(values), **epoch)
        for fx in ("sum", "min", "max"):
            self.log(f"{fx}{name}", getattr(values, fx)(), reduce_fx=fx, **epoch)
        self.mean(values)
        self.log(f"mean{name}", self.mean)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


class Data(LightningDataModule):
    """Gives new loaders each time it is asked."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.case = case
        self.num_asked = 0

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(Numbered(8), batch_size=2)

    def val_dataloader(self) -> Any:
        self.num_asked += 1
        return self.case.loaders()


@like_torchrun()
def evaluate(cases: list[Case], stage: str = "validate") -> list[dict[str, Any]]:
    """What this rank has seen, batch by batch, and what it has logged, for each of `cases`."""
    outcomes = []
    for case in cases:
        # Unlike in `ddp`, nothing depends on ranks that draw the same random numbers.
        torch.manual_seed(dist.get_rank())
        strategy = BucketDDPStrategy(exact_evaluation=case.exact)
        trainer = make_trainer(strategy, **{"max_epochs": 1, "num_sanity_val_steps": 0, **case.trainer})
        module, data = Counting(is_combined=case.mode != "sequential"), Data(case)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            if stage == "fit":
                trainer.fit(module, data)
            else:
                getattr(trainer, stage)(module, case.loaders(), verbose=False)
        logged = {name: value.item() for name, value in trainer.callback_metrics.items()}
        logged = {name: value for name, value in logged.items() if not name.endswith("_step")}
        seen = {"seen": module.seen, "num_steps": module.num_steps, "num_asked": data.num_asked}
        is_warned = any("it is recommended to use `Trainer(devices=1" in str(one.message) for one in caught)
        outcomes.append({"logged": logged, "is_warned": is_warned, **seen})
    return outcomes


@like_torchrun()
def evaluate_with_fabric(num_samples: list[int], **options: Any) -> list[list[list[int]]]:
    """The batches that this rank gets of each of several loaders."""
    torch.manual_seed(dist.get_rank())
    fabric = make_fabric("bucketddp")
    batches = []
    for case in (Case((number,), **options) for number in num_samples):
        [loader] = case.loaders()
        exact = fabric.setup_dataloaders(fabric.strategy.exact_dataloader(loader))
        batches.append([indices.tolist() for indices, *_ in exact])
    return batches


class Writer(BasePredictionWriter):
    """Notes what it would write: by sample number, what was predicted."""

    def __init__(self) -> None:
        super().__init__("batch_and_epoch")
        self.by_batch: list[tuple[int, float]] = []
        self.by_epoch: list[tuple[int, float]] = []

    def write_on_batch_end(self, trainer: Any, pl_module: Any, prediction: Any, batch_indices: Any, *_: Any) -> None:
        self.by_batch += zip(batch_indices, prediction["value"].tolist(), strict=True)

    def write_on_epoch_end(self, trainer: Any, pl_module: Any, predictions: Any, batch_indices: Any) -> None:
        by_loader = [predictions] if len(batch_indices) == 1 else predictions
        for batches, indices in zip(by_loader, batch_indices, strict=True):
            for prediction, numbers in zip(batches, indices, strict=True):
                self.by_epoch += zip(numbers, prediction["value"].tolist(), strict=True)


@dataclass
class Named:
    """An object of the user's own."""

    names: list[str]


class Predicting(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)

    def predict_step(self, batch: list[Tensor], batch_idx: int, dataloader_idx: int = 0) -> Any:
        steps = torch.tensor([batch_idx, 1])
        dist.all_reduce(steps)
        assert steps.tolist() == [batch_idx * dist.get_world_size(), dist.get_world_size()]
        indices, values, _ = batch
        # A view of much more than it is; what depends on the batch; and what is no tensor.
        rows = values.float()[:, None].expand(-1, 1000)
        return {
            "value": rows[:, 0] * 2,
            "view": rows[:, :2],
            "of_batch": (values.sum().item(), len(values)),
            "names": [f"sample {index}" for index in indices.tolist()],
            "own": Named([str(index) for index in indices.tolist()]),
        }


@like_torchrun()
def predict(cases: list[Case], **options: Any) -> list[dict[str, Any]]:
    """What `trainer.predict` returns here, what a writer has seen, and our warnings, for each of `cases`."""
    outcomes = []
    for case in cases:
        torch.manual_seed(dist.get_rank())
        writer = Writer()
        callbacks = [] if case.kind == "stream" else [writer]  # Lightning has no indices of a stream
        trainer = make_trainer(BucketDDPStrategy(**options), callbacks=callbacks, **case.trainer)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            returned = trainer.predict(Predicting(), case.loaders())
        warned = [str(one.message) for one in caught if "gather_predictions" in str(one.message)]
        seen = {"by_batch": writer.by_batch, "by_epoch": writer.by_epoch}
        outcomes.append({"returned": returned, "warned": warned, **seen})
    return outcomes


def memory_of_gathering(num_batches: int, num_bytes: int) -> tuple[int, int]:
    """How many bytes this process needs to gather so many predictions of each rank, and how many it receives."""
    collectives = Collectives(torch.device("cpu"))
    by_loader = [[torch.ones(num_bytes, dtype=torch.uint8) for _ in range(num_batches)]]
    Path("/proc/self/clear_refs").write_text("5")  # begin to look for the peak anew
    before = _peak_memory()
    gather_predictions(by_loader, collectives)
    return _peak_memory() - before, (len(by_loader[0]) - num_batches) * num_bytes


def _peak_memory() -> int:
    [peak] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")]
    return int(peak.split()[1]) * 1024


CASES = {
    "more batches on some ranks": Case((103,)),
    "shuffled": Case((21,), shuffle=True),
    "drawn by the user's sampler": Case((41,), kind="subset"),
    "selected by torch's sampler": Case((41,), kind="half"),
    "in batches of torch's": Case((41,), kind="half, in batches"),
    "the user's batches": Case((17,), kind="custom batches", batch_size=3),
    "two loaders": Case((20, 9)),
    "two loaders at once, the longer one is uneven": Case((23, 12), mode="max_size"),
    "fewer samples than ranks": Case((3,), batch_size=2),
    "no batches": Case((10,), batch_size=None),
    "two loaders, one sample in the second": Case((9, 1)),
}


def test_every_sample_counts_once() -> None:
    ranks = run_on_ranks(evaluate, world_size=3, cases=list(CASES.values()))
    [alone] = run_on_ranks(evaluate, world_size=1, cases=list(CASES.values()))
    for number, (name, case) in enumerate(CASES.items()):
        outcomes, expected = [rank[number] for rank in ranks], alone[number]
        assert len({outcome["num_steps"] for outcome in outcomes}) == 1, name
        assert not any(outcome["is_warned"] for outcome in outcomes), name
        for outcome in outcomes:
            assert outcome["logged"] == pytest.approx(expected["logged"], rel=1e-6), name
        seen = {index for outcome in outcomes for batch in outcome["seen"] for index in batch}
        assert seen == {index for batch in expected["seen"] for index in batch}, name
        assert all(len(batch) <= (case.batch_size or 1) for outcome in outcomes for batch in outcome["seen"])
        if case.kind != "custom batches":
            sizes = [[len(batch) for batch in outcome["seen"]] for outcome in outcomes]
            assert all(of_rank == sizes[0] for of_rank in sizes), name


@for_each("mode", ["min_size", "max_size", "max_size_cycle"])
def test_loaders_that_are_combined_take_as_many_steps_on_all_ranks(mode: Any) -> None:
    ranks = [outcome for [outcome] in run_on_ranks(evaluate, cases=[Case((21, 10), mode=mode)])]
    # 9 samples of the first loader on both ranks, and 3 more on one; 5 and 5 of the second.
    assert [outcome["num_steps"] for outcome in ranks] == ([2, 2] if mode == "min_size" else [4, 4])
    sizes = [[len(batch) for batch in outcome["seen"]] for outcome in ranks]
    together = {"min_size": [4, 4, 4, 1], "max_size": [4, 4, 4, 1, 1, 3], "max_size_cycle": [4, 4, 4, 1, 1, 4, 3, 1]}
    assert sizes == [together[mode]] * 2
    assert ranks[0]["logged"] == ranks[1]["logged"]


# Options of the Trainer, how many batches a rank sees in each validation, and how often the data module is asked.
FITS: list[tuple[dict[str, Any], list[int], int]] = [
    ({"limit_val_batches": 3, "num_sanity_val_steps": 1}, [1, 3], 1),
    ({"limit_val_batches": 0.5}, [2], 1),
    ({"overfit_batches": 2}, [2], 1),
    ({"max_epochs": 3, "reload_dataloaders_every_n_epochs": 2}, [5, 5, 5], 2),
]


def test_validation_in_a_fit() -> None:
    ranks = run_on_ranks(evaluate, cases=[Case((31,), trainer=trainer) for trainer, *_ in FITS], stage="fit")
    for rank, outcomes in enumerate(ranks):
        share = list(range(rank, 28, 2))
        batches = [*(share[at : at + 4] for at in range(0, len(share), 4)), [28, 29, 30]]
        for (_, num_batches, num_asked), outcome, first in zip(FITS, outcomes, ranks[0], strict=True):
            assert outcome["seen"] == [batch for num in num_batches for batch in batches[:num]]
            assert outcome["num_asked"] == num_asked
            assert outcome["logged"] == first["logged"]


@on_ranks()
@like_torchrun()
def test_a_mean_of_integers_is_not_cut_off_and_leaves_them_as_they_are() -> None:
    trainer = make_trainer(BucketDDPStrategy())
    trainer.validate(Counting(), Case((4,)).loaders(), verbose=False)
    own = torch.tensor(1 + dist.get_rank())
    assert trainer.strategy.reduce(own) == 1.5
    assert own == 1 + dist.get_rank()


def test_what_lightning_leaves_alone_is_left_alone_and_samples_are_repeated_as_ddp_does_if_asked() -> None:
    untouched = Case((5,), trainer={"use_distributed_sampler": False})
    others = [Case((5,), kind="stream"), Case((5,), kind="distributed"), Case((5,), exact=False)]
    for rank, outcomes in enumerate(run_on_ranks(evaluate, cases=[untouched, *others])):
        all_samples, stream, of_user, as_ddp = (outcome["seen"] for outcome in outcomes)
        assert all_samples == stream == [[0, 1, 2, 3], [4]]
        assert of_user == as_ddp == [[[0, 2, 4], [1, 3, 0]][rank]]
        assert outcomes[-1]["is_warned"] == (rank == 0)


@for_each("options", [{}, {"shuffle": True}, {"kind": "custom batches"}, {"batch_size": None}])
def test_fabric_evaluates_every_sample_once(options: dict[str, Any]) -> None:
    num_samples = [1, 9, 10, 31]
    ranks = run_on_ranks(evaluate_with_fabric, num_samples=num_samples, **options)
    for number, *batches in zip(num_samples, *ranks, strict=True):
        samples = itertools.chain.from_iterable
        assert sorted(samples(samples(batches))) == list(range(number))
        if number > 1 and "batch_size" not in options and "kind" not in options:  # there is something to split
            assert len(batches[0]) == len(batches[1])


@on_ranks()
@like_torchrun()
def test_fabric_refuses_to_divide_what_has_no_end_or_is_divided() -> None:
    fabric = make_fabric("bucketddp")
    for kind, found in (("stream", "a stream"), ("distributed", "what its sampler has divided already")):
        [loader] = Case((9,), kind=kind).loaders()
        raised = raised_by(functools.partial(fabric.strategy.exact_dataloader, loader))
        assert raised == f"ValueError: `exact_dataloader` divides samples among the ranks, and cannot divide {found}."


PREDICTED = {
    "more batches on some ranks": Case((23,)),
    "fewer batches than ranks": Case((3,)),
    "selected by torch's sampler": Case((41,), kind="half"),
    "in batches of torch's": Case((41,), kind="half, in batches"),
    "the user's batches": Case((13,), kind="custom batches", batch_size=3),
    "two loaders": Case((9, 4), batch_size=2),
    "a stream": Case((9,), kind="stream", batch_size=2),
}


def batches_in(outcome: dict[str, Any], case: Case) -> list[dict[str, Any]]:
    by_loader = [outcome["returned"]] if len(case.num_samples) == 1 else outcome["returned"]
    return list(itertools.chain.from_iterable(by_loader))


def plain(batch: dict[str, Any]) -> dict[str, Any]:
    return {name: part.tolist() if isinstance(part, torch.Tensor) else part for name, part in batch.items()}


@pytest.mark.parametrize("world_size", [2, 4])
def test_predictions_of_all_ranks_are_those_of_one_process(world_size: int) -> None:
    cases = list(PREDICTED.values())
    [expected] = run_on_ranks(predict, world_size=1, cases=cases)
    ranks = run_on_ranks(predict, world_size=world_size, cases=cases, gather_predictions=True, shard_iterable=True)
    for case, alone, *outcomes in zip(cases, expected, *ranks, strict=True):
        returned = batches_in(outcomes[0], case)
        assert [plain(batch) for batch in returned] == [plain(batch) for batch in batches_in(alone, case)]
        # What another rank has made a view of a larger tensor comes alone.
        assert {batch["view"].untyped_storage().nbytes() == batch["view"].nbytes for batch in returned[1:2]} <= {True}
        assert outcomes[0]["warned"] == []
        for kind in ("by_batch", "by_epoch"):
            assert sorted(sample for outcome in outcomes for sample in outcome[kind]) == sorted(alone[kind])


def test_a_limit_of_predicted_batches_is_one_of_each_rank() -> None:
    case = Case((40,), trainer={"limit_predict_batches": 2})
    [limited], _ = run_on_ranks(predict, cases=[case], gather_predictions=True)
    assert [name for batch in limited["returned"] for name in batch["names"]] == [f"sample {i}" for i in range(16)]


def test_predictions_that_were_not_divided_are_returned_once_or_refused() -> None:
    read_in_full = Case((5,), batch_size=2, trainer={"use_distributed_sampler": False})
    [[outcome], _] = run_on_ranks(predict, cases=[read_in_full], gather_predictions=True)
    assert [index for index, _ in outcome["by_epoch"]] == list(range(5))
    assert "returns rank zero's own predictions" in " ".join(outcome["warned"][0].split())
    with pytest.raises(RankFailed, match=r"dataloader 0 has a `DistributedSampler` already"):
        run_on_ranks(predict, cases=[Case((5,), kind="distributed")], gather_predictions=True)


def test_predictions_stay_where_they_are_made_by_default() -> None:
    ranks = run_on_ranks(predict, cases=[Case((5,), batch_size=2), Case((1,))])
    for number, num_samples in enumerate((5, 1)):
        predicted = [index for rank in ranks for index, _ in rank[number]["by_batch"]]
        assert sorted(predicted) == list(range(num_samples))
    assert [[len(batch["value"]) for batch in rank[0]["returned"]] for rank in ranks] == [[2, 1], [2]]


def test_rank_zero_needs_memory_for_the_result_and_little_more() -> None:
    num_bytes, num_batches = 4 * 2**20, 32
    (needed, received), _ = run_on_ranks(memory_of_gathering, num_batches=num_batches, num_bytes=num_bytes)
    assert received == num_batches * num_bytes
    # To hold all batches as they travel, beside what they become, would take twice as much.
    assert received <= needed < 1.6 * received


@pytest.mark.long
@pytest.mark.parametrize("launcher", ["popen", "fork", "spawn", "torchrun"])
def test_every_launcher(launcher: str, tmp_path: Path) -> None:
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command: list[str | Path] = [*(torchrun if launcher == "torchrun" else []), SCRIPTS / "evaluate.py", launcher]
    root = "pytorch_lightning" if launcher in ("spawn", "torchrun") else "lightning.pytorch"
    finished = run(*command, root=root, directory=tmp_path)
    assert finished.returncode == 0, finished.output
    in_order = [[2.0 * number for number in range(at, min(at + 4, 103))] for at in range(0, 103, 4)]
    assert finished.results["predict"] == in_order
    mean = sum(i * i % 97 for i in range(103)) / 103
    assert finished.results["test"] == [pytest.approx({"mean": mean, "count": 103})]
    assert finished.results["steps"] == [14, 14]
