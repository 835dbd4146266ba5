"""`bucketddp doctor`: a healthy machine is healthy, and what is wrong is found, named, and ends in status 1."""

from __future__ import annotations

import copy
import json
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from benchmarks.ports import own_port
from lightning_bucketddp.checkpoint.atomic_file import temporary_name
from lightning_bucketddp.cli import main
from lightning_bucketddp.commands.doctor import (
    Diagnosis,
    host,
    network,
    observe,
    print_diagnosis,
)
from lightning_bucketddp.commands.doctor.finding import Finding, NeverEnded, ProbeGroup, Severity
from lightning_bucketddp.config import MIB
from lightning_bucketddp.planning.cost import AllReduceCost
from lightning_bucketddp.startup.store import StoreAddress
from tests.support.cases import for_each
from tests.support.disks import forbidden_directory, not_as_root, small_disk
from tests.support.programs import Program, no_process_left

Capture = pytest.CaptureFixture[str]
COMMAND = ["-m", "lightning_bucketddp.cli", "doctor"]


def start(*programs: Program, directory: Path) -> list[tuple[int, str, str]]:
    """Exit status, standard output and standard error of programs that run at once and leave no process behind."""
    with no_process_left() as variables:
        processes = []
        for number, program in enumerate(programs):
            out, err = directory / f"{number}.out", directory / f"{number}.err"
            with out.open("w") as stdout, err.open("w") as stderr:
                processes.append(program.start(variables=variables, cwd=directory, stdout=stdout, stderr=stderr))
        # Enough on a busy machine; a time-out of NCCL or gloo takes longer.
        codes = [process.wait(timeout=240) for process in processes]
    return [
        (code, (directory / f"{n}.out").read_text(), (directory / f"{n}.err").read_text())
        for n, code in enumerate(codes)
    ]


def launched(rank: int, *arguments: str, port: int, **variables: str) -> Program:
    """A rank of two, as a launcher would start it."""
    place = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return Program([*COMMAND, *arguments], {**place, **variables})


def examine_here(capsys: Capture, *arguments: object) -> tuple[int, dict[str, Any]]:
    """Exit status and JSON of a doctor that is alone in this process."""
    status = main(["doctor", "--processes", "1", "--json", *map(str, arguments)])
    return status, json.loads(capsys.readouterr().out)


def only_error(capsys: Capture, *arguments: object) -> str:
    """The one error that a doctor finds which is alone in this process."""
    status, seen = examine_here(capsys, *arguments)
    assert status == 1
    [error] = said(seen["findings"], "error")
    return error


def said(findings: list[dict[str, str]], verdict: str) -> list[str]:
    return [f"{finding['text']} {finding['remedy']}" for finding in findings if finding["verdict"] == verdict]


# --- Healthy machines


