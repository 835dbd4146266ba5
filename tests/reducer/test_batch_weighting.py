"""Ranks that contribute differently to a step: skipped steps, weights, and data that ends earlier than elsewhere."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.utils.data import DataLoader, IterableDataset

from lightning_bucketddp.bindings.trainer_lightning import BucketDDPStrategy
from lightning_bucketddp.comm.collectives import Collectives
from lightning_bucketddp.comm.step_exchange import StepExchange, Weighting
from lightning_bucketddp.config import LocalSteps, ReducerConfig
from lightning_bucketddp.reducer.reducer import Reducer
from lightning_bucketddp.replicas.replicas import Replicas
from tests.support.cases import for_each
from tests.support.jobs.parity import assert_equal_on_all_ranks
from tests.support.ranks import device, on_ranks, raised_by, run_on_ranks
from tests.support.scripts.trainers import SMALL_BUCKETS_MB, like_torchrun, make_trainer

WIDTH = 3

# A batch: inputs, targets, and which of its elements count ("tokens").
Batch = tuple[Tensor, Tensor, Tensor]


def batches_of(rank: int, sizes: Sequence[int]) -> list[Batch]:
    """The batches of a rank: of these numbers of samples, half of the elements masked at random."""
    generator = torch.Generator().manual_seed(rank)
    made = []
    for size in sizes:
        inputs = torch.randn(size, WIDTH, generator=generator, dtype=torch.float64)
        mask = torch.rand(size, generator=generator) < 0.5
        mask[0] = True
        made.append((inputs, inputs.sin().sum(dim=1), mask))
    return made


def num_tokens(batch: Batch) -> Tensor:
    return batch[2].sum()


class Net(nn.Module):
    def __init__(self, *, batchnorm: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        norm = nn.BatchNorm1d(4) if batchnorm else nn.Identity()
        self.layers = nn.Sequential(nn.Linear(WIDTH, 4), norm, nn.Tanh(), nn.Linear(4, 1)).double()

    def loss(self, batch: Batch, *, of_tokens: bool = False) -> Tensor:
        inputs, targets, mask = batch
        errors = F.mse_loss(self.layers(inputs).squeeze(1), targets, reduction="none")
        return errors[mask].mean() if of_tokens else errors.mean()


def make_optimizer(net: nn.Module) -> torch.optim.Optimizer:
    # With weight decay and momentum a parameter changes even by a gradient of zero, but not without one.
    return torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)


@dataclass(frozen=True)
class Setting:
    """How the ranks differ: batch sizes by rank, (rank, batch) pairs that are skipped, options of the strategy."""

    sizes: Sequence[Sequence[int]]
    skipped: Sequence[tuple[int, int]] = ()
    options: dict[str, Any] = field(default_factory=dict)
    accumulate: int = 1
    of_tokens: bool = False
    batchnorm: bool = False
    data: str = "iterable"
    has_two_losses: bool = False
    validates: bool = True
    num_epochs: int = 2
    ignored: Sequence[str] = ()


class Module(LightningModule):
    def __init__(self, setting: Setting) -> None:
        super().__init__()
        self.net = Net(batchnorm=setting.batchnorm)
        self._setting = setting
        self._ddp_params_and_buffers_to_ignore: Any = setting.ignored
        self.automatic_optimization = not setting.has_two_losses
        self.outputs: list[bool] = []

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor | None:
        setting = self._setting
        if setting.data == "several":
            batch, _ = batch  # type: ignore[misc]
        if setting.has_two_losses:
            optimizer: Any = self.optimizers()
            optimizer.zero_grad()
            # One after the other, the second of the tokens alone.
            self.manual_backward(self.net.loss(batch))
            self.manual_backward(self.net.loss(batch, of_tokens=True))
            optimizer.step()
            return None
        loss = self.net.loss(batch, of_tokens=setting.of_tokens)
        # Collectives of its own, which a rank that has left the loop does not take part in.
        self.log("loss", loss, sync_dist=setting.data != "several", on_step=True, on_epoch=True, batch_size=1)
        return None if (self.global_rank, batch_idx) in setting.skipped else loss

    def on_train_batch_end(self, outputs: Any, *_: Any) -> None:
        self.outputs.append(bool(outputs))

    def validation_step(self, batch: Batch) -> None:
        self.log("val_loss", self.net.loss(batch), sync_dist=True)

    def configure_optimizers(self) -> Any:
        return make_optimizer(self)


class _Batches:
    """A list of batches; the list itself would be several loaders to Lightning."""

    def __init__(self, batches: list[Batch]) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[Batch]:
        return iter(self._batches)


class _Stream(_Batches, IterableDataset[Batch]):
    pass


def make_loader(kind: str, batches: list[Batch]) -> Any:
    loaders: dict[str, Any] = {
        "iterable": _Batches(batches),
        "generator": (batch for batch in batches),
        "stream": DataLoader(_Stream(batches), batch_size=None),
        "sized": DataLoader(batches, batch_size=None),  # type: ignore[arg-type]
        "several": [DataLoader(_Stream(batches), batch_size=None), _Batches(batches)],
    }
    return loaders[kind]


@dataclass(frozen=True)
class Outcome:
    weights: list[Tensor]
    had_output: list[bool]
    num_skipped: float
    loader_type: str


class _Metrics(Callback):
    """Keeps what was logged: the Trainer forgets it when a fit ends."""

    skipped = 0.0

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        self.skipped = float(trainer.logged_metrics.get("bucketddp/skipped_batches_total", 0))


@like_torchrun()
def fit(*, setting: Setting) -> Outcome:
    """Train with our strategy."""
    batches = batches_of(dist.get_rank(), setting.sizes[dist.get_rank()])
    module = Module(setting)
    metrics = _Metrics()
    trainer = make_trainer(
        BucketDDPStrategy(bucket_cap_mb=SMALL_BUCKETS_MB, **setting.options),
        max_epochs=setting.num_epochs,
        accumulate_grad_batches=setting.accumulate,
        use_distributed_sampler=False,
        sync_batchnorm=setting.batchnorm,
        precision="64-true",
        num_sanity_val_steps=0,
        limit_val_batches=None if setting.validates else 0,
        log_every_n_steps=1,
        callbacks=metrics,
    )
    trainer.fit(module, make_loader(setting.data, batches), _Batches(batches))
    return Outcome(
        [parameter.detach() for parameter in module.net.parameters()],
        module.outputs,
        metrics.skipped,
        type(trainer.train_dataloader).__name__,
    )


def refusal(*, setting: Setting) -> str:
    return raised_by(lambda: fit(setting=setting))


def expected_weights(setting: Setting) -> list[Tensor]:
    """What one process comes to that sees all ranks' batches: weighted gradients over the sum of weights."""
    by_rank = [batches_of(rank, sizes) for rank, sizes in enumerate(setting.sizes)]
    net = Net(batchnorm=setting.batchnorm)
    optimizer = make_optimizer(net)
    num_batches = max(map(len, setting.sizes))
    for _ in range(setting.num_epochs):
        for start in range(0, num_batches, setting.accumulate):
            window = range(start, min(start + setting.accumulate, num_batches))
            optimizer.zero_grad()
            _accumulate(net, setting, by_rank, window)
            optimizer.step()
    return [parameter.detach() for parameter in net.parameters()]


