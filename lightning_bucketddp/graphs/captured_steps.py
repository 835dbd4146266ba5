"""Training steps without host time: `training_step` and backward are captured as a CUDA graph, and replayed.

Each signature of a batch has its own graph. Everything around `training_step` and backward still runs in Python:
`zero_grad`, the broadcast of buffers, messages between ranks, non-finite checks, the optimizer's step with clipping and
scaler, callbacks. Calls of `self.log` are recorded, and repeated after each replay with copies of the graph's values.

Note: proof
    Before a graph is used, one step runs both with and without it, from the same weights, gradients, buffers and random
    numbers. Loss, outputs, logged values, gradients and buffers must be equal; those computed without the graph count.
    All ranks compute such a step twice, so they agree on it first. The proof is repeated every few thousand steps, and
    a graph that differs is given up. Otherwise each rank decides for itself whether to replay: a replay has the same
    reductions in the same order.

Note: one stream
    The autograd nodes that hold our hooks remember the stream on which they were made, and a capture that waits for
    another stream fails. So everything in a fit runs on one side stream, from the set-up on.

Note: memory of graphs
    All graphs share one pool. Gradients of a captured step lie there until the next replay overwrites them: by then the
    optimizer has used them. A graph that is compared again is replayed first and dropped before the step runs without
    it, so that the pool and the memory of that step do not add up.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torch.optim import Optimizer

from lightning_bucketddp.comm.collectives import Collectives
from lightning_bucketddp.graphs.proof import (
    NotCapturedError,
    PythonState,
    StepStart,
    checked_call,
    compute_watched,
    explain_failure,
    is_of_user,
    methods_replaced,
)
from lightning_bucketddp.graphs.replay import (
    CUDAGraph,
    GradientMemory,
    Outcome,
    Values,
    captured_in,
    is_replayable,
    references_to,
    replay_backward,
    take_gradients,
)
from lightning_bucketddp.part import RunPart
from lightning_bucketddp.reducer.grad_hooks import adding_zeros
from lightning_bucketddp.reducer.launch_queue import CapturedBackward
from lightning_bucketddp.reducer.reducer import Reducer
from lightning_bucketddp.trainer_internals import ClosureParts, Undo, logging_in, replace_closures
from lightning_bucketddp.wording import list_names

# A step runs so often before it is captured: state that is made lazily exists by then.
_NUM_BEFORE = 3
# Ranks agree on proofs in each of the first steps, and then once in so many.
_AGREE_IN_FIRST, _AGREE_EVERY = 64, 64
_COMPARE_EVERY = 4096
_MOST_GRAPHS = 8
_REPLAYS_PER_CAPTURE = 64
_HOOKS_IN_CLOSURE = ("on_before_zero_grad", "on_before_backward", "on_after_backward")
# What ranks agree to do in a step.
_PROVE, _COMPARE = "prove", "compare"


@dataclass(frozen=True)
class _Step:
    """A captured step."""

    graph: CUDAGraph
    inputs: list[Tensor]  # the batch's tensors that the graph reads
    params: list[Tensor]  # all parameters of the module
    before: list[Any]  # by parameter, references to the gradients that the graph adds to; None: the graph makes it
    gradients: GradientMemory  # after the step
    result: Any  # what the closure returns
    logged: list[Any]  # the calls of `self.log`
    backward: CapturedBackward
    state: PythonState  # at the capture

    def copy_batch(self, tensors: list[Tensor]) -> None:
        """Copy the tensors of a batch to where the graph reads them."""
        if tensors:
            torch._foreach_copy_(self.inputs, tensors)

    def finds_gradients(self, *, zeroed: bool) -> bool:
        """Return whether the gradients that the graph adds to are still in place; `zeroed`: `zero_grad` comes first."""
        return all(
            zeroed or param.grad is None if gradient is None else param.grad is not None and param.grad is gradient()
            for param, gradient in zip(self.params, self.before, strict=True)
        )

    @property
    def values(self) -> Values:
        """What the step computes besides gradients."""
        return Values.of((self.result.loss, self.result.extra, self.logged))


@dataclass(eq=False)
class CapturedSteps(RunPart):
    """Captures and replays the steps of a fit with automatic optimization."""

    trainer: Any
    collectives: Collectives  # of the ranks that take each step together
    log: Callable[[str], None]
    make_graph: Callable[[], CUDAGraph] | None  # None: this device has no graphs
    num_replayed: int = 0
    _undo: Undo | None = None
    _reason: str = ""  # why this rank captures nothing any more
    _has_ended: bool = False  # all ranks know that reason
    _steps: dict[Any, _Step] = field(default_factory=dict)
    _num_runs: Counter[Any] = field(default_factory=Counter)  # without a graph, by key
    _num_recaptured: int = 0
    _num_closures: int = 0
    _stream_before: torch.cuda.Stream | None = None

    def __post_init__(self) -> None:
        device = self.collectives.device
        if self.make_graph is None:
            self._give_up(f"there are none on a {device.type}")
        elif device.type == "cuda":
            # Note: one stream
            self._stream_before = torch.cuda.current_stream(device)
            stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            stream.wait_stream(self._stream_before)
            torch.cuda.set_stream(stream)

    def begin_training(self) -> None:
        if obstacle := find_obstacle(self.trainer, self._reducer):
            self._give_up(obstacle)
        self._agree()
        if not self._reason:
            self._undo = replace_closures(self.trainer, self.run)

    def end_training(self) -> None:
        if self._undo is not None:
            self._undo()
        self._undo = None

    def close(self) -> None:
        """Drop all graphs, and return to the stream of before."""
        self.end_training()
        self._steps.clear()
        if self._stream_before is not None:
            self._stream_before.wait_stream(torch.cuda.current_stream(self.collectives.device))
            torch.cuda.set_stream(self._stream_before)
            self._stream_before = None

    def release(self) -> None:
        """Release all graphs, from another thread: NCCL is being aborted."""
        for step in list(self._steps.values()):
            step.graph.release()

    def describe(self) -> str:
        return f"{self.num_replayed} of {self._num_closures} steps were replayed" if self.num_replayed else ""

    @property
    def _module(self) -> Any:
        return self.trainer.lightning_module

    @property
    def _reducer(self) -> Reducer:
        reducer: Reducer = self.trainer.strategy.reducer
        return reducer

    def _give_up(self, reason: str) -> None:
        """Capture nothing any more on this rank; the others follow at the next `_agree`."""
        self._reason = self._reason or reason
        self._steps.clear()

    def _agree(self, wish: str = "") -> str:
        """Return what all ranks do: `_PROVE` if one wishes it, else the wish of all of them.

        If one rank has given up, all do, and log why.
        """
        # Over host memory: a host that waits for a device cannot be interrupted if another rank does not come.
        group = self.collectives if self.collectives.world_size == 1 else self.collectives.host_group()
        ranks = group.gather_json([wish, self._reason])
        for rank, (_, reason) in enumerate(ranks):
            if reason:
                self._give_up(reason)
                self._has_ended = True
                on_rank = f"on rank {rank} " if rank else ""
                self.log(f"bucketddp: steps are not captured as CUDA graphs: {on_rank}{reason}.")
                return ""
        wishes = {wish for wish, _ in ranks}
        if _PROVE in wishes:
            return _PROVE
        return wish if len(wishes) == 1 else ""

    def run(self, closure: ClosureParts) -> Any:
        """Replay the step of a batch, or run its closure."""
        if self._has_ended or not closure.has_backward or (trainable := self._reducer.settled()) is None:
            return closure.run()
        self._num_closures += 1
        key, tensors = self._key(closure)
        step = None if key is None else self._steps.get(key)
        if step is not None and (changed := self._find_change(step, trainable)):
            del self._steps[key]  # to be captured again
            self._num_recaptured += 1
            if self._num_recaptured > _MOST_GRAPHS + self.num_replayed // _REPLAYS_PER_CAPTURE:
                self._give_up(changed)
            step = None
        can_replay = step is not None and step.finds_gradients(zeroed=closure.zero_grad is not None)
        wish = self._wish(key, can_replay=can_replay)
        if wish == _PROVE:
            return self._prove(key, closure)
        if step is not None and wish == _COMPARE:
            del step  # the last reference is in `_steps`: `_compare` frees its memory
            return self._compare(key, closure, tensors)
        if step is not None and can_replay:
            return self._replay(step, closure, tensors)
        self._num_runs[key] += 1
        return closure.run()

    def _key(self, closure: ClosureParts) -> tuple[Any, list[Tensor]]:
        """Return the key of the graph for this batch, None if it has none, and the tensors of the batch."""
        if self._reason:
            return None, []
        try:
            signature, tensors = signature_of(closure.arguments, self.collectives.device)
        except NotCapturedError as error:
            self._give_up(str(error))
            return None, []
        how = (closure.zero_grad is None, self._reducer.is_synchronised, self.trainer.accumulate_grad_batches)
        return (signature, how, self.trainer.strategy.loss_factor()), tensors

    def _find_change(self, step: _Step, trainable: tuple[bool, ...]) -> str:
        """Return why `step`, which was captured earlier, can no longer be replayed, or ""."""
        if changed := step.state.find_change():
            return f"`{changed}` changes between steps"
        if not is_replayable(self._reducer, step.backward, trainable):
            return "`requires_grad` changes between steps"
        return "a gradient is kept for later steps without a copy" if step.gradients.is_taken() else ""

    def _wish(self, key: Any, *, can_replay: bool) -> str:
        """Return what all ranks do in this step besides training. All ranks call this in the same steps."""
        if self._num_closures > _AGREE_IN_FIRST and self._num_closures % _AGREE_EVERY:
            return ""
        if can_replay:
            return self._agree(_COMPARE if self._num_closures % _COMPARE_EVERY == 0 else "")
        return self._agree(_PROVE if self._lacks(key) and self._num_runs[key] >= _NUM_BEFORE else "")

    def _lacks(self, key: Any) -> bool:
        return key is not None and key not in self._steps and len(self._steps) < _MOST_GRAPHS

    def _replay(self, step: _Step, closure: ClosureParts, tensors: list[Tensor]) -> Any:
        strategy = self.trainer.strategy
        strategy.before_forward()
        strategy.weigh(torch.ones(()))  # counts the batch; the factor itself is in the graph
        weighting, syncs = self._reducer.weighting, self._reducer.is_synchronised
        # Otherwise gradients need not be set to None first: the replay overwrites them.
        sees_earlier = weighting is not None and weighting.looks_at_earlier(syncs=syncs)
        if closure.zero_grad is not None and (sees_earlier or self._reducer.maker is not None):
            closure.zero_grad()

        def run() -> None:
            step.graph.replay()
            step.gradients.attach()
            if self._reducer.is_alone and strategy.loss_factor() != 0:
                self._reducer.finiteness.check_loss(step.result.loss)

        with torch.no_grad():
            step.copy_batch(tensors)
            with strategy.replayed_backward():
                replay_backward(self._reducer, step.backward, run)
            result = copy.copy(step.result)
            result.loss, result.extra = apply_to_collection((result.loss, result.extra), Tensor, torch.clone)
        with logging_in(self._module, "training_step"):
            for args, kwargs in apply_to_collection(step.logged, Tensor, torch.clone):
                self._module.log(*args, **kwargs)
        self.num_replayed += 1
        return result

    def _prove(self, key: Any, closure: ClosureParts) -> Any:
        """Run a step, and then capture and replay it (Note: proof); return the result of the run."""
        self.trainer.strategy.before_forward()
        start = StepStart(self._module, closure, self.collectives.device, self._reducer)
        result, values, found = compute_watched(closure, self.trainer, self._reducer, self.collectives.device)
        if found:
            self._give_up(found[0])
        # A step that changes Python state must not run twice, on any rank.
        if not self._agree(_PROVE):
            return result
        kept = start.keep()
        start.restore(zero=True)
        try:
            step = self._capture(closure, start.loss_digest) if self._lacks(key) else None
            if step is None:
                self._run_as_captured(closure, dict(closure.arguments), start.loss_digest)
            else:
                # Before the replay, so that an abort can release it. If it differs, all graphs are given up.
                self._steps[key] = step
                step.graph.replay()
                buffers = list(self._module.buffers())
                self._compare_outcomes(
                    Outcome(step.values, step.gradients.tensors(), buffers), kept.outcome(values), when="first"
                )
        finally:
            kept.restore()
            take_gradients(self._reducer)
        return result

    def _compare(self, key: Any, closure: ClosureParts, tensors: list[Tensor]) -> Any:
        """Replay a step, and then run it; return the result of the run (Note: memory of graphs)."""
        self.trainer.strategy.before_forward()
        start = StepStart(self._module, closure, self.collectives.device, self._reducer)
        step = self._steps[key]
        with torch.no_grad():
            step.copy_batch(tensors)
            step.graph.replay()
            replayed = Outcome.of(self._module, step.values, step.gradients.tensors())
        self._steps.clear()
        del step
        start.restore()
        result, values, _ = compute_watched(closure, self.trainer, self._reducer, self.collectives.device)
        self._compare_outcomes(replayed, start.keep().outcome(values), when="again")
        return result

    def _capture(self, closure: ClosureParts, loss_digest: Tensor | None) -> _Step | None:
        arguments = apply_to_collection(dict(closure.arguments), Tensor, torch.clone)
        _, inputs = signature_of(arguments, self.collectives.device)
        params = list(self._module.parameters())
        before = references_to(params)
        assert self.make_graph is not None
        graph = self.make_graph()

        def body() -> _Step:
            result, logged, backward = self._run_as_captured(closure, arguments, loss_digest)
            gradients = GradientMemory(params, backward.bucket_set)
            state = PythonState(self._module, self.collectives.device)
            return _Step(graph, inputs, params, before, gradients, result, logged, backward, state)

        try:
            step = graph.capture(body)
        except Exception as error:
            self._give_up(explain_failure(error))
            return None
        if step.backward.missing:
            names = [self._reducer.specs[index].name for index in step.backward.missing]
            self._give_up(f"{list_names(names)} got no gradient")
            return None
        step.result.closure_loss = None
        return step

    @torch.enable_grad()
    def _run_as_captured(
        self, closure: ClosureParts, arguments: Mapping[str, Any], loss_digest: Tensor | None
    ) -> tuple[Any, list[Any], CapturedBackward]:
        """Run what is captured: `training_step` and backward as the strategy runs them, without the host's part.

        Return the closure's result, the calls of `self.log`, which log nothing here, and the backward.
        """
        module, reducer, strategy = self._module, self._reducer, self.trainer.strategy
        precision, logged = strategy.precision_plugin, list[Any]()

        def record(*args: Any, **kwargs: Any) -> None:
            logged.append(checked_call(args, kwargs, []))

        with captured_in(reducer, loss_digest) as backward, methods_replaced(module, log=record):
            with precision.train_step_context():
                output = module.training_step(*arguments.values())
            result = closure.result_of(output)
            loss = result.closure_loss
            if loss is None:
                raise NotCapturedError("`training_step` returned None")
            weight = strategy.loss_factor()
            if weight != 0 and not reducer.is_alone:
                reducer.finiteness.check_loss(loss)
            loss = precision.pre_backward(loss if weight == 1 else loss * weight, module)
            with adding_zeros([] if weight != 0 else reducer.params), reducer.captured_backward(backward):
                precision.backward(loss, module, closure.optimizer)
            precision.post_backward(loss, module)
        return result, logged, backward

    def _compare_outcomes(self, with_graph: Outcome, without: Outcome, *, when: str) -> None:
        if different := with_graph.find_difference(without, self._module, factor=self._reducer.factor):
            self._give_up(f"{different} differs with a graph, when it was compared {when}")


def find_obstacle(trainer: Any, reducer: Reducer) -> str:
    """Return why no step of this fit can be captured, or ""."""
    module = trainer.lightning_module
    if not module.automatic_optimization:
        return "optimization is manual"
    for owner in (module, *trainer.callbacks):
        for name in (*_HOOKS_IN_CLOSURE, *(("backward", "optimizer_zero_grad") if owner is module else ())):
            # In Lightning's own classes these hooks do nothing.
            if (method := getattr(owner, name, None)) is not None and is_of_user(method):
                return f"`{type(owner).__name__}.{name}` runs within it"
    optimizer, params = trainer.optimizers[0], set(module.parameters())
    if type(optimizer).zero_grad is not Optimizer.zero_grad:
        return f"`{type(optimizer).__name__}.zero_grad` may do more than torch's"
    if any(param not in params for group in optimizer.param_groups for param in group["params"]):
        return "the optimizer has parameters that the module has not"
    return "a communication hook may do other things in each step" if reducer.uses_hook else ""


def signature_of(arguments: Mapping[str, Any], device: torch.device) -> tuple[Any, list[Tensor]]:
    """Return the part of a batch that a graph has fixed, hashable, and its tensors in order."""
    tensors: list[Tensor] = []

    def visit(value: Any) -> Any:
        if isinstance(value, Tensor):
            if value.device != device:
                raise NotCapturedError(f"the batch has a tensor on {value.device}")
            if value.layout is not torch.strided or type(value) is not Tensor:
                raise NotCapturedError(f"the batch has a tensor of another kind, `{type(value).__name__}`")
            tensors.append(value)
            return value.shape, value.stride(), value.dtype
        if isinstance(value, str | bytes | int | float | bool | type(None)):
            return type(value), value
        if isinstance(value, Mapping):
            return type(value), tuple((key, visit(each)) for key, each in value.items())
        if isinstance(value, list | tuple):
            return type(value), tuple(map(visit, value))
        if is_dataclass(value):
            return type(value), tuple(visit(getattr(value, field.name)) for field in fields(value))
        raise NotCapturedError(f"the batch has a `{type(value).__name__}`, which is unknown")

    # `watched_index` finds out whether a step uses the number of the batch.
    return visit({name: value for name, value in arguments.items() if name != "batch_idx"}), tensors
