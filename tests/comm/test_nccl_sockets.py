"""NCCL's settings for sockets between hosts: when they are chosen, when the user's or NCCL's own stay."""

from __future__ import annotations

import json
import os
import pwd
import time
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from lightning_bucketddp import BucketDDPStrategy
from lightning_bucketddp.bindings.fabric_lightning import BucketDDPStrategy as FabricStrategy
from lightning_bucketddp.comm.connections import SETTINGS, more_sockets, nccl_settings, uses_sockets_untuned
from lightning_bucketddp.comm.process_group import access_store
from lightning_bucketddp.wording import wrap
from tests.support.cases import for_each
from tests.support.doomed_ranks import TIMEOUT_S, doomed_ranks
from tests.support.ranks import run_on_ranks
from tests.support.scripts.fit import Regression, lightning


def decide(*, case: str, variables: list[dict[str, str]], roots: list[Path]) -> dict[str, Any]:
    """Return NCCL's variables in the block, from `variables[rank]` on a machine with the files of `roots[rank]`."""
    rank = dist.get_rank()
    with patch.dict(os.environ, variables[rank]):
        store = PrefixStore(f"sockets of {case}", access_store().store)
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


HOME = f"{pwd.getpwuid(os.getuid()).pw_dir}/.nccl.conf"
MACHINE, NAMED = "/etc/nccl.conf", "/opt/nccl.conf"
INFINIBAND = {"/sys/class/infiniband/mlx5_0/ports": ""}


def make_machine(root: Path, files: dict[str, str] | None = None) -> Path:
    """Write the files of a machine with an ordinary network, and interfaces that are not hardware."""
    ordinary = {"/sys/class/net/eth0/device/vendor": "0x15b3\n", "/sys/class/net/bonding_masters": "\n"}
    for path, text in {**ordinary, **(files or {})}.items():
        file = root / path.lstrip("/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    (root / "sys/class/net/lo").mkdir()
    return root


@for_each(
    ("files", "variables", "is_tuned"),
    [
        ({}, {}, True),
        # What the user has set stays, also in a file of NCCL's. A file that is named is read instead of that at home.
        *[({}, {name: value}, False) for name in SETTINGS for value in ("1", "")],
        *[({file: f"NCCL_DEBUG=WARN\n{name}=1"}, {}, False) for name in SETTINGS for file in (MACHINE, HOME)],
        *[({file: f"# {name}=5\nNCCL_DEBUG=WARN\n"}, {}, True) for name in SETTINGS for file in (MACHINE, HOME)],
        ({NAMED: "NCCL_SOCKET_NTHREADS=1"}, {}, True),
        *[
            ({file: "NCCL_SOCKET_NTHREADS=1"}, {"NCCL_CONF_FILE": NAMED}, file == HOME)
            for file in (MACHINE, HOME, NAMED)
        ],
        # Other transports that the user has chosen or NCCL may use stay.
        (INFINIBAND, {}, False),
        ({}, {"NCCL_NET": "IB"}, False),
        *[(files, {"NCCL_NET": net}, True) for files in ({}, INFINIBAND) for net in ("Socket", "socket")],
        ({}, {"NCCL_NET_PLUGIN": "aws-ofi"}, False),
        ({}, {"NCCL_NET_PLUGIN": "none"}, True),
        (INFINIBAND, {"NCCL_NET_PLUGIN": "none"}, False),
        ({}, {"NCCL_NET": "Socket", "NCCL_NET_PLUGIN": "aws-ofi"}, False),
        ({}, {"NCCL_SOCKET_IFNAME": "eth0", "NCCL_DEBUG": "INFO"}, True),
        (INFINIBAND, {"NCCL_IB_DISABLE": "0"}, False),
        (INFINIBAND, {"NCCL_IB_DISABLE": "1"}, True),
        # A cloud that NCCL knows is left to it.
        *[({"/sys/class/net/ens5/device/vendor": f"{vendor}\n"}, {}, False) for vendor in ("0x1d0f", "0x1ae0")],
        ({"/sys/class/net/ens5/device/vendor": "0x1d0f\n"}, {"NCCL_NET": "Socket"}, False),
    ],
)
def test_more_sockets_are_used_where_nothing_else_was_chosen(
    files: dict[str, str], variables: dict[str, str], is_tuned: bool, tmp_path: Path
) -> None:
    root = make_machine(tmp_path / str(len(list(tmp_path.iterdir()))), files)
    assert uses_sockets_untuned(nccl_settings(variables, root=root), root) is is_tuned


A, B = {"NCCL_HOSTID": "a"}, {"NCCL_HOSTID": "b"}


@pytest.mark.parametrize(
    ("variables", "file_of_one", "expected"),
    [
        ([A, B], None, [SETTINGS, SETTINGS]),
        ([A, A], None, [{}, {}]),
        ([A, {**B, "NCCL_SOCKET_NTHREADS": "3"}], None, [{}, {"NCCL_SOCKET_NTHREADS": "3"}]),
        ([A, B], {MACHINE: "NCCL_NSOCKS_PERTHREAD=2\n"}, [{}, {}]),
    ],
    ids=["two hosts", "one host", "set on one", "set in one's file"],
)
def test_ranks_of_several_hosts_set_the_same_or_nothing(
    variables: list[dict[str, str]], file_of_one: dict[str, str] | None, expected: list[dict[str, str]], tmp_path: Path
) -> None:
    roots = [make_machine(tmp_path / "0"), make_machine(tmp_path / "1", file_of_one)]
    ranks = run_on_ranks(decide, case=str(tmp_path), variables=variables, roots=roots)
    num_hosts = 2 if SETTINGS in expected else 0
    assert ranks == [{"num_hosts": num_hosts, **of_rank} for of_rank in expected]


NO_NCCL = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU: the group would be made")


@NO_NCCL
@pytest.mark.parametrize("interface", ["trainer", "fabric"])
def test_variables_are_set_while_the_group_is_made_and_rank_zero_says_so(interface: str, tmp_path: Path) -> None:
    with doomed_ranks(start, directory=tmp_path, interface=interface, backend="nccl") as ranks:
        ended = ranks.wait()
    expected = {"has_group": False, "while made": [SETTINGS if can_be_tuned() else {}], "later": {}}
    assert ended.results == {"0": expected, "1": expected}, ended.output
    line = wrap(
        "bucketddp: NCCL_NSOCKS_PERTHREAD=4 NCCL_SOCKET_NTHREADS=2, because NCCL sends through sockets between 2 hosts."
        " Set one of them yourself, and both are left as you want them."
    )
    assert [output.count(f"{line}\n") for output in ended.output] == [1 if can_be_tuned() else 0, 0]


def can_be_tuned() -> bool:
    """Not where the network of this machine is one that is left alone."""
    return uses_sockets_untuned(nccl_settings(os.environ))


@pytest.mark.parametrize(("backend", "same_host"), [("gloo", False), pytest.param("nccl", True, marks=NO_NCCL)])
def test_nothing_is_set_for_gloo_nor_within_one_host(backend: str, same_host: bool, tmp_path: Path) -> None:
    with doomed_ranks(start, directory=tmp_path, interface="fabric", backend=backend, same_host=same_host) as ranks:
        ended = ranks.wait()
    expected = {"has_group": backend == "gloo", "while made": [{}], "later": {}}
    assert ended.results == {"0": expected, "1": expected}, ended.output
    assert "NCCL_NSOCKS_PERTHREAD" not in "".join(ended.output)
