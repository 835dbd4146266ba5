"""What the watchdogs of all ranks tell each other outside of collectives: through the store of their process group.

JSON only. The store has no password: what is no JSON, or has another shape than a rank writes, counts as not there, so
that untrusted input ends no thread of ours. Ranks on one host see each other's processes, too: these may have died, or
be frozen, and with one of them the store.

Note: one saver
    At most one rank saves. Each rank that ends waits for the lower ones, as long as they may come, and then claims to
    be the saver; the store keeps the first claim. If the store has died with rank zero, whoever makes a file first is
    the saver, in the directory of the checkpoints. The rank whose exception ends the run saves only if it is rank zero:
    it may be in the middle of a step (docs/design/saver.md).
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
from typing import TYPE_CHECKING, Any, TypeVar

from lightning_bucketddp.comm.connections import Connections
from lightning_bucketddp.faults.failure import Failure, Kind, describe_exit
from lightning_bucketddp.processes import Worker, pid_namespace, process_state

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

log = logging.getLogger(__name__)

_LOOKS_EVERY_S = 0.2
# Thousands of ranks ask less often, so that together they ask no more than the store can answer.
_PER_RANK_S = 0.0005

_Value = TypeVar("_Value")
_Answer = TypeVar("_Answer")


class StoreSilentError(RuntimeError):
    """The store does not answer now; it may later."""


class SideChannel:
    """Keys in the store that begin with `name`, which is that of one run: the store outlives it.

    Over a connection of its own: a thread that waits for an answer of the store keeps others waiting. And by a thread
    of its own: the process of the store may be stopped after it was asked, and then the one that asks waits for ever.
    """

    def __init__(self, store: Store, *, name: str, rank: int, world_size: int) -> None:
        self.rank = rank
        self.world_size = world_size
        # Asked while a question waits: whether the store cannot answer. Then there is a `StoreSilentError`.
        self.is_silent: Callable[[], bool] = lambda: False
        self._store = store
        self._name = name
        self._worker = Worker("bucketddp-store", stops_at_error=False)
        self._asked_at: float | None = None

    @property
    def silent_for_s(self) -> float:
        """Return how long the store has not answered what it was asked last; 0 if it has."""
        asked_at = self._asked_at
        return 0.0 if asked_at is None else time.monotonic() - asked_at

    @property
    def run_id(self) -> str:
        """A name of this run, of 16 hex digits, that no other has and that is the same on all ranks."""
        # A digest, fit for the name of a file: a part of our own name is from the store (untrusted input).
        return hashlib.blake2b(self._name.encode(), digest_size=8).hexdigest()

    def interval(self, at_least: float) -> float:
        """Return the seconds between two questions of a rank that asks again and again."""
        return max(at_least, _PER_RANK_S * self.world_size)

    def close(self) -> None:
        """End the thread that asks the store, as soon as the store has answered it."""
        self._worker.close()

    def set(self, key: str, value: Any) -> None:
        self._ask(lambda: self._store.set(self._key(key), json.dumps(value)))

    def first(self, key: str, value: _Value) -> _Value | None:
        """Write `value` unless there is one; return the one that is there, None if it is of another type."""
        there = _parse(self._ask(lambda: self._store.compare_set(self._key(key), "", json.dumps(value))))
        return there if isinstance(there, type(value)) else None

    def get(self, key: str, kind: type[_Value]) -> _Value | None:
        """Return the value that is there; None if there is none, or of another type."""

        def question() -> Any:
            # Asking for a key that is not there would wait for it.
            return self._store.get(self._key(key)) if self._store.check([self._key(key)]) else b""

        value = _parse(self._ask(question))
        return value if isinstance(value, kind) else None

    def add(self, key: str, amount: int = 1) -> int:
        """Add to a counter, and return the sum."""
        return int(self._ask(lambda: self._store.add(self._key(key), amount)))

    def is_among_first(self, number: int, what: str) -> bool:
        """Return whether this rank is one of the first `number` that ask this of `what`."""
        return self.add(what) <= number

    def last_beats(self) -> dict[int, dict[str, Any]]:
        """Return the newest heartbeats of the other ranks, by rank, without those that have sent none."""
        ranks = [rank for rank in range(self.world_size) if rank != self.rank]
        keys = [self._key(f"beat/{rank}") for rank in ranks]

        def question() -> list[Any]:
            if self._store.check(keys):  # two questions, however many ranks there are
                return list(self._store.multi_get(keys))
            return [self._store.get(key) if self._store.check([key]) else b"" for key in keys]

        beats = zip(ranks, map(_parse, self._ask(question) if keys else ()), strict=True)
        return {rank: beat for rank, beat in beats if isinstance(beat, dict)}

    def report(self, failure: Failure) -> Failure:
        """Tell the others of `failure`; return the first one that any rank has reported: that one counts."""
        first = Failure.from_dict(self.first("failure", asdict(failure)))
        if first is None:  # untrusted input
            self.set("failure", asdict(failure))
        return first or failure

    def failure(self) -> Failure | None:
        return Failure.from_dict(self.get("failure", dict))

    def _key(self, key: str) -> str:
        return f"{self._name}/{key}"

    def _ask(self, question: Callable[[], Any]) -> Any:
        def timed() -> Any:
            self._asked_at = time.monotonic()
            try:
                return question()
            finally:
                self._asked_at = None

        answer = self._worker.submit(timed)
        while not wait([answer], timeout=_LOOKS_EVERY_S).done:
            if self.is_silent():
                raise StoreSilentError(f"The store does not answer rank {self.rank}.")
        return answer.result()


def _parse(raw: bytes) -> Any:
    """Return what the JSON `raw` says; None if it is none."""
    try:
        return json.loads(raw)
    except (ValueError, RecursionError):
        return None


# Linux 6.15 and later tell how a process ended, also to those that are not its parent (`PIDFD_GET_INFO`).
_GET_INFO = 0xC040FF0B
_INFO_SIZE = 64
_WITH_EXIT = 1 << 3
# How a process ended is known to its parent, or to all where the system tells: so long the others wait for who knows.
_STATUS_WITHIN_S = 0.7
# The store answers at once, unless its process is stopped.
_ANSWERS_WITHIN_S = 10.0


def place() -> str:
    """Return a name of this host and PID namespace, in which process numbers mean the same."""
    return f"{socket.gethostname()}/{pid_namespace()}"


def introduce(channel: SideChannel, *, pid: int, place: str) -> None:
    """Tell the ranks at `place` which process this rank is."""
    number = channel.add(f"num_at/{place}")
    channel.set(f"identity/{place}/{number}", {"rank": channel.rank, "pid": pid})
    channel.add("num_introduced")


@dataclass(frozen=True, slots=True)
class LocalProcess:
    """Another rank's process on this host. The handle stays its own when the number is given to another process."""

    pid: int
    handle: int

    @property
    def has_ended(self) -> bool:
        poll = select.poll()
        poll.register(self.handle, select.POLLIN)
        return bool(poll.poll(0))

    @property
    def exit_status(self) -> int | None:
        """Return the exit status, negative for a signal; None if the system does not tell."""
        import fcntl  # not on every platform

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