def test_a_healthy_machine_is_healthy(tmp_path: Path, capsys: Capture) -> None:
    """With warnings only, and nothing but JSON on the standard output."""
    variables = {"NCCL_P2P_DISABLE": "1", "OMP_NUM_THREADS": "1"}
    arguments = [*COMMAND, "--processes", "2", "--json", "--checkpoints", str(tmp_path)]
    [(status, printed, errors)] = start(Program(arguments, variables), directory=tmp_path)
    assert status == 0, errors
    seen = json.loads(printed)
    assert seen["verdict"] == "warning"
    assert "Unset `NCCL_P2P_DISABLE` for a long run." in " ".join(said(seen["findings"], "warning"))
    assert [rank["rank"] for rank in seen["ranks"]] == [0, 1]
    assert {finding["theme"] for finding in seen["findings"]} >= {"Software", "GPUs", "Network", "Limits", "Ports"}
    sizes = seen["all_reduce"]["by_size"]
    assert [size["bytes"] for size in sizes] == [1024 * 4**n for n in range(len(sizes))]
    assert len(sizes) > 3
    assert all(size["link_bytes_per_s"] == pytest.approx(size["bytes"] / size["seconds"]) for size in sizes)
    assert seen["all_reduce"]["expected"]["origin"].startswith("what copying within memory gives here, measured")
    assert list(seen["wires"]) == ["fp32", "bf16", "int8"]
    assert all(set(wire) == {"latency_s", "s_per_byte"} for wire in seen["wires"].values())
    assert any(text.startswith("Gradients of 100 million parameters take ") for text in said(seen["findings"], "note"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0.err", "0.out"]
    # Its network is one that a plan can be made for.
    cluster = tmp_path / "cluster.json"
    cluster.write_text(printed)
    planned = ["plan", "tests.support.jobs.planned:Huge", "--backward-ms", "5", "--json", "--network", str(cluster)]
    assert main(planned) == 0
    [found] = json.loads(capsys.readouterr().out)["networks"]
    assert (found["bytes_per_s"], found["hop_s"]) == tuple(
        seen["all_reduce"][name] for name in ("link_bytes_per_s", "hop_seconds")
    )
    assert found["origin"] == "measured between 2 ranks by `bucketddp doctor`"


def test_torchrun_can_launch_it(tmp_path: Path) -> None:
    torchrun = Program(["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *COMMAND])
    [(status, printed, errors)] = start(torchrun, directory=tmp_path)
    assert status == 0, errors
    assert "2 ranks on 1 host met." in printed
    assert "All 2 ranks have the same versions." in printed
    assert printed.count("all-reduce   ") == 1  # rank 0 speaks for all
    assert "\x1b" not in printed
    assert printed.splitlines()[-1].startswith(("Nothing is wrong", "1 warning", "2 warnings", "3 warnings"))


# --- Ranks


def test_a_rank_that_does_not_come_is_named(tmp_path: Path) -> None:
    """Everything else is examined all the same."""
    arguments = ["--timeout", "1", "--json", "--checkpoints", str(tmp_path)]
    [(status, printed, _)] = start(launched(0, *arguments, port=own_port()), directory=tmp_path)
    assert status == 1
    findings = json.loads(printed)["findings"]
    # On a busy machine half a second may be too little for a look at a directory, which is an error as well.
    [error] = [text for text in said(findings, "error") if text.startswith("Rank 1 of 2 did not join at 127.0.0.1:")]
    assert error.endswith("If it only takes longer, pass a larger `--timeout`.")
    assert {"Software", "Checkpoints"} <= {finding["theme"] for finding in findings}


def test_a_rank_that_comes_and_is_silent_does_not_hold_it_up(tmp_path: Path) -> None:
    port = own_port()
    silent = """if True:
        import time
        from lightning_bucketddp.startup.store import StoreAddress
        from lightning_bucketddp.startup.rendezvous import Rendezvous
        point = StoreAddress(address="127.0.0.1", port=int({port}), rank=1, world_size=2, local_rank=1)
        Rendezvous(point, timeout_s=60).meet(listener=None, find_failure=lambda: None)
        time.sleep(6)
    """.replace("{port}", str(port))
    programs = [launched(0, "--timeout", "3", "--json", port=port), Program(["-c", silent])]
    [(status, printed, _), _] = start(*programs, directory=tmp_path)
    assert status == 1
    [error] = said(json.loads(printed)["findings"], "error")
    assert error.startswith("Ranks met, but cannot talk to each other: ")


def test_what_differs_between_ranks_is_named(tmp_path: Path) -> None:
    """Rank 1 has another Lightning installed, is on another host as NCCL sees it, and has another setting."""
    other = tmp_path / "other" / "lightning-9.9.9.dist-info"
    other.mkdir(parents=True)
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: lightning\nVersion: 9.9.9\n")
    path = f"{other.parent}:{os.environ.get('PYTHONPATH', '')}"
    port = own_port()
    programs = [
        launched(0, "--json", port=port, NCCL_HOSTID="a", LOCAL_RANK="0"),
        launched(1, "--json", port=port, NCCL_HOSTID="b", LOCAL_RANK="0", PYTHONPATH=path, NCCL_ALGO="Ring"),
    ]
    [(status, printed, _), (other_status, other_printed, _)] = start(*programs, directory=tmp_path)
    assert (status, other_status, other_printed) == (1, 0, "")
    findings = json.loads(printed)["findings"]
    [error] = said(findings, "error")
    assert error.startswith("Ranks have different versions of lightning: 2.")
    assert "; 9.9.9 on rank 1. Install the same environment on every host." in error
    assert any(w.startswith("NCCL_ALGO differs: unset on rank 0; Ring on rank 1.") for w in said(findings, "warning"))
    assert any(text.startswith("2 ranks on 2 hosts met.") for text in said(findings, "ok"))
    assert any(text.startswith("The clocks of 2 hosts are at most ") for text in said(findings, "ok"))
    unknown = "What it should give is not known: the system does not tell the speed of the network"
    assert any(text.startswith(unknown) for text in said(findings, "note"))


def test_an_interface_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nosuch0")
    status, seen = examine_here(capsys)
    assert status == 1
    talking, setting = said(seen["findings"], "error")
    assert talking.startswith("Ranks met, but cannot talk to each other: ")
    assert not dist.distributed_c10d._world.pg_map
    assert setting.startswith("GLOO_SOCKET_IFNAME=nosuch0, but there is no such interface. Set it to one of ")


@pytest.fixture
def alone() -> ProbeGroup:
    point = StoreAddress(address="127.0.0.1", port=own_port(), rank=0, world_size=1, local_rank=0)
    return ProbeGroup(store=point, is_spawned=True)


@for_each("error", [None, KeyboardInterrupt(), ValueError("a bug")])
def test_no_process_group_is_left(alone: ProbeGroup, error: BaseException | None) -> None:
    with pytest.raises(type(error)) if error else nullcontext(), alone.join(timeout_s=20) as (hosts, _):
        assert hosts.gather_json(1) == [1]
        if error is not None:
            raise error
    # One that torch has forgotten only warns when Python ends.
    assert not dist.is_initialized()
    assert not dist.distributed_c10d._world.pg_map


def test_a_process_group_that_cannot_be_left_is_not_waited_for(
    alone: ProbeGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    destroy = dist.destroy_process_group
    is_over = threading.Event()
    monkeypatch.setattr(dist, "destroy_process_group", is_over.wait)
    try:
        # To come together, too, on a busy machine.
        with pytest.raises(NeverEnded, match="lost"), alone.join(timeout_s=4):
            raise RuntimeError("lost")
    finally:
        is_over.set()
        destroy()


# --- This host


def test_a_port_in_use_is_found(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setenv("MASTER_PORT", str(port))
        error = only_error(capsys)
    assert error.startswith(f"Rank 0 cannot listen at MASTER_PORT={port}: Address already in use. Set it to a free")
    status, seen = examine_here(capsys)
    assert status == 0
    assert f"MASTER_PORT={port} is free. " in said(seen["findings"], "ok")


def test_a_small_shared_memory_is_found(tmp_path: Path) -> None:
    with small_disk(num_bytes=MIB) as disk:
        disk.mount("-t", "tmpfs", "-o", "size=1m", "none", "/dev/shm")
        program = Program([*COMMAND, "--processes", "1", "--json"], within=disk.within)
        [(status, printed, errors)] = start(program, directory=tmp_path)
    assert status == 1, errors
    [error] = said(json.loads(printed)["findings"], "error")
    assert error.startswith("/dev/shm: 0.00 of 0.00 GiB are free. Data workers hand batches through it and will die.")


def test_warnings_fail_if_they_are_to(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1000")
    assert examine_here(capsys)[0] == 0
    assert examine_here(capsys, "--strict")[0] == 1


# --- The directory for checkpoints


def test_a_full_and_a_read_only_disk_are_found(capsys: Capture) -> None:
    with small_disk(num_bytes=8 * MIB) as disk:
        full = f"A checkpoint cannot be written to {disk.path}: No space left on device. Make room there,"
        assert only_error(capsys, "--checkpoints", disk.path).startswith(full)
        assert list(disk.path.iterdir()) == []
        disk.make_read_only()
        assert "Read-only file system" in only_error(capsys, "--checkpoints", disk.path)


def test_a_directory_of_others_and_what_it_hides_are_errors(capsys: Capture) -> None:
    with forbidden_directory() as directory:
        with not_as_root():
            assert "Permission denied" in only_error(capsys, "--checkpoints", directory)
        (directory / "inner").mkdir()
        directory.chmod(0)
        with not_as_root():
            error = only_error(capsys, "--checkpoints", directory / "inner")
        directory.chmod(0o755)
        (directory / "inner").rmdir()
    assert error.startswith(f"There is no directory {directory}/inner.")


def test_what_killed_saves_have_left_is_counted(tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / temporary_name()).write_bytes(bytes(MIB))
    _, seen = examine_here(capsys, "--checkpoints", tmp_path)
    [note] = [text for text in said(seen["findings"], "note") if "temporary file" in text]
    assert note.startswith("1 temporary file of saves, 1.0 MiB:")


def test_a_directory_that_never_answers_does_not_hold_it_up(tmp_path: Path) -> None:
    """Opening a pipe that nobody reads never ends; a process that is stuck ends all the same."""
    code = f"""if True:
        import os, sys
        from lightning_bucketddp.commands.doctor import host
        from lightning_bucketddp.cli import main
        os.mkfifo({str(tmp_path / "pipe")!r})
        host.find_temporary_files = lambda directory: open({str(tmp_path / "pipe")!r})
        sys.exit(main(["doctor", "--processes", "1", "--json", "--timeout", "1", "--checkpoints", {str(tmp_path)!r}]))
    """
    [(status, printed, _)] = start(Program(["-c", code]), directory=tmp_path)
    assert status == 1
    [error] = said(json.loads(printed)["findings"], "error")
    assert error.startswith(f"A checkpoint cannot be written to {tmp_path}: it did not answer within 1 s.")


@pytest.mark.parametrize(
    ("links", "expected"),
    [("Link 0: 26.562 GB/s\\nLink 1: 26.562 GB/s", 53.124e9), ("", 16 * 3.938e9)],
    ids=["nvlink", "pcie"],
)
def test_the_driver_is_asked_for_the_speed_of_links(
    links: str, expected: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text(f'#!/bin/sh\ncase "$1" in nvlink) printf "{links}";; *) echo "5, 16";; esac\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    found = host._link_speed()
    assert found is not None
    assert found["value"] == pytest.approx(expected)
    assert "nvidia-smi" in found["origin"]


# --- Machines that are not at hand: what they would tell, judged


@pytest.fixture(scope="module")
def this_rank() -> dict[str, Any]:
    point = StoreAddress(address="127.0.0.1", port=1, rank=0, world_size=2, local_rank=0)
    observed = observe(ProbeGroup(store=point, is_spawned=False))
    observed["network"] |= {"settings": {}, "infiniband_gbit": None}
    return observed


def two_hosts(this_rank: dict[str, Any]) -> list[dict[str, Any]]:
    ranks = [copy.deepcopy(this_rank) for _ in range(2)]
    for number, observed in enumerate(ranks):
        observed |= {"rank": number, "host": f"host{number} 1", "hostname": f"host{number}"}
        observed["network"] |= {"interfaces": {"eth7": {"is_up": True, "gbit": 10.0}}, "towards_main_address": "eth7"}
    return ranks


def texts(findings: Iterator[Finding], verdict: Severity) -> list[str]:
    return [f"{finding.text} {finding.remedy}".strip() for finding in findings if finding.severity == verdict]


def measurement(bytes_per_s: float) -> dict[str, Any]:
    by_size = [{"bytes": size, "seconds": size / bytes_per_s, "link_bytes_per_s": bytes_per_s} for size in (1024, MIB)]
    return {"by_size": by_size, "memory_bytes_per_s": 10e9}


@pytest.mark.parametrize(("gbit", "verdict"), [(8.0, Severity.OK), (3.0, Severity.WARNING)])
def test_a_network_is_compared_with_its_nominal_speed(
    gbit: float, verdict: Severity, this_rank: dict[str, Any]
) -> None:
    findings = network.judge_all_reduce(two_hosts(this_rank), measurement(gbit * 1e9 / 8), backend="gloo")
    *_, last = texts(findings, verdict)
    assert last.startswith(f"That is {gbit / 10:.0%} of 1.25 GB/s: the slowest of eth7, says /sys/class/net.")


def test_infiniband_and_the_links_of_gpus_count_for_nccl(this_rank: dict[str, Any]) -> None:
    ranks = two_hosts(this_rank)
    for observed in ranks:
        observed["network"]["infiniband_gbit"] = 400.0
    assert network.expect_all_reduce(ranks, measurement(1e9), backend="NCCL")["bytes_per_s"] == 50e9
    assert network.expect_all_reduce(ranks, measurement(1e9), backend="gloo")["bytes_per_s"] == 1.25e9
    links = {"link_bytes_per_s": {"value": 450e9, "origin": "18 NVLinks"}}
    known = {**this_rank, "gpus": {**this_rank["gpus"], **links}}
    expected = network.expect_all_reduce([known], measurement(1e9), backend="NCCL")
    assert (expected["bytes_per_s"], expected["origin"]) == (450e9, "18 NVLinks")
    findings = network.judge_all_reduce([this_rank], measurement(1e9), backend="NCCL")
    assert texts(findings, Severity.NOTE) == [
        "What it should give is not known: the driver does not tell what links the GPUs."
    ]


@for_each(
    ("ns_per_byte", "advice"),
    [
        ((8, 4, 2), "A longer backward hides it. If yours takes less than 1,600 ms for as many parameters, set"
         ' `reduce_dtype="int8"`. If far less than 800 ms, set `local_steps`. `bucketddp plan` tells for your model.'),
        ((0.8, 0.5, 0.49), "A longer backward hides it. If yours takes less than 320 ms for as many parameters, set"
         ' `reduce_dtype="bf16"`. Not int8, which takes 0.98x as long as bf16. `bucketddp plan` tells for your model.'),
        ((0.3, 0.5, 2), "Do not set `reduce_dtype` here: int8 takes 6.7x as long as fp32, and bf16 1.7x."),
        ((0.5, 0.495, 0.495), "Do not set `reduce_dtype` here: int8 takes 0.99x as long as fp32, and bf16 0.99x."),
    ],
)  # fmt: skip
def test_what_gradients_should_travel_as_is_said(ns_per_byte: tuple[float, ...], advice: str) -> None:
    costs = [AllReduceCost(0.0, ns * 1e-9) for ns in ns_per_byte]
    [finding] = network.judge_wires(dict(zip(["fp32", "bf16", "int8"], costs, strict=True)))
    assert (finding.severity, finding.remedy) == (Severity.NOTE, advice)
    fp32, bf16, int8 = (f"{400 * ns:,.0f} ms" for ns in ns_per_byte)
    assert finding.text == (
        f"Gradients of 100 million parameters take {fp32} as fp32, {bf16} as bf16 and {int8} as int8; with"
        f" `local_steps=30` a step's share is {400 * ns_per_byte[0] / 30:,.0f} ms."
    )


def test_clocks_that_are_apart_are_named(this_rank: dict[str, Any]) -> None:
    ranks = two_hosts(this_rank)
    [warning] = texts(network.judge_clocks(ranks, [0.0, -5.0]), Severity.WARNING)
    assert warning.startswith("The clock of host1 is 5.0 s behind rank 0's: logs and files get times that mislead. Let")
    assert texts(network.judge_clocks(ranks, [0.0, 0.25]), Severity.OK) == [
        "The clocks of 2 hosts are at most 250 ms from rank 0's."
    ]


def test_gpus_that_torch_cannot_use_differ_or_are_not_linked_are_named(this_rank: dict[str, Any]) -> None:
    ranks = two_hosts(this_rank)
    ranks[0]["gpus"] |= {"devices": [], "seen_by_driver": ["H100", "H100"]}
    [error] = texts(host.judge_gpus(ranks), Severity.ERROR)
    assert error.startswith("The driver sees 2 GPUs on host0, but torch cannot use them. Install a torch that is built")
    h100 = {"name": "H100", "free_mib": 80_000, "total_mib": 81_000}
    ranks[0]["gpus"] |= {"devices": [h100, {**h100, "free_mib": 10_240}], "without_peer_access": [[1, 0]]}
    ranks[1]["gpus"] |= {"devices": [{**h100, "name": "A100"}], "without_peer_access": []}
    memory, links, kinds = texts(host.judge_gpus(ranks), Severity.WARNING)
    assert memory.startswith("Of GPU 1 on host0 only 10.0 of 79.1 GiB are free.")
    assert links.startswith("GPUs on host0 do not reach each other directly (pairs 0-1):")
    assert kinds.startswith("GPUs differ, and every step waits for the slowest.")


def test_settings_that_cost_speed_are_named(this_rank: dict[str, Any]) -> None:
    ranks = two_hosts(this_rank)
    for observed in ranks:
        observed["network"]["settings"] = {"NCCL_P2P_DISABLE": "1", "NCCL_IB_DISABLE": "1", "NCCL_SOCKET_IFNAME": "eth"}
    ranks[1]["network"]["infiniband_gbit"] = 200.0
    warnings = texts(network.judge_network(ranks), Severity.WARNING)
    assert [warning.partition(":")[0] for warning in warnings] == [
        "NCCL_P2P_DISABLE=1 on host0",
        "NCCL_P2P_DISABLE=1 on host1",
        "NCCL_IB_DISABLE=1 on host1",
    ]
    assert "NCCL_SOCKET_IFNAME=eth on host0: eth7." in texts(network.judge_network(ranks), Severity.OK)
    for observed in ranks:
        observed["gpus"]["devices"] = [{"name": "A10", "free_mib": 1, "total_mib": 1}]
        observed["network"] |= {"uses_sockets_untuned": True, "settings": {}}
    [note] = texts(network.judge_network(ranks), Severity.NOTE)
    assert "`bucketddp` sets NCCL_NSOCKS_PERTHREAD=4 NCCL_SOCKET_NTHREADS=2" in note


def test_limits_are_judged_by_what_is_needed(this_rank: dict[str, Any]) -> None:
    ranks = two_hosts(this_rank)
    ranks[0]["network"]["infiniband_gbit"] = 200.0
    ranks[0]["resources"] |= {"open_files": 200, "locked_memory": 64 * 1024, "shared_memory": None}
    ranks[1]["resources"] |= {"processes": 100, "memory_available": 1000, "cores": 0, "open_files": 1024}
    few, locked, shared = texts(host.judge_limits(ranks), Severity.ERROR)
    assert few.startswith("A process may open only 200 files on host0; ")
    assert locked.startswith("Locked memory is limited to 0.0625 MiB on host0, and InfiniBand needs as much as it can")
    assert shared.startswith("There is no /dev/shm on host0, which data workers hand batches through.")
    files, processes, cores, memory = texts(host.judge_limits(ranks[1:]), Severity.WARNING)
    assert files.startswith("A process may open only 1,024 files: with many data workers that may not be enough.")
    assert processes.startswith("This user may start only 100 processes and threads.")
    assert cores.startswith("1 ranks share 0 cores.")
    assert memory.startswith("Memory: 0.0 GiB are free for 1 rank. End what else runs there")


def test_directories_that_are_slow_small_or_not_shared_are_named(this_rank: dict[str, Any]) -> None:
    ranks = two_hosts(this_rank)
    seen = {"directory": "/ckpt", "exists": True, "free": 2**30, "file_system": "tmpfs", "num_leftovers": 0}
    ranks[0]["checkpoints"] = {**seen, "leftover_bytes": 0, "error": None, "num_bytes": 64 * MIB, "seconds": 64.0}
    ranks[1]["checkpoints"] = {"directory": "/ckpt", "exists": False}
    slow, memory, space, shared = texts(host.judge_directory(ranks), Severity.WARNING)
    assert "1 MiB/s. A checkpoint of 1 GiB holds training up for 1024 s. Pass `async_checkpoints=True`" in slow
    assert memory.startswith("The file system is tmpfs: checkpoints are lost when the machine stops.")
    assert space.startswith("Only 1.0 GiB are free in /ckpt.")
    assert shared.startswith("There is no directory /ckpt on rank 1: resuming reads it on all.")


def test_what_is_well_on_many_hosts_is_said_once(this_rank: dict[str, Any], capsys: Capture) -> None:
    ranks = [two_hosts(this_rank)[n % 2] | {"rank": n, "host": f"{n}", "hostname": f"node-{n}"} for n in range(64)]
    ranks[7]["resources"] |= {"memory_available": 1000}
    print_diagnosis(Diagnosis(ranks, clocks_s=[0.0] * 64))
    lines = capsys.readouterr().out.splitlines()
    assert len([line for line in lines if "Open files on node-0: " in line and "(63 more hosts alike.)" in line]) == 1
    assert any("Memory on node-7: 0.0 GiB are free" in line and "warning" in line for line in lines)
    assert len(lines) < 60


# --- Wrong use


PLACE = {"RANK": "0", "WORLD_SIZE": "2"}
ADDRESS = {"MASTER_ADDR": "a", "MASTER_PORT": "1"}


@pytest.mark.parametrize(
    ("arguments", "variables", "message"),
    [
        ("--processes 0", {}, "--processes must be at least 1, got 0."),
        ("--timeout nan", {}, "--timeout must be a positive number of seconds, got nan."),
        ("", PLACE, "RANK and WORLD_SIZE are set, but not MASTER_ADDR and MASTER_PORT:"),
        ("", PLACE | ADDRESS | {"RANK": "x"}, "RANK, WORLD_SIZE, MASTER_PORT and LOCAL_RANK must be numbers: "),
        ("--processes 2", PLACE | ADDRESS, "--processes is for a start without a launcher, but RANK and WORLD_SIZE"),
    ],
)
def test_wrong_use_is_one_line(
    arguments: str, variables: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert main(["doctor", *arguments.split()]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"bucketddp doctor: {message}")
    assert len(error.splitlines()) == 1
