"""The signal by which SLURM announces the end of a job's time, answered by all ranks at the same place.

Note: requeue
    Lightning answers the signal where it meets a process: between any two lines, so maybe in the middle of an
    optimizer's step, and on each rank at another one. What is saved then is no state that training ever had, and ranks
    that save wait for others that train. Here the signal is only noted. All ranks tell each other in every batch
    whether they have it, which costs no time because nobody waits for the answer before the batch ends. When one has
    it, all of them do what Lightning does, after a batch with which an optimizer has stepped.
"""

from __future__ import annotations

import signal
import threading
from typing import TYPE_CHECKING, Any

import torch

from lightning_bucketddp.core.collectives import Collectives, PendingGather

if TYPE_CHECKING:
    from lightning.pytorch import Trainer


class Requeue:
    """Answers a signal after a batch, on all ranks at once (Note: requeue). All ranks must make one.

    Args:
        number: the signal.
        collectives: the ranks.
        trainer: whose fit it is.
        callback: Lightning's base class of callbacks: in one of them it can save within an epoch.
    """

    def __init__(self, number: int, collectives: Collectives, *, trainer: Trainer, callback: type) -> None:
        self._number = number
        self._hosts = collectives.new_host_group()
        self._answer: Any = None
        self._is_noted = False
        self._is_due = False
        self._asked: PendingGather | None = None
        self._step = 0
        self._callbacks = trainer.callbacks  # type: ignore[attr-defined]
        self._callback = _callback_for(self, callback)
        self._callbacks.append(self._callback)

    def close(self) -> None:
        """The fit is over. Lightning itself restores the handlers that were there before."""
        self._callbacks.remove(self._callback)

    def take_over(self) -> None:
        """From now on note the signal, if it is Lightning that answers it; a handler of the user's is left alone."""
        handler = signal.getsignal(self._number)
        if type(handler).__name__ == "_HandlersCompose" and threading.current_thread() is threading.main_thread():
            self._answer = handler
            signal.signal(self._number, self._note)

    def _note(self, *_: Any) -> None:
        self._is_noted = True

    def begin_batch(self, step: int) -> None:
        """Ask the other ranks, after `step` steps of the optimizer."""
        self._step = step
        self._asked = self._hosts.start_gather(torch.tensor([float(self._is_noted)]))

    def end_batch(self, step: int) -> None:
        """Answer, if any rank has the signal and the optimizer has stepped in this batch."""
        if self._asked is None:
            return
        self._is_due |= any(bool(noted) for noted in self._asked.wait())
        self._asked = None
        if self._is_due and step != self._step:
            self._is_due = self._is_noted = False
            if self._answer is not None:
                self._answer(self._number, None)


def _callback_for(requeue: Requeue, base: type) -> Any:
    class AnswerRequeue(base):
        def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
            requeue.begin_batch(trainer.global_step)

        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            requeue.end_batch(trainer.global_step)

    return AnswerRequeue()
