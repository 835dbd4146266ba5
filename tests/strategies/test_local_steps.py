"""Steps that islands take without the others: the same numbers as DiLoCo's, and fewer bytes between them."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, Trainer, callbacks
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_bucketddp import BucketDDPMonitor
from lightning_bucketddp.bindings.trainer_lightning import BucketDDPStrategy
from lightning_bucketddp.callbacks.batch_size_finder import _COLLECTIVES
from lightning_bucketddp.config import LocalSteps
from lightning_bucketddp.recording.schema import read_run
from lightning_bucketddp.replicas.consistency import ReplicaDivergedError
from tests.reducer.test_batch_weighting import make_loader
from tests.support.cases import for_each
from tests.support.doomed_ranks import doomed_ranks
from tests.support.ranks import on_ranks, raised_by, run_on_ranks
from tests.support.scripts.faults import Fault, fit
from tests.support.scripts.models import Regression, loader
from tests.support.scripts.trainers import like_torchrun, lines_logged, make_trainer

PLAIN: dict[str, Any] = {"outer_lr": 1.0, "outer_momentum": 0.0}
DECAY = 0.75
Weights = dict[str, Any]


def weights_of(module: nn.Module) -> Weights:
    return {name: tensor.tolist() for name, tensor in module.state_dict().items()}


class Adaptive(Regression):
    """With an optimizer that has a state, a schedule, and a layer that has buffers."""

    def __init__(self, *, has_schedule: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1))
        self._has_schedule = has_schedule

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.5)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}] if self._has_schedule else []


class Wide(Adaptive):
    """With enough weights for scales to be few among them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 512), nn.Tanh(), nn.Linear(512, 1))


class Dyadic(Regression):
    """Numbers of so few digits that nothing is rounded."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2, 1, bias=False))
        nn.init.constant_(self.layers[0].weight, 0.5)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.125)


class Taught(Regression):
    """With a mean teacher, which follows the weights and is not trained, and something large that stays as it is.

    Its optimizer makes of a mean of gradients what it makes of them.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        self.teacher = copy.deepcopy(self.layers).requires_grad_(False)
        self.backbone = nn.Parameter(torch.ones(1000), requires_grad=False)

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)
        for mine, student in zip(self.teacher.parameters(), self.layers.parameters(), strict=True):
            mine.data.mul_(DECAY).add_(student.data, alpha=1 - DECAY)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def dyadic_loader() -> DataLoader[Any]:
    inputs = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0], [1.0, -1.0]] * 4)
    targets = torch.tensor([[1.0], [0.5], [-1.0], [2.0]] * 4)
    return DataLoader(TensorDataset(inputs, targets), batch_size=2)


