"""Jobs of ranks that take themselves for hosts of their own, or not."""

from __future__ import annotations

import json
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch.distributed as dist
from lightning.fabric import Fabric

from lightning_bucketddp import BucketDDPStrategy
from lightning_bucketddp.bindings.fabric_lightning import BucketDDPStrategy as FabricStrategy
from lightning_bucketddp.comm.connections import more_sockets
from lightning_bucketddp.comm.process_group import access_store
from lightning_bucketddp.startup.store import part_of
from tests.support.doomed_ranks import TIMEOUT_S
from tests.support.scripts.fit import Regression, lightning


def decide(*, case: str, variables: list[dict[str, str]], roots: list[Path]) -> dict[str, Any]:
    """What `variables[rank]` become for a while on a machine that looks like `roots[rank]`, and what is reported."""
    rank = dist.get_rank()
    with patch.dict(os.environ, variables[rank]):
        store = part_of(access_store().store, f"sockets of {case}")
        before = nccl_variables()
        with more_sockets(store, rank=rank, world_size=dist.get_world_size(), root=roots[rank]) as num_hosts:
            dist.barrier()  # the store is read by all
            decided = {"num_hosts": num_hosts, **nccl_variables()}
        assert nccl_variables() == before
        return decided


def start(*, directory: Path, interface: str, backend: str, same_host: bool = False) -> None:
    """Start on a host of its own for each rank, and write down what it has set when the process group is to be made."""
    os.environ["NCCL_HOSTID"] = "host" if same_host else f"host{os.environ['RANK']}"
    set_for_group: list[dict[str, str]] = []
    make_group = dist.init_process_group

    def take_note(*args: Any, **options: Any) -> None:
        set_for_group.append(nccl_variables())
        # The store goes with rank 0, which may fail at once, and the other one has still to read it.
        (directory / f"{os.environ['RANK']} has read").touch()
        deadline = time.monotonic() + TIMEOUT_S
        while len(list(directory.glob("* has read"))) < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        make_group(*args, **options)

    # There is no NCCL without a GPU.
    with suppress(Exception), patch.object(dist, "init_process_group", take_note):
        if interface == "fabric":
            Fabric(accelerator="cpu", devices=2, strategy=FabricStrategy(process_group_backend=backend)).launch()
            dist.barrier()  # the store goes with rank 0
        else:
            strategy = BucketDDPStrategy(process_group_backend=backend)
            lightning.Trainer(accelerator="cpu", devices=2, strategy=strategy, fast_dev_run=1).fit(Regression())
    result = {"has_group": dist.is_initialized(), "while made": set_for_group, "later": nccl_variables()}
    (directory / f"{os.environ['RANK']}.json").write_text(json.dumps(result))


def nccl_variables() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith("NCCL_") and name != "NCCL_HOSTID"}
