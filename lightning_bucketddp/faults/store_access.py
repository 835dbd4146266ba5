"""Access to the store while it answers: whoever asks a store that is frozen, or whose host is gone, waits for ever."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

from lightning_bucketddp.comm.connections import Connections
from lightning_bucketddp.faults.local_ranks import LocalRanks
from lightning_bucketddp.faults.side_channel import SideChannel, StoreSilentError

log = logging.getLogger(__name__)

_Answer = TypeVar("_Answer")

# The store answers at once, unless its process is stopped.
_ANSWERS_WITHIN_S = 10.0


class StoreAccess:
    """Asks the store only while it answers.

    Args:
        store_rank: the rank whose process holds the store; None if no rank's does.

    Attributes:
        is_lost: whether the connection to the store is broken, for good.
    """

    def __init__(
        self, channel: SideChannel, local_ranks: LocalRanks, connections: Connections, *, store_rank: int | None
    ) -> None:
        self.is_lost = False
        self._channel = channel
        self._local_ranks = local_ranks
        self._connections = connections
        self._store_rank = store_rank
        channel.is_silent = self._look_whether_it_is_silent

    @property
    def can_ask(self) -> bool:
        """Return whether the store answers."""
        return not self.is_lost and not self.is_silent

    @property
    def is_silent(self) -> bool:
        """Return whether the store does not answer now: its process is frozen, or its host cannot be reached."""
        store_host = self._connections.store_host
        is_unreachable = store_host is not None and store_host in self._connections.silent_hosts
        return is_unreachable or self._store_rank in self.frozen_ranks()

    def frozen_ranks(self) -> list[int]:
        """Return the ranks that are known to be frozen: on this host, and the one whose store does not answer."""
        frozen = self._local_ranks.frozen()
        is_silent = self._channel.silent_for_s > self._channel.interval(_ANSWERS_WITHIN_S)
        if is_silent and self._store_rank is not None and self._store_rank not in (self._channel.rank, *frozen):
            frozen.append(self._store_rank)
        return frozen

    def ask(self, exchange: Callable[[], _Answer]) -> _Answer | None:
        """Return what `exchange` gets from the store; None if the store does not answer."""
        if self.can_ask:
            try:
                return exchange()
            except StoreSilentError:
                pass
            except RuntimeError as error:  # torch's network errors are no `OSError`s
                self.is_lost = True
                log.debug("bucketddp: rank %d has lost the store: %s", self._channel.rank, error)
        return None

    def ask_or_do_without(self, act: Callable[..., _Answer]) -> _Answer:
        """Return what `act` does, given the frozen ranks and whether the store answers, which may end meanwhile."""
        if self.can_ask:
            try:
                return act(self.frozen_ranks(), can_ask=True)
            except StoreSilentError:
                pass
        return act(self.frozen_ranks(), can_ask=False)

    def _look_whether_it_is_silent(self) -> bool:
        self._connections.look()
        return self.is_silent
