"""What watchdogs exchange outside of collectives, through the store of their process group; processes on this host.

Note: one saver
    At most one rank saves. Each rank that ends waits for the lower ones, as long as they may come, and then claims to
    be the saver; the store keeps the first claim. If the store has died with rank zero, the first rank to make a file
    is the saver, in the directory of the checkpoints. The rank whose exception ends the run saves only if it is rank
    zero: it may be in the middle of a step (docs/design/saver.md).
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import select
import signal
import socket
import struct
import time
from collections.abc import Callable
from concurrent.futures import wait
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from lightning_bucketddp.comm.connections import Connections
from lightning_bucketddp.comm.process_group import ASKS_EVERY_S_PER_RANK
from lightning_bucketddp.faults.failure import Failure, Kind, describe_exit
from lightning_bucketddp.processes import Worker, pid_scope, process_state

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

log = logging.getLogger(__name__)

_CHECK_EVERY_S = 0.2
# The store answers at once, unless its process is stopped.
_ANSWERS_WITHIN_S = 10.0


@dataclass(eq=False)
class SideChannel:
    """Keys in the store that begin with `name`, which is that of one run: the store outlives it.

    Every question returns None if the store does not answer, because it is lost, or its process is stopped.

    The channel has a connection of its own, because a thread that waits for an answer keeps others waiting; and a
    thread of its own, which waits for ever if the process of the store is stopped after it was asked.
    """

    store: Store
    name: str
    rank: int
    world_size: int
    connections: Connections = field(default_factory=Connections)  # of this process to other hosts
    store_rank: int | None = None  # the rank whose process holds the store; None: no rank's does

    def __post_init__(self) -> None:
        self.local_ranks = LocalRanks(self)
        self.is_lost = False  # the connection to the store is broken, for good
        # A name of this run that is the same on all ranks, fit for the name of a file.
        self.run_id = hashlib.blake2b(self.name.encode(), digest_size=8).hexdigest()
        self._worker = Worker("bucketddp-store", stops_at_error=False)
        self._asked_at: float | None = None  # None: the store has answered everything

    def interval(self, at_least: float) -> float:
        """Return the seconds between two questions of a rank that asks again and again."""
        return max(at_least, ASKS_EVERY_S_PER_RANK * self.world_size)

    def close(self) -> None:
        """End the thread that asks the store, as soon as the store has answered it."""
        self._worker.close()
        self.local_ranks.close()

    def set(self, key: str, value: Any) -> None:
        self._ask(lambda: self.store.set(self._key(key), json.dumps(value)))

    def first(self, key: str, value: Any) -> Any:
        """Write `value` unless there is one; return the one that is there."""
        return _parse(self._ask(lambda: self.store.compare_set(self._key(key), "", json.dumps(value))))

    def get(self, key: str) -> Any:
        """Return the value that is there; None if there is none."""

        def question() -> Any:
            # Asking for a key that is not there would wait for it.
            return self.store.get(self._key(key)) if self.store.check([self._key(key)]) else None

        return _parse(self._ask(question))

    def get_of_others(self, kind: str) -> dict[int, Any]:
        """Return what is under "`kind`/`rank`", by rank, of all other ranks that have written something there."""
        ranks = [rank for rank in range(self.world_size) if rank != self.rank]
        keys = [self._key(f"{kind}/{rank}") for rank in ranks]

        def question() -> list[Any]:
            if self.store.check(keys):  # two questions, however many ranks there are
                return list(self.store.multi_get(keys))
            return [self.store.get(key) if self.store.check([key]) else None for key in keys]

        values = map(_parse, (self._ask(question) or ()) if keys else ())
        return {rank: value for rank, value in zip(ranks, values, strict=False) if value is not None}

    def add(self, key: str, amount: int = 1) -> int | None:
        """Add to a counter, and return the sum."""
        return self._ask(lambda: int(self.store.add(self._key(key), amount)))  # type: ignore[no-any-return]

    def is_among_first(self, number: int, what: str) -> bool:
        """Return whether this rank is one of the first `number` that ask this of `what`, or the store is silent."""
        count = self.add(what)
        return count is None or count <= number

    def report(self, failure: Failure) -> Failure:
        """Report `failure` to the others; return the first one that any rank has reported: that one counts."""
        first = self.first("failure", asdict(failure))
        return failure if first is None else Failure.from_dict(first)

    def failure(self) -> Failure | None:
        content = self.get("failure")
        return None if content is None else Failure.from_dict(content)

    @property
    def can_ask(self) -> bool:
        return not self.is_lost and not self.is_silent

    @property
    def is_silent(self) -> bool:
        """Return whether the store does not answer now: its process is frozen, or its host cannot be reached."""
        store_host = self.connections.store_host
        is_unreachable = store_host is not None and store_host in self.connections.silent_hosts
        holder = None if self.store_rank is None else self.local_ranks.processes.get(self.store_rank)
        return is_unreachable or self._is_late or (holder is not None and holder.is_frozen)

    def frozen_ranks(self) -> list[int]:
        """Return the ranks that are known to be frozen: on this host, and the one whose store does not answer."""
        frozen = {rank for rank, process in self.local_ranks.processes.items() if process.is_frozen}
        return sorted(frozen | ({self.store_rank} if self._is_late and self.store_rank is not None else set()))

    @property
    def _is_late(self) -> bool:
        """Return whether the store of another rank should have answered long ago."""
        asked_at = self._asked_at
        is_late = asked_at is not None and time.monotonic() - asked_at > self.interval(_ANSWERS_WITHIN_S)
        return is_late and self.store_rank not in (self.rank, None)

    def _key(self, key: str) -> str:
        return f"{self.name}/{key}"

    def _ask(self, question: Callable[[], Any]) -> Any:
        def timed() -> Any:
            self._asked_at = time.monotonic()
            try:
                return question()
            finally:
                self._asked_at = None

        if not self.can_ask:
            return None
        answer = self._worker.submit(timed)
        while not wait([answer], timeout=_CHECK_EVERY_S).done:
            self.connections.check()
            if self.is_silent:
                return None
        try:
            return answer.result()
        except RuntimeError as error:  # torch's network errors are no `OSError`s
            self.is_lost = True
            log.debug("bucketddp: rank %d has lost the store: %s", self.rank, error)
            return None


def _parse(raw: bytes | None) -> Any:
    return None if raw is None else json.loads(raw)


# Since Linux 6.15 the kernel reports how a process ended, also to those that are not its parent (`PIDFD_GET_INFO`).
_GET_INFO = 0xC040FF0B
_INFO_SIZE = 64
_WITH_EXIT = 1 << 3
# The others wait so long for a rank that knows how a process ended, such as its parent.
_STATUS_WITHIN_S = 0.7


@dataclass(frozen=True, slots=True)
class LocalProcess:
    """Another rank's process on this host. The handle stays its own when the number is given to another process."""

    pid: int
    handle: int | None  # None: it had ended before it was found

    @property
    def has_ended(self) -> bool:
        if self.handle is None:
            return True
        poll = select.poll()
        poll.register(self.handle, select.POLLIN)
        return bool(poll.poll(0))

    @property
    def exit_status(self) -> int | None:
        """Return the exit status, negative for a signal; None if the kernel does not report it."""
        import fcntl  # not on every platform

        if self.handle is None:
            return None
        info = bytearray(struct.pack("QQ", _WITH_EXIT, 0).ljust(_INFO_SIZE, b"\0"))
        with suppress(OSError):
            fcntl.ioctl(self.handle, _GET_INFO, info)
            if struct.unpack_from("Q", info)[0] & _WITH_EXIT:
                return os.waitstatus_to_exitcode(struct.unpack_from("i", info, _INFO_SIZE - 4)[0])
        return None

    @property
    def is_frozen(self) -> bool:
        """Return whether it has been stopped (SIGSTOP, a debugger) and can do nothing by itself."""
        return process_state(self.pid) in ("T", "t") and not self.has_ended


