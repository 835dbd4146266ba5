"""The state of a run of the Trainer on this rank, and how it is made from the options."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, MutableMapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from torch import nn

from lightning_bucketddp.comm.collectives import Collectives
from lightning_bucketddp.comm.step_exchange import StepExchange
from lightning_bucketddp.config import MIB
from lightning_bucketddp.data.sharded_iterable import IterableSharding
from lightning_bucketddp.data.uneven_data import FirstBatches, UnevenData
from lightning_bucketddp.graphs.captured_steps import CapturedSteps
from lightning_bucketddp.graphs.replay import new_graph
from lightning_bucketddp.local_steps.islands import Islands, find_islands, refuse_layers_between_islands
from lightning_bucketddp.local_steps.rounds import LocalRounds
from lightning_bucketddp.part import RunPart
from lightning_bucketddp.processes import rank_zero_info, rank_zero_warn
from lightning_bucketddp.reducer.nonfinite import Finiteness, scaler_of
from lightning_bucketddp.reducer.reducer import Reducer
from lightning_bucketddp.replicas.consistency import ReplicaComparison
from lightning_bucketddp.replicas.replicas import Replicas
from lightning_bucketddp.sharding.shards import Shards
from lightning_bucketddp.strategies.exact_evaluation import ExactEvaluation
from lightning_bucketddp.strategies.parts import (
    BatchWeighting,
    BufferSync,
    ConvertedLayers,
    ScheduledComparison,
    UnfinishedBatch,
)
from lightning_bucketddp.trainer_internals import layer_sync_of, replace_method, wrap_requests
from lightning_bucketddp.wording import list_names, pluralize

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

    from lightning_bucketddp.strategies.trainer import TrainerStrategy


class FitTally:
    """Counts what a fit does after it has begun to train, for the log."""

    def __init__(self, strategy: TrainerStrategy) -> None:
        assert strategy.reducer is not None  # a fit runs
        self._strategy = strategy
        self._global_step = strategy.trainer.global_step
        self._began_at = time.monotonic()
        self._before = replace(strategy.reducer.stats)  # a search for a learning rate may have counted before
        self.num_withheld = 0  # steps with non-finite gradients, or without a loss on any rank

    def describe(self) -> list[str]:
        """Return the steps and reductions, decisions about buckets, and the summaries of the parts."""
        strategy, reducer = self._strategy, self._strategy.reducer
        assert reducer is not None
        stats = reducer.stats
        # Lightning also counts steps that were withheld.
        num_steps = strategy.trainer.global_step - self._global_step - self.num_withheld
        skipped = f" and {self.num_withheld} skipped" if self.num_withheld else ""
        lines = [pluralize(num_steps, "optimizer step") + skipped]
        if num_reductions := stats.num_reductions - self._before.num_reductions:
            mib = (stats.bytes_sent - self._before.bytes_sent) / MIB
            lines.append(f"{mib:.1f} MiB sent per rank in {pluralize(num_reductions, 'reduction')}")
        if reducer.bucket_set is not None and stats.num_plans > 1:
            lines.append(f"last plan: {pluralize(len(reducer.bucket_set.buckets), 'bucket')}")
        lines += [reducer.plans.tuning, *(part.describe() for part in strategy._parts)]
        if strategy.shards is not None:
            lines.append(strategy.shards.describe())
        if strategy.checkpoint_stats.held_up_s >= max(1.0, (time.monotonic() - self._began_at) / 100):
            lines.append(strategy.checkpoint_stats.describe())
        return [line for line in lines if line]


@dataclass(slots=True)
class FitState:
    """Everything that `setup` makes and `teardown` closes; what is switched off is None.

    It is kept until the next `setup`: a checkpoint may be saved after the fit, and `strategy.reducer` be read.
    """

    is_fit: bool = False  # or else an evaluation
    replicas: Replicas | None = None  # parameters and buffers; None: no module was set up
    reducer: Reducer | None = None  # None: nothing was trained
    shards: Shards | None = None  # optimizers whose state is divided
    exchange: StepExchange | None = None  # messages of a step; None: there are no other ranks, and no weights
    weighting: BatchWeighting | None = None  # None: nothing is trained
    buffers: BufferSync | None = None
    layers: Any = None  # synchronises layers between ranks: ours, or the user's plugin
    comparison: ScheduledComparison | None = None
    evaluation: ExactEvaluation | None = None  # None: this rank is alone
    first_batches: FirstBatches | None = None
    sharding: IterableSharding | None = None
    islands: Islands | None = None  # None: all ranks take each step together
    local_steps: LocalRounds | None = None
    graphs: CapturedSteps | None = None
    has_warned_of_own_gradients: bool = False  # of steps with gradients that were not averaged
    unfinished: UnfinishedBatch | None = None
    tally: FitTally | None = None  # None: training has not begun
    done: list[str] = field(default_factory=list)  # logged when the run is over

    def close(self, model: nn.Module | None) -> nn.Module | None:
        """Take hooks and conversions off `model`, and return it."""
        if self.graphs is not None:
            self.graphs.close()
        if self.reducer is not None:
            self.reducer.close()
        if self.shards is not None:
            self.shards.release_gradients()
        if self.evaluation is not None:
            self.evaluation.close()
        if self.unfinished is not None:
            self.unfinished.close()
        layers, self.layers = self.layers, None
        return model if model is None or layers is None else layers.revert(model)

    def end_exchange(self, collectives: Collectives | None, *, has_raised: bool) -> None:
        """Exchange no more, and close connections unless some rank may still wait for this one, as after an error."""
        exchange, self.exchange = self.exchange, None
        self.weighting = None
        are_quiet = [self.local_steps is None or self.local_steps.close(), exchange is None or exchange.close()]
        # Otherwise a program that fits thousands of times runs out of connections.
        if (exchange is not None or self.islands is not None) and all(are_quiet) and not has_raised:
            groups = [] if self.islands is None else [self.islands.own, self.islands.peers]
            for group in (collectives, *groups):
                assert group is not None
                group.close_host_groups()


class LoaderPreparation:
    """Has the parts of a run prepare dataloaders, and knows which are for training: Lightning does not say."""

    def __init__(self) -> None:
        self._is_training = False  # while Lightning sets up training data
        self._is_first = True
        self._undo = ExitStack()
        self._combined: MutableMapping[Any, list[Any]] = {}  # by `CombinedLoader`: the loaders that the user put in it

    def watch(self, trainer: Trainer) -> None:
        """Know from now on which dataloaders are for training."""
        self.close()
        self._combined = WeakKeyDictionary()
        set_up = trainer.fit_loop.setup_data

        def set_up_training_data() -> None:
            self._is_training = self._is_first = True
            try:
                set_up()
            finally:
                self._is_training = False

        def request(ask: Callable[[], Any]) -> Any:
            if hasattr(loader := ask(), "flattened"):
                self._combined.setdefault(loader, loader.flattened)
            return loader

        self._undo.callback(replace_method(trainer.fit_loop, "setup_data", set_up_training_data))
        self._undo.callback(wrap_requests(trainer, request))

    def restore_combined(self) -> None:
        """Put the user's loaders back, in whose place Lightning has put some that are divided among the ranks."""
        for combined, loaders in self._combined.items():
            combined.flattened = loaders

    def close(self) -> None:
        self._undo.close()

    def prepare(self, loader: object, parts: list[RunPart]) -> object:
        """Return `loader`, prepared by all `parts`, from its original if it was prepared before."""
        original = loader = getattr(loader, "prepared_from", loader)
        if self._is_training and self._is_first:
            self._is_first = False
            for part in parts:
                part.begin_loaders()
        for part in parts:
            loader = part.prepare_loader(loader, is_training=self._is_training)
        if loader is not original:
            vars(loader)["prepared_from"] = original  # not by `setattr`, which may set it in the user's object
        return loader


