"""Starting together: what the strategies for the Trainer and for Fabric do before they make a process group."""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed
from lightning_utilities.core.rank_zero import rank_zero_info
from torch.distributed.constants import default_pg_timeout

from lightning_bucketddp.comm.gloo_interface import gloo_between_hosts
from lightning_bucketddp.comm.nccl_sockets import SETTINGS, open_more_sockets
from lightning_bucketddp.startup.child_processes import ChildProcesses
from lightning_bucketddp.startup.rendezvous import Rendezvous
from lightning_bucketddp.startup.store import StoreAddress
from lightning_bucketddp.strategies.launchers import HoldsPort


class StartsTogether:
    """Has all ranks meet, or end, before any of them waits in a collective."""

    _init_dist_connection: ClassVar[Any]
    _start_timeout_s: float
    if TYPE_CHECKING:
        launcher: Any
        cluster_environment: Any
        root_device: torch.device
        _timeout: timedelta | None
        _get_process_group_backend: Any

    def _start_together(self) -> None:
        """Make the process group, once all ranks are there."""
        if torch.distributed.is_initialized():
            self._take_listener(port=None)
            return
        environment = self.cluster_environment
        point = StoreAddress(
            address=environment.main_address,
            port=environment.main_port,
            rank=environment.global_rank(),
            world_size=environment.world_size(),
            local_rank=environment.local_rank(),
        )
        os.environ.update(MASTER_ADDR=point.address, MASTER_PORT=str(point.port))
        rendezvous = Rendezvous(point, timeout_s=self._start_timeout_s)
        launched = ChildProcesses(self.launcher, rank=point.rank, local_rank=point.local_rank)
        listener = self._take_listener(port=point.port if point.is_host else None)
        with launched.ended_on_failure():
            store = rendezvous.meet(listener=listener, find_failure=launched.find_failure)
            store.set_timeout(self._timeout or default_pg_timeout)
            backend = self._get_process_group_backend()
            if "nccl" in backend:
                self._open_more_sockets(store, point)
            with gloo_between_hosts():
                # Lightning's, which does what else belongs to it.
                self._init_dist_connection(
                    environment,
                    backend,
                    store=store,
                    timeout=self._timeout,
                    device_id=None if self.root_device.type == "cpu" else self.root_device,
                )

    def _open_more_sockets(self, store: torch.distributed.Store, point: StoreAddress) -> None:  # type: ignore[name-defined]
        num_hosts = open_more_sockets(store, rank=point.rank, world_size=point.world_size)
        if num_hosts > 0:
            settings = " ".join(f"{name}={value}" for name, value in SETTINGS.items())
            rank_zero_info(
                f"bucketddp: {settings}, because NCCL sends through sockets between {num_hosts} hosts. Set one of them"
                " yourself, and both are left as you want them."
            )

    def _take_listener(self, *, port: int | None) -> socket.socket | None:
        """Return the socket that the launcher has opened for rank 0, if it is at `port`; otherwise close it."""
        listener = self.launcher.take_listener() if isinstance(self.launcher, HoldsPort) else None
        if listener is not None and listener.getsockname()[1] != port:
            listener.close()
            return None
        return listener
