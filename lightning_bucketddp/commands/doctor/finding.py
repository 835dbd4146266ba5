"""Findings, the results of the doctor's checks, and the process group that it probes."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent import futures
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from enum import IntEnum
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]

from lightning_bucketddp.comm.collectives import Collectives
from lightning_bucketddp.comm.connections import gloo_interface, more_sockets
from lightning_bucketddp.comm.process_group import TRIED_NCCL
from lightning_bucketddp.commands import UsageError
from lightning_bucketddp.processes import Worker, variables_by_default
from lightning_bucketddp.startup.rendezvous import Rendezvous
from lightning_bucketddp.startup.store import LAUNCHER_PID, ChildProcesses, StoreAddress
from lightning_bucketddp.wording import list_some_ranks


class Severity(IntEnum):
    """How bad a finding is; the larger, the worse."""

    OK = 0
    NOTE = 1
    WARNING = 2
    ERROR = 3

    def __str__(self) -> str:
        return self.name.lower()


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check, in a sentence, and a remedy; it is printed under the heading `theme`."""

    severity: Severity
    text: str
    remedy: str = ""
    theme: str = ""

    def to_json(self) -> dict[str, str]:
        return {"theme": self.theme, "verdict": str(self.severity), "text": self.text, "remedy": self.remedy}


ok = partial(Finding, Severity.OK)
note = partial(Finding, Severity.NOTE)
warning = partial(Finding, Severity.WARNING)
error = partial(Finding, Severity.ERROR)

# The observations of a rank, as JSON.
Observation = Mapping[str, Any]


def differences(values: Mapping[int, Mapping[str, Any]], *, absent: str) -> dict[str, str]:
    """Return the names whose values differ between ranks, each with a text such as `2.5 on rank 0; none on rank 1`."""
    found: dict[str, str] = {}
    for name in dict.fromkeys(name for of_rank in values.values() for name in of_rank):
        ranks: dict[Any, list[int]] = {}
        for rank, of_rank in values.items():
            ranks.setdefault(of_rank.get(name), []).append(rank)
        if len(ranks) > 1:
            found[name] = "; ".join(f"{value or absent} on {list_some_ranks(of)}" for value, of in ranks.items())
    return found


def one_per_host(ranks: Sequence[Observation]) -> list[Observation]:
    """Return the first rank of each host, with `where`: ` on HOSTNAME` if there are several hosts, else nothing."""
    hosts = list({observed["host"]: observed for observed in reversed(ranks)}.values())[::-1]
    return [{**observed, "where": f" on {observed['hostname']}" if len(hosts) > 1 else ""} for observed in hosts]


T = TypeVar("T")


class NeverEnded(Exception):
    """A call did not end in time. Its thread may hang for ever: the process must not wait for it."""


def within(seconds: float, do: Callable[[], T], *, what: str) -> T:
    """Run `do` in a thread and return its result; raise `NeverEnded` if it takes longer than `seconds`."""
    worker = Worker("bucketddp-doctor")
    outcome = worker.submit(do)
    if not futures.wait([outcome], timeout=seconds).done:
        raise NeverEnded(f"{what} did not end within {seconds:g} s")
    worker.close()
    return outcome.result()


