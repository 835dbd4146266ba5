"""Rounds of local steps in a fit: when a round ends, what the ranks exchange then, and what a checkpoint holds of it.

A round ends after `local_steps` steps of the optimizers, between two batches. It ends earlier where weights are read:
before a validation, before a checkpoint is saved, at the end of an epoch and of the training; and when a signal stops
the run. So weights are equal on all ranks whenever they are read.

Note: averaged models
    A moving average of weights is linear in them: the mean over the islands of each island's average is the average of
    the mean. So the models that Lightning's `WeightAveraging` keeps are averaged when weights are read. The same holds
    at the end of each round for parameters that were changed without being trained, as those of a mean teacher. They
    are found by checksums, because `Tensor._version` does not count what is written through `Tensor.data`.
"""

from __future__ import annotations

import logging
import time
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed
from torch import Tensor, nn

from lightning_bucketddp.checkpoint.rank_state import gather_to_rank_zero
from lightning_bucketddp.comm.step_exchange import MessageKind, StepExchange
from lightning_bucketddp.config import MIB, LocalSteps, ReducerConfig, ReplicaChecks
from lightning_bucketddp.faults.progress import Progress
from lightning_bucketddp.faults.signals import StopSignals
from lightning_bucketddp.local_steps.islands import Islands, OuterStep, average
from lightning_bucketddp.part import RunPart
from lightning_bucketddp.reducer.nonfinite import NonFiniteError, scaler_of
from lightning_bucketddp.reducer.observer import OuterStepStats, ReducerStats
from lightning_bucketddp.reducer.quantization import reduction_of
from lightning_bucketddp.replicas.consistency import Checksums, ReplicaComparison, training_state
from lightning_bucketddp.replicas.replicas import ReplicaMismatchError, Replicas, explain_difference
from lightning_bucketddp.trainer_internals import averaged_models
from lightning_bucketddp.wording import list_names, list_ranks, pluralize, wrap

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

log = logging.getLogger(__name__)

OUTER_STEP = "the outer step"


