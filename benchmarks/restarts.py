"""Seconds from a fault to the next step that all ranks have trained: `max_restarts`, and torchrun with `auto_resume`.

    python -m benchmarks.restarts [--ranks 2] [--repetitions 3] [--setup 10] [--json FILE]

A program sleeps for `--setup` seconds at its beginning, for imports and data, and trains. At one step rank 1 raises, or
is killed. Ways to go on take turns.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.command import write
from benchmarks.report import Table, about
from benchmarks.turns import take_turns

FAULT_STEP, NUM_STEPS = 5, 8
OURS, TORCHRUN = "max_restarts=1", "torchrun --max-restarts 1, auto_resume"


def train(fault: str, num_ranks: int, setup_s: float, max_restarts: int) -> None:
    """The program: leaves a line for each step, and one for the fault."""
    time.sleep(setup_s)
    import torch
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.callbacks import ModelCheckpoint
    from torch.utils.data import DataLoader, TensorDataset

    from lightning_bucketddp import BucketDDPStrategy

    def note(name: str, value: Any) -> None:
        with Path(name).open("a") as file:
            file.write(json.dumps(value) + "\n")

    class Model(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(8, 1)

        def training_step(self, batch: Any) -> Any:
            if self.global_step == FAULT_STEP and self.global_rank == 1 and not Path("fault").exists():
                note("fault", time.time())
                if fault == "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                raise ValueError("by chance")
            return self.layer(batch[0]).pow(2).mean()

        def on_train_batch_end(self, *args: Any) -> None:
            note("steps", [self.global_step, time.time()])

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    trainer = Trainer(
        accelerator="cpu",
        devices=num_ranks,
        max_steps=NUM_STEPS,
        strategy=BucketDDPStrategy(auto_resume=True, max_restarts=max_restarts),
        callbacks=ModelCheckpoint(every_n_train_steps=2, save_on_exception=True),
        default_root_dir=os.getcwd(),
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Model(), DataLoader(TensorDataset(torch.ones(64 * num_ranks, 8)), batch_size=4))


def recover(way: str, fault: str, num_ranks: int, setup_s: float) -> float:
    """Run the program; return the seconds."""
    within = []
    if way == TORCHRUN:
        within = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}", "--max-restarts=1"]
    program = [__file__, "train", fault, str(num_ranks), str(setup_s), str(int(way == OURS))]
    repository = str(Path(__file__).parent.parent)
    with tempfile.TemporaryDirectory() as directory:
        finished = subprocess.run(
            [sys.executable, *within, *program],
            cwd=directory,
            env={**os.environ, "PYTHONPATH": repository},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        assert finished.returncode == 0, finished.stdout
        faulted = float(Path(directory, "fault").read_text())
        steps = [json.loads(line) for line in Path(directory, "steps").read_text().splitlines()]
    return max(at for step, at in steps if step == FAULT_STEP + 1) - faulted


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2, help="processes (default: 2)")
    parser.add_argument("--repetitions", type=int, default=3, help="rounds (default: 3)")
    parser.add_argument("--setup", type=float, default=10.0, help="seconds of imports and data (default: 10)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all numbers here")
    options = parser.parse_args(arguments)
    options.png = None
    place = f"gloo, {options.ranks} processes"
    print(about(place), flush=True)
    tables = []
    for fault in ("raise", "kill"):
        turns = {way: partial(recover, way, fault, options.ranks, options.setup) for way in (OURS, TORCHRUN)}
        samples = take_turns(turns, repetitions=options.repetitions)
        medians = {way: statistics.median(values) for way, values in samples.items()}
        slowest = medians[TORCHRUN]
        rows = {way: [medians[way], min(samples[way]), max(samples[way]), medians[way] / slowest] for way in turns}
        title = f"From `{fault}` on rank 1 to the next step of {options.ranks} ranks; set-up takes {options.setup:g} s"
        tables.append(Table(title, ["median s", "min", "max", "of torchrun's"], rows, samples=samples))
        print(tables[-1], flush=True)
    write(tables, options, place=place)


if __name__ == "__main__":
    if sys.argv[1:2] == ["train"]:
        train(sys.argv[2], int(sys.argv[3]), float(sys.argv[4]), int(sys.argv[5]))
    else:
        main()