@dataclass(frozen=True, kw_only=True)
class ProbeGroup:
    """The ranks that probe together, and this rank among them."""

    store: StoreAddress
    is_spawned: bool  # rank 0 starts the others, on this host
    children: Sequence[subprocess.Popen[bytes]] = ()  # processes that this one has started
    listener: socket.socket | None = None  # of the store, if this process listens already

    @classmethod
    def from_environment(cls) -> ProbeGroup | None:
        """Return the group of the launcher that started this process, or None without one."""
        given = os.environ
        if "RANK" not in given or "WORLD_SIZE" not in given:
            return None
        if missing := [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in given]:
            raise UsageError(
                f"RANK and WORLD_SIZE are set, but not {' and '.join(missing)}: set them, or none of them."
            )
        try:
            rank, world_size, port = (int(given[name]) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
            local_rank = int(given.get("LOCAL_RANK", rank))
        except ValueError as wrong:
            raise UsageError(f"RANK, WORLD_SIZE, MASTER_PORT and LOCAL_RANK must be numbers: {wrong}.") from None
        address = StoreAddress(
            address=given["MASTER_ADDR"], port=port, rank=rank, world_size=world_size, local_rank=local_rank
        )
        return cls(store=address, is_spawned=LAUNCHER_PID in given)

    @classmethod
    @contextmanager
    def spawn(cls, world_size: int, *, arguments: Sequence[str]) -> Iterator[ProbeGroup]:
        """Start ranks on this host that run the same command, and kill them at the end."""
        local = "127.0.0.1"
        listener = socket.create_server((local, 0), backlog=socket.SOMAXCONN)
        port = listener.getsockname()[1]
        address = StoreAddress(address=local, port=port, rank=0, world_size=world_size, local_rank=0)
        variables = {**os.environ, "WORLD_SIZE": str(world_size), "MASTER_ADDR": local, "MASTER_PORT": str(port)}
        variables[LAUNCHER_PID] = str(os.getpid())
        command = [sys.executable, "-m", "lightning_bucketddp.cli", "doctor", *arguments]
        children: list[subprocess.Popen[bytes]] = []
        nowhere = subprocess.DEVNULL
        try:
            for rank in range(1, world_size):
                own = {**variables, "RANK": str(rank), "LOCAL_RANK": str(rank)}
                children.append(subprocess.Popen(command, env=own, stdin=nowhere, stdout=nowhere))
            yield cls(store=address, is_spawned=True, listener=listener, children=children)
        finally:
            listener.close()
            for child in children:
                child.kill()  # does nothing if it has ended
                child.wait()

    @contextmanager
    def join(self, *, timeout_s: float) -> Iterator[tuple[Collectives, Collectives]]:
        """Form a process group of all ranks, and destroy it at the end; `StartError` if some do not come.

        Yield the collectives between the hosts' CPUs, and those between the devices that gradients are on.
        """
        rendezvous = Rendezvous(self.store, timeout_s=timeout_s, option="--timeout")
        launched = ChildProcesses(self, rank=self.store.rank, local_rank=self.store.local_rank)
        store = rendezvous.meet(listener=self.listener, find_failure=launched.find_failure)
        store.set_timeout(timedelta(seconds=timeout_s))
        try:
            yield self._init_group(store, timeout_s=timeout_s)
        except NeverEnded:
            raise  # a thread still uses the group, and destroying it would wait for that thread
        except BaseException as cause:
            try:
                _destroy_group(timeout_s=timeout_s, is_broken=True)
            except NeverEnded:
                raise NeverEnded(str(cause)) from cause
            raise
        _destroy_group(timeout_s=timeout_s, is_broken=False)

    def _init_group(self, store: Store, *, timeout_s: float) -> tuple[Collectives, Collectives]:
        rank, world_size = self.store.rank, self.store.world_size
        has_gpu = torch.cuda.is_available() and torch.cuda.device_count() > self.store.local_rank
        keys = [f"bucketddp/doctor/has_gpu/{other}" for other in range(world_size)]
        store.set(keys[rank], json.dumps(has_gpu))
        on_gpus = all(json.loads(has) for has in store.multi_get(keys))
        device = torch.device("cuda", self.store.local_rank) if on_gpus else None
        if device is not None:
            torch.cuda.set_device(device)
        settings = more_sockets(store, rank=rank, world_size=world_size) if on_gpus else nullcontext()
        with settings, variables_by_default(TRIED_NCCL), gloo_interface(on_one_host=self.is_spawned):
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if on_gpus else "gloo",
                store=store,
                rank=rank,
                world_size=world_size,
                timeout=timedelta(seconds=timeout_s),
                device_id=device,
            )
            hosts = Collectives(torch.device("cpu"), on_one_host=self.is_spawned)
            return hosts, hosts if device is None else Collectives(device)  # which connects it


def _destroy_group(*, timeout_s: float, is_broken: bool) -> None:
    """Destroy the process group, if there is one; NCCL warns at exit if it was not destroyed."""
    group = dist.group.WORLD
    if group is None:
        return

    def leave() -> None:
        if is_broken and "nccl" in dist.get_backend(group):
            group.abort()  # destroying it would wait for ranks that may be gone
        dist.destroy_process_group()

    within(timeout_s, leave, what="leaving the process group")