def run_parts(strategy: TrainerStrategy) -> list[RunPart]:
    """Return the parts of a run. All ranks call the hooks of the parts in this order."""
    state = strategy._state
    parts = [
        strategy._batch_size,
        state.sharding,
        None if strategy.is_searching else strategy._position,
        state.first_batches,
        state.buffers,
        state.unfinished,  # after the buffers: copies those that are shared
        state.local_steps,
        state.weighting,
        state.layers,  # after the weighting: asks whether this rank is idle
        state.comparison,
        state.evaluation,
        None if strategy.is_searching else state.graphs,
    ]
    return [part for part in parts if isinstance(part, RunPart)]


def prepare_run(strategy: TrainerStrategy, trainer: Trainer) -> None:
    """Make everything that does not need the parameters. All ranks must call this."""
    state, options, collectives = strategy._state, strategy.options, strategy._collectives
    assert collectives is not None
    state.evaluation = ExactEvaluation(trainer, collectives, options)
    if options.shard_iterable:
        state.sharding = IterableSharding(
            rank=strategy.global_rank, world_size=strategy.world_size, warn=rank_zero_warn
        )
    if state.is_fit:
        _prepare_fit(strategy, trainer, collectives)


def _prepare_fit(strategy: TrainerStrategy, trainer: Trainer, collectives: Collectives) -> None:
    state, options, layer_sync = strategy._state, strategy.options, layer_sync_of(strategy)
    assert strategy.model is not None
    strategy._batch_size.begin(trainer)
    strategy._position.begin(trainer)
    if state.shards is not None:
        state.shards.close()
    state.shards = strategy.new_shards()
    if options.local_steps is not None:
        strategy._islands = state.islands = find_islands(
            collectives,
            options.local_steps,
            known=strategy._islands,
            host=f"{socket.gethostname()} {strategy.cluster_environment.node_rank()}",
            syncs_layers=layer_sync is not None,
        )
    if state.islands is None:
        _begin_common_steps(strategy, trainer, collectives)
    else:
        _begin_local_steps(strategy, trainer, state.islands)
    weighting, steps_with = state.weighting, collectives if state.islands is None else state.islands.own
    assert weighting is not None
    of_all_ranks = state.exchange if state.local_steps is None else state.local_steps.exchange
    if strategy.signals is not None:
        strategy.signals.exchange = of_all_ranks
    if options.cuda_graphs:
        make_graph = new_graph(strategy.root_device)
        state.graphs = CapturedSteps(trainer, steps_with, log=rank_zero_info, make_graph=make_graph)
    # With `overfit_batches` all ranks train on the same batches on purpose.
    if steps_with.world_size > 1 and state.exchange is not None and not trainer.overfit_batches:  # type: ignore[attr-defined]
        state.first_batches = FirstBatches(state.exchange, warn=rank_zero_warn)
    if layer_sync is not None:
        is_torchs = type(layer_sync) is strategy.root.torch_sync_batchnorm
        state.layers = ConvertedLayers(steps_with, weighting) if is_torchs else layer_sync
        strategy.model = state.layers.apply(strategy.model)
    if state.islands is not None:
        refuse_layers_between_islands(strategy.model, state.islands)