@dataclass(eq=False)
class LocalRanks:
    """The processes of the other ranks on this host, found as they `introduce` themselves in the side channel."""

    channel: SideChannel
    exit_status_of: Callable[[int], int | None]
    are_known: bool = False  # all ranks have introduced themselves
    _known: set[int] = field(default_factory=set)
    _processes: dict[int, LocalProcess] = field(default_factory=dict)
    _ended_at: dict[int, float] = field(default_factory=dict)

    def discover(self) -> None:
        """Look for ranks on this host that have introduced themselves since the last call."""
        if self.are_known:
            return
        world_size = self.channel.world_size
        are_all_there = self.channel.add("num_introduced", 0) == world_size
        for number in range(1, min(self.channel.add(f"num_at/{place()}", 0), world_size) + 1):
            if number in self._known:
                continue
            if (introduced := self.channel.get(f"identity/{place()}/{number}", dict)) is None:
                continue  # not written yet
            self._known.add(number)
            rank, pid = introduced.get("rank"), introduced.get("pid")
            if type(rank) is int and type(pid) is int and rank not in (self.channel.rank, *self._processes):
                with suppress(OSError, OverflowError, AttributeError):  # it is gone, or the system has no handles
                    self._processes[rank] = LocalProcess(pid, os.pidfd_open(pid))
        self.are_known = are_all_there

    def find_death(self, *, has_left: Callable[[int, int | None], bool]) -> Failure | None:
        """Return the death of a rank on this host that was not through; `has_left` is asked by rank and exit status."""
        for rank, process in self._processes.items():
            if not process.has_ended:
                continue
            ended_at = self._ended_at.setdefault(rank, time.monotonic())
            status = process.exit_status
            status = self.exit_status_of(rank) if status is None else status
            if has_left(rank, status):
                continue
            if status is not None or time.monotonic() - ended_at > _STATUS_WITHIN_S:
                where = f"process {process.pid} on {socket.gethostname()}"
                return Failure(rank=rank, kind=Kind.DIED, what=describe_exit(status), process=where)
        return None

    def numbers(self) -> list[int]:
        return list(self._processes)

    def gone(self) -> list[int]:
        """Return the ranks whose processes have ended or are frozen: they learn nothing any more."""
        return [rank for rank, process in self._processes.items() if process.has_ended or process.is_frozen]

    def frozen(self) -> list[int]:
        return [rank for rank, process in self._processes.items() if process.is_frozen]

    def kill_frozen(self) -> None:
        """Kill the processes that cannot end by themselves."""
        for rank in self.frozen():
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._processes[rank].handle, signal.SIGKILL)

    def close(self) -> None:
        for process in self._processes.values():
            os.close(process.handle)
        self._processes.clear()