class Witness(Callback):
    """Writes down what this rank has at each place, and what it has sent to others in each batch."""

    def __init__(self) -> None:
        self.after_batches: list[Weights] = []
        self.at_validation: list[Weights] = []
        self.at_epoch_end: list[Weights] = []
        self.learning_rates: list[float] = []
        self.calls: list[list[int]] = [[]]

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, *_: Any) -> None:
        self.after_batches.append({name: param.tolist() for name, param in pl_module.named_parameters()})
        self.learning_rates.append(trainer.optimizers[0].param_groups[0]["lr"])
        self.calls.append([])

    def on_validation_start(self, trainer: Trainer, pl_module: Any) -> None:
        self.at_validation.append(weights_of(pl_module))

    def on_train_epoch_end(self, trainer: Trainer, pl_module: Any) -> None:
        self.at_epoch_end.append(weights_of(pl_module))

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Note the bytes of each collective of this process, by batch."""
        group_class: Any = dist.ProcessGroup
        members = vars(group_class)
        originals = {name: members[name] for name in _COLLECTIVES if name in members}

        def noted(name: str) -> Any:
            def call(group: Any, *args: Any, **kwargs: Any) -> Any:
                tensors = args[0] if args and isinstance(args[0], list) else args[:1]
                self.calls[-1].append(sum(t.nbytes for t in tensors if isinstance(t, Tensor)))
                return originals[name](group, *args, **kwargs)

            return call

        with ExitStack() as patches:
            for name in originals:
                patches.enter_context(patch.object(group_class, name, noted(name)))
            yield


class Corrupts(Callback):
    """Flips a weight of one rank behind the back of everybody, when an outer step has made all equal."""

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        chunk = trainer.strategy._state.local_steps._outer._chunks[0]  # type: ignore[attr-defined]
        if trainer.global_step == 2 and trainer.global_rank == 1:
            chunk.weights[0] += 1


class Thaws(Callback):
    """Trains the first layer from the second epoch on."""

    def on_fit_start(self, trainer: Trainer, pl_module: Any) -> None:
        pl_module.layers[0].requires_grad_(False)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: Any) -> None:
        pl_module.layers[0].requires_grad_(trainer.current_epoch > 0)


@like_torchrun()
def train(
    kind: type[Regression] = Adaptive,
    *,
    strategy: str | None = None,
    of_trainer: dict[str, Any] | None = None,
    also: Sequence[Callback] = (),
    **options: Any,
) -> dict[str, Any]:
    """Train ten batches on two ranks, five on four; what each rank had at each place."""
    module, witness = kind(), Witness()
    trainer = make_trainer(
        strategy or BucketDDPStrategy(**options),
        callbacks=[witness, *also],
        **{"max_epochs": 1, "num_sanity_val_steps": 0, **(of_trainer or {})},
    )
    with witness.counting():
        trainer.fit(
            module,
            dyadic_loader() if kind is Dyadic else loader(),
            loader() if "val_check_interval" in (of_trainer or {}) else None,
        )
    stats = getattr(getattr(trainer.strategy, "reducer", None), "stats", None)
    return {
        **vars(witness),
        "final": weights_of(module),
        "num_outer_steps": getattr(stats, "num_outer_steps", None),
        "outer_bytes": getattr(stats, "outer_bytes", None),
        "num_bytes": sum(param.nbytes for param in module.parameters()),
    }


def same_batches() -> DataLoader[Any]:
    """Five batches, each rank's all the same: wherever an epoch is resumed, the data is the same."""
    inputs = torch.randn(8, 4, generator=torch.Generator().manual_seed(dist.get_rank())).repeat(5, 1)
    return DataLoader(TensorDataset(inputs, inputs.sum(dim=1, keepdim=True)), batch_size=8)


class SavesAt(Callback):
    def __init__(self, step: int, path: Path) -> None:
        self._step, self._path = step, path

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step == self._step:
            trainer.save_checkpoint(self._path)


class _AtStart(Callback):
    """The state of the optimizer when training begins."""

    def __init__(self) -> None:
        self.moments: list[float] = []

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        states = [state["exp_avg"] for state in trainer.optimizers[0].state.values()]
        self.moments = [float(moment.sum()) for moment in states]


@like_torchrun()
def save_and_resume(
    *, path: Path, resume: bool, strategy: str | None = None, with_scaler: bool = False, **options: Any
) -> dict[str, Any]:
    """Save after 7 steps of training, within a round; or go on from there."""
    # Between two batches Lightning saves before it steps schedules, so that a run that is resumed is a step behind.
    module = Adaptive(has_schedule=False)
    at_start = _AtStart()
    plugins: list[Any] = []
    if with_scaler:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** (8 + dist.get_rank()), growth_interval=4)
        plugins = [MixedPrecision("16-mixed", "cpu", scaler=scaler)]
    trainer = make_trainer(
        strategy or BucketDDPStrategy(**options),
        max_epochs=3,
        use_distributed_sampler=False,
        plugins=plugins,
        callbacks=[at_start, *([] if resume else [SavesAt(7, path)])],
    )
    trainer.fit(module, same_batches(), ckpt_path=path if resume else None)
    scale = scaler.get_scale() if with_scaler else None
    return {"final": weights_of(module), "moments": at_start.moments, "scale": scale}