def _begin_common_steps(strategy: TrainerStrategy, trainer: Trainer, collectives: Collectives) -> None:
    """Have all ranks wait for each other in each step."""
    state, weight = strategy._state, strategy.options.gradient_weight
    # A single rank waits for no other, but may weigh its micro-batches.
    if collectives.world_size > 1 or weight is not None:
        state.exchange = StepExchange(collectives, has_alert=lambda: strategy._writer.has_failed)
    state.weighting = BatchWeighting(
        trainer,
        state.exchange,
        collectives,
        weight_of=strategy.root.batch_size_of if weight == "batch_size" else weight,
        extends_uneven_data=strategy.options.uneven_data,
    )


def _begin_local_steps(strategy: TrainerStrategy, trainer: Trainer, islands: Islands) -> None:
    """Have the ranks of an island wait for each other in each step, and all ranks when a round ends."""
    state, options = strategy._state, strategy.options
    assert options.local_steps is not None
    exchange = StepExchange(islands.world, has_alert=lambda: strategy._writer.has_failed)
    uneven_data = None
    if islands.own.world_size > 1 or options.uneven_data:
        state.exchange = StepExchange(islands.own)
        asks_every = options.local_steps.steps * trainer.accumulate_grad_batches
        uneven_data = UnevenData(exchange, extends=True, asks_every=asks_every) if options.uneven_data else None
    state.weighting = weighting = BatchWeighting(
        trainer, state.exchange, islands.own, extends_uneven_data=options.uneven_data, uneven_data=uneven_data
    )
    state.local_steps = LocalRounds(
        trainer,
        islands,
        options.local_steps,
        config=options.reducer,
        replica_checks=options.replica_checks,
        broadcasts_buffers=options.broadcast_buffers,
        exchange=exchange,
        of_island=state.exchange,
        progress=strategy._progress,
        signals=strategy.signals,
        has_trained=lambda: not weighting.nobody_trained,
    )
    state.local_steps.install(strategy.root.callback)


