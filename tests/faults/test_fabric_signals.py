"""Ctrl-C in a Fabric loop: it ends a wait for other ranks, and is the user's own where Python can raise it."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from tests.support.doomed_ranks import doomed_ranks
from tests.support.scripts.fabric_signals import end_the_loop_on_ctrl_c, wait_for_rank_one


@pytest.mark.parametrize(("where", "targets"), [("backward", (0,)), ("barrier", (0, 1))])
def test_ctrl_c_ends_a_loop_that_waits_for_another_rank(where: str, targets: tuple[int, ...], tmp_path: Path) -> None:
    with doomed_ranks(wait_for_rank_one, directory=tmp_path, where=where) as ranks:
        ranks.wait_for("fault.json")
        time.sleep(1.5)
        for rank in targets:
            ranks.send(rank, signal.SIGINT)
        ended = ranks.wait()
    assert ended.exit_codes == [1, 1]
    assert "KeyboardInterrupt" in ended.output[0]
    # Ended by an exception, and not at once, so that what the user has to tidy up is tidied up.
    assert all("exits at once" not in output for output in ended.output), ended.output


def test_ctrl_c_that_python_raises_is_left_to_the_user(tmp_path: Path) -> None:
    with doomed_ranks(end_the_loop_on_ctrl_c, directory=tmp_path, tidies_for_s=5) as ranks:
        for rank in (0, 1):
            ranks.wait_for(f"fault{rank}.json")
        for rank in (0, 1):
            ranks.send(rank, signal.SIGINT)
        ended = ranks.wait()
    assert ended.exit_codes == [0, 0], ended.output
    assert {"left0", "left1"} <= ended.results.keys()
