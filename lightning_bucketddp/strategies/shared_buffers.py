"""When the ranks get rank 0's buffers."""

from __future__ import annotations

from lightning_bucketddp.reducer.stats import ReducerStats
from lightning_bucketddp.replicas.replicas import Replicas


class SharedBuffers:
    """Shares the buffers of a module before something reads them.

    Args:
        replicas: the module's state.
        stats: what the reducer has done since; None if nothing trains.
    """

    def __init__(self, replicas: Replicas, stats: ReducerStats | None) -> None:
        self._replicas = replicas
        self._stats = stats
        self._num_backwards_shared = 0
        self._validation_has_begun = False

    def before_training_step(self) -> None:
        """Before the first forward after a synchronised backward, as torch DDP does."""
        if self._stats is not None and self._num_backwards_shared != self._stats.num_backwards:
            self._num_backwards_shared = self._stats.num_backwards
            self._replicas.broadcast_buffers()

    def before_evaluation(self) -> None:
        """Also the statistics that training has left alone."""
        if self._stats is not None:
            self._num_backwards_shared = self._stats.num_backwards
        self._replicas.broadcast_all_buffers()

    def begin_validation(self) -> None:
        """Wait for its first step, as torch DDP does: until then callbacks exchange weights and statistics."""
        self._validation_has_begun = True

    def before_validation_step(self) -> None:
        """Share before the first step of a validation."""
        if self._validation_has_begun:
            self._validation_has_begun = False
            self.before_evaluation()