@dataclass(eq=False)
class LocalRounds(RunPart):
    """Rounds of `local_steps` steps in each island, with an outer step at the end of each."""

    trainer: Trainer
    islands: Islands
    option: LocalSteps
    config: ReducerConfig
    replica_checks: ReplicaChecks
    broadcasts_buffers: bool  # all ranks have the same buffers (`broadcast_buffers`)
    exchange: StepExchange  # between all ranks, for the end of a round
    of_island: StepExchange | None  # between the ranks of this island; None: this rank is alone in it
    progress: Progress
    signals: StopSignals | None  # those that stop the run, and travel with `exchange`; None: they are not handled
    has_trained: Callable[[], bool]  # whether there was data in this island for the step that has ended

    def __post_init__(self) -> None:
        self._reduction = reduction_of(self.config, self.islands.peers)
        self._checks = ReplicaComparison(
            self.islands.world, self.replica_checks, exchange=self.exchange, has_messages=True
        )
        self._replicas: Replicas  # set by `set_replicas`, before anything is trained
        self._stats = ReducerStats()
        self._outer: OuterStep | None = None
        self._restored_momentum: dict[str, Tensor] = {}
        # Since the last outer step.
        self._num_steps = self._num_trained = 0
        self._has_stepped = False
        self._are_equal = True  # all ranks have the weights of the last outer step
        self._have_averaged = True  # all ranks have the same averaged models
        self._callback: Any = None
        self._left_out: set[int] = set()  # non-finite islands since averaged models were averaged over the islands
        self._checksums = Checksums()
        # Of the parameters that are not trained, by name, when all ranks had the same.
        self._untrained: dict[str, int] = {}

    @property
    def is_partial(self) -> bool:
        """Whether an outer step has begun and not ended."""
        return self._outer is not None and self._outer.is_partial

    def set_replicas(self, replicas: Replicas, stats: ReducerStats) -> None:
        """Train these `replicas` from now on. All ranks must call this."""
        stats.outer_steps = self._stats.outer_steps
        self._replicas, self._stats = replicas, stats
        if self._outer is not None:
            self._make_outer_step()

    def begin_training(self) -> None:
        self._outer = None
        self._num_steps = self._num_trained = 0
        self._make_outer_step().set_momentum(self._restored_momentum)

    def _make_outer_step(self) -> OuterStep:
        trained = self._trained()
        momentum = {} if self._outer is None else self._outer.gather_momentum()
        self._outer = OuterStep(trained, self.islands, self._reduction, self.option)
        self._outer.set_momentum(momentum)
        self._untrained = self._checksums_of([name for name in self._replicas.parameters if name not in trained])
        return self._outer

    def _checksums_of(self, names: list[str]) -> dict[str, int]:
        parameters = self._replicas.parameters
        sums = self._checksums.start([[parameters[name].detach()] for name in names])()
        return dict(zip(names, sums, strict=True))

    def _trained(self) -> dict[str, nn.Parameter]:
        return {name: param for name, param in self._replicas.parameters.items() if param.requires_grad}

    def begin_batch(self, batch_idx: int) -> None:
        self.exchange.epoch = self.trainer.current_epoch
        self.exchange.num_batches = batch_idx + 1
        self._has_stepped = False
        if self.of_island is not None and self.signals is not None:
            self.of_island.stop_signal = self.signals.stop_signal
        assert self._outer is not None
        if list(self._trained()) != self._outer.names:  # parameters were frozen or unfrozen since the last batch
            self._end_round(MessageKind.OUTER_STEP)
            self._make_outer_step()

    def complete_step(self) -> None:
        self._num_steps += 1
        self._num_trained += self.has_trained()
        self._has_stepped = True
        self._are_equal = self._have_averaged = False

    def after_batch(self) -> None:
        """End the round if it is over, or if the run is to stop.

        The watchdog of each rank learns of a signal that any rank has received. The ranks of an island then agree on
        the step after which they go to the outer step, where they meet the other islands.
        """
        if not self._has_stepped:
            return
        self._has_stepped = False
        stops = 0 if self.signals is None else self.signals.stop_signal
        if self.of_island is not None:
            stops = self.of_island.all_stop_by
        if self._num_steps >= self.option.steps or stops:
            self.exchange.stop_signal = self.exchange.stop_signal or stops
            self._end_round(MessageKind.OUTER_STEP)
        if self.signals is not None:
            self.signals.stop_if_agreed()

    def share_weights(self, kind: MessageKind) -> None:
        """End the round before a validation, or with the epoch: that raises on all ranks if it goes on for some."""
        if self._outer is not None:
            self._end_round(kind)
            self._average_models()

    def before_save(self) -> None:
        if self._outer is not None and self.islands.world.is_open:
            if self._num_steps:
                self._end_round(MessageKind.OUTER_STEP)
            self._average_models()

    def _end_round(self, kind: MessageKind) -> None:
        outer = self._outer
        assert outer is not None
        began_at = time.monotonic()
        with self.progress.during(OUTER_STEP):
            # Reset first, so that an error below does not lead to another attempt.
            has_trained, self._num_steps, self._num_trained = self._num_trained > 0, 0, 0
            nonfinite = outer.nonfinite() if has_trained else []
            sums = self._checksums_of(list(self._untrained))
            updated = [name for name, before in self._untrained.items() if sums[name] != before]
            self.exchange.send(
                kind,
                weight=has_trained,
                full_weight=bool(nonfinite),
                trainable=zlib.crc32(repr((outer.names, updated)).encode()),
            )
            received = self.exchange.receive()
            if received.least.trainable != received.greatest.trainable:
                updated = self._updated_anywhere(outer.names, updated)
            if received.total.weight == 0:
                self._are_equal = True
                return
            left_out = self._handle_nonfinite(nonfinite, outer) if received.total.full_weight else set()
            num_counted = round(received.total.weight / self.islands.own.world_size) - len(left_out)
            counts = has_trained and self.islands.index not in left_out
            share = self.islands.number / num_counted if counts else 0.0
            num_bytes = 0
            if num_counted:
                num_bytes = outer.step(share=share)
                if self.broadcasts_buffers:
                    average(list(self._replicas.buffers().values()), self.islands, share=share)
            else:
                outer.restore_global_weights()
                share = 1.0
            if updated:  # (Note: averaged models)
                average([self._replicas.parameters[name] for name in updated], self.islands, share=share)
                self._untrained |= self._checksums_of(updated)
            self._are_equal = True
            seconds = time.monotonic() - began_at
            self._stats.outer_steps.append(OuterStepStats(self.trainer.global_step, seconds, num_bytes))
        every = self.replica_checks.every_n_steps
        # Outer steps are counted, because all ranks have taken the same number of them.
        if every and self._stats.num_outer_steps % -(-every // self.option.steps) == 0:
            self.compare(when=f"after {pluralize(self._stats.num_outer_steps, 'outer step')}")

    def _updated_anywhere(self, trained: list[str], updated: list[str]) -> list[str]:
        """Return the names `updated` on any rank: one may be out of data. Raise if ranks train other parameters."""
        world = self.islands.world.host_group()
        by_rank = world.gather_json([trained, updated])
        if any(names != trained for names, _ in by_rank):
            mine = {name: {"requires_grad": name in trained} for name in self._replicas.parameters}
            raise ReplicaMismatchError(explain_difference(dict(enumerate(world.gather_json(mine)))))
        return list(dict.fromkeys(name for _, names in by_rank for name in names))

    def _handle_nonfinite(self, names: list[str], outer: OuterStep) -> set[int]:
        """Apply `on_nonfinite` to weights that are non-finite on some rank; return the islands to leave out."""
        by_rank = self.islands.world.host_group().gather_json(names)
        ranks = [rank for rank, found in enumerate(by_rank) if found]
        islands = {index for index, members in enumerate(self.islands.members) if set(members) & set(ranks)}
        of_islands = [rank for index in sorted(islands) for rank in self.islands.members[index]]
        all_names = list(dict.fromkeys(name for found in by_rank for name in found))
        found = f"not finite after the local steps before step {self.trainer.global_step}: the weights"
        found = f"{found} {list_names(all_names)} on {list_ranks(of_islands)}"
        response = self.config.on_nonfinite
        if response == "raise":
            outer.restore_global_weights()
            raise NonFiniteError(
                f"N{found[1:]}. All ranks have the weights of the last outer step again. Clip gradients or lower the"
                " learning rate; or pass `on_nonfinite='skip'` to the strategy to leave such ranks out."
            )
        outcome = (
            "They go into the weights of all ranks; `on_nonfinite='raise'` or `on_nonfinite='skip'` prevents that."
        )
        if response == "skip":
            outcome = "They are left out, and those ranks go on with the weights of the others."
            self._left_out |= islands
            if self.islands.index in islands:
                self._reset_nonfinite_state()
        if self.islands.world.rank == 0:
            log.warning(wrap(f"bucketddp: {found}. {outcome}"))
        return islands if response == "skip" else set()

    def _reset_nonfinite_state(self) -> None:
        """Reset the optimizer state of parameters for which it is non-finite."""
        for optimizer in self.trainer.strategy.optimizers:
            for param, state in list(optimizer.state.items()):
                tensors = [value for value in state.values() if isinstance(value, Tensor) and value.is_floating_point()]
                if not all(bool(tensor.isfinite().all()) for tensor in tensors):
                    del optimizer.state[param]

    def _average_models(self) -> None:
        """Average the averages of this island's weights that callbacks keep (Note: averaged models)."""
        if self._have_averaged:
            return
        self._have_averaged = True
        left_out, self._left_out = self._left_out, set()
        models = averaged_models(self.trainer.callbacks)  # type: ignore[attr-defined]
        averaged = [model.module for model in models if isinstance(model, torch.optim.swa_utils.AveragedModel)]
        num_counted = self.islands.number - len(left_out)
        share = 0.0 if self.islands.index in left_out else self.islands.number / num_counted
        for module in averaged if num_counted else []:
            average([*module.parameters(), *module.buffers()], self.islands, share=share)

    def compare(self, *, when: str) -> bool:
        parameters = self._replicas.parameters
        if not self._are_equal:
            return False  # an error has interrupted the round
        has_differed = self._checks.compare(lambda: training_state(parameters, []), when=when)
        if has_differed and self._outer is not None:
            self._outer.take_weights()
        return has_differed

    def describe(self) -> str:
        stats, steps = self._stats, pluralize(self._stats.num_outer_steps, "outer step")
        islands = f"{self.islands.number} islands of {pluralize(len(self.islands.members[0]), 'rank')}"
        seconds = sum(one.seconds for one in stats.outer_steps)
        return f"{steps} between {islands}: {stats.outer_bytes / MIB:.1f} MiB and {seconds:.1f} s"

    def install(self, base: type) -> None:
        """Add a callback to the Trainer that ends rounds; `base` is its class of callbacks."""
        hooks = {
            "on_train_batch_end": lambda *_: self.after_batch(),
            "on_validation_start": lambda *_: self.share_weights(MessageKind.OUTER_STEP),
            "on_train_epoch_end": lambda *_: self.share_weights(MessageKind.OUT_OF_DATA),
        }
        self._callback = type("EndsRounds", (base,), hooks)()
        # It comes first, because other callbacks read weights.
        self.trainer.callbacks.insert(0, self._callback)  # type: ignore[attr-defined]

    def close(self) -> bool:
        """Stop exchanging; return whether connections may be closed."""
        self.trainer.callbacks.remove(self._callback)  # type: ignore[attr-defined]
        self._reduction.close()
        if self._outer is not None:
            self._outer.free_device()
        return self.exchange.close()

    def gather_state(self, precision: Any) -> dict[str, Any] | None:
        """Return the state for a checkpoint, on rank zero; None: there is none. All ranks must call this."""
        if self._outer is None:
            return None
        scaler = scaler_of(precision)
        of_island = {
            "optimizer_states": [optimizer.state_dict() for optimizer in self.trainer.strategy.optimizers],
            "scaler": None if scaler is None else scaler.state_dict(),
        }
        momentum = self._outer.gather_momentum() if self.islands.index == 0 else {}
        # The first rank of each island has all of its state. Lightning saves that of the first island.
        islands = gather_to_rank_zero(of_island, self.islands.peers) if self.islands.own.rank == 0 else None
        return {"momentum": momentum, "other_islands": None if islands is None else islands[1:]}

    def take_state(self, checkpoint: Mapping[str, Any], precision: Any) -> Mapping[str, Any]:
        """Restore from `checkpoint`; return it with the optimizer state of this island."""
        state = checkpoint.get("bucketddp", {}).get("local_steps", {})
        self._restored_momentum = dict(state.get("momentum", {}))
        others = state.get("other_islands", [])
        # If there were fewer islands, several take the same state.
        position = self.islands.index % (len(others) + 1)
        if position == 0:
            return checkpoint
        scaler = scaler_of(precision)
        if scaler is not None and others[position - 1]["scaler"]:
            scaler.load_state_dict(others[position - 1]["scaler"])
        return {**checkpoint, "optimizer_states": others[position - 1]["optimizer_states"]}
