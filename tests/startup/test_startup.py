"""Starting: the ranks meet within the start time-out, or all end with a message that names what is missing."""

from __future__ import annotations

import math
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent import futures
from contextlib import ExitStack, contextmanager, suppress
from importlib import import_module
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed import HashStore, PrefixStore, TCPStore  # type: ignore[attr-defined]

from benchmarks.ports import own_port
from lightning_bucketddp.bindings.registration import strategy_class
from lightning_bucketddp.config import Timeouts
from lightning_bucketddp.startup import store
from lightning_bucketddp.startup.rendezvous import RankInfo, RendezvousRound
from lightning_bucketddp.startup.store import ChildProcesses, Deadline, StartError
from tests.support import warm
from tests.support.cases import for_each
from tests.support.hosts import two_hosts
from tests.support.jobs.meetings import ALL_THERE, meet, meet_alone
from tests.support.programs import REPOSITORY, SCRIPTS, Program, Run, assert_trained, run, run_together
from tests.support.ranks import run_on_ranks

# Far below the time-outs of the tests that expect an end at once.
AT_ONCE_S = 120
HOST = re.escape(socket.gethostname())


def outcomes(**options: Any) -> list[str]:
    """Return the outcome of a meeting of two processes, which must come at once unless a time-out is given."""
    results = run_on_ranks(meet, port=options.pop("port", None) or own_port(), **options)
    limit_s = options.get("start_timeout_s", 0) + AT_ONCE_S
    assert all(result["seconds"] < limit_s for result in results)
    return [result["outcome"] for result in results]


# --- Ranks that meet


@pytest.mark.parametrize("late_s", [[0, 1], [1, 0]], ids=["rank_1_late", "rank_0_late"])
def test_a_rank_may_be_late(late_s: list[float]) -> None:
    assert outcomes(ranks=[0, 1], world_sizes=[2, 2], late_s=late_s) == [ALL_THERE] * 2


