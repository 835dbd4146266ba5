"""What a fit with local steps begins with: islands, and who waits for whom in a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.distributed
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import nn

from lightning_bucketddp.comm.collectives import Collectives
from lightning_bucketddp.comm.step_exchange import StepExchange
from lightning_bucketddp.data.uneven_data import UnevenData
from lightning_bucketddp.faults.progress import Progress
from lightning_bucketddp.local_steps.islands import Islands, make_islands
from lightning_bucketddp.strategies.batch_weighting import (
    BatchWeighting,
    EqualBatches,
    SkippedStep,
    accept_skipped_steps,
)
from lightning_bucketddp.strategies.fit_state import FitState
from lightning_bucketddp.strategies.local_steps import LocalSteps
from lightning_bucketddp.strategies.options import StrategyOptions
from lightning_bucketddp.strategies.signals import StopSignals

if TYPE_CHECKING:
    from lightning.pytorch import Trainer


def find_islands(
    world: Collectives, options: StrategyOptions, *, known: Islands | None, host: str, syncs_layers: bool
) -> Islands | None:
    """Divide the ranks into islands; None: there is one only. All ranks must call this.

    Args:
        known: those of an earlier fit.
        host: names the host of this rank.
        syncs_layers: layers of an island talk to each other.
    """
    islands = known
    if islands is None or islands.world is not world:
        islands = make_islands(world, options.islands, host=host)
    if islands is None:
        rank_zero_warn(
            f"bucketddp: `local_steps={options.local_steps}` has no effect, because all ranks are in one"
            f" island (`islands={options.islands!r}`): gradients are averaged in each step."
        )
    elif syncs_layers:
        _refuse_lone_sync_batchnorm(islands)
    return islands


def begin_local_steps(
    state: FitState,
    trainer: Trainer,
    islands: Islands,
    options: StrategyOptions,
    *,
    progress: Progress,
    signals: StopSignals | None,
    has_alert: Callable[[], bool],
    callback: type,
) -> None:
    """Have the ranks of an island wait for each other in each step, and all ranks when a round ends.

    Args:
        has_alert: something has gone wrong that all ranks have to hear of.
        callback: the Trainer's class of callbacks.
    """
    assert options.local_steps is not None
    state.islands = islands
    exchange = StepExchange(islands.world, has_alert=has_alert)
    state.weighting = LoneBatches(trainer, islands.world.device)
    if islands.own.world_size > 1 or options.uneven_data:
        state.exchange = StepExchange(islands.own)
        asks_every = options.local_steps * trainer.accumulate_grad_batches
        uneven_data = UnevenData(exchange, extends=True, asks_every=asks_every) if options.uneven_data else None
        state.weighting = BatchWeighting(
            trainer,
            state.exchange,
            islands.own,
            weight_of=None,
            extends_uneven_data=options.uneven_data,
            uneven_data=uneven_data,
        )
    state.local_steps = local_steps = LocalSteps(
        trainer,
        islands,
        options,
        exchange=exchange,
        of_island=state.exchange,
        progress=progress,
        signals=signals,
    )
    local_steps.install(callback)
    if signals is not None:
        signals.travel_with(exchange)


class LoneBatches(EqualBatches):
    """Batches of a rank that is alone in its island: it may leave out a step, because nobody waits for it."""

    def __init__(self, trainer: Trainer, device: torch.device) -> None:
        super().__init__()
        self._device = device
        accept_skipped_steps(trainer)

    def skip(self) -> SkippedStep:
        return SkippedStep(torch.zeros((), device=self._device, requires_grad=True))


def refuse_layers_between_islands(model: nn.Module, islands: Islands) -> None:
    """Raise if a layer of `model` talks to ranks of other islands in each step."""
    members = set(islands.own.global_ranks)
    for name, layer in model.named_modules():
        if isinstance(layer, nn.SyncBatchNorm) and getattr(layer, "_sync_original", None) is None:
            group = layer.process_group or torch.distributed.group.WORLD
            if not members.issuperset(torch.distributed.get_process_group_ranks(group)):
                raise ValueError(
                    f"`{name}` (SyncBatchNorm) talks to ranks of other islands in each step, which `local_steps` is to"
                    " avoid. Use BatchNorm layers and `Trainer(sync_batchnorm=True)`, which stays inside of an island."
                )


def _refuse_lone_sync_batchnorm(islands: Islands) -> None:
    """Raise if there is nobody in an island to synchronize BatchNorm layers with."""
    if islands.own.world_size == 1:
        raise ValueError(
            "`sync_batchnorm=True` needs other ranks in each step, but with `local_steps` each rank is alone in its"
            " island. Pass `islands='host'` or a smaller number of islands to the strategy, or leave `sync_batchnorm`"
            " out."
        )