def _accumulate(net: Net, setting: Setting, by_rank: list[list[Batch]], window: range) -> None:
    weights, losses = [], []
    for index in window:
        present = [(rank, batches[index]) for rank, batches in enumerate(by_rank) if index < len(batches)]
        if setting.batchnorm and present:
            # Normalisation over the batches of all ranks: one forward of all of them.
            together = tuple(torch.cat(parts) for parts in zip(*[batch for _, batch in present], strict=True))
            losses.append(net.loss(together))  # type: ignore[arg-type]
            weights.append(1.0)
            continue
        for rank, batch in present:
            if (rank, index) not in setting.skipped:
                losses.append(net.loss(batch, of_tokens=setting.of_tokens))
                if setting.has_two_losses:
                    losses[-1] = losses[-1] + net.loss(batch, of_tokens=True)
                weight = setting.options.get("gradient_weight", lambda _: 1.0)
                weights.append(float(len(batch[0])) if weight == "batch_size" else float(weight(batch)))
    if not losses:
        return
    total = torch.stack([w * loss for w, loss in zip(weights, losses, strict=True)]).sum() / sum(weights)
    if setting.options.get("gradient_weight") is None:
        # The plain mean: Lightning divides by the size of a full window, also in the last one.
        total = total * len(window) / setting.accumulate
    total.backward()


CONFIGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "without_overlap": {"overlap": False},
    "bf16_wire": {"reduce_dtype": "bf16"},
    "int8_wire": {"reduce_dtype": "int8"},
    "hook": {"comm_hook": default_hooks.allreduce_hook},
}


class _Model(nn.Module):
    """A sparse bucket, a dense one of many, and a layer that only rank 0 uses."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embedding = nn.Embedding(7, 4, sparse=True)
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
        self.only_on_rank_zero = nn.Linear(4, 4)

    def loss(self, rank: int, step: int) -> Tensor:
        generator = torch.Generator().manual_seed(10 * step + rank)
        words = torch.randint(0, 7, (5,), generator=generator).to(device())
        outputs = self.layers(self.embedding(words))
        return (self.only_on_rank_zero(outputs) if rank == 0 else outputs).square().mean()


def weighted_mean(config: str, num_micro_batches: int, *, exchanges_each: bool) -> None:
    """Three steps; rank r weighs r + 1, micro-batch m weighs m + 1, and rank 1 has nothing in the last step.

    If each micro-batch is exchanged, a step is the sum of their means.
    """
    model, reference = _Model().to(device()), _Model().to(device())
    collectives = Collectives(device())
    weighting = Weighting(StepExchange(collectives), by_weight=True)
    reducer_config = ReducerConfig(bucket_cap_mb=60 / 2**20, **CONFIGS[config])
    reducer = Reducer(Replicas(model, collectives), reducer_config, weighting=weighting)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    for step in range(3):
        model.zero_grad()
        reference.zero_grad()
        weights = {
            (r, m): (r + 1.0) * (m + 1.0) * (step < 2 or r != 1)
            for r in range(world_size)
            for m in range(num_micro_batches)
        }
        for m in range(num_micro_batches):
            weighting.add(weights[rank, m])
            is_exchanged = exchanges_each or m == num_micro_batches - 1
            with nullcontext() if is_exchanged else reducer.no_sync(), reducer.backward():
                (model.loss(rank, 10 * step + m) * weights[rank, m]).backward()
        total = {m: sum(w for (_, n), w in weights.items() if n == m or not exchanges_each) for _, m in weights}
        losses = [w * reference.loss(r, 10 * step + m) / total[m] for (r, m), w in weights.items()]
        torch.stack(losses).sum().backward()
        tolerance = 2e-2 if config in ("bf16_wire", "int8_wire") else 1e-5
        for (name, param), other in zip(model.named_parameters(), reference.parameters(), strict=True):
            assert param.grad is not None, name
            assert other.grad is not None, name
            assert param.grad.is_sparse == other.grad.is_sparse, name
            gradients = param.grad.to_dense(), other.grad.to_dense()
            torch.testing.assert_close(*gradients, rtol=tolerance, atol=tolerance, msg=name)
        assert_equal_on_all_ranks(model)


EVEN = [[4, 4, 4, 4, 4]] * 2
DIFFERENT_SIZES = [[4, 4, 4, 4, 1], [4, 2, 4, 7, 3]]
UNEVEN = [[4, 4, 4, 4, 4], [4, 4, 4]]


class KeepsGradients(LightningModule):
    """Adds the gradients of two batches by itself: steps with both, or with the first and then with both."""

    def __init__(self, *, steps_each: bool) -> None:
        super().__init__()
        self.automatic_optimization = steps_each
        self.weights = nn.ParameterList([torch.zeros(2), torch.zeros(2)])

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor | None:
        # -1 stands for a batch that nothing can be learnt from.
        loss = torch.stack([weight.sum() for weight in self.weights]).sum() * batch
        if self.automatic_optimization:
            return None if batch < 0 else loss
        self.manual_backward(loss)
        if batch_idx % 2:
            optimizer: Any = self.optimizers()
            optimizer.step()
            optimizer.zero_grad()
        return None

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: torch.optim.Optimizer) -> None:
        if batch_idx % 2 == 0:
            optimizer.zero_grad()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1.0)


@like_torchrun()
def fit_and_keep_gradients(
    *, batches: list[list[float]], steps_each: bool, options: dict[str, Any], accumulate: int = 1
) -> list[Any]:
    module = KeepsGradients(steps_each=steps_each)
    strategy = BucketDDPStrategy(bucket_cap_mb=SMALL_BUCKETS_MB, **options)
    data: Any = _Batches([torch.tensor(value) for value in batches[dist.get_rank()]])  # type: ignore[misc]
    make_trainer(strategy, max_epochs=1, accumulate_grad_batches=accumulate).fit(module, data)
    return [weight.tolist() for weight in module.weights]


def assert_trained_as_one_process(setting: Setting) -> list[Outcome]:
    ranks: list[Outcome] = run_on_ranks(fit, world_size=len(setting.sizes), setting=setting)
    for rank in ranks:
        for ours, expected in zip(rank.weights, expected_weights(setting), strict=True):
            torch.testing.assert_close(ours, expected, rtol=1e-11, atol=1e-13)
        for ours, first in zip(rank.weights, ranks[0].weights, strict=True):
            assert torch.equal(ours, first)
    return ranks


# --- Steps that return None, and weights


@pytest.mark.parametrize(
    ("skipped", "accumulate", "data"),
    [([(1, 0), (0, 2), (1, 2)], 1, "stream"), ([(0, 1), (1, 3), (1, 4)], 2, "iterable")],
    ids=["first_and_everywhere", "in_turns_and_last"],
)
def test_a_skipped_step_is_left_out_of_the_average(skipped: list[tuple[int, int]], accumulate: int, data: str) -> None:
    setting = Setting(EVEN, skipped=skipped, accumulate=accumulate, data=data)
    for number, rank in enumerate(assert_trained_as_one_process(setting)):
        assert rank.num_skipped == 2 * len(skipped)
        assert rank.had_output == [(number, step) not in skipped for step in range(5)] * 2
        # A loader whose end is watched keeps its class.
        assert rank.loader_type == ("_Batches" if data == "iterable" else "DataLoader")


@pytest.mark.parametrize("sharded", [False, True])
@for_each(
    ("batches", "how", "expected"),
    [
        # The averages of the batches are 4, 6, 2 and 3; where rank 1 has nothing rank 0's counts.
        ([[2, 6, 1, 3], [6, -1, 3, 3]], {"steps_each": True}, 4 + (4 + 6) + 2 + (2 + 3)),
        ([[2, -1, 1, 3], [6, -1, 3, 3]], {"steps_each": True}, 4 + 4 + 2 + (2 + 3)),
        # Windows of three batches, which average 9 each, of the second without one batch of rank 1.
        ([[6, 6, 6, 9, 9, 9], [12, 12, 12, -1, 9, 9]], {"steps_each": True, "accumulate": 3}, 9 + (9 + 9)),
        ([[2, 6, 1, 3], [6, 6, 3]], {"steps_each": False, "options": {"uneven_data": True}}, (4 + 6) + (2 + 3)),
    ],
)
def test_earlier_gradients_stay_what_they_are_where_a_rank_adds_nothing(
    batches: Any, how: dict[str, Any], expected: int, sharded: bool
) -> None:
    how = {**how, "options": {"shard_optimizer": sharded, **how.get("options", {})}}
    ranks = run_on_ranks(fit_and_keep_gradients, batches=batches, **how)
    rounding = 1e-6 if "accumulate" in how else 0.0  # windows divide by three
    torch.testing.assert_close(torch.tensor(ranks), torch.full((2, 2, 2), -float(expected)), rtol=rounding, atol=0.0)


def test_the_last_batch_of_a_rank_counts_if_it_steps_alone_and_runs_out_of_data_before_it_steps() -> None:
    local_steps = LocalSteps(100, islands="rank", outer_lr=1.0, outer_momentum=0.0)
    ranks = run_on_ranks(
        fit_and_keep_gradients,
        batches=[[2, 6, 1, 3], [6, 6, 3]],
        steps_each=False,
        options={"local_steps": local_steps, "uneven_data": True},
    )
    assert ranks == [[[-((2 + 6 + 1 + 3) + (6 + 6 + 3)) / 2] * 2] * 2] * 2


def has_inputs(batch: Batch) -> bool:
    return bool(batch[0].any())


@for_each(
    ("skipped", "options", "num_steps"),
    [
        ([(1, 2)], {}, 5),
        ([(0, 2), (1, 2)], {}, 4),
        ([(0, 2)], {"gradient_weight": has_inputs}, 4),  # nothing counts on the other rank
    ],
)
@on_ranks()
@like_torchrun()
def test_a_grad_scaler_counts_the_steps_that_some_rank_took(
    skipped: list[tuple[int, int]], options: dict[str, Any], num_steps: int
) -> None:
    """It doubles its scale at every step that is taken."""
    module = Module(Setting(EVEN, skipped=skipped)).float()
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0, growth_interval=1)
    precision = MixedPrecision("16-mixed", "cpu", scaler=scaler)
    batches = [(x.float(), y.float(), mask) for x, y, mask in batches_of(dist.get_rank(), EVEN[0])]
    batches[2][0].mul_(not options)
    strategy = BucketDDPStrategy(**options)
    trainer = make_trainer(strategy, max_epochs=1, use_distributed_sampler=False, plugins=precision)
    trainer.fit(module, _Batches(batches))
    assert scaler.get_scale() == 2**num_steps
    assert_equal_on_all_ranks(module)


BY_SIZE = {"gradient_weight": "batch_size"}
WEIGHED = {
    "plain mean by default": Setting(DIFFERENT_SIZES),
    "samples of micro-batches": Setting(DIFFERENT_SIZES, accumulate=3, options=BY_SIZE),
    "samples of one process": Setting(DIFFERENT_SIZES[1:], accumulate=2, options=BY_SIZE),
    "tokens": Setting(DIFFERENT_SIZES, accumulate=2, of_tokens=True, options={"gradient_weight": num_tokens}),
    "skipped steps": Setting(DIFFERENT_SIZES, skipped=[(0, 0), (1, 3)], options=BY_SIZE),
    "several losses in a step": Setting(DIFFERENT_SIZES, has_two_losses=True, options=BY_SIZE),
}


@for_each("what", WEIGHED)
def test_what_is_weighed_counts_as_in_one_process(what: str) -> None:
    assert_trained_as_one_process(WEIGHED[what])


@pytest.mark.parametrize(
    ("world_size", "num_micro_batches", "exchanges_each"), [(2, 3, False), (3, 1, False), (2, 2, True)]
)
@for_each("config", CONFIGS)
def test_every_kind_of_bucket_is_weighed(
    config: str, num_micro_batches: int, world_size: int, exchanges_each: bool
) -> None:
    options: Any = {"num_micro_batches": num_micro_batches, "exchanges_each": exchanges_each}
    run_on_ranks(weighted_mean, world_size=world_size, config=config, **options)


# --- Uneven data

UNEVEN_DATA = {
    "stream": Setting(UNEVEN[::-1], data="stream", accumulate=2),
    "sized": Setting([[4], [4, 4], [4, 4, 4, 4]], data="sized"),
    "generator": Setting(UNEVEN, data="generator", num_epochs=1),
    "weighed": Setting([[4, 2, 4, 1], [3, 5]], data="stream", options=BY_SIZE),
    # A rank without data adds nothing to batch statistics.
    "batchnorm": Setting(UNEVEN, data="stream", batchnorm=True),
    # Momentum would move the weights in a step that no batch asks for.
    "nothing to learn from where data is left": Setting([[4] * 6, [4]], skipped=[(0, 2), (0, 3)], accumulate=2),
}


@pytest.mark.parametrize("kind", UNEVEN_DATA)
def test_no_batch_is_lost_where_data_is_uneven(kind: str) -> None:
    setting = replace(UNEVEN_DATA[kind], options={"uneven_data": True, **UNEVEN_DATA[kind].options})
    for rank in assert_trained_as_one_process(setting):
        assert len(rank.had_output) == setting.num_epochs * max(map(len, setting.sizes))


class MeanOfTokens(LightningModule):
    """Its loss is nan, and so are its gradients, for a batch in which no element counts."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()

    def training_step(self, batch: Batch, batch_idx: int = 0) -> Tensor:
        inputs, targets, mask = batch
        return ((self.net.layers(inputs).squeeze(1) - targets).square() * mask).sum() / mask.sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@for_each(
    ("sizes", "empty", "steps", "options"),
    [
        # By steps: the batches that count, as (rank, batch).
        ([3, 3], (1, 1), [[(0, 0), (1, 0), (0, 1)], [(0, 2), (1, 2)]], {"on_nonfinite": "raise"}),
        # Its own step is skipped, and not those in which it stands for data that there is no more.
        ([6, 2], (1, 1), [[(0, 2), (0, 3)], [(0, 4), (0, 5)]], {"on_nonfinite": "skip", "uneven_data": True}),
    ],
)
@on_ranks()
@like_torchrun()
def test_a_loss_of_nan_that_has_no_weight_changes_nothing(
    sizes: list[int], empty: tuple[int, int], steps: list[list[tuple[int, int]]], options: dict[str, Any]
) -> None:
    batches = [batches_of(rank, [4] * size) for rank, size in enumerate(sizes)]
    batches[empty[0]][empty[1]][2].fill_(False)
    weight = num_tokens if "uneven_data" not in options else None
    module, reference = MeanOfTokens(), MeanOfTokens()
    trainer = make_trainer(
        BucketDDPStrategy(bucket_cap_mb=SMALL_BUCKETS_MB, gradient_weight=weight, **options),
        max_epochs=1,
        accumulate_grad_batches=2,
        use_distributed_sampler=False,
        precision="64-true",
    )
    trainer.fit(module, DataLoader(batches[dist.get_rank()], batch_size=None))  # type: ignore[arg-type]
    optimizer = reference.configure_optimizers()
    for step in steps:
        counted = [batches[rank][index] for rank, index in step]
        weights = [float(num_tokens(batch)) if weight else 1.0 for batch in counted]
        losses = [w * reference.training_step(batch) for w, batch in zip(weights, counted, strict=True)]
        optimizer.zero_grad()
        (torch.stack(losses).sum() / sum(weights)).backward()
        optimizer.step()
    for param, right in zip(module.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(param, right, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("stopped", "data"), [(1, "stream"), (0, "sized")])
def test_the_rank_that_stops_is_named_on_every_rank(stopped: int, data: str) -> None:
    sizes = UNEVEN if stopped == 1 else UNEVEN[::-1]
    text = (
        f"OutOfStepError: Rank {stopped} has no more data in epoch 0, while rank {1 - stopped} goes on after 3 batches."
        " Give every rank the same number of batches, or pass `uneven_data=True` to the strategy: a rank that has run"
        " out then takes part with weight zero until all have."
    )
    assert run_on_ranks(refusal, setting=Setting(sizes, data=data)) == [text] * 2


def negative(_batch: object) -> int:
    return -1


@for_each(
    ("setting", "text"),
    [
        (
            Setting(EVEN, options={"gradient_weight": negative}),
            "ValueError: `gradient_weight` gave -1.0 for a batch on rank {}. A weight must be a finite number that is"
            " not negative, such as a number of samples or tokens.",
        ),
        # Its gradients would be sums of weighted ones.
        (
            Setting(EVEN, options=BY_SIZE, ignored=["net.layers.0.weight"]),
            "ValueError: `gradient_weight` multiplies losses by weights and divides averages by their sum, but"
            " `_ddp_params_and_buffers_to_ignore` keeps `net.layers.0.weight` out of the average. Leave one out.",
        ),
        # Where data is not watched: a rank that is in the next epoch.
        (
            Setting(UNEVEN, data="several", validates=False),
            "OutOfStepError: Rank 1 has no more data in epoch 0, while rank 0 goes on after 4 batch",
        ),
        (
            Setting([[4], []], data="stream", options={"uneven_data": True}),
            "ValueError: Rank 1 has no training data at all. `uneven_data` needs at least one batch on every rank.",
        ),
        (
            Setting(EVEN, data="several", options={"uneven_data": True}),
            "ValueError: `uneven_data` works with one training dataloader, not with several. Combine them in one"
            " dataset.",
        ),
    ],
)
def test_weights_and_data_that_cannot_be_used_are_refused_on_every_rank(setting: Setting, text: str) -> None:
    for rank, refused in enumerate(run_on_ranks(refusal, setting=setting)):
        assert refused.startswith(text.format(rank))
