"""What a run leaves behind in the process of the user: nothing that `ddp` does not leave, too."""

from __future__ import annotations

import gc
import itertools
import json
import os
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from lightning import Fabric
from lightning.pytorch.demos.boring_classes import BoringModel

from tests.support import leaks
from tests.support.leaks import ProcessState, wait_until_empty
from tests.support.programs import REPOSITORY, Program, run_together
from tests.support.scripts.trainers import make_trainer


def use_trainer(strategy: str, *, action: str) -> None:
    limits = {f"limit_{stage}_batches": 2 for stage in ("val", "test", "predict")}
    trainer = make_trainer(strategy, devices=2, max_steps=2, **limits)
    getattr(trainer, action)(BoringModel())


def use_fabric(strategy: str) -> None:
    fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy)
    fabric.launch()
    module = torch.nn.Linear(2, 2)
    model, optimizer = fabric.setup(module, torch.optim.SGD(module.parameters(), lr=0.1))
    for _ in range(2):
        fabric.backward(model(torch.ones(1, 2)).sum())
        optimizer.step()
        optimizer.zero_grad()
    fabric.barrier()


RUNS: dict[str, list[Callable[[str], None]]] = {
    "trainer": [partial(use_trainer, action=action) for action in ("fit", "validate", "test", "predict", "fit")],
    "fabric": [use_fabric] * 5,
}


def open_descriptors() -> Counter[str]:
    """How many descriptors there are of each kind, such as `socket` and `pipe`; files by their paths."""
    found: Counter[str] = Counter()
    for name in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # the one of the listing
            found[os.readlink(f"/proc/self/fd/{name}").partition(":")[0]] += 1
    return found


def grown(before: Counter[str], *, num_runs: int) -> list[str]:
    """The kinds of descriptors of which each run has left one at least.

    One or two more are no leak: torch's threads close connections a moment later, and rank 0 has those of others.
    """
    return wait_until_empty(
        lambda: [f"descriptor {name}" for name, more in (open_descriptors() - before).items() if more >= num_runs]
    )


def main(strategy: str, kind: str) -> None:
    """Write down what each run leaves behind, and all of them when the group is gone."""
    torch.set_num_threads(1)
    if strategy == "ddp":
        leaks.ENDS_WITHIN_S = 1.0  # it leaves a thread, for which nobody has to wait long
    at_first = ProcessState.now()
    after_first: Counter[str] = Counter()
    left: list[list[str]] = []
    for use in RUNS[kind]:
        before = ProcessState.now()
        use(strategy)
        gc.collect()
        lines = before.left_behind(known_children=lambda: ProcessState.now().children)  # ranks end with the script
        # Without what they were and are: ports differ from run to run.
        left.append([line.partition(":")[0] for line in lines])
        if len(left) == 1:  # which makes the group, with its connections
            after_first = open_descriptors()
    left[-1] += grown(after_first, num_runs=len(left) - 1)
    rank = os.environ.get("LOCAL_RANK", "0")
    dist.barrier()
    dist.destroy_process_group()
    gc.collect()
    lines = at_first.left_behind(known_children=lambda: ProcessState.now().children)
    at_last = [line.partition(":")[0] for line in lines]
    path = Path(os.environ["RESULTS"], f"{kind} {strategy} rank {rank}.json")
    path.write_text(json.dumps({"runs": left, "at last": at_last}))


def test_a_run_leaves_behind_what_ddp_leaves(tmp_path: Path) -> None:
    # At once: for the most part they wait to see whether a thread ends.
    programs = [
        Program(["-m", "tests.strategies.test_leftovers", strategy, kind])
        for kind in RUNS
        for strategy in ("ddp", "bucketddp")
    ]
    finished = run_together(*programs, root="lightning.pytorch", directory=tmp_path, cwd=REPOSITORY)
    assert finished.returncode == 0, finished.output
    for kind, rank in itertools.product(RUNS, (0, 1)):
        ours, theirs = (finished.results[f"{kind} {strategy} rank {rank}"] for strategy in ("bucketddp", "ddp"))
        for in_ours, in_theirs in zip(ours["runs"], theirs["runs"], strict=True):
            assert set(in_ours) <= set(in_theirs)
        # No thread, logger or handler of signals, whatever `ddp` does.
        assert set(ours["at last"]) <= {line for line in theirs["at last"] if line.startswith("variable ")}


if __name__ == "__main__":
    main(*sys.argv[1:])