def set_up_model(strategy: TrainerStrategy, model: nn.Module) -> None:
    """Make `model` the same on every rank, and a reducer for its gradients. All ranks must call this."""
    state, options, collectives = strategy._state, strategy.options, strategy._collectives
    assert collectives is not None
    state.replicas = Replicas(model, collectives)
    state.replicas.agree()
    if options.init_sync:
        state.replicas.broadcast(buffers=options.init_sync_buffers)
    if state.islands is not None:
        state.replicas = Replicas(model, state.islands.own)
    if state.is_fit:
        _make_reducer(strategy, model, state.replicas)
    if options.broadcast_buffers:
        is_manual = strategy.lightning_module is not None and not strategy.lightning_module.automatic_optimization
        state.buffers = BufferSync(state.replicas, state.reducer, once=state.is_fit and is_manual)


def divide_optimizers(strategy: TrainerStrategy, model: nn.Module) -> None:
    """Divide the state of the new optimizers among the ranks (`shard_optimizer`)."""
    state = strategy._state
    if state.shards is not None and state.shards.optimizers:
        # The shards belong to optimizers that the new ones replace.
        state.shards.close()
        state.shards = strategy.new_shards()
        set_up_model(strategy, model)
    if state.shards is not None:
        for optimizer in strategy.optimizers:
            state.shards.add(optimizer)


def _make_reducer(strategy: TrainerStrategy, model: nn.Module, replicas: Replicas) -> None:
    state, trainer, params = strategy._state, strategy.trainer, model.named_parameters()
    ignored = [name for name, param in params if param.requires_grad and name not in replicas.parameters]
    if ignored and strategy.options.gradient_weight is not None:
        raise ValueError(
            "`gradient_weight` multiplies losses by weights and divides averages by their sum, but"
            f" `_ddp_params_and_buffers_to_ignore` keeps {list_names(ignored)} out of the average. Leave one out."
        )

    def where() -> str:
        return f"step {trainer.global_step} (epoch {trainer.current_epoch}, batch {trainer.fit_loop.batch_idx})"

    has_scaler = scaler_of(strategy.precision_plugin) is not None
    if state.reducer is not None:
        state.reducer.close()
    state.reducer = reducer = Reducer(
        replicas,
        strategy.config,
        weighting=None if state.weighting is None else state.weighting.weighting,
        maker=state.shards,
        finiteness=Finiteness(replicas, strategy.config, where=where, has_scaler=has_scaler),
        # While a fit trains its counters and the numbers of its plans go on.
        stats=None if state.reducer is None or state.tally is None else state.reducer.stats,
    )
    strategy._progress.describe_backward = reducer.describe_backward
    if state.local_steps is not None:
        state.local_steps.set_replicas(replicas, reducer.stats)
    device = None if strategy._rank_seeds is None else strategy.root_device
    state.unfinished = UnfinishedBatch(trainer, model, strategy._position, device)

    state.comparison = None
    # In a search some ranks may take a step that others do not; weights are restored after it.
    may_differ = strategy.differs_by_design or strategy.is_searching
    if state.exchange is not None and replicas.collectives.world_size > 1 and not may_differ:
        checks = strategy.options.replica_checks
        comparison = ReplicaComparison(replicas.collectives, checks, exchange=state.exchange, has_messages=True)
        state.comparison = ScheduledComparison(comparison, strategy, replicas, reducer.stats)
