"""What data-parallel training means, in one process: the specification of the reducer.

Every rank has a copy of the model, in which it computes gradients of its own batches. Where gradients are exchanged,
each becomes the mean over the ranks, and a rank that has none counts as zeros; one that no rank has stays away. Then
all take the same step. If a rank fails, none takes a step with gradients of that batch. Buffers are those of rank 0.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from tests.fuzz.events import Accident
from tests.fuzz.program import NUM_EPOCHS, NUM_RANKS, Program
from tests.fuzz.training import Outcome, Run, scheduler_of, values_of, weights_of
from tests.support.ranks import device


def average_gradients(nets: list[nn.Module]) -> None:
    """Give all ranks the mean of their gradients."""
    for params in zip(*[net.parameters() for net in nets], strict=True):
        if any(param.grad is not None for param in params):
            grads = [torch.zeros_like(param) if param.grad is None else param.grad for param in params]
            for param in params:
                param.grad = sum(grads[1:], start=grads[0]) / len(nets)


def share_buffers(nets: list[nn.Module]) -> None:
    """Give all ranks the buffers of rank 0."""
    for first, *others in zip(*[net.buffers() for net in nets], strict=True):
        for other in others:
            other.copy_(first)


class Rank:
    """One rank: a copy of the model and its optimizers."""

    def __init__(self, program: Program, rank: int) -> None:
        self.run = Run(program, rank, seed=0, keeps_trajectory=True)  # rank 0's weights are those of all
        self.run.is_alone = True
        self.program = program
        self.is_automatic = program.loop == "automatic"
        self.optimizers = self.run.optimizers()
        self.schedulers = [scheduler_of(optimizer) for optimizer in self.optimizers] if program.has_scheduler else []
        self.loss = torch.zeros(())
        self.is_spoiled = False  # something was not finite since the last step
        self.seen: list[dict[str, Any]] = []  # weights since the ranks have last met

    def forward(self) -> None:
        if self.program.loop == "fabric":
            self.loss = self.run.loss(self._fabric_net)
        else:
            with self._precision():  # all of `training_step`
                self.loss = self.run.loss(self.run.net)

    def backward(self) -> None:
        if not (self.is_automatic and self.run.leaves_out_step):  # `training_step` has returned None
            # Lightning takes the mean over the batches of a step.
            (self.loss / (self.program.accumulate if self.is_automatic else 1)).backward()
        seen = [param.grad for param in self.run.net.parameters()] + [self.loss]
        self.is_spoiled |= not all(bool(value.isfinite().all()) for value in seen if value is not None)

    def finish(self, response: str | None) -> None:
        """Do what follows a backward; `response`: to what is not finite, as `on_nonfinite` says it."""
        if response == "raise":
            raise Accident("not finite")
        if not (self.is_automatic and self.run.leaves_out_step):
            self.run.happen("backward")
        if self.run.closes_window and (self.is_automatic or not self.run.leaves_out_step):
            self.is_spoiled = False
            if response == "skip":
                self.run.net.zero_grad()
            elif not self.run.leaves_out_step:
                self._step()
            for scheduler in self.schedulers:
                scheduler.step()
        self.run.end_batch()

    def _step(self) -> None:
        for optimizer in self.optimizers:
            params = [param for group in optimizer.param_groups for param in group["params"]]
            if self.program.clip == "norm":
                nn.utils.clip_grad_norm_(params, 0.05)
            elif self.program.clip == "value":
                nn.utils.clip_grad_value_(params, 0.05)
            self.run.happen("step")
            optimizer.step()
            optimizer.zero_grad()
            self.seen.append(weights_of(self.run.net))

    def _fabric_net(self, x: Tensor, turn: int) -> Any:
        with self._precision():
            return self.run.net(x.bfloat16() if self.program.precision == "bf16-mixed" else x, turn)

    def _precision(self) -> AbstractContextManager[Any]:
        is_mixed, is_fabric = self.program.precision == "bf16-mixed", self.program.loop == "fabric"
        return torch.autocast(device().type, torch.bfloat16, enabled=is_mixed, cache_enabled=is_fabric)


class Reference:
    """All ranks of a program, one after the other."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self.ranks = [Rank(program, rank) for rank in range(NUM_RANKS)]
        self.weights_at_accident: list[list[dict[str, Any]]] = []  # by rank, those that it may have then

    def train(self) -> list[Outcome]:
        """Train, and return what each rank has; an accident ends all of them."""
        outcomes = [Outcome(trajectory=rank.run.trajectory or []) for rank in self.ranks]
        try:
            for batch in range(NUM_EPOCHS * self._program.num_batches):
                self._train_batch(batch)
        except Accident as accident:
            for outcome in outcomes:
                outcome.error, outcome.kinds = str(accident), ("Accident",)
        for outcome, rank in zip(outcomes, self.ranks, strict=True):
            outcome.values = values_of(rank.run, [optimizer.state_dict() for optimizer in rank.optimizers])
        return outcomes

    def _train_batch(self, batch: int) -> None:
        nets = [rank.run.net for rank in self.ranks]
        self._on_all(lambda rank: rank.run.begin_batch(batch))
        # Lightning keeps torch DDP from it where a module optimizes by itself, but for the first time.
        if batch == 0 or (self._program.exchanges(batch - 1) and self._program.loop != "manual"):
            share_buffers(nets)
        self._on_all(Rank.forward)
        self._on_all(Rank.backward)
        response = "warn"
        if self._program.exchanges(batch):
            average_gradients(nets)
            if any(rank.is_spoiled for rank in self.ranks):
                response = self._program.all_options["on_nonfinite"]
        self._on_all(lambda rank: rank.finish(response))

    def _on_all(self, act: Callable[[Rank], None]) -> None:
        """Do this on each rank. If it fails on one, the others may have done it, or a part of it, or nothing."""
        accidents = []
        for rank in self.ranks:
            rank.seen = [weights_of(rank.run.net)]
            try:
                act(rank)
            except Accident as accident:
                accidents.append(accident)
            rank.seen.append(weights_of(rank.run.net))
        if accidents:
            self.weights_at_accident = [rank.seen for rank in self.ranks]
            raise accidents[0]
