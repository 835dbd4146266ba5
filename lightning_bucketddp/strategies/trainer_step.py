"""What happens in a fit: when training begins, in a step, in this order, and when it ends; and who records it."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.optim import Optimizer

from lightning_bucketddp.faults.progress import BACKWARD, FORWARD, OPTIMIZER
from lightning_bucketddp.processes import rank_zero_info, rank_zero_warn
from lightning_bucketddp.reducer.nonfinite import StepWithheld, drop_gradients, withhold_nonfinite
from lightning_bucketddp.reducer.observer import NO_OBSERVER, NOTHING, graphs_split, outside_of_graphs
from lightning_bucketddp.reducer.reducer import Reducer
from lightning_bucketddp.strategies.fit_state import FitTally, set_up_model

if TYPE_CHECKING:
    from lightning_bucketddp.recording.writer import MarkedStep, StepRecorder
    from lightning_bucketddp.strategies.trainer import TrainerStrategy


class StepRecording:
    """Tells a recorder what a step does, as long as there is one."""

    def __init__(self) -> None:
        self.recorder: StepRecorder | None = None
        self._on_recorded: Callable[[MarkedStep], None] | None = None

    def begin(
        self, strategy: TrainerStrategy, recorder: StepRecorder, on_recorded: Callable[[MarkedStep], None]
    ) -> None:
        """Record steps from now on; `on_recorded` gets each when the optimizer has stepped."""
        assert strategy.reducer is not None  # there is one as long as there is a fit
        recorder.begin(strategy.reducer.stats)
        self.recorder, self._on_recorded = recorder, on_recorded
        if strategy.shards is not None:
            strategy.shards.observe(recorder)

    def end(self, strategy: TrainerStrategy) -> None:
        """Record nothing any more."""
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

    def forward(self, reducer: Reducer | None) -> AbstractContextManager[Any]:
        """Record what happens inside as forward, and have `reducer` tell of the backward that follows."""
        if self.recorder is not None and reducer is not None:
            reducer.observer = self.recorder
        return self.during(FORWARD)

    def during(self, phase: str) -> AbstractContextManager[Any]:
        """Record what happens inside as `phase`."""
        return NOTHING if self.recorder is None else self.recorder.during(phase)

    @property
    def phase(self) -> str | None:
        """What the step is doing; None: nothing that is recorded."""
        return None if self.recorder is None else self.recorder.phase

    def optimizer_begins(self) -> None:
        if self.recorder is not None:
            self.recorder.turn_to(OPTIMIZER)

    def complete_step(self, reducer: Reducer | None, *, step: int, phase: str | None) -> None:
        """End a recorded step, after the optimizer's, and go on with the `phase` from before, if there was one."""
        if self.recorder is None or reducer is None:
            return
        assert self._on_recorded is not None
        bucket_set = reducer.bucket_set
        version, buckets = (0, []) if bucket_set is None else (bucket_set.version, bucket_set.buckets)
        self._on_recorded(self.recorder.complete(reducer.stats, step=step, plan=version, buckets=buckets))
        if phase is not None:  # within a `training_step` that optimizes by itself
            self.recorder.turn_to(phase)


def begin_training(strategy: TrainerStrategy) -> None:
    """Begin to train: everything is restored."""
    for part in strategy._parts:
        part.begin_training()
    strategy._checkpoints.begin_training()
    assert strategy.reducer is not None  # there is one as long as there is a fit
    strategy._state.tally = FitTally(strategy.trainer.global_step, strategy.reducer)
    if strategy.restarts is not None:
        strategy.restarts.begin_training()
    if strategy._rank_seeds is not None:
        strategy._rank_seeds.continue_after_start(strategy.trainer, strategy.root_device)


def begin_batch(strategy: TrainerStrategy, batch_idx: int) -> None:
    """Turn to another training batch."""
    _refuse_after_failure(strategy)
    # All ranks have heard of it in the last step, or none.
    alerts = [part.take_alert() for part in strategy._parts]
    if any(alerts):
        strategy._checkpoints.raise_failure()
    if strategy.restarts is not None:
        strategy.restarts.admit_returned()
    module, replicas = strategy.lightning_module, strategy._state.replicas
    assert module is not None  # there is one as long as there is a run
    strategy._progress.epoch, strategy._progress.batch = module.current_epoch, batch_idx
    strategy._progress.enter("start")
    # Layers may have been added or replaced between epochs. Looking costs more than a step of a small model.
    if batch_idx == 0 and replicas is not None and replicas.are_outdated(module):
        set_up_model(strategy, module)
    for part in strategy._parts:
        part.begin_batch(batch_idx)


def _refuse_after_failure(strategy: TrainerStrategy) -> None:
    """Raise where no `training_step` can catch it if a backward has failed, even if one has caught that."""
    if strategy.reducer is not None and not strategy.is_searching:
        strategy.reducer.refuse_after_failure()


