"""When a backward raises on one rank, nobody takes the step, and what is saved is the state before it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import OnExceptionCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_bucketddp import BucketDDPStrategy
from lightning_bucketddp.bindings.fabric_lightning import BucketDDPStrategy as FabricBucketDDPStrategy
from tests.support.doomed_ranks import doomed_ranks
from tests.support.scripts.faults import write
from tests.support.scripts.trainers import make_trainer

# In this batch, on one rank, after the first and before the last gradient.
FAILS_IN = 4
SMALL_BUCKETS_MB = 8 / 2**20


class Failing(torch.autograd.Function):
    """Passes on what it gets, and raises in backward."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor) -> Tensor:
        return inputs.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        raise RuntimeError("boom")


class Steps(LightningModule):
    """Weights of which each moves by -1 in each step, whatever the batch."""

    def __init__(
        self, *, fails_on: int = 1, num_unused: int = 0, overrides_backward: bool = False, fails_at: int = 3
    ) -> None:
        super().__init__()
        self._fails_at = fails_at
        self.weights = nn.ParameterList([torch.zeros(4) for _ in range(6)])
        self.unused = nn.ParameterList([torch.zeros(4) for _ in range(num_unused)])
        self._fails_on = fails_on
        self._overrides_backward = overrides_backward

    def loss(self, batch_idx: int, rank: int) -> Tensor:
        fails = batch_idx == FAILS_IN and rank == self._fails_on and not self._overrides_backward
        loss = torch.zeros(())
        for number, weight in enumerate(self.weights):
            used = Failing.apply(weight) if fails and number == self._fails_at else weight
            loss = loss + used.sum()
        # Before the first gradient there is.
        return Failing.apply(loss) if fails and self._fails_at < 0 else loss

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.loss(batch_idx, self.global_rank)

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        loss.backward()
        if self._overrides_backward and self.trainer.fit_loop.batch_idx == FAILS_IN:
            assert self.global_rank != self._fails_on, "boom"

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1.0)


class Witness(Callback):
    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        seen = {"weights": [w.tolist() for w in pl_module.weights], "error": f"{type(exception).__name__}: {exception}"}
        write(self._directory / f"seen{trainer.global_rank}.json", seen)


def fit(*, directory: Path, accumulate: int, module: dict[str, Any], **options: Any) -> None:
    trainer = make_trainer(
        BucketDDPStrategy(bucket_cap_mb=SMALL_BUCKETS_MB, **options),
        devices=2,
        max_epochs=1,
        accumulate_grad_batches=accumulate,
        enable_checkpointing=True,
        callbacks=[OnExceptionCheckpoint(directory / "rescued"), Witness(directory)],
    )
    trainer.fit(Steps(**module), DataLoader(TensorDataset(torch.zeros(40, 1)), batch_size=2))


@pytest.mark.parametrize(
    ("module", "accumulate", "options"),
    [
        pytest.param({"fails_on": 0, "num_unused": 2}, 1, {}, id="rank zero, unused parameters"),
        pytest.param({}, 2, {}, id="no_sync"),  # batch 4 is the first of two
        pytest.param({"overrides_backward": True}, 1, {}, id="overridden backward"),
        pytest.param({}, 1, {"reduce_dtype": "int8"}, id="int8"),
    ],
)
def test_nobody_takes_a_step_in_which_a_backward_failed(
    module: dict[str, Any], accumulate: int, options: dict[str, Any], tmp_path: Path
) -> None:
    with doomed_ranks(fit, directory=tmp_path, module=module, accumulate=accumulate, **options) as ranks:
        ended = ranks.wait()
    assert 0 not in ended.exit_codes
    num_steps = FAILS_IN // accumulate
    expected = [[-1.0 * num_steps] * 4] * 6
    failed = module.get("fails_on", 1)
    assert "boom" in ended.results[f"seen{failed}"]["error"]
    assert f"Rank {failed} (process" in ended.results[f"seen{1 - failed}"]["error"]
    for rank in (0, 1):
        # Blocks of int8 have a scale, which is rounded.
        assert torch.allclose(torch.tensor(ended.results[f"seen{rank}"]["weights"]), torch.tensor(expected), rtol=1e-6)
    saved = torch.load(tmp_path / "rescued" / "on_exception.ckpt", weights_only=True)
    assert saved["global_step"] == num_steps
    weights = [saved["state_dict"][f"weights.{number}"].tolist() for number in range(6)]
    assert weights == ended.results["seen0"]["weights"]


def train_with_fabric(*, directory: Path) -> None:
    """Catch what a backward raises before its first gradient, and go on."""
    fabric = Fabric(accelerator="cpu", devices=2, strategy=FabricBucketDDPStrategy(bucket_cap_mb=SMALL_BUCKETS_MB))
    fabric.launch()
    module = Steps(fails_at=-1)
    model, optimizer = fabric.setup(module, torch.optim.SGD(module.parameters(), lr=1.0))
    model.mark_forward_method("loss")
    errors: list[str] = []
    for step in range(FAILS_IN + 3):
        optimizer.zero_grad()
        loss = model.loss(step, fabric.global_rank)
        try:
            fabric.backward(loss)
        except RuntimeError as error:
            errors.append(str(error))
        else:
            optimizer.step()
    weights = [w.tolist() for w in module.weights]
    write(directory / f"seen{fabric.global_rank}.json", {"weights": weights, "errors": errors})


