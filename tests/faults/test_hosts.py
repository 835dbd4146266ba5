"""Faults between hosts: each has a network of its own, and real links to a switch where they are cut and disturbed."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path
from typing import Any

import pytest

from lightning_bucketddp.config import Timeouts
from tests.support.doomed_ranks import Ended, doomed_ranks
from tests.support.host_faults import HOST_FAULTS, let_happen
from tests.support.hosts import hosts_on_a_switch
from tests.support.scripts.faults import fit

# All of it happens in the set-up of the first test.
pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ended]:
    with hosts_on_a_switch(1):  # or skip
        ends = let_happen(HOST_FAULTS, tmp_path_factory.mktemp("hosts"))
    return {name: end.ended for name, end in ends.items()}


UNREACHABLE = "can no longer be reached: its host has not answered for 15 s"
BROKEN = "Rank 0 can no longer be reached: its connection broke"
WAITED = "the others have waited for longer than `stall_s`, 3 s"


@pytest.mark.long
@pytest.mark.parametrize(
    ("what", "words"),
    [
        # By rank: what its error matches. A rank cannot know whose cable it is.
        (
            "cable of host 3 pulled",
            {
                0: rf"Rank 2 \(process .*{UNREACHABLE}; it was last heard of in",
                1: rf"Rank 2 \(process .*{UNREACHABLE}; it was last heard of in",
                2: "Rank 0 can no longer be reached.*that host is gone, or the network between",
            },
        ),
        (
            "cable of host 1 pulled",
            {0: r"Rank [12] \(process ", 1: f"Rank 0 {UNREACHABLE}", 2: f"Rank 0 {UNREACHABLE}"},
        ),
        (
            "host 2 no longer reaches host 3",
            dict.fromkeys(
                range(3),
                r"Rank (1 \(process .*although it lives: it and rank 2|2 \(.*it and rank 1) do not reach each other",
            ),
        ),
        ("host 2 no longer reaches host 1", {0: r"Rank 1 \(process ", 1: "Rank 0 can no longer be reached"}),
        ("rank 0 killed", {1: BROKEN, 2: BROKEN}),
        ("rank 2 killed", {0: r"Rank 2 \(process ", 1: r"Rank 2 \(process "}),
        ("rank 1 sleeps", {0: f"Rank 1 .*is stuck.*{WAITED}.*in happen"}),  # the user's part of its stack
        ("rank 0 stopped", {1: f"Rank 0 .*is stuck(?!.*in happen).*{WAITED}"}),
        ("rank 1 stopped", {0: f"Rank 1 .*is stuck(?!.*in happen).*{WAITED}"}),
    ],
)
def test_all_ranks_end_and_name_the_one_that_is_lost_or_stands_still(
    what: str, words: dict[int, str], ended: dict[str, Ended]
) -> None:
    end = ended[what]
    assert 0 not in end.exit_codes
    seen = {rank: one for rank in range(3) if (one := end.results.get(f"seen{rank}")) is not None}
    assert {one["type"] for one in seen.values()} == {"RankFailedError"}
    if "killed" in what:
        assert seen.keys() == words.keys()
    for rank, expected in words.items():
        assert re.search(expected, seen[rank]["message"], re.DOTALL), seen[rank]["message"]
        if WAITED in expected:
            assert f"rank {rank} has waited " in end.output[rank]  # a warning comes first


@pytest.mark.long
@pytest.mark.parametrize("what", ["5% of packets lost", "packets 200 ms late"])
def test_runs_go_on_over_a_bad_network(what: str, ended: dict[str, Ended]) -> None:
    assert ended[what].exit_codes == [0, 0, 0], ended[what].output


@pytest.mark.long
def test_an_exception_on_another_host_ends_all(ended: dict[str, Ended]) -> None:
    seen = ended["rank 1 raises"].results
    assert seen["seen1"]["type"] == "ValueError"
    assert "on host2) failed in" in seen["seen0"]["message"]
    assert "ValueError: boom" in seen["seen0"]["message"]


# --- Names

_NEW_MOUNTS, _BIND = 0x20000, 0x1000


def fit_by_name(*, names: Path, directory: Path, num_fits: int, **options: Any) -> None:
    """Train with the names of hosts that are in `names`, which knows no other."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_NEW_MOUNTS) != 0 or libc.mount(bytes(names), b"/etc/hosts", None, _BIND, None) != 0:
        raise OSError(ctypes.get_errno(), "no mounts of our own")
    for number in range(num_fits):
        own = directory / f"fit{number}"
        own.mkdir(exist_ok=True)
        fit(directory=own, **options)


@pytest.mark.long
def test_a_run_goes_on_without_names_and_a_restart_says_that_there_is_none(tmp_path: Path) -> None:
    names = tmp_path / "names"
    this_host = "127.0.0.1 localhost\n::1 localhost\n"
    names.write_text(f"{this_host}10.0.0.1 main\n")
    with hosts_on_a_switch(2) as network:
        options: dict[str, Any] = {
            "names": names,
            "hosts": network.hosts,
            "address": "main",
            "num_batches": 20,
            "pause_after_s": 0.05,
        }
        (tmp_path / "first").mkdir()
        with doomed_ranks(fit_by_name, directory=tmp_path / "first", num_fits=2, **options) as ranks:
            ranks.wait_for("fit0/training.json")
            names.write_text(this_host)
            ended = ranks.wait()
        assert ended.exit_codes == [0, 0], ended.output
        assert all((tmp_path / "first" / f"fit1/finished{rank}.json").exists() for rank in range(2))
        (tmp_path / "again").mkdir()
        options["timeouts"] = Timeouts(start_s=3)
        with doomed_ranks(fit_by_name, directory=tmp_path / "again", num_fits=1, **options) as ranks:
            ended = ranks.wait()
    assert ended.exit_codes == [1, 1]
    for rank, output in enumerate(ended.output):
        assert f"Rank {rank} on host host{rank + 1} could not reach rank 0 at main:" in output
        assert "Name or service not known" in output or "Temporary failure in name resolution" in output
