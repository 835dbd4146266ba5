"""Ctrl-C in a Fabric loop: it ends a wait for other ranks, and is the user's own where Python can raise it."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest
import torch
from lightning.fabric import Fabric
from torch import nn

from lightning_bucketddp.bindings.fabric_lightning import BucketDDPStrategy
from tests.support.doomed_ranks import doomed_ranks
from tests.support.scripts.faults import write


def _begin() -> Fabric:
    fabric = Fabric(accelerator="cpu", devices=2, strategy=BucketDDPStrategy())
    fabric.launch()
    return fabric


def wait_for_rank_one(*, directory: Path, where: str) -> None:
    """Let rank 0 wait for rank 1, which sleeps, in a backward or at a barrier."""
    fabric = _begin()
    module = nn.Linear(4, 1)
    module, optimizer = fabric.setup(module, torch.optim.SGD(module.parameters(), lr=0.1))
    for step in range(10):
        if (fabric.global_rank, step) == (1, 3):
            write(directory / "fault.json", {})
            time.sleep(1000)
        if step == 3 and where == "barrier":
            fabric.barrier()
        optimizer.zero_grad()
        fabric.backward(module(torch.ones(2, 4)).mean())
        optimizer.step()


def end_the_loop_on_ctrl_c(*, directory: Path, tidies_for_s: float) -> None:
    """Leave the loop by Ctrl-C, tidy up for a while, and meet the others once more."""
    fabric = _begin()
    try:
        write(directory / f"fault{fabric.global_rank}.json", {})
        time.sleep(1000)
    except KeyboardInterrupt:
        time.sleep(tidies_for_s)
        fabric.barrier()
        write(directory / f"left{fabric.global_rank}.json", {})


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