@for_each(
    ("waited_s", "world_size", "pause_s"),
    [(0.0, 2, 0.001), (0.2, 2, 0.02), (100.0, 2, 0.05), (0.0, 1000, 0.5), (100.0, 1000, 0.5)],
)
def test_ranks_ask_again_soon_at_first_but_thousands_never_too_often(
    waited_s: float, world_size: int, pause_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []
    deadline = Deadline(1000, world_size=world_size)
    monkeypatch.setattr(time, "monotonic", lambda: deadline._began + waited_s)
    monkeypatch.setattr(time, "sleep", pauses.append)
    deadline.pause()
    assert pauses == [pytest.approx(pause_s)]


def test_ranks_that_are_missing_are_named_on_every_rank_that_is_there() -> None:
    port = own_port()
    expected = (
        rf"Ranks 1, 2, 4, 5, 6, 7, 8, 9 and 2 more of 12 did not join at 127\.0\.0\.1:{port} within 1\.5 s\. 2 did,"
        rf" from host {HOST}\. Look at the output of the missing ranks; .* pass a larger `Timeouts\(start_s=\.\.\.\)`\."
    )
    for outcome in outcomes(port=port, ranks=[0, 3], world_sizes=[12, 12], start_timeout_s=1.5):
        assert re.fullmatch(expected, outcome)


def test_the_first_rank_to_run_out_of_time_ends_all() -> None:
    for outcome in outcomes(ranks=[0, 1], world_sizes=[3, 3], start_timeout_s=8, late_s=[1, 0]):
        assert outcome.startswith("Rank 2 of 3 did not join")


@pytest.mark.long
def test_rank_zero_stays_until_the_others_know_why() -> None:
    port = own_port()
    alone = f"""if True:
        from tests.support.jobs.meetings import *
        try:
            meet_alone({port}, rank=0, world_size=3, timeout_s=5)
        except StartError:
            os._exit(1)
        """
    with subprocess.Popen([warm.python(), "-c", alone], stderr=subprocess.DEVNULL) as rank_0:
        with pytest.raises(StartError, match=r"^Rank 2 of 3 did not join"):
            meet_alone(port, rank=1, world_size=3, timeout_s=100)
        assert rank_0.wait(AT_ONCE_S) == 1


PROCESS = rf"process \d+ on host {HOST}"
TWO_PROCESSES = rf"Two processes want to be rank {{}}: {PROCESS}, and {PROCESS}\. Give every node a `NODE_RANK` .*"


@pytest.fixture
def agent() -> TCPStore:
    """The store that torchrun's agent holds."""
    return TCPStore("localhost", own_port(), is_master=True, wait_for_workers=False)


def test_another_world_size_is_refused_at_once_by_all() -> None:
    [everywhere] = set(outcomes(ranks=[0, 1], world_sizes=[2, 4], late_s=[0, 0.5]))
    assert re.fullmatch(
        rf"Rank 0 \({PROCESS}\) was started as one of 2, but rank 1 \({PROCESS}\) as one of 4\. Start every node with"
        r" the same `devices` and `num_nodes`, and give different runs different ports \(`MASTER_PORT`\)\.",
        everywhere,
    )


def test_two_processes_of_one_rank_are_refused_at_once_by_all() -> None:
    port = own_port()
    with futures.ThreadPoolExecutor() as pool:
        rank_0 = pool.submit(meet_alone, port, rank=0, world_size=3, timeout_s=60)
        [everywhere] = {*outcomes(port=port, ranks=[1, 1], world_sizes=[3, 3]), str(rank_0.exception())}
    assert re.fullmatch(TWO_PROCESSES.format(1), everywhere)


def test_a_failure_that_one_rank_finds_is_every_ranks_error_at_once() -> None:
    assert outcomes(ranks=[0, 1], world_sizes=[3, 3], failure_on=1) == ["it broke"] * 2


def test_waiting_is_reported(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(store, "_REPORTS_S", (0.2, 0.8))
    port = own_port()
    with pytest.raises(StartError, match=r"Rank 1 of 2 did not join"):
        meet_alone(port, rank=0, world_size=2, timeout_s=1.7)
    text = rf"bucketddp: have waited \d+ s for rank 1 to join at 127.0.0.1:{port}; giving up after 1.7 s."
    reports = [message for message in caplog.messages if "have waited" in message]
    # After 0.2, 0.8 and 1.6 s; a busy machine may be late for one.
    assert 2 <= len(reports) <= 3
    assert all(re.fullmatch(text, report) for report in reports)


# --- The store that torchrun's agent hosts


def test_ranks_meet_at_the_agent_again_and_again(agent: TCPStore) -> None:
    options: dict[str, Any] = {"ranks": [0, 1], "world_sizes": [2, 2], "agent": True, "num_meetings": 3}
    assert outcomes(port=agent.port, **options) == [ALL_THERE] * 2


def test_two_rank_zeros_are_refused_at_once(agent: TCPStore) -> None:
    [everywhere] = set(outcomes(port=agent.port, ranks=[0, 0], world_sizes=[2, 2], agent=True))
    assert re.fullmatch(TWO_PROCESSES.format(0), everywhere)


def test_what_an_earlier_start_has_left_does_not_count(agent: TCPStore) -> None:
    options: dict[str, Any] = {"port": agent.port, "world_sizes": [3, 3], "agent": True}
    # Neither that it failed, nor that it was not decided.
    outcomes(ranks=[0, 1], start_timeout_s=0.5, **options)
    assert outcomes(ranks=[1, 2], start_timeout_s=0.5, **options)[0].startswith("Rank 1 found at 127.0.0.1:")
    left_behind = RendezvousRound(PrefixStore("bucketddp/start", agent), RankInfo(rank=0, world_size=2))
    left_behind.post(PrefixStore("bucketddp/start", agent))
    left_behind.join(RankInfo(rank=1, world_size=2))
    assert outcomes(**{**options, "ranks": [0, 1], "world_sizes": [2, 2], "late_s": [1, 0]}) == [ALL_THERE] * 2


@for_each("written", ["nonsense", "{}", '{"rank": 0, "world_size": 2, "added": 1}'])
def test_what_another_version_has_written_is_named(written: str) -> None:
    keys = HashStore()
    keys.set("round", written)
    with pytest.raises(StartError, match=r"^The store at the main address holds data of another program, or of anoth"):
        RendezvousRound.find(keys)


def test_a_process_that_is_in_another_fit_of_its_program_does_not_join() -> None:
    rdzv = RendezvousRound(HashStore(), RankInfo(rank=0, world_size=2, num_fits=1))
    rdzv.join(RankInfo(rank=1, world_size=2))
    assert re.match(r"Rank 1 \(.*\) is in fit or evaluation 1 of its program, rank 0 in 2: ", str(rdzv.objection()))
    assert rdzv.missing() == [0, 1]


def test_rank_zero_may_be_what_is_missing(agent: TCPStore) -> None:
    for outcome in outcomes(port=agent.port, ranks=[1, 2], world_sizes=[3, 3], start_timeout_s=1.5, agent=True):
        assert outcome.startswith("Rank 0 of 3 did not join")


# --- No store


def test_an_address_where_nobody_listens_is_named() -> None:
    port = own_port()
    with pytest.raises(StartError) as raised:
        meet_alone(port, rank=1, timeout_s=1)
    assert str(raised.value) == (
        f"Rank 1 on host {socket.gethostname()} could not reach rank 0 at 127.0.0.1:{port} within 1 s: Connection"
        " refused. Check that rank 0 runs there, `MASTER_ADDR`, `MASTER_PORT`, and firewalls."
    )


@pytest.mark.parametrize("answer", [b"", b"SSH-2.0-OpenSSH_9.2\r\n"], ids=["silence", "garbage"])
def test_a_port_of_another_program_is_named(answer: bytes) -> None:
    with another_program(answer) as port:
        began = time.monotonic()
        with pytest.raises(StartError, match=rf"at 127\.0\.0\.1:{port} within 1 s: .*, maybe another program\."):
            meet_alone(port, rank=1, timeout_s=1)
        assert time.monotonic() - began < AT_ONCE_S


@contextmanager
def another_program(answer: bytes) -> Iterator[int]:
    """Yield the port of a program that listens, and gives `answer` to everything."""
    connections: list[socket.socket] = []

    def serve() -> None:
        with suppress(OSError):
            while True:
                connections.append(server.accept()[0])
                connections[-1].sendall(answer)

    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=serve, daemon=True).start()
        yield server.getsockname()[1]
        server.shutdown(socket.SHUT_RDWR)
    for connection in connections:
        connection.close()


def test_strangers_at_the_port_keep_nobody_from_starting(tmp_path: Path) -> None:
    port, everything, is_over = own_port(), tmp_path / "all was said", threading.Event()
    # Among them half a greeting of torch's, and after a whole one half a question.
    said = [b"", b"\x00", b"\x00\xce\xf7\x85\x3c\x01", b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 100]

    def knock() -> None:
        with ExitStack() as connections:
            for number in count():
                if is_over.wait(0.01):
                    return
                with suppress(ConnectionRefusedError):
                    # From another address, or it may meet itself.
                    address = ("127.0.0.2", 0)
                    s = connections.enter_context(socket.create_connection(("127.0.0.1", port), source_address=address))
                    s.sendall(said[number % len(said)])
                    if number >= 2 * len(said):
                        everything.touch()

    with futures.ThreadPoolExecutor(1) as threads:
        stranger = threads.submit(knock)
        try:
            options: dict[str, Any] = {"world_sizes": [2, 2], "rank_one_waits_for": everything}
            assert outcomes(port=port, ranks=[0, 1], **options) == [ALL_THERE] * 2
        finally:
            is_over.set()
        stranger.result()


def test_rank_zero_says_at_once_that_its_port_is_in_use() -> None:
    with another_program(b"") as port, pytest.raises(StartError) as raised:
        meet_alone(port, rank=0, timeout_s=60)
    assert str(raised.value) == port_in_use(port)


def port_in_use(port: int) -> str:
    return (
        f"Rank 0 cannot listen on port {port}: another program is using it. Set `MASTER_PORT` to a free port, the same"
        " for all ranks; for a run on this host alone leave it unset, and a free one is found."
    )


# --- Processes that a launcher watches


@for_each(
    ("command", "how", "why"),
    [
        ("kill -9 $$", "by signal 9 (SIGKILL)", "The kernel does that when memory runs out: see `dmesg`."),
        ("true", "with exit status 0", "Its output says why."),
    ],
)
def test_processes_that_end_are_named_and_the_others_ended(command: str, how: str, why: str) -> None:
    ended, sleeping = children = [subprocess.Popen(["sh", "-c", it]) for it in (command, "exec sleep 1000")]
    launched = ChildProcesses(SimpleNamespace(children=children), rank=4, local_rank=0)
    ended.wait()
    assert launched.find_failure() == (f"Rank 5 (process {ended.pid}) ended {how} before all ranks had joined. {why}")
    with pytest.raises(KeyboardInterrupt), launched.ended_on_failure():
        raise KeyboardInterrupt
    assert sleeping.returncode == -signal.SIGKILL


def test_a_launcher_that_has_ended_is_noticed_before_anybody_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as launcher:
        monkeypatch.setenv("BUCKETDDP_LAUNCHER_PID", str(launcher.pid))
        launched = ChildProcesses(None, rank=3, local_rank=1)
        assert launched.find_failure() is None
        launcher.kill()
        os.waitid(os.P_PID, launcher.pid, os.WEXITED | os.WNOWAIT)
        why = f"Rank 3 has lost the process that launched it ({launcher.pid}): that one has ended."
        assert launched.find_failure() == why
        launcher.wait()
        assert launched.find_failure() == why
    # One that was not launched has not lost anything.
    assert ChildProcesses(None, rank=2, local_rank=0).find_failure() is None


# --- The port of a local launch


ROOTS = ["lightning.pytorch", "pytorch_lightning", "lightning.fabric", "lightning_fabric"]


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """The variables of a process that has launched nothing."""
    for name in ("MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def make_launcher(root: str = "lightning.pytorch", start_method: str = "popen") -> Any:
    """Return the launcher of a strategy for two processes, for which nothing but Lightning chooses the port."""
    plugins = import_module(
        f"{'lightning.fabric' if 'lightning.' in root else 'lightning_fabric'}.plugins.environments"
    )
    strategy = strategy_class(root)(
        cluster_environment=plugins.LightningEnvironment(),
        parallel_devices=[torch.device("cpu")] * 2,
        start_method=start_method,
    )
    # Lightning and its users ask for exactly this class.
    assert type(strategy.cluster_environment) is plugins.LightningEnvironment
    strategy._configure_launcher()
    return strategy.launcher


def open_port(launcher: Any) -> int:
    """Make `launcher` open the port; return the one that Lightning will pass to all ranks."""
    environment = launcher.guarding_strategy.cluster_environment
    launcher._open_port(environment)
    return int(environment.main_port)


@pytest.mark.usefixtures("environment")
@pytest.mark.parametrize("root", ROOTS)
def test_a_port_that_nobody_chose_is_free_and_kept(root: str) -> None:
    launchers = [make_launcher(root) for _ in range(20)]
    ports = [open_port(launcher) for launcher in launchers]
    assert len(set(ports)) == 20
    for port in ports:
        with pytest.raises(OSError, match="Address already in use"):
            socket.create_server(("", port))
    for launcher in launchers:
        launcher.take_listener().close()


@pytest.mark.parametrize(
    ("main_address", "num_nodes", "is_local"),
    [(None, 1, True), ("localhost", 1, True), ("127.0.0.1", 2, False), (socket.gethostname(), 1, False)],
)
def test_only_a_run_on_several_hosts_is_reached_from_others(
    main_address: str | None, num_nodes: int, is_local: bool, environment: pytest.MonkeyPatch
) -> None:
    if main_address is not None:
        environment.setenv("MASTER_ADDR", main_address)
    launcher = make_launcher()
    launcher.guarding_strategy.num_nodes = num_nodes
    open_port(launcher)
    with launcher.take_listener() as listener:
        assert (listener.getsockname()[0] == "127.0.0.1") is is_local


def test_a_port_that_the_user_chose_is_taken_again_and_again(environment: pytest.MonkeyPatch) -> None:
    with another_program(b"") as port:
        environment.setenv("MASTER_PORT", str(port))
        with pytest.raises(StartError, match=re.escape(port_in_use(port))):
            open_port(make_launcher())
    for launcher in [make_launcher(), make_launcher()]:
        assert open_port(launcher) == port
        assert launcher.take_listener() is None
    # One for programs that find a free one is kept.
    environment.delenv("MASTER_PORT")
    environment.setenv("STANDALONE_PORT", str(port))
    launcher = make_launcher()
    assert open_port(launcher) == port
    launcher.take_listener().close()


@pytest.mark.parametrize("variable", ["NODE_RANK", "LOCAL_RANK"])
def test_only_who_launches_rank_zero_keeps_the_port(variable: str, environment: pytest.MonkeyPatch) -> None:
    environment.setenv("MASTER_PORT", str(own_port()))
    environment.setenv(variable, "1")
    launcher = make_launcher()
    assert open_port(launcher) == int(os.environ["MASTER_PORT"])
    assert launcher.take_listener() is None


@pytest.mark.parametrize("start_method", ["popen", "fork"])
def test_a_launch_that_fails_leaves_the_environment_as_it_was(
    start_method: str, environment: pytest.MonkeyPatch
) -> None:
    with another_program(b"") as port:
        environment.setenv("MASTER_PORT", str(port))
        before = dict(os.environ)
        with pytest.raises(StartError):
            make_launcher(start_method=start_method).launch(print, trainer=None)
        assert os.environ == before


# --- The option


@for_each("value", [0, -1, math.nan, math.inf, "5", True, None])
def test_a_start_timeout_that_is_no_time_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match=r"`start_s` must be a positive number of seconds, got .*\."):
        Timeouts(start_s=value)


# --- Programs


def start(directory: Path, *arguments: object, root: str = "lightning.pytorch", **variables: str) -> Run:
    """Run `starts.py` until no process of it is left, which is long before its start time-out if it has none."""
    program = Program([SCRIPTS / "starts.py", *map(str, arguments)], variables)
    return run_together(program, root=root, directory=directory)


def assert_ended(finished: Run, message: str) -> None:
    """The run has ended with `message` as its only error, on all ranks that were there yet, and was not killed."""
    assert finished.returncode == 1, finished.output
    errors = re.findall(r"StartError: (.*)", finished.output)
    assert errors, finished.output
    assert all(re.match(message, error) for error in errors), finished.output


def test_a_rank_that_does_not_start_ends_the_run_at_once(tmp_path: Path) -> None:
    finished = start(tmp_path, "--rank-1", "exit", root="pytorch_lightning")
    message = r"Rank 1 \(process \d+\) ended with exit status 3 before all ranks had joined\. Its output says why\."
    assert_ended(finished, message)


def test_a_rank_whose_launcher_is_gone_ends_at_once(tmp_path: Path) -> None:
    finished = start(tmp_path, "--rank-1", "kill_launcher")  # it kills its parent
    assert finished.returncode == -signal.SIGKILL
    assert re.search(r"StartError: Rank 1 has lost the process that launched it \(\d+\)", finished.output)


def test_a_port_in_use_ends_the_run_before_anything_is_launched(tmp_path: Path) -> None:
    with another_program(b"") as port:
        finished = start(tmp_path, MASTER_PORT=str(port))
    assert_ended(finished, re.escape(port_in_use(port)))
    assert finished.output.count("started") == 1


def test_a_node_that_is_missing_ends_the_others(tmp_path: Path) -> None:
    variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(own_port())}
    finished = start(tmp_path, "--fabric", "--num-nodes", 2, "--start-timeout-s", 8, **variables)
    assert_ended(finished, r"Ranks (1, )?2, 3 of 4 did not join at 127\.0\.0\.1:\d+ within 8 s\. \d did")


@pytest.mark.long
def test_a_main_address_on_another_host_where_nobody_is_ends_the_run(tmp_path: Path) -> None:
    with two_hosts() as hosts:
        obstacles = {hosts[0].address: "Connection refused", "10.0.0.3": "(No route to host|timed out)"}
        for address, obstacle in obstacles.items():
            alone = f"meet_alone(29500, rank=1, timeout_s=4, address={address!r})"
            code = f"from tests.support.jobs.meetings import *; {alone}"
            program = Program(["-c", code], within=hosts[1].within)
            finished = run_together(program, root="lightning.pytorch", directory=tmp_path, cwd=REPOSITORY)
            message = rf"Rank 1 on host {HOST} could not reach rank 0 at {address}:29500 within 4 s: {obstacle}\. Check"
            assert_ended(finished, message)


def test_torchrun_starts_a_run_again(tmp_path: Path) -> None:
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "1"]
    finished = run(*torchrun, SCRIPTS / "starts.py", "--fail-first", root="lightning.pytorch", directory=tmp_path)
    assert_trained(finished, root="lightning.pytorch")
    assert finished.output.count("RuntimeError: the first attempt fails") >= 1
