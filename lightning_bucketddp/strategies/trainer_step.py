"""The training step: batch, forward, backward and optimizer, in this order; and how a step is recorded."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.optim import Optimizer

from lightning_bucketddp.checkpoint.checkpoint_io import write_on_rank_zero
from lightning_bucketddp.faults.progress import BACKWARD, FORWARD, OPTIMIZER
from lightning_bucketddp.graphs.proof import HOOKS_OF_MODULE
from lightning_bucketddp.processes import rank_zero_warn
from lightning_bucketddp.reducer.grad_hooks import adding_zeros
from lightning_bucketddp.reducer.nonfinite import StepWithheld, drop_gradients, withhold_nonfinite
from lightning_bucketddp.reducer.observer import NO_OBSERVER, NOTHING, graphs_split, outside_of_graphs
from lightning_bucketddp.reducer.reducer import Reducer
from lightning_bucketddp.strategies.fit_state import divide_optimizers, set_up_model
from lightning_bucketddp.trainer_internals import call_for_step

if TYPE_CHECKING:
    from lightning_bucketddp.recording.writer import MarkedStep, StepRecorder
    from lightning_bucketddp.strategies.trainer import TrainerStrategy


class StepRecording:
    """Notifies a recorder of the phases of a step, as long as there is one."""

    def __init__(self) -> None:
        self.recorder: StepRecorder | None = None
        self._on_recorded: Callable[[MarkedStep], None] | None = None

    def begin(
        self, strategy: TrainerStrategy, recorder: StepRecorder, on_recorded: Callable[[MarkedStep], None]
    ) -> None:
        """Record steps from now on; `on_recorded` gets each when the optimizer has stepped."""
        assert strategy.reducer is not None  # a fit runs
        recorder.begin(strategy.reducer.stats)
        self.recorder, self._on_recorded = recorder, on_recorded
        if strategy.shards is not None:
            strategy.shards.observe(recorder)

    def end(self, strategy: TrainerStrategy) -> None:
        """Stop recording."""
        if self.recorder is not None:
            self.recorder.forget_phase()
        self.recorder = self._on_recorded = None
        if strategy.reducer is not None:
            strategy.reducer.observer = NO_OBSERVER
        if strategy.shards is not None:
            strategy.shards.observe(NO_OBSERVER)

    def batch_arrived(self) -> None:
        if self.recorder is not None and self.recorder.phase == "data":
            self.recorder.turn_to(None)

    def during(self, phase: str) -> AbstractContextManager[Any]:
        """Record what happens inside as `phase`."""
        return NOTHING if self.recorder is None else self.recorder.during(phase)

    def complete_step(self, reducer: Reducer | None, *, step: int, phase: str | None) -> None:
        """End a recorded step after that of the optimizer, and return to the `phase` before it, if there was one."""
        if self.recorder is None or reducer is None:
            return
        assert self._on_recorded is not None
        bucket_set = reducer.bucket_set
        version, buckets = (0, []) if bucket_set is None else (bucket_set.version, bucket_set.buckets)
        self._on_recorded(self.recorder.complete(reducer.stats, step=step, plan=version, buckets=buckets))
        if phase is not None:  # within a `training_step` that optimizes by itself
            self.recorder.turn_to(phase)


def begin_batch(strategy: TrainerStrategy, batch_idx: int) -> None:
    """Begin a training batch."""
    # All ranks have received an alert in the last step, or none. A single rank may exchange no messages.
    has_alert, local_steps = strategy.world_size == 1 and strategy._writer.has_failed, strategy._state.local_steps
    for exchange in (strategy._state.exchange, None if local_steps is None else local_steps.exchange):
        if exchange is not None and exchange.is_alerted:
            exchange.is_alerted, has_alert = False, True
    if has_alert:
        write_on_rank_zero(strategy._writer.raise_failure, strategy._collectives)
    if strategy.restarts is not None:
        strategy.restarts.admit_returned()
    module, replicas = strategy.trainer.lightning_module, strategy._state.replicas
    strategy._progress.epoch, strategy._progress.batch = module.current_epoch, batch_idx
    strategy._progress.enter("start")
    # Layers may have been added or replaced between epochs. In each batch this would cost more than a small model.
    if batch_idx == 0 and replicas is not None and replicas.are_outdated(module):
        set_up_model(strategy, module)
    if (shards := strategy.shards) is not None and not all(map(shards.of, strategy.optimizers)):
        divide_optimizers(strategy, module)  # the program has set others
    for part in strategy._parts:
        part.begin_batch(batch_idx)


def with_hooks(strategy: TrainerStrategy, step: Callable[..., Any]) -> Callable[..., Any]:
    """Return `step` of a strategy, in a fit with the hooks that a user has put on the module, if there are some.

    With `ddp` each step calls torch's wrapper, and that calls the module.
    """
    module, plugin, name = strategy.lightning_module, strategy.precision_plugin, step.__name__
    if not strategy._state.is_fit or not any(getattr(module, kind) for kind in HOOKS_OF_MODULE):
        return step

    def call_module(*args: Any, **kwargs: Any) -> Any:
        with plugin.train_step_context() if name == "training_step" else plugin.val_step_context():
            return call_for_step(strategy, name, *args, **kwargs)

    return call_module


def run_forward(strategy: TrainerStrategy, step: Callable[[], Any]) -> Any:
    """Call `step`, the user's `training_step`, and return its output, or what stands for None."""
    recorder, reducer = strategy.recording.recorder, strategy.reducer
    if recorder is not None and reducer is not None:
        reducer.observer = recorder
    with strategy.recording.during(FORWARD):
        strategy.before_forward()
        if reducer is not None:
            reducer.give_back_memory()
        with graphs_split(strategy.config, world_size=strategy.world_size):
            output = step()
    module, weighting = strategy.lightning_module, strategy._state.weighting
    if output is None and module is not None and module.automatic_optimization and weighting is not None:
        return weighting.skip()
    return output