def run_forward(strategy: TrainerStrategy, step: Callable[[], Any]) -> Any:
    """Call `step`, the user's `training_step`, and return what it does, or what stands for None."""
    with strategy.recording.forward(strategy.reducer):
        strategy.before_forward()
        if strategy.reducer is not None:
            strategy.reducer.give_back_memory()
        with graphs_split(strategy.config, world_size=strategy.world_size):
            output = step()
    module, weighting = strategy.lightning_module, strategy._state.weighting
    if output is None and module is not None and module.automatic_optimization and weighting is not None:
        return weighting.skip()
    return output


def run_backward(
    strategy: TrainerStrategy, loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any
) -> Tensor:
    """Run the backward of `loss` as Lightning's `Strategy.backward` does, but for weight and scope.

    Gradients must be final before `precision.post_backward`, which calls `on_after_backward`, also on a rank where no
    parameter took part.
    """
    reducer, precision, module = strategy.reducer, strategy.precision_plugin, strategy.lightning_module
    assert module is not None  # there is one as long as there is a run
    with strategy.recording.during(BACKWARD):
        strategy._progress.enter(BACKWARD)
        strategy.pre_backward(loss)
        if reducer is not None:
            reducer.finiteness.check_loss(loss)
        loss = precision.pre_backward(strategy.weigh(loss), module)
        # In a trial the ranks fail together and go on.
        is_guarded = not strategy.is_searching
        with (
            strategy.ending_all_ranks(reducer) if is_guarded and reducer is not None else nullcontext(),
            nullcontext() if reducer is None else reducer.backward(),
        ):
            precision.backward(loss, module, optimizer, *args, **kwargs)
        if strategy.signals is not None:
            strategy.signals.stop_if_agreed()
        loss = precision.post_backward(loss, module)
        strategy.post_backward(loss)
    return loss


@contextmanager
def replayed_backward(strategy: TrainerStrategy) -> Iterator[None]:
    """Run a replay of `training_step` and backward inside; afterwards gradients are final."""
    with (
        strategy.recording.during(BACKWARD),
        strategy.ending_all_ranks(*[strategy.reducer] if strategy.reducer else []),
    ):
        strategy._progress.enter(BACKWARD)
        yield
    if strategy.signals is not None:
        strategy.signals.stop_if_agreed()


def take_step(
    strategy: TrainerStrategy, optimizer: Optimizer, closure: Callable[[], Any], step: Callable[[Any], Any]
) -> Any:
    """Call `step`, which takes the optimizer's, with Lightning's `closure` and all that we add to it."""
    phase, reducer, module = strategy.recording.phase, strategy.reducer, strategy.trainer.lightning_module

    # The user may have compiled the optimizer's step, and has not meant all of this.
    @outside_of_graphs
    def before_step() -> Any:
        loss = closure()  # forward and backward, where Lightning optimizes
        strategy.recording.optimizer_begins()
        weighting = strategy._state.weighting
        assert weighting is not None  # there is one as long as there is a fit
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
    # The trainer counts this step later.
    strategy.recording.complete_step(reducer, step=strategy.trainer.global_step, phase=phase)
    return output


def _check_own_gradients(strategy: TrainerStrategy, optimizer: Optimizer) -> None:
    """Warn, or raise where shards need averages, if `optimizer` steps with gradients of this rank alone."""
    reason = strategy.explain_own_gradients(optimizer, remedy="self.manual_backward(loss)")
    if reason is None or strategy._state.has_told_own_gradients:
        return
    if strategy.shards is not None:
        raise RuntimeError(f"{reason} `shard_optimizer` needs the averages.")
    strategy._state.has_told_own_gradients = True
    rank_zero_warn(f"bucketddp: {reason} Weights differ between the ranks from now on.")


def undo_unfinished(strategy: TrainerStrategy, error: BaseException) -> None:
    """Undo what the batch has changed that `error` has interrupted, if a resumed run will see it again."""
    unfinished, module = strategy._state.unfinished, strategy.lightning_module
    if unfinished is not None and module is not None and not isinstance(error, strategy.root.normal_ends):
        with suppress(RuntimeError):  # where the device has failed, nothing can be saved
            unfinished.undo_if_repeated(is_automatic=module.automatic_optimization)


def end_training(strategy: TrainerStrategy) -> None:
    """End the training, and note what the log will say of it when all is over."""
    _refuse_after_failure(strategy)
    state = strategy._state
    if state.reducer is not None:
        state.reducer.finiteness.catch_up(state.reducer.stats)
    for part in strategy._parts:
        part.end_training()
    strategy._checkpoints.end_training()
    assert state.tally is not None
    state.done = state.tally.describe(strategy)


def end_run(strategy: TrainerStrategy, stop_signal: int) -> None:
    """Say what a run has done that has ended well; `stop_signal` has come to some rank, or none (0)."""
    done, strategy._state.done = strategy._state.done, []
    if done:
        rank_zero_info(f"bucketddp: {'; '.join(done)}.")
    if stop_signal == signal.SIGINT:  # too late for this run, but the program may begin another
        signal.raise_signal(signal.SIGINT)