class Spoiled(Adaptive):
    """Has infinite weights and moments on one rank at the end of the second round."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)
        if batch_idx == 5 and self.global_rank == 1:
            bias = self.layers[3].bias
            for tensor in (bias.data, optimizer.state[bias]["exp_avg"]):
                tensor.fill_(torch.inf)


@like_torchrun()
def spoil(*, on_nonfinite: Literal["warn", "raise", "skip"]) -> dict[str, Any]:
    module = Spoiled()
    strategy = BucketDDPStrategy(local_steps=LocalSteps(3, "rank"), on_nonfinite=on_nonfinite)
    trainer = make_trainer(strategy, max_epochs=1)
    with lines_logged("lightning_bucketddp") as messages:
        messages.append(raised_by(lambda: trainer.fit(module, loader())))
    return {"messages": messages, "final": weights_of(module)}


@like_torchrun()
def train_unevenly(*, num_batches: list[int], kind: str, uneven_data: bool, **options: Any) -> dict[str, Any]:
    torch.manual_seed(dist.get_rank())
    batches: Any = [(torch.randn(4, 4), torch.randn(4, 1)) for _ in range(num_batches[dist.get_rank()])]
    module = Adaptive()
    witness = Witness()
    strategy = BucketDDPStrategy(uneven_data=uneven_data, **options)
    trainer = make_trainer(strategy, max_epochs=2, use_distributed_sampler=False, callbacks=[witness])
    error = raised_by(lambda: trainer.fit(module, make_loader(kind, batches)))
    return {"error": error, "final": weights_of(module), "steps": trainer.global_step, **vars(witness)}


class _Averages(Callback):
    """The same moving average as `EMAWeightAveraging` keeps, of what this rank has after each step."""

    def __init__(self) -> None:
        self.mean: list[Tensor] = []

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, *_: Any) -> None:
        weights = [param.detach().clone() for param in pl_module.parameters()]
        if trainer.global_step == 1:
            self.mean = weights
        self.mean = [DECAY * mean + (1 - DECAY) * weight for mean, weight in zip(self.mean, weights, strict=True)]


@pytest.mark.skipif(not hasattr(callbacks, "EMAWeightAveraging"), reason="of Lightning 2.6")
@on_ranks()
@like_torchrun()
def test_a_moving_average_is_that_of_the_mean_of_all_islands() -> None:
    """What `EMAWeightAveraging` ends with is the mean over the ranks of averages that each keeps alone."""
    module, own = Adaptive(), _Averages()
    strategy = BucketDDPStrategy(local_steps=LocalSteps(4, "rank"))
    ema = callbacks.EMAWeightAveraging(decay=DECAY)
    options = {"max_epochs": 1, "val_check_interval": 5, "num_sanity_val_steps": 0}
    make_trainer(strategy, callbacks=[ema, own], **options).fit(module, loader(), loader())
    for param, mean in zip(module.parameters(), own.mean, strict=True):
        dist.all_reduce(mean)
        torch.testing.assert_close(param.detach(), mean / 2)
        of_rank_zero = param.detach().clone()
        dist.broadcast(of_rank_zero, src=0)
        assert torch.equal(param, of_rank_zero)


class SyncedByHand(Adaptive):
    def __init__(self) -> None:
        super().__init__()
        self.layers[1] = nn.SyncBatchNorm(8)


@for_each(
    ("local_steps", "kind", "sync_batchnorm", "text"),
    [
        (
            *(LocalSteps(2, 3), Adaptive, False),
            "`islands=3` cannot divide 2 ranks into islands of equal size. Pass a number that divides 2: 2; or 'host'",
        ),
        (
            *(LocalSteps(2, "rank"), Adaptive, True),
            "`sync_batchnorm=True` needs other ranks in each step, but with `local_steps` each rank is alone in its",
        ),
        (
            *(LocalSteps(2, "rank"), SyncedByHand, False),
            "`layers.1` (SyncBatchNorm) talks to ranks of other islands in each step, which `local_steps` is to avoid.",
        ),
    ],
)
@on_ranks()
@like_torchrun()
def test_what_cannot_be_had_is_refused_before_the_first_step(
    local_steps: LocalSteps, kind: type[Regression], sync_batchnorm: bool, text: str
) -> None:
    trainer = make_trainer(BucketDDPStrategy(local_steps=local_steps), max_epochs=1, sync_batchnorm=sync_batchnorm)
    with pytest.raises(ValueError, match=f"^{re.escape(text)}"):
        trainer.fit(kind(), loader())


@on_ranks()
@like_torchrun()
def test_local_steps_of_one_island_are_warned_of() -> None:
    text = r"^bucketddp: `local_steps=2` has no effect, because all ranks are in one island \(`islands='host'`\):"
    with pytest.warns(UserWarning, match=text) if dist.get_rank() == 0 else nullcontext():
        make_trainer(BucketDDPStrategy(local_steps=2), max_steps=1).fit(Adaptive(), loader())


def test_a_round_of_one_plain_step_equals_ddp_bit_for_bit() -> None:
    ours = run_on_ranks(train, kind=Dyadic, local_steps=LocalSteps(1, "rank", **PLAIN))
    ddp = run_on_ranks(train, kind=Dyadic, strategy="ddp")
    assert len(ddp[0]["after_batches"]) == 4
    assert [rank["after_batches"] for rank in ours] == [ddp[0]["after_batches"]] * 2


def test_islands_exchange_nothing_between_outer_steps_and_then_each_weight_once() -> None:
    ranks = run_on_ranks(train, local_steps=LocalSteps(5, "rank"))
    for rank in ranks:
        talkative = [batch for batch, calls in enumerate(rank["calls"][:10]) if calls]
        assert talkative == [0, 4, 9]  # the first has what the fit begins with
        # One all-reduce of all parameters in an outer step; the rest are buffers and a message.
        assert all(max(rank["calls"][batch]) == rank["num_bytes"] for batch in (4, 9))
        assert rank["num_outer_steps"] == 2
        assert rank["outer_bytes"] / 10 == rank["num_bytes"] / 5
    first, second = (rank["after_batches"] for rank in ranks)
    assert [batch for batch in range(10) if first[batch] == second[batch]] == [4, 9]
    assert ranks[0]["learning_rates"] == ranks[1]["learning_rates"]
    assert len(set(ranks[0]["learning_rates"])) == 4


@pytest.mark.parametrize(("reduce_dtype", "fraction"), [("bf16", 0.5), ("int8", 0.3)])
def test_changes_travel_as_gradients_would(reduce_dtype: str, fraction: float) -> None:
    ranks = run_on_ranks(train, kind=Wide, local_steps=LocalSteps(5, "rank"), reduce_dtype=reduce_dtype)
    assert ranks[0]["final"] == ranks[1]["final"]
    assert ranks[0]["outer_bytes"] <= fraction * ranks[0]["num_bytes"] * 2


def test_an_island_of_two_ranks_averages_in_each_step_and_halves_what_each_rank_exchanges(tmp_path: Path) -> None:
    monitor = BucketDDPMonitor(every_n_steps=1, dirpath=tmp_path)
    ranks = run_on_ranks(train, world_size=4, local_steps=LocalSteps(2, 2), also=[monitor])
    weights = [rank["after_batches"] for rank in ranks]
    assert weights[0] == weights[1] != weights[2] == weights[3]
    assert [batch for batch in range(5) if weights[0][batch] == weights[2][batch]] == [1, 3]
    assert len({str(rank["at_epoch_end"]) for rank in ranks}) == 1
    for rank in ranks:
        assert rank["num_outer_steps"] == 3
        assert 0.5 * rank["num_bytes"] <= rank["outer_bytes"] / 3 < 0.52 * rank["num_bytes"]
    for rank, record in read_run(tmp_path / "bucketddp").ranks.items():
        assert [outer.step for outer in record.outer_steps] == [2, 4, 5]
        assert sum(outer.num_bytes for outer in record.outer_steps) == ranks[rank]["outer_bytes"]
        assert record.run.options["num_islands"] == 2


@pytest.mark.long
def test_batchnorm_is_synchronized_inside_of_an_island_only() -> None:
    synced, apart = (
        run_on_ranks(train, world_size=4, local_steps=LocalSteps(2, 2), of_trainer={"sync_batchnorm": is_on})
        for is_on in (True, False)
    )
    assert len({str(rank["final"]) for rank in synced}) == 1
    # In the first step the statistics make a difference, and nothing has been exchanged between islands.
    assert synced[0]["after_batches"][0] != apart[0]["after_batches"][0]
    assert synced[0]["after_batches"][0] == synced[1]["after_batches"][0] != synced[2]["after_batches"][0]


def test_layers_that_are_frozen_at_first_are_exchanged_once_they_are_trained() -> None:
    ranks = run_on_ranks(train, local_steps=LocalSteps(4, "rank"), also=[Thaws()], of_trainer={"max_epochs": 2})
    first, second = (rank["after_batches"] for rank in ranks)
    assert [batch for batch in range(20) if first[batch] == second[batch]] == [3, 7, 13, 17]
    assert first[9]["layers.0.weight"] == first[0]["layers.0.weight"]
    assert first[19]["layers.0.weight"] != first[13]["layers.0.weight"] != first[0]["layers.0.weight"]


def test_a_validation_sees_the_same_weights_on_all_ranks() -> None:
    ranks = run_on_ranks(train, local_steps=LocalSteps(4, "rank"), of_trainer={"val_check_interval": 3})
    assert len(ranks[0]["at_validation"]) == 3
    assert ranks[0]["at_validation"] == ranks[1]["at_validation"]
    assert ranks[0]["at_epoch_end"] == ranks[1]["at_epoch_end"]


def test_a_run_that_is_resumed_ends_as_if_it_had_not_been_interrupted(tmp_path: Path) -> None:
    path = tmp_path / "model.ckpt"
    options: dict[str, Any] = {"path": path, "local_steps": LocalSteps(4, "rank"), "with_scaler": True}
    whole = run_on_ranks(save_and_resume, resume=False, **options)
    resumed = run_on_ranks(save_and_resume, resume=True, **options)
    assert resumed[0]["moments"] != resumed[1]["moments"]
    for before, after in zip(whole, resumed, strict=True):
        assert (after["final"], after["scale"]) == (whole[0]["final"], before["scale"])
    # The scales differ, because each has counted its own steps.
    assert whole[0]["scale"] != whole[1]["scale"]

    # In other divisions: states are dealt out in turn. And without: those of the first island.
    four = run_on_ranks(save_and_resume, world_size=4, path=path, resume=True, local_steps=LocalSteps(4, "rank"))
    assert [rank["moments"] for rank in four] == [resumed[r % 2]["moments"] for r in range(4)]
    for strategy in ("ddp", "bucketddp"):
        plain = run_on_ranks(save_and_resume, path=path, resume=True, strategy=strategy)
        assert [rank["moments"] for rank in plain] == [resumed[0]["moments"]] * 2
    run_on_ranks(save_and_resume, path=path, resume=False, strategy="ddp")
    from_ddp = run_on_ranks(save_and_resume, path=path, resume=True, local_steps=LocalSteps(4, "rank"))
    assert from_ddp[0]["moments"] == from_ddp[1]["moments"]
    assert from_ddp[0]["final"] == from_ddp[1]["final"]


def test_weights_that_are_not_finite_are_named_and_left_out() -> None:
    raised = run_on_ranks(spoil, on_nonfinite="raise")
    for rank in raised:
        assert rank["messages"][-1].startswith(
            "NonFiniteError: Not finite after the local steps before step 6: the weights `layers.3.bias` on rank 1. All"
        )
    skipped = run_on_ranks(spoil, on_nonfinite="skip")
    assert skipped[0]["final"] == skipped[1]["final"]
    assert all(torch.tensor(weight).isfinite().all() for weight in skipped[0]["final"].values())
    told = [message for message in skipped[0]["messages"] if "the weights" in message]
    assert len(told) == 1
    expected = "on rank 1. They are left out, and those ranks go on with the weights of the others."
    assert " ".join(told[0].split()).endswith(expected)


@on_ranks()
@like_torchrun()
def test_global_weights_that_differ_between_islands_are_noticed_after_an_outer_step() -> None:
    strategy = BucketDDPStrategy(local_steps=LocalSteps(2, "rank"), replica_checks=4)
    text = r"(?s)^The replicas are not equal after 2 outer steps: `layers.0.weight`.*differs between rank 0 and rank 1"
    with pytest.raises(ReplicaDivergedError, match=text):
        make_trainer(strategy, max_epochs=1, callbacks=[Corrupts()]).fit(Adaptive(), loader())


@pytest.mark.parametrize("kind", ["sized", pytest.param("stream", marks=pytest.mark.long)])
def test_islands_that_run_out_of_data_at_different_times_wait_for_the_others(kind: str) -> None:
    options: dict[str, Any] = {"kind": kind, "local_steps": LocalSteps(2, "rank")}
    ranks = run_on_ranks(train_unevenly, num_batches=[3, 8], uneven_data=True, **options)
    assert ranks[0]["steps"] == 16
    for what in ("final", "at_epoch_end"):
        assert ranks[0][what] == ranks[1][what]
    # An island without data takes no step of its own.
    has_moved = [rank["after_batches"][4] != rank["after_batches"][3] for rank in ranks]
    assert has_moved == [False, True]
    for rank in run_on_ranks(train_unevenly, num_batches=[3, 8], uneven_data=False, **options):
        text = "OutOfStepError: Rank 0 has no more data in epoch 0, while rank 1 goes on after"
        assert rank["error"].startswith(text)


@pytest.mark.long
def test_ranks_of_an_island_that_run_out_of_data_go_on_with_it() -> None:
    options: dict[str, Any] = {"kind": "stream", "local_steps": LocalSteps(2, 2)}
    ranks = run_on_ranks(train_unevenly, world_size=4, num_batches=[2, 5, 8, 3], uneven_data=True, **options)
    assert len({str(rank["final"]) for rank in ranks}) == 1
    assert {rank["steps"] for rank in ranks} == {16}


def test_a_teacher_that_is_updated_and_not_trained_is_that_of_the_mean_of_all_islands() -> None:
    first, second = run_on_ranks(train, kind=Taught, local_steps=LocalSteps(4, "rank"), replica_checks=1)
    ours, theirs = first["after_batches"], second["after_batches"]
    assert [batch for batch in range(10) if ours[batch] == theirs[batch]] == [3, 7]
    assert first["final"] == second["final"]
    # Neither is anything sent that has not changed.
    assert max(num_bytes for calls in first["calls"][1:] for num_bytes in calls) < 4 * 1000

    ours, *_ = run_on_ranks(train, kind=Taught, local_steps=LocalSteps(1, "rank", **PLAIN))
    ddp, *_ = run_on_ranks(train, kind=Taught, strategy="ddp")
    for name, weight in ddp["final"].items():
        torch.testing.assert_close(torch.tensor(ours["final"][name]), torch.tensor(weight))


def fit_under(fault: Fault, directory: Path, **options: Any) -> Any:
    with doomed_ranks(fit, directory=directory, fault=fault, **options) as ranks:
        return ranks.wait()


@pytest.mark.long
def test_a_signal_ends_the_round_on_all_ranks(tmp_path: Path) -> None:
    ended = fit_under(Fault("SIGTERM", rank=1), tmp_path, local_steps=LocalSteps(10**6, "rank"), pause_after_s=0.1)
    assert ended.exit_codes == [143, 143], ended.output
    seen = [ended.results[f"seen{rank}"] for rank in (0, 1)]
    assert all(one["has_group"] for one in seen)
    assert seen[0]["weights"] == seen[1]["weights"]
    checkpoint = torch.load(tmp_path / "on_exception" / "on_exception.ckpt", weights_only=True)
    assert len(checkpoint["bucketddp"]["local_steps"]["other_islands"]) == 1


@pytest.mark.long
def test_what_a_rank_leaves_that_dies_in_an_outer_step_is_not_saved(tmp_path: Path) -> None:
    ended = fit_under(Fault("SIGKILL", "outer step", rank=1), tmp_path, local_steps=LocalSteps(4, "rank"))
    assert ended.results["seen0"]["type"] == "RankFailedError"
    assert "Rank 1" in ended.results["seen0"]["message"]
    assert "is not saved, because a rank was lost" in " ".join(ended.output[0].split()), ended.output[0]
    assert not list(tmp_path.rglob("*.ckpt"))