def run_backward(
    strategy: TrainerStrategy, loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any
) -> Tensor:
    """Run the weighted backward of `loss` as Lightning's `Strategy.backward` does, and reduce the gradients.

    Gradients must be final before `precision.post_backward`, which calls `on_after_backward`, also on a rank where no
    parameter took part.
    """
    reducer, precision, module = strategy.reducer, strategy.precision_plugin, strategy.trainer.lightning_module
    with strategy.recording.during(BACKWARD):
        strategy._progress.enter(BACKWARD)
        strategy.pre_backward(loss)
        weighted = strategy.weigh(loss)
        counts = weighted is loss or strategy.loss_factor() != 0
        if reducer is not None and counts:
            reducer.finiteness.check_loss(loss)
        loss = precision.pre_backward(weighted, module)
        # In a trial of a search the ranks fail together and go on.
        is_guarded = not strategy.is_searching
        with (
            strategy.ending_all_ranks(reducer) if is_guarded and reducer is not None else nullcontext(),
            nullcontext() if counts or reducer is None else adding_zeros(reducer.params),
            nullcontext() if reducer is None else reducer.backward(),
        ):
            precision.backward(loss, module, optimizer, *args, **kwargs)
        if strategy.signals is not None:
            strategy.signals.stop_if_agreed()
        loss = precision.post_backward(loss, module)
        strategy.post_backward(loss)
    return loss


def take_step(
    strategy: TrainerStrategy, optimizer: Optimizer, closure: Callable[[], Any], step: Callable[[Any], Any]
) -> Any:
    """Call `step`, which takes the optimizer's, with Lightning's `closure` and what the strategy adds to it."""
    reducer, module, recorder = strategy.reducer, strategy.trainer.lightning_module, strategy.recording.recorder
    phase = None if recorder is None else recorder.phase

    @outside_of_graphs  # of a step that the user has compiled
    def before_step() -> Any:
        loss = closure()  # forward and backward, where Lightning optimizes
        if (recorder := strategy.recording.recorder) is not None:
            recorder.turn_to(OPTIMIZER)
        weighting = strategy._state.weighting
        assert weighting is not None  # a fit runs
        if module.automatic_optimization:
            loss = weighting.agree(loss)
        else:
            _check_own_gradients(strategy, optimizer)
        if weighting.nobody_trained:
            raise StepWithheld
        if reducer is not None:
            withhold_nonfinite(optimizer, [reducer.finiteness])
        strategy._progress.enter(OPTIMIZER)
        return loss

    try:
        output = step(before_step)
    except StepWithheld:
        drop_gradients(optimizer, strategy.precision_plugin)
        if strategy._state.tally is not None:
            strategy._state.tally.num_withheld += 1
        output = None
    for part in strategy._parts:
        part.complete_step()
    strategy._progress.complete_step()
    if reducer is not None:
        counts = {"skipped_batches_total": reducer.stats.num_skipped, "nonfinite_steps": reducer.stats.num_nonfinite}
        for name, count in counts.items():
            if count:
                module.log(f"bucketddp/{name}", float(count), on_step=True)
    if strategy._model_averager is not None:
        params = [param for group in optimizer.param_groups for param in group["params"] if param.grad is not None]
        strategy._model_averager.average_parameters(iter(params))
    # The Trainer counts this step later.
    strategy.recording.complete_step(reducer, step=strategy.trainer.global_step, phase=phase)
    return output


def _check_own_gradients(strategy: TrainerStrategy, optimizer: Optimizer) -> None:
    """Warn, or raise where shards need averages, if `optimizer` steps with gradients of this rank alone."""
    reason = strategy.explain_own_gradients(optimizer, remedy="self.manual_backward(loss)")
    if reason is None or strategy._state.has_warned_of_own_gradients:
        return
    if strategy.shards is not None:
        raise RuntimeError(f"{reason} `shard_optimizer` needs the averages.")
    strategy._state.has_warned_of_own_gradients = True
    rank_zero_warn(f"bucketddp: {reason} Weights differ between the ranks from now on.")
