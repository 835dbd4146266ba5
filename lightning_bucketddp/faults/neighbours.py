"""The other ranks on this host: who has died, and who is frozen."""

from __future__ import annotations

import time
from collections.abc import Callable

from lightning_bucketddp.faults.failure import Failure, Kind, describe_exit
from lightning_bucketddp.faults.peers import Peer
from lightning_bucketddp.faults.side_channel import SideChannel

# How a process ended is known to its parent, or to all where the system tells: so long the others wait for who knows.
_STATUS_WITHIN_S = 0.7


class Neighbours:
    """The processes of the ranks on this host, found as they introduce themselves.

    Args:
        channel: where they do.
        exit_status_of: how the process of a rank ended, if this process has started it.
    """

    def __init__(self, channel: SideChannel, *, exit_status_of: Callable[[int], int | None]) -> None:
        self._channel = channel
        self._exit_status_of = exit_status_of
        self._unmet = {rank for rank in range(channel.world_size) if rank != channel.rank}
        self._peers: dict[int, Peer] = {}
        self._ended_at: dict[int, float] = {}

    def meet(self) -> None:
        """Look for ranks that have introduced themselves since."""
        for rank in sorted(self._unmet):
            if (described := self._channel.identity_of(rank)) is not None:
                self._unmet.discard(rank)
                if (peer := Peer.find(described)) is not None:
                    self._peers[rank] = peer

    @property
    def are_met(self) -> bool:
        """Whether all ranks have introduced themselves."""
        return not self._unmet

    def death(self, *, has_left: Callable[[int, int | None], bool]) -> Failure | None:
        """The death of a neighbour that had not left before; `has_left` is asked with its rank and exit status."""
        for rank, peer in self._peers.items():
            if not peer.has_ended:
                continue
            ended_at = self._ended_at.setdefault(rank, time.monotonic())
            status = peer.exit_status
            status = self._exit_status_of(rank) if status is None else status
            if has_left(rank, status):
                continue
            if status is not None or time.monotonic() - ended_at > _STATUS_WITHIN_S:
                process = f"process {peer.pid} on {peer.host}"
                return Failure(rank=rank, kind=Kind.DIED, what=describe_exit(status), process=process)
        return None

    def gone(self) -> list[int]:
        """Return the ranks whose processes have ended or are stopped: they learn nothing any more."""
        return [rank for rank, peer in self._peers.items() if peer.has_ended or peer.is_frozen]

    def frozen(self) -> list[int]:
        """The ranks whose processes are stopped."""
        return [rank for rank, peer in self._peers.items() if peer.is_frozen]

    def kill_frozen(self) -> None:
        """End those that can no longer end by themselves."""
        for rank in self.frozen():
            self._peers[rank].kill()

    def close(self) -> None:
        for peer in self._peers.values():
            peer.close()
        self._peers.clear()