def test_nobody_goes_on_with_fabric_even_if_the_exception_is_caught(tmp_path: Path) -> None:
    with doomed_ranks(train_with_fabric, directory=tmp_path) as ranks:
        ended = ranks.wait()
    for rank in (0, 1):
        assert ended.results[f"seen{rank}"]["weights"] == [[-1.0 * FAILS_IN] * 4] * 6
    first, *others = ended.results["seen1"]["errors"]
    assert (first, len(others)) == ("boom", 2)
    # Without "boom": a program that catches by text would catch this for the rest of the run.
    assert all("Rank 1 cannot go on: a backward has failed while ranks" in error for error in others)
    assert not any("boom" in error for error in others)
    first, *others = ended.results["seen0"]["errors"]
    assert "Rank 1 (process" in first
    assert all("Rank 0 cannot go on: a backward has failed" in error for error in others)


class Forgiving(Steps):
    """Raises in one backward on all ranks, and leaves the batch out, as after an out-of-memory error."""

    automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> None:  # type: ignore[override]
        self._fails_on = self.global_rank
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        try:
            self.manual_backward(self.loss(batch_idx, self.global_rank))
            optimizer.step()
        except RuntimeError:
            optimizer.zero_grad()


def fit_and_catch(*, directory: Path) -> None:
    trainer = make_trainer(BucketDDPStrategy(), devices=2, max_epochs=1, callbacks=[Witness(directory)])
    trainer.fit(Forgiving(), DataLoader(TensorDataset(torch.zeros(2 * (FAILS_IN + 1), 1))))


def test_a_fit_does_not_end_well_after_a_last_backward_that_all_ranks_have_caught(tmp_path: Path) -> None:
    with doomed_ranks(fit_and_catch, directory=tmp_path) as ranks:
        ended = ranks.wait()
    assert 0 not in ended.exit_codes
    for rank in (0, 1):
        seen = ended.results[f"seen{rank}"]
        assert f"Rank {rank} cannot go on: a backward has failed" in seen["error"]
        assert seen["weights"] == [[-1.0 * FAILS_IN] * 4] * 6


class AfterTheExchange(Steps):
    """Raises once on rank 1 in front of a step, which rank 0 takes."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if self.global_rank == self._fails_on and self.global_step == FAILS_IN:
            self._fails_on = -1
            raise RuntimeError("boom")


def fit_again(*, directory: Path) -> None:
    module, data = AfterTheExchange(fails_at=6), DataLoader(TensorDataset(torch.zeros(12, 1)))
    trainers = [make_trainer(BucketDDPStrategy(), devices=2, max_epochs=1) for _ in range(2)]

    def error_of(trainer: Any) -> str:
        try:
            trainer.fit(module, data)
        except RuntimeError as error:
            return str(error)
        return ""

    errors = [error_of(trainer) for trainer in (trainers[0], *trainers)]
    weights = [w.tolist() for w in module.weights]
    write(directory / f"seen{trainers[0].global_rank}.json", {"weights": weights, "errors": errors})


def test_a_trainer_whose_ranks_have_failed_at_different_steps_does_not_fit_again(tmp_path: Path) -> None:
    with doomed_ranks(fit_again, directory=tmp_path) as ranks:
        ended = ranks.wait()
    assert ended.exit_codes == [0, 0], ended.output
    for rank in (0, 1):
        seen = ended.results[f"seen{rank}"]
        first, refused, none = seen["errors"]
        assert "boom" in first
        assert "different steps (rank 0: step 5 in epoch 0, rank 1: step 4 in epoch 0)" in refused
        assert not none
        # Another Trainer goes on from the step that rank 0 has taken.
        assert seen["weights"] == [[-1.0 * (FAILS_IN + 1 + 6)] * 4] * 6


class FailsAtTheEnd(LightningModule):
    """Raises on rank 1 in the second run, when the other ranks need nothing of it any more."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.number = 0

    def training_step(self, batch: Any) -> Tensor:
        self.check_run()
        return self.weight.sum()

    def predict_step(self, batch: Any) -> None:
        self.check_run()

    def check_run(self) -> None:
        numbers: Any = self.all_gather(torch.tensor(self.number))
        assert numbers.tolist() == [self.number] * 2, "the ranks are in different runs"

    def on_predict_epoch_end(self) -> None:
        self.fail()

    def on_fit_end(self) -> None:
        self.fail()

    def fail(self) -> None:
        if self.number == 1 and self.global_rank == 1:
            raise RuntimeError("boom")

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1.0)


def run_again(*, run: str, directory: Path) -> None:
    module, errors = FailsAtTheEnd(), []
    for module.number in range(3):
        trainer = make_trainer(BucketDDPStrategy(), devices=2, max_epochs=1)
        try:
            getattr(trainer, run)(module, DataLoader(TensorDataset(torch.zeros(4, 1))))
            errors.append("")
        except RuntimeError as error:
            errors.append(str(error))
    write(directory / f"seen{trainer.global_rank}.json", {"errors": errors})


@pytest.mark.parametrize("run", ["predict", "fit"])
def test_a_rank_that_fails_when_the_others_are_done_is_with_them_in_the_next_run(run: str, tmp_path: Path) -> None:
    with doomed_ranks(run_again, run=run, directory=tmp_path) as ranks:
        ended = ranks.wait()
    assert ended.exit_codes == [0, 0], ended.output
    assert [ended.results[f"seen{rank}"]["errors"] for rank in range(2)] == [[""] * 3, ["", "boom", ""]]
