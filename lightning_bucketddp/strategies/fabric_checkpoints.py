"""Checkpoints, of a `BucketDDPStrategy` for Fabric."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.optim import Optimizer

from lightning_bucketddp.checkpoint.collective_io import read_on_every_rank, write_on_rank_zero
from lightning_bucketddp.checkpoint.errors import CheckpointWriteError
from lightning_bucketddp.checkpoint.finite_weights import Severities, severities_of, spoiled_weights
from lightning_bucketddp.comm.collectives import Collectives
from lightning_bucketddp.faults.progress import SAVING
from lightning_bucketddp.replicas.consistency import ReplicaComparison, TrainingState
from lightning_bucketddp.replicas.replicas import unwrapped
from lightning_bucketddp.strategies.base import StrategyBase
from lightning_bucketddp.strategies.fault_handling import lost_shards, torn
from lightning_bucketddp.trainer_internals import convert_to_state

if TYPE_CHECKING:
    from lightning.fabric.strategies.ddp import DDPStrategy as _ParallelStrategy
else:
    _ParallelStrategy = object


class FabricCheckpointHooks(StrategyBase, _ParallelStrategy):
    """The part of a strategy that Fabric calls to save and to load."""

    _checks: ReplicaComparison | None
    # None: none was given, and nobody has asked for it.
    _io: Any = None
    _trained_state: Callable[[], TrainingState]
    # Of the modules that were set up.
    _weights_at_start: dict[nn.Module, Severities]

    @property
    def checkpoint_io(self) -> Any:
        if self._io is None:
            self._io = self._default_checkpoint_io()
        return self._io

    @checkpoint_io.setter
    def checkpoint_io(self, io: Any) -> None:
        self._io = io

    def save_checkpoint(
        self,
        path: Any,
        state: dict[str, Any],
        storage_options: Any | None = None,
        filter: dict[str, Callable[[str, Any], bool]] | None = None,
    ) -> None:
        """Write on rank zero; a failure is raised on every rank."""
        if self.has_torn_weights:
            raise CheckpointWriteError(torn(path))
        if self.has_lost_shards and any(self._holds_shards(value) for value in state.values()):
            raise CheckpointWriteError(lost_shards(path))
        if self._checks is not None and self._collectives is not None and self._collectives.is_open:
            self._checks.compare(self._trained_state, when=f"before checkpoint `{path}` is written")
        # On every rank: an optimizer may have to gather its state.
        checkpoint = convert_to_state(self, state, filter=filter or {})

        def save() -> None:
            spoiled = [
                weight
                for name, value in state.items()
                if isinstance(value, nn.Module) and (module := unwrapped(value)) in self._weights_at_start
                for weight in spoiled_weights(checkpoint[name], module, at_start=self._weights_at_start[module])
            ]
            place = self._finite_checkpoints.place(path, spoiled, refuses=not self.config.trains_on)

            def write(content: dict[str, Any]) -> None:
                with self._finite_checkpoints.known_unless_failing(place):
                    self.checkpoint_io.save_checkpoint(content, place, storage_options=storage_options)

            self._writer.save(checkpoint, write, path=place, in_background=self.options.async_checkpoints)

        with self._progress.during(SAVING):
            write_on_rank_zero(save, self._collectives, path=path)

    def get_module_state_dict(self, module: nn.Module) -> dict[str, Any]:
        return super().get_module_state_dict(unwrapped(module))

    def load_module_state_dict(self, module: nn.Module, state_dict: dict[str, Any], strict: bool = True) -> None:
        super().load_module_state_dict(unwrapped(module), state_dict, strict=strict)

    def _holds_shards(self, value: Any) -> bool:
        return self.shards is not None and self.shards.of(value) is not None

    def wait_for_checkpoints(self) -> None:
        """Wait until all checkpoints are written; a failure is raised on every rank. All ranks must call this."""
        write_on_rank_zero(self._writer.drain, self._collectives)

    def load_checkpoint(  # type: ignore[override]
        self, path: Any, state: Any = None, strict: bool = True, **kwargs: Any
    ) -> dict[str, Any]:
        """Give `state` what a checkpoint holds, once all ranks have read the same."""
        own_io = self.checkpoint_io
        # Not for `fabric.load_raw`, which one rank may call alone: other than `fabric.load` it waits for nobody.
        if self._collectives is not None and not isinstance(state, nn.Module | Optimizer):
            if self.options.async_checkpoints:
                self.wait_for_checkpoints()
            self._io = _ReadOnEveryRank(own_io, self._collectives)
        try:
            rest = super().load_checkpoint(path, state, strict, **kwargs)
        finally:
            self._io = own_io
        # Training begins again with what was loaded.
        loaded = list(state.values()) if isinstance(state, dict) else [state]
        for module in self._weights_at_start:
            if any(isinstance(other, nn.Module) and module is unwrapped(other) for other in loaded):
                self._weights_at_start[module] = severities_of(module)
        return rest

    def teardown(self) -> None:
        with suppress(Exception):  # it is in the log
            self._writer.drain()
        super().teardown()


@dataclass(frozen=True)
class _ReadOnEveryRank:
    """What `checkpoint_io` reads, for Fabric's own code to take apart."""

    checkpoint_io: Any
    collectives: Collectives

    def load_checkpoint(self, path: Any, **kwargs: Any) -> dict[str, Any]:
        return read_on_every_rank(
            lambda: self.checkpoint_io.load_checkpoint(path, **kwargs), self.collectives, path=path
        )
