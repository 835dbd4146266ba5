"""Faults between hosts: each has a network of its own, and real links to a switch where they are cut and disturbed."""

from __future__ import annotations

import ctypes
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


def said(ended: Ended) -> dict[int, str]:
    """What each rank that was left has raised."""
    seen = {rank: ended.results.get(f"seen{rank}") for rank in range(len(ended.exit_codes))}
    assert all(one["type"] == "RankFailedError" for one in seen.values() if one is not None), seen
    assert all(code != 0 for code in ended.exit_codes)
    return {rank: one["message"] for rank, one in seen.items() if one is not None}


def lost(rank: int) -> str:
    return f"Rank {rank} (process "


@pytest.mark.long
def test_a_host_without_its_cable_is_named(ended: dict[str, Ended]) -> None:
    by_rank = said(ended["cable of host 3 pulled"])
    for rank in (0, 1):
        assert lost(2) in by_rank[rank]
        assert "can no longer be reached: its host has not answered for 15 s; it was last heard of in" in by_rank[rank]
    assert "Rank 0 can no longer be reached" in by_rank[2]  # it cannot know whose cable it is, and says so
    assert "that host is gone, or the network between" in by_rank[2]


@pytest.mark.long
def test_the_main_host_without_its_cable_is_named(ended: dict[str, Ended]) -> None:
    by_rank = said(ended["cable of host 1 pulled"])
    for rank in (1, 2):
        assert "Rank 0 can no longer be reached: its host has not answered for 15 s" in by_rank[rank]
    assert lost(1) in by_rank[0] or lost(2) in by_rank[0]


@pytest.mark.long
def test_both_ends_are_named_where_one_does_not_reach_the_other(ended: dict[str, Ended]) -> None:
    for message in said(ended["host 2 no longer reaches host 3"]).values():
        first, other = (1, 2) if lost(1) in message else (2, 1)
        assert lost(first) in message
        assert f"although it lives: it and rank {other} do not reach each other" in message


@pytest.mark.long
def test_a_host_that_is_not_reached_or_does_not_reach_the_main_host_is_named(ended: dict[str, Ended]) -> None:
    from_main = said(ended["host 1 no longer reaches host 2"])
    assert "Rank 0 can no longer be reached" in from_main[1]
    assert all(lost(1) in from_main[rank] for rank in (0, 2))
    to_main = said(ended["host 2 no longer reaches host 1"])
    assert "Rank 0 can no longer be reached" in to_main[1]
    assert lost(1) in to_main[0]


@pytest.mark.long
@pytest.mark.parametrize("what", ["5% of packets lost", "packets 200 ms late"])
def test_runs_go_on_over_a_bad_network(what: str, ended: dict[str, Ended]) -> None:
    assert ended[what].exit_codes == [0, 0, 0], ended[what].output


@pytest.mark.long
def test_ranks_that_are_killed_alone_on_their_hosts_are_named(ended: dict[str, Ended]) -> None:
    of_rank_0 = said(ended["rank 0 killed"])
    assert of_rank_0.keys() == {1, 2}
    assert all("Rank 0 can no longer be reached: its connection broke" in message for message in of_rank_0.values())
    of_rank_2 = said(ended["rank 2 killed"])
    assert of_rank_2.keys() == {0, 1}
    assert all(lost(2) in message for message in of_rank_2.values())


@pytest.mark.long
def test_an_exception_on_another_host_ends_all(ended: dict[str, Ended]) -> None:
    seen = ended["rank 1 raises"].results
    assert seen["seen1"]["type"] == "ValueError"
    assert "on host2) failed in" in seen["seen0"]["message"]
    assert "ValueError: boom" in seen["seen0"]["message"]


@pytest.mark.long
@pytest.mark.parametrize(("what", "rank"), [("rank 1 sleeps", 1), ("rank 0 stopped", 0), ("rank 1 stopped", 1)])
def test_a_rank_that_stands_still_on_another_host_ends_the_run(what: str, rank: int, ended: dict[str, Ended]) -> None:
    message = said(ended[what])[1 - rank]
    assert f"Rank {rank} " in message
    assert "is stuck" in message
    assert f"rank {1 - rank} has waited " in ended[what].output[1 - rank]  # a warning comes first
    assert "the others have waited for longer than `stall_s`, 3 s" in message
    assert ("in happen" in message) == (what == "rank 1 sleeps")  # the user's part of its stack


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