class LocalRanks:
    """The processes of the other ranks on this host, which they `introduce` in the side channel."""

    def __init__(self, channel: SideChannel) -> None:
        # The host, and where process numbers mean the same.
        self.place = f"{socket.gethostname()}/{pid_scope()}"
        self.are_known = False
        self.processes: dict[int, LocalProcess] = {}  # by rank
        self._channel = channel
        self._ended_at: dict[int, float] = {}

    def introduce(self, pid: int) -> None:
        """Report to the other ranks which process this rank is."""
        self._channel.set(f"identity/{self._channel.rank}", {"place": self.place, "pid": pid})
        self._channel.add("num_introduced")

    def discover(self) -> None:
        """Find the processes of this host, as soon as all ranks have introduced themselves."""
        if self.are_known or self._channel.add("num_introduced", 0) != self._channel.world_size:
            return
        found: dict[int, LocalProcess] = {}
        for rank, identity in self._channel.get_of_others("identity").items():
            if identity["place"] == self.place:
                pid = identity["pid"]
                with suppress(OSError, AttributeError):  # the system has no handles
                    try:
                        found[rank] = LocalProcess(pid, os.pidfd_open(pid))
                    except ProcessLookupError:
                        found[rank] = LocalProcess(pid, None)
        self.processes, self.are_known = found, True

    def find_death(self, exit_status_of: Callable[[int], int | None]) -> Failure | None:
        """Return the death of a rank on this host in the middle of the run.

        `exit_status_of` returns how the process of a rank ended, if this process has started it.
        """
        for rank, process in self.processes.items():
            if not process.has_ended:
                continue
            ended_at = self._ended_at.setdefault(rank, time.monotonic())
            status = process.exit_status
            status = exit_status_of(rank) if status is None else status
            has_left = self._channel.get(f"left/{rank}") is not None
            if has_left or (status == 0 and not self._channel.can_ask):
                continue
            if status is not None or time.monotonic() - ended_at > _STATUS_WITHIN_S:
                where = f"process {process.pid} on {socket.gethostname()}"
                return Failure(rank=rank, kind=Kind.DIED, what=describe_exit(status), process=where)
        return None

    def gone(self) -> list[int]:
        """Return the ranks whose processes have ended or are frozen."""
        return [rank for rank, process in self.processes.items() if process.has_ended or process.is_frozen]

    def kill_frozen(self) -> None:
        """Kill the processes that cannot end by themselves."""
        for process in self.processes.values():
            if process.handle is not None and process.is_frozen:
                with suppress(ProcessLookupError):
                    signal.pidfd_send_signal(process.handle, signal.SIGKILL)

    def close(self) -> None:
        for process in self.processes.values():
            if process.handle is not None:
                os.close(process.handle)
        self.processes.clear()


