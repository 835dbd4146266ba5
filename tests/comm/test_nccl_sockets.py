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
from lightning_bucketddp.comm.connections import SETTINGS, host_of, more_sockets, nccl_settings, uses_sockets_untuned
from lightning_bucketddp.comm.process_group import access_store
from lightning_bucketddp.wording import wrap
from tests.support.cases import for_each
from tests.support.doomed_ranks import TIMEOUT_S, doomed_ranks
from tests.support.ranks import run_on_ranks
from tests.support.scripts.fit import Regression, lightning


def decide(*, case: str, variables: list[dict[str, str]], roots: list[Path]) -> dict[str, Any]:
    """What `variables[rank]` become for a while on a machine that looks like `roots[rank]`, and what is reported."""
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


HOME = pwd.getpwuid(os.getuid()).pw_dir


def write(root: Path, path: str, text: str = "") -> None:
    file = root / path.lstrip("/")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """The files of a machine with an ordinary network, and interfaces that are not hardware."""
    write(tmp_path, "/sys/class/net/eth0/device/vendor", "0x15b3\n")
    (tmp_path / "sys/class/net/lo").mkdir()
    write(tmp_path, "/sys/class/net/bonding_masters", "\n")
    return tmp_path


def is_tuned(machine: Path, **environment: str) -> bool:
    return uses_sockets_untuned(nccl_settings(environment, root=machine), machine)


# --- What a machine and its user want


def test_an_ordinary_network_or_an_unknown_machine_gets_more_sockets(machine: Path, tmp_path: Path) -> None:
    assert is_tuned(machine)
    (machine / "sys/class/infiniband").mkdir()
    assert is_tuned(machine)
    assert is_tuned(tmp_path / "no such machine")


@pytest.mark.parametrize("name", SETTINGS)
def test_what_the_user_has_set_stays(name: str, machine: Path) -> None:
    assert not is_tuned(machine, **{name: "1"})
    assert not is_tuned(machine, **{name: ""})


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("file", ["/etc/nccl.conf", f"{HOME}/.nccl.conf", "/opt/nccl.conf"])
def test_what_the_user_has_set_in_a_file_of_nccl_stays(name: str, file: str, machine: Path) -> None:
    write(machine, file, f"# {name}=5\nNCCL_DEBUG=WARN\n")
    assert is_tuned(machine, NCCL_CONF_FILE="/opt/nccl.conf")
    write(machine, file, f"NCCL_DEBUG=WARN\n{name}=1")
    # A file that is named is read instead of the one at home.
    is_read = file != f"{HOME}/.nccl.conf"
    assert is_tuned(machine, NCCL_CONF_FILE="/opt/nccl.conf") is not is_read
    assert is_tuned(machine) is (file == "/opt/nccl.conf")


def test_settings_are_those_that_nccl_takes(machine: Path) -> None:
    write(machine, "/etc/nccl.conf", "NCCL_NET=machine\nNCCL_DEBUG=machine\nNCCL_ALGO=machine\n")
    write(machine, f"{HOME}/.nccl.conf", "NCCL_NET=user\nNCCL_DEBUG=user\n")
    assert nccl_settings({"NCCL_NET": "environment", "PATH": "no matter"}, root=machine) == {
        "NCCL_NET": "environment",
        "NCCL_DEBUG": "user",
        "NCCL_ALGO": "machine",
    }


def test_a_relative_file_is_the_one_that_nccl_opens(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(machine, "my.conf", "NCCL_SOCKET_NTHREADS=1")
    monkeypatch.chdir(machine)
    assert nccl_settings({"NCCL_CONF_FILE": "my.conf"})["NCCL_SOCKET_NTHREADS"] == "1"


@for_each(
    ("variables", "is_left", "is_left_beside_infiniband"),
    [
        ({}, False, True),
        ({"NCCL_NET": "IB"}, True, True),
        ({"NCCL_NET": "Socket"}, False, False),
        ({"NCCL_NET": "socket"}, False, False),
        ({"NCCL_NET_PLUGIN": "aws-ofi"}, True, True),
        ({"NCCL_NET_PLUGIN": "none"}, False, True),
        ({"NCCL_NET": "Socket", "NCCL_NET_PLUGIN": "aws-ofi"}, True, True),
        ({"NCCL_SOCKET_IFNAME": "eth0", "NCCL_DEBUG": "INFO"}, False, True),
        ({"NCCL_IB_DISABLE": "0"}, False, True),
        ({"NCCL_IB_DISABLE": "1"}, False, False),
    ],
)
def test_other_transports_that_the_user_has_chosen_or_nccl_may_use_stay(
    variables: dict[str, str], is_left: bool, is_left_beside_infiniband: bool, machine: Path
) -> None:
    assert is_tuned(machine, **variables) is not is_left
    infiniband = machine / "sys/class/infiniband/mlx5_0"
    infiniband.mkdir(parents=True)
    assert is_tuned(machine, **variables) is not is_left_beside_infiniband
    infiniband.rmdir()


@pytest.mark.parametrize("vendor", ["0x1d0f", "0x1ae0"])
def test_a_cloud_that_nccl_knows_is_left_to_it(vendor: str, machine: Path) -> None:
    write(machine, "/sys/class/net/ens5/device/vendor", f"{vendor}\n")
    assert not is_tuned(machine)
    assert not is_tuned(machine, NCCL_NET="Socket")


def test_hosts_are_those_that_nccl_sees(machine: Path) -> None:
    assert host_of({"NCCL_HOSTID": "a"}, root=machine) == "a"
    without_boot = host_of({}, root=machine)
    write(machine, "/proc/sys/kernel/random/boot_id", "first\n")
    first = host_of({}, root=machine)
    write(machine, "/proc/sys/kernel/random/boot_id", "second\n")
    assert len({without_boot, first, host_of({}, root=machine)}) == 3


# --- Ranks


@pytest.mark.parametrize("case", ["two hosts", "one host", "one by its name", "set on one", "set in one's file"])
def test_ranks_of_several_hosts_set_the_same_or_nothing(
    case: str, machine: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    variables, roots = [{"NCCL_HOSTID": "a"}, {"NCCL_HOSTID": "b"}], [machine, machine]
    expected = [dict(SETTINGS) if case == "two hosts" else {} for _ in range(2)]
    if case == "one host":
        variables = [{"NCCL_HOSTID": "a"}] * 2
    elif case == "one by its name":
        variables = [{}, {}]
    elif case == "set on one":
        variables[1]["NCCL_SOCKET_NTHREADS"] = "3"
        expected[1] = {"NCCL_SOCKET_NTHREADS": "3"}
    elif case == "set in one's file":
        roots[1] = tmp_path_factory.mktemp("other machine")
        write(roots[1], "/etc/nccl.conf", "NCCL_NSOCKS_PERTHREAD=2\n")
    ranks = run_on_ranks(decide, case=case, variables=variables, roots=roots)
    num_hosts = 2 if case == "two hosts" else 0
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
