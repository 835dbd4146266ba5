"""What users of `ddp` do in evaluation works, with numbers of samples that the ranks cannot share evenly."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import EarlyStopping
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader
from torchmetrics import CatMetric, MeanMetric, Metric, MetricCollection, SumMetric
from torchmetrics.classification import MulticlassAccuracy, MulticlassRecall
from torchmetrics.regression import SpearmanCorrCoef
from torchmetrics.retrieval import RetrievalMAP

from lightning_bucketddp import BucketDDPStrategy
from tests.support.ranks import on_ranks, run_on_ranks
from tests.support.scripts.evaluations import Numbered
from tests.support.scripts.trainers import like_torchrun, make_trainer


class Evaluated(LightningModule):
    """Trains nothing to speak of; a test and a validation are the same."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.told: list[Any] = []

    def training_step(self, batch: list[Tensor]) -> Tensor:
        return self.layer(batch[1].float()[:, None]).mean()

    def evaluate(self, batch: list[Tensor]) -> None:
        raise NotImplementedError

    def validation_step(self, batch: list[Tensor]) -> None:
        self.evaluate(batch)

    def test_step(self, batch: list[Tensor]) -> None:
        self.evaluate(batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


class Gathers(Evaluated):
    """Collects outputs, and gathers them in a step and at the end."""

    def evaluate(self, batch: list[Tensor]) -> None:
        self.told.append(batch[0])
        gathered: Any = self.all_gather({"indices": batch[0], "pair": [batch[1], batch[2]]})
        assert gathered["indices"].shape == (dist.get_world_size(), len(batch[0])) == gathered["pair"][0].shape

    def on_validation_epoch_end(self) -> None:
        everything: Any = self.all_gather(torch.cat(self.told))
        self.told = everything.flatten().tolist()

    on_test_epoch_end = on_validation_epoch_end


class GatheredOneByOne(Metric):
    """Keeps a tensor for each sample, as metrics of detections do, and begins to count in integers."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("boxes", [], dist_reduce_fx=None)
        self.add_state("weight", torch.tensor(0), dist_reduce_fx="sum")
        self.add_state("by_class", torch.tensor(0.0), dist_reduce_fx="sum")
        self.boxes: list[Tensor]
        self.weight: Tensor
        self.by_class: Tensor

    def update(self, indices: Tensor) -> None:
        self.boxes += [torch.full((2, 4), float(index)) for index in indices]
        self.weight = self.weight + indices.double().sum()
        self.by_class = self.by_class + torch.stack([indices.float().sum(), indices.float().square().sum()])

    def compute(self) -> Tensor:
        boxes = torch.cat(self.boxes) if self.boxes else torch.zeros(0, 4)
        return torch.stack([boxes.double().sum(), self.weight, *self.by_class.double()])


class Measures(Evaluated):
    """Has metrics everywhere, and logs in many ways."""

    def __init__(self) -> None:
        super().__init__()
        self.one_by_one = GatheredOneByOne()
        self.retrieval, self.ranks, self.values = RetrievalMAP(), SpearmanCorrCoef(), CatMetric()
        self.group = MetricCollection([MulticlassAccuracy(3, average="micro"), MulticlassRecall(3, average="micro")])
        self.in_a_dict = {"mean": MeanMetric()}
        self.after_each = SumMetric()
        self.so_far = SumMetric()

    def evaluate(self, batch: list[Tensor]) -> None:
        indices, values, labels = batch
        self.trainer.strategy.batch_to_device(batch)
        scores = (indices * 7 % 11) / 11
        self.one_by_one.update(indices)
        self.retrieval.update(scores, indices % 2 == 0, indexes=indices // 4)
        self.ranks.update(scores, values.float())
        self.values.update(values)
        self.group.update((indices * 7 // 5) % 3, labels)
        self.in_a_dict["mean"].update(values)
        # A metric keeps what it has computed, and ranks meet in it.
        self.so_far.update(values)
        self.so_far.compute()
        self.log("float64", values.mean(), sync_dist=True, on_epoch=True, batch_size=len(values))
        self.log("total", values.sum(), sync_dist=True, on_epoch=True, reduce_fx="sum")

    def on_test_batch_end(self, outputs: Any, batch: list[Tensor], batch_idx: int, dataloader_idx: int = 0) -> None:
        self.after_each.update(batch[1])
        self.log("later", batch[1].sum(), sync_dist=True, on_epoch=True, reduce_fx="sum")
        # One that is emptied in every batch has nothing to take back.
        self.after_each.compute()
        self.after_each.reset()

    def on_test_epoch_end(self) -> None:
        self.told = [
            self.one_by_one.compute().tolist(),
            self.retrieval.compute().item(),
            self.ranks.compute().item(),
            sorted(torch.as_tensor(self.values.compute()).reshape(-1).tolist()),
            {name: value.item() for name, value in self.group.compute().items()},
            self.in_a_dict["mean"].compute().item(),
            self.after_each.compute().item(),
            self.so_far.compute().item(),
        ]


class Counts(Callback):
    """Has a metric of its own, and asks for a batch as some do who run the model once more."""

    def __init__(self) -> None:
        self.metric = SumMetric()

    def on_test_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        trainer.strategy.batch_to_device(batch)
        self.metric.update(batch[0])

    def on_test_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.total = self.metric.compute().item()


def run_stage(module: Evaluated, loader: Any, *, stage: str = "test", callbacks: Any = (), **options: Any) -> Any:
    trainer_options = {"max_epochs": 1, "num_sanity_val_steps": 0, **options.pop("trainer", {})}
    trainer = make_trainer(BucketDDPStrategy(**options), callbacks=list(callbacks), **trainer_options)
    if stage == "fit":
        trainer.fit(module, DataLoader(Numbered(8), batch_size=2), loader)
    else:
        trainer.test(module, loader, verbose=False)
    return {name: value.item() for name, value in trainer.callback_metrics.items()}


@on_ranks()
@like_torchrun()
def test_outputs_are_gathered_in_steps_and_at_the_end() -> None:
    for number in (101, 7, 3, 1):
        module = Gathers()
        run_stage(module, DataLoader(Numbered(number), batch_size=4), stage="fit")
        assert set(module.told) == set(range(number))
        assert len(module.told) <= number + 3  # what is repeated


@like_torchrun()
def measure(num_samples: list[int]) -> list[Any]:
    outcomes = []
    for number in num_samples:
        module, callback = Measures(), Counts()
        logged = run_stage(module, DataLoader(Numbered(number), batch_size=4), callbacks=[callback])
        outcomes.append((module.told, logged, callback.total))
    return outcomes


@pytest.mark.parametrize("world_size", [2, 3])
def test_what_is_logged_and_measured_is_that_of_one_process(world_size: int) -> None:
    num_samples = [29, 30, 9, 5]
    [alone] = run_on_ranks(measure, world_size=1, num_samples=num_samples)
    for rank in run_on_ranks(measure, world_size=world_size, num_samples=num_samples):
        for (told, logged, counted), expected in zip(rank, alone, strict=True):
            assert told == [pytest.approx(value, rel=1e-6) for value in expected[0]]
            assert logged == pytest.approx(expected[1])
            assert counted == expected[2]


class Pairs(BatchSampler):
    """An anchor and what belongs to it, which lie far apart."""

    def __iter__(self) -> Iterator[list[int]]:
        samples = list(self.sampler)
        half = len(samples) // 2
        return ([anchor, positive] for anchor, positive in zip(samples[:half], samples[half:], strict=True))


class UnsizedPairs(Pairs):
    def __len__(self) -> int:
        raise TypeError("nobody knows how many")


class EndlessPairs(UnsizedPairs):
    def __iter__(self) -> Iterator[list[int]]:
        return itertools.cycle(super().__iter__())


class Agreement(Evaluated):
    def __init__(self, num_pairs: int) -> None:
        super().__init__()
        self.num_pairs = num_pairs

    def evaluate(self, batch: list[Tensor]) -> None:
        indices = batch[0]
        agrees = float(len(indices) == 2 and indices[1] - indices[0] == self.num_pairs)
        dist.all_reduce(torch.ones(1))
        self.log("agreement", agrees, sync_dist=True, on_epoch=True, batch_size=1)
        self.log("number", 1.0, sync_dist=True, on_epoch=True, reduce_fx="sum")


@on_ranks()
@like_torchrun()
def test_batches_of_a_users_sampler_are_never_cut() -> None:
    outcomes = []
    for pairs in (Pairs, UnsizedPairs, EndlessPairs):
        loader = DataLoader(Numbered(2 * 5), batch_sampler=pairs(range(2 * 5), 2, drop_last=False))
        limit = {"limit_test_batches": 2} if pairs is EndlessPairs else {}
        outcomes.append(run_stage(Agreement(5), loader, trainer=limit))
    sized, unsized, endless = outcomes
    assert sized == unsized == {"agreement": 1.0, "number": 5.0}
    assert endless == {"agreement": 1.0, "number": 4.0}


class LooksAgain(Callback):
    """Takes the first batch once more while others have been fetched already, as callbacks do that show samples."""

    def on_test_batch_end(self, trainer: Any, *_: Any) -> None:
        next(iter(trainer.test_dataloaders))


@on_ranks()
@like_torchrun()
def test_batches_count_once_if_a_callback_looks_at_the_first_one_meanwhile() -> None:
    loader = DataLoader(Numbered(2 * 5), batch_sampler=UnsizedPairs(range(2 * 5), 2, drop_last=False))
    assert run_stage(Agreement(5), loader, callbacks=[LooksAgain()]) == {"agreement": 1.0, "number": 5.0}


class OwnValue(Evaluated):
    """Logs the value of each rank, which callbacks of that rank watch."""

    def evaluate(self, batch: list[Tensor]) -> None:
        self.log("own", batch[1].mean())
        self.log("shared", batch[1].mean(), sync_dist=True)


@on_ranks(3)
@like_torchrun()
def test_a_rank_without_samples_watches_the_value_of_one_that_has_some() -> None:
    module = OwnValue()
    stopping = EarlyStopping("own", patience=5, check_finite=True)
    loader = DataLoader(Numbered(2), batch_size=4)
    logged = run_stage(module, loader, stage="fit", callbacks=[stopping], trainer={"max_epochs": 3})
    assert module.trainer.current_epoch == 3
    assert (logged["own"], logged["shared"]) == ((0.0, 1.0, 0.0)[dist.get_rank()], pytest.approx(0.5))