# Longer than a rank that hangs may take to end.
_COMES_WITHIN_S = 5.0
_ASKS_FOR_SAVER_EVERY_S = 0.05


@dataclass(eq=False)
class SaverElection:
    """Finds the rank that saves for all (Note: one saver).

    `claim_file` returns whether this rank is the first to make a file for this run.
    """

    channel: SideChannel
    claim_file: Callable[[str], bool]
    is_own: bool | None = None  # whether the saver is this rank; None: not known yet

    def check(self) -> None:
        """Check whether a rank is the saver by now."""
        if self.is_own is None and (saver := self.channel.get("saver")) is not None:
            self.is_own = saver == self.channel.rank

    def is_won(self, failure: Failure) -> bool:
        """Return whether this rank, which ends after `failure`, is the saver. May wait for ranks that are lower."""
        rank = self.channel.rank
        if failure.kind is Kind.RAISED and failure.rank == rank != 0:
            return False
        deadline = time.monotonic() + _COMES_WITHIN_S
        while self.is_own is None and time.monotonic() < deadline and self._may_lower_rank_come(failure):
            time.sleep(self.channel.interval(_ASKS_FOR_SAVER_EVERY_S))
            self.check()
        if self.is_own is None:
            saver = self.channel.first("saver", rank)
            # On the other side of a network that is cut, ranks may find the store gone, and save as well.
            needs_file = saver is None or (saver == rank and failure.kind is Kind.LOST)
            self.is_own = self.claim_file(self.channel.run_id) if needs_file else saver == rank
        return self.is_own

    def _may_lower_rank_come(self, failure: Failure) -> bool:
        lower = set(range(self.channel.rank)).difference(self.channel.local_ranks.gone())
        if failure.kind in (Kind.DIED, Kind.LOST):
            lower.discard(failure.rank)
        if not self.channel.can_ask:
            lower.intersection_update(self.channel.local_ranks.processes)  # the others cannot claim anything
        return bool(lower)
