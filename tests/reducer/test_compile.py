"""Compiled modules: the same numbers, and communication while their backward runs."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch._inductor.config
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from functorch.compile import make_boxed_func
from lightning.fabric import Fabric
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.backends.distributed import DDPOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from lightning_bucketddp.bindings import fabric_lightning, trainer_lightning
from lightning_bucketddp.config import MIB, ReducerConfig
from lightning_bucketddp.reducer.launch_queue import LaunchQueue
from lightning_bucketddp.reducer.observer import graphs_split
from tests.support.cases import for_each
from tests.support.ranks import run_on_ranks
from tests.support.scripts.trainers import like_torchrun, make_trainer

# A layer has 1 MiB of weights, the least that dynamo puts into a part.
WIDTH = 512
NUM_LAYERS = 3
NUM_STEPS = 5


class Layers(nn.Module):
    """Of a class of its own: torch does not compile `nn.Sequential().compile()`."""

    def __init__(self, *, checkpointed: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(NUM_LAYERS))
        self._checkpointed = checkpointed

    def forward(self, inputs: Tensor) -> Tensor:
        for layer in self.layers:
            inputs = checkpoint(layer, inputs, use_reentrant=False) if self._checkpointed else layer(inputs)
            inputs = inputs.tanh()
        return inputs


class Deep(LightningModule):
    """Compiles itself in the way that is named by `compiled`, with `backend`."""

    def __init__(self, *, compiled: str, checkpointed: bool = False, **compile_options: Any) -> None:
        super().__init__()
        self.net: Any = Layers(checkpointed=checkpointed)
        self._compiled = compiled
        self._compile_options = compile_options
        if compiled == "submodule":
            self.net = torch.compile(self.net, **compile_options)

    def configure_model(self) -> None:
        if self._compiled == "in configure_model":
            self.net.compile(**self._compile_options)

    def as_given_to_fit(self) -> Any:
        return torch.compile(self, **self._compile_options) if self._compiled == "module" else self

    def training_step(self, batch: list[Tensor]) -> Tensor:
        inputs = targets = batch[0]
        if self._compiled == "teacher":
            with torch.no_grad():
                targets = torch.compile(self.net, **self._compile_options)(inputs)
        return F.mse_loss(self.net(inputs), targets.sin())

    def validation_step(self, batch: list[Tensor]) -> None:
        F.mse_loss(self.net(batch[0]), batch[0].sin())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@dataclass(frozen=True)
class Compiled:
    """What a rank has at the end, and what happened on the way."""

    weights: dict[str, Any]
    # In order: "part 1" for the backward of the graph that was compiled second, "bucket 0" for its launch, "end".
    events_by_step: list[list[str]]
    num_graphs: int


class Recorder:
    """A backend for `torch.compile` that computes as eager does and writes down when each backward runs."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.num_graphs = 0
        self._num_parts = 0

    @property
    def backend(self) -> Any:
        # A function: lightning copies the options of `torch.compile` for Fabric, and with them everything we hold.
        return aot_autograd(
            fw_compiler=lambda graph, _: self._count(graph),
            bw_compiler=lambda graph, _: self._record(graph),
            inference_compiler=lambda graph, _: self._count(graph),
        )

    def _count(self, graph: Any) -> Any:
        self.num_graphs += 1
        return make_boxed_func(graph.forward)

    def _record(self, graph: Any) -> Any:
        part, self._num_parts = self._num_parts, self._num_parts + 1

        def run(*args: Any) -> Any:
            self.events.append(f"part {part}")
            return graph(*args)

        return make_boxed_func(run)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Write down launches and ends of backwards too."""
        torch._dynamo.reset()
        launch, wait = LaunchQueue._launch_next, LaunchQueue.wait

        def recorded_launch(queue: LaunchQueue) -> None:
            self.events.append(f"bucket {queue.next_to_launch}")
            launch(queue)

        def recorded_end(queue: LaunchQueue, **options: Any) -> None:
            self.events.append("end")
            wait(queue, **options)

        with patch.multiple(LaunchQueue, _launch_next=recorded_launch, wait=recorded_end):
            yield

    def result(self, module: nn.Module) -> Compiled:
        ends = [0, *(index + 1 for index, event in enumerate(self.events) if event == "end")]
        steps = [self.events[start:end] for start, end in pairwise(ends)]
        # As numpy arrays: lists of so many numbers take long to compare.
        weights = {name.replace("_orig_mod.", ""): value.numpy() for name, value in module.state_dict().items()}
        return Compiled(weights, steps, self.num_graphs)


def loader() -> DataLoader[Any]:
    """Enough for `NUM_STEPS` steps on each of two ranks."""
    inputs = torch.randn(4 * NUM_STEPS, WIDTH, generator=torch.Generator().manual_seed(0))
    return DataLoader(TensorDataset(inputs), batch_size=2)


@like_torchrun()
def fit(
    *,
    compiled: str,
    compile_with: str | None = None,
    options: dict[str, Any] | None = None,
    checkpointed: bool = False,
    dynamic: bool | None = None,
    cache: Path | None = None,
    **trainer_options: Any,
) -> Compiled:
    """Train `Deep`, compiled with the recording backend or the one that is named."""
    recorder = Recorder()
    module = Deep(
        compiled=compiled, backend=compile_with or recorder.backend, checkpointed=checkpointed, dynamic=dynamic
    )
    strategy = trainer_lightning.BucketDDPStrategy(**{"bucket_cap_mb": 1.0, **(options or {})})
    # Validation comes before (sanity check) and between training steps.
    often = {"limit_train_batches": NUM_STEPS, "val_check_interval": 2}
    trainer = make_trainer(strategy, **{"max_epochs": 1, **often, **trainer_options})
    with (
        recorder.recording(),
        # Not in processes that outlive the test, and without vectors, whose headers take most of the compiler's time.
        torch._inductor.config.patch({"compile_threads": 1, "cpp.simdlen": 1}),
        patch.dict(os.environ, {} if cache is None else {"TORCHINDUCTOR_CACHE_DIR": str(cache)}),
    ):
        trainer.fit(module.as_given_to_fit(), loader(), loader())
    assert DistributedDataParallel._active_ddp_module is None
    return recorder.result(module)


@like_torchrun()
def train_with_fabric(*, compiled: bool, reapply: bool = True) -> Compiled:
    """The same with Fabric; the module is evaluated after each step."""
    recorder = Recorder()
    fabric = Fabric(
        accelerator="cpu",
        devices=dist.get_world_size(),
        strategy=fabric_lightning.BucketDDPStrategy(bucket_cap_mb=1.0),
    )
    fabric.launch()
    layers = Layers()
    optimizer = torch.optim.SGD(layers.parameters(), lr=0.1)
    given: Any = torch.compile(layers, backend=recorder.backend) if compiled else layers
    module, optimizer = fabric.setup(given, optimizer, _reapply_compile=reapply)
    with recorder.recording():
        for (inputs,) in list(loader())[dist.get_rank() :: dist.get_world_size()]:
            optimizer.zero_grad()
            fabric.backward(F.mse_loss(module(inputs), inputs.sin()), model=module)
            optimizer.step()
            with torch.no_grad():
                module(inputs)
    return recorder.result(layers)


def assert_overlap(events: list[str]) -> None:
    """A bucket leaves between any two parts of the backward."""
    parts = [position for position, event in enumerate(events) if event.startswith("part")]
    assert len(parts) == NUM_LAYERS
    for part, next_part in pairwise(parts):
        assert [event for event in events[part:next_part] if event.startswith("bucket")], events


def assert_same(rank: Compiled, expected: Compiled, **tolerance: Any) -> None:
    torch.testing.assert_close(rank.weights, expected.weights, **(tolerance or {"rtol": 0, "atol": 0}))


@pytest.fixture(scope="module")
def eager() -> list[Compiled]:
    return run_on_ranks(fit, compiled="not")


@pytest.mark.parametrize("compiled", ["module", "in configure_model"])
def test_buckets_leave_between_the_parts_of_a_compiled_backward(compiled: str, eager: list[Compiled]) -> None:
    for rank, expected in zip(run_on_ranks(fit, compiled=compiled), eager, strict=True):
        assert len(rank.events_by_step) == NUM_STEPS
        for events in rank.events_by_step[1:]:  # the first backward is observed
            assert_overlap(events)
        # Nothing is compiled again; validation shares no graph with training.
        assert rank.num_graphs == 1 + NUM_LAYERS
        assert_same(rank, expected)


def test_accumulation_overlaps_in_the_last_micro_batch() -> None:
    how: Any = {"accumulate_grad_batches": 2, "limit_train_batches": 4}
    eager, ranks = (run_on_ranks(fit, compiled=compiled, **how) for compiled in ("not", "module"))
    for rank, expected in zip(ranks, eager, strict=True):
        alone, together = rank.events_by_step[1][:NUM_LAYERS], rank.events_by_step[1][NUM_LAYERS:]
        assert alone == [f"part {part}" for part in range(NUM_LAYERS)]
        assert_overlap(together)
        assert_same(rank, expected)


CANNOT_SPLIT = pytest.mark.skipif(
    "has_higher_order_op" in DDPOptimizer.compile_fn.__code__.co_names,
    reason="this torch cannot split a graph that has checkpointing in it",
)


@pytest.mark.parametrize("how", [{"dynamic": True}, pytest.param({"checkpointed": True}, marks=CANNOT_SPLIT)], ids=str)
def test_dynamic_shapes_and_activation_checkpointing_overlap(how: dict[str, Any], eager: list[Compiled]) -> None:
    for rank, expected in zip(run_on_ranks(fit, compiled="module", **how), eager, strict=True):
        assert_overlap(rank.events_by_step[-1])
        assert_same(rank, expected)


@for_each(
    "how",
    [
        {"options": {"overlap": False}},
        # With an option that gives the reducer something to do there.
        {"world_size": 1, "options": {"on_nonfinite": "raise"}},
    ],
)
def test_a_graph_stays_whole_where_no_split_is_wanted_and_on_one_rank(how: dict[str, Any]) -> None:
    for rank in run_on_ranks(fit, compiled="submodule", max_steps=2, limit_val_batches=0, **how):
        parts = [[event for event in events if event.startswith("part")] for events in rank.events_by_step]
        assert [len(of_step) for of_step in parts] == [1, 1]


def test_a_graph_without_a_backward_stays_whole() -> None:
    for rank in run_on_ranks(fit, compiled="teacher", max_steps=1, limit_val_batches=0):
        assert rank.num_graphs == 1


@pytest.mark.long
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
def test_inductor_gives_the_same_up_to_rounding(eager: list[Compiled], tmp_path: Path) -> None:
    how: dict[str, Any] = {"compile_with": "inductor", "limit_val_batches": 0, "cache": tmp_path}
    for rank, expected in zip(run_on_ranks(fit, compiled="submodule", **how), eager, strict=True):
        assert_same(rank, expected, rtol=1e-5, atol=1e-6)


def test_fabric_overlaps() -> None:
    eager = run_on_ranks(train_with_fabric, compiled=False)
    for reapply in (True, False):
        ranks = run_on_ranks(train_with_fabric, compiled=True, reapply=reapply)
        for rank, expected in zip(ranks, eager, strict=True):
            for events in rank.events_by_step[1:]:
                assert_overlap(events)
            assert rank.num_graphs == NUM_LAYERS + 1  # evaluation has one graph, in one part
            assert_same(rank, expected)


@for_each(("bucket_cap_mb", "part_mb"), [(3.0, 3), (None, 25), ([1.0, 2.0, 5.0], 5), (0.5, 1)])
def test_parts_are_as_large_as_buckets_but_not_smaller_than_torch_allows(bucket_cap_mb: Any, part_mb: int) -> None:
    with graphs_split(ReducerConfig(bucket_cap_mb=bucket_cap_mb), world_size=2):
        cap = DistributedDataParallel._get_active_ddp_module().bucket_bytes_cap
    assert cap == part_mb * MIB
    DDPOptimizer(cap, lambda *_: None)  # type: ignore[arg-type]  # which checks it
