"""The processes that the doctor runs in: those of a launcher such as torchrun, or its own."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta

import torch
import torch.distributed as dist

from lightning_bucketddp.comm.collectives import Collectives
from lightning_bucketddp.comm.gloo_interface import gloo_between_hosts
from lightning_bucketddp.comm.nccl_sockets import open_more_sockets
from lightning_bucketddp.commands.doctor.deadline import NeverEnded, within
from lightning_bucketddp.commands.usage import UsageError
from lightning_bucketddp.startup.child_processes import LAUNCHER_PID, ChildProcesses
from lightning_bucketddp.startup.rendezvous import Rendezvous
from lightning_bucketddp.startup.store import StoreAddress

_LOCAL = "127.0.0.1"
_OF_A_LAUNCHER = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_HAS_GPU = "bucketddp/doctor/has_gpu"


@dataclass(frozen=True, kw_only=True)
class Crew:
    """One rank's view of the processes.

    Attributes:
        point: where they meet.
        is_our_own: they are started by rank 0, on this host.
        children: those that this process has started.
        listener: where they meet, if this process listens there already.
    """

    point: StoreAddress
    is_our_own: bool
    children: Sequence[subprocess.Popen[bytes]] = ()
    listener: socket.socket | None = None

    @classmethod
    def of_environment(cls) -> Crew | None:
        """That of the launcher which has started this process; None if a person has."""
        given = {name: os.environ[name] for name in _OF_A_LAUNCHER if name in os.environ}
        if "RANK" not in given or "WORLD_SIZE" not in given:
            return None
        if missing := [name for name in _OF_A_LAUNCHER if name not in given]:
            raise UsageError(
                f"RANK and WORLD_SIZE are set, but not {' and '.join(missing)}: set them, or none of them."
            )
        try:
            rank, world_size, port = (int(given[name]) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
            local_rank = int(os.environ.get("LOCAL_RANK", rank))
        except ValueError as error:
            raise UsageError(f"RANK, WORLD_SIZE, MASTER_PORT and LOCAL_RANK must be numbers: {error}.") from None
        point = StoreAddress(
            address=given["MASTER_ADDR"], port=port, rank=rank, world_size=world_size, local_rank=local_rank
        )
        return cls(point=point, is_our_own=LAUNCHER_PID in os.environ)

    @classmethod
    @contextmanager
    def of_our_own(cls, world_size: int, *, arguments: Sequence[str]) -> Iterator[Crew]:
        """Processes on this host that do what this one does; none is left afterwards."""
        listener = socket.create_server((_LOCAL, 0), backlog=socket.SOMAXCONN)
        port = listener.getsockname()[1]
        variables = {"WORLD_SIZE": world_size, "MASTER_ADDR": _LOCAL, "MASTER_PORT": port, LAUNCHER_PID: os.getpid()}
        children: list[subprocess.Popen[bytes]] = []
        point = StoreAddress(address=_LOCAL, port=port, rank=0, world_size=world_size, local_rank=0)
        crew = cls(point=point, is_our_own=True, listener=listener)
        try:
            for rank in range(1, world_size):
                own = {name: str(value) for name, value in {**variables, "RANK": rank, "LOCAL_RANK": rank}.items()}
                command = [sys.executable, "-m", "lightning_bucketddp.cli", "doctor", *arguments]
                child = subprocess.Popen(
                    command, env={**os.environ, **own}, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL
                )
                children.append(child)
            yield replace(crew, children=children)
        finally:
            listener.close()
            for child in children:
                child.kill()  # nothing, if it has ended
                child.wait()

    @contextmanager
    def meet(self, *, timeout_s: float) -> Iterator[Colleagues]:
        """A process group of all ranks; `StartError` if some do not come."""
        rendezvous = Rendezvous(self.point, timeout_s=timeout_s, option="--timeout")
        launched = ChildProcesses(self, rank=self.point.rank, local_rank=self.point.local_rank)
        store = rendezvous.meet(listener=self.listener, find_failure=launched.find_failure)
        store.set_timeout(timedelta(seconds=timeout_s))
        try:
            yield self._make_group(store, timeout_s=timeout_s)
        except NeverEnded:
            raise  # a thread still uses the group, and would be waited for: the process has to end without leaving it
        except BaseException as error:
            try:
                _leave(timeout_s=timeout_s, is_broken=True)
            except NeverEnded:
                raise NeverEnded(str(error)) from error
            raise
        _leave(timeout_s=timeout_s, is_broken=False)

    def _make_group(self, store: dist.Store, *, timeout_s: float) -> Colleagues:  # type: ignore[name-defined]
        rank, world_size = self.point.rank, self.point.world_size
        has_gpu = torch.cuda.is_available() and torch.cuda.device_count() > self.point.local_rank
        store.set(f"{_HAS_GPU}/{rank}", json.dumps(has_gpu))
        on_gpus = all(json.loads(has) for has in store.multi_get([f"{_HAS_GPU}/{r}" for r in range(world_size)]))
        if on_gpus:
            open_more_sockets(store, rank=rank, world_size=world_size)
            torch.cuda.set_device(self.point.local_rank)
        with gloo_between_hosts():
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if on_gpus else "gloo",
                store=store,
                rank=rank,
                world_size=world_size,
                timeout=timedelta(seconds=timeout_s),
            )
        hosts = Collectives(torch.device("cpu"))
        device = torch.device("cuda", self.point.local_rank)
        return Colleagues(hosts, gradients=Collectives(device) if on_gpus else hosts)


@dataclass(frozen=True, slots=True)
class Colleagues:
    """How to reach the other ranks: to talk, and as gradients do."""

    hosts: Collectives
    gradients: Collectives

    @property
    def backend(self) -> str:
        return "gloo" if self.gradients is self.hosts else "NCCL"


def _leave(*, timeout_s: float, is_broken: bool) -> None:
    """Destroy the process group, if there is one. NCCL's warns at the end of the process otherwise."""
    group = dist.group.WORLD
    if group is None:
        return

    def leave() -> None:
        if is_broken and "nccl" in dist.get_backend(group):
            group.abort()  # or else destroying it would wait for ranks that may be gone
        dist.destroy_process_group()

    within(timeout_s, leave, what="leaving the process group")