@dataclass(eq=False)
class GuardedStore:
    """Asks the store only while it answers."""

    channel: SideChannel
    local_ranks: LocalRanks
    connections: Connections
    store_rank: int | None  # whose process holds the store; None if no rank's does
    is_lost: bool = False  # the connection to the store is broken, for good

    def __post_init__(self) -> None:
        def is_silent() -> bool:
            self.connections.look()
            return self.is_silent

        self.channel.is_silent = is_silent

    @property
    def can_ask(self) -> bool:
        return not self.is_lost and not self.is_silent

    @property
    def is_silent(self) -> bool:
        """Return whether the store does not answer now: its process is frozen, or its host cannot be reached."""
        store_host = self.connections.store_host
        is_unreachable = store_host is not None and store_host in self.connections.silent_hosts
        return is_unreachable or self.store_rank in self.frozen_ranks()

    def frozen_ranks(self) -> list[int]:
        """Return the ranks that are known to be frozen: on this host, and the one whose store does not answer."""
        frozen = self.local_ranks.frozen()
        is_silent = self.channel.silent_for_s > self.channel.interval(_ANSWERS_WITHIN_S)
        if is_silent and self.store_rank is not None and self.store_rank not in (self.channel.rank, *frozen):
            frozen.append(self.store_rank)
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
                log.debug("bucketddp: rank %d has lost the store: %s", self.channel.rank, error)
        return None


# Longer than a rank that hangs may take to end.
_COMES_WITHIN_S = 5.0
_ASKS_FOR_SAVER_EVERY_S = 0.05


class SaverElection:
    """Finds the rank that saves for all (Note: one saver).

    `claim_file` returns whether this rank is the first to make a file for this run.
    """

    def __init__(self, store: GuardedStore, *, claim_file: Callable[[str], bool]) -> None:
        self._store = store
        self._channel = store.channel
        self._local_ranks = store.local_ranks
        self._claim_file = claim_file
        self.is_own: bool | None = None  # whether the saver is this rank; None: not known yet

    def look(self) -> None:
        """Check whether a rank is the saver by now."""
        if self.is_own is None and (saver := self._channel.get("saver", int)) is not None:
            self.is_own = saver == self._channel.rank

    def is_won(self, failure: Failure) -> bool:
        """Return whether this rank, which ends after `failure`, is the saver. May wait for ranks that are lower."""
        rank = self._channel.rank
        if failure.kind is Kind.RAISED and failure.rank == rank != 0:
            return False
        deadline = time.monotonic() + _COMES_WITHIN_S
        while self.is_own is None and time.monotonic() < deadline and self._may_lower_rank_come(failure):
            time.sleep(self._channel.interval(_ASKS_FOR_SAVER_EVERY_S))
            self._store.ask(self.look)
        if self.is_own is None:
            saver = self._store.ask(lambda: self._channel.first("saver", rank))
            # On the other side of a network that is cut, ranks may find the store gone, and save as well.
            needs_file = saver is None or (saver == rank and failure.kind is Kind.LOST)
            self.is_own = self._claim_file(self._channel.run_id) if needs_file else saver == rank
        return self.is_own

    def _may_lower_rank_come(self, failure: Failure) -> bool:
        lower = set(range(self._channel.rank)).difference(self._local_ranks.gone())
        if failure.kind in (Kind.DIED, Kind.LOST):
            lower.discard(failure.rank)
        if not self._store.can_ask:
            lower.intersection_update(self._local_ranks.numbers())  # of others nobody can hear
        return bool(lower)
