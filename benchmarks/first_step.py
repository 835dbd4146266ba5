"""A program that fits a tiny model and writes down when its first step began and ended; see `benchmarks.startup`.

RESULTS=DIRECTORY python -m benchmarks.first_step bucketddp [--together]
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from tests.support.scripts.fit import Regression


class Clock(Callback):
    """Writes down when this rank called `fit`, began its first training step, and ended its first optimizer step.

    In seconds of a clock that all processes of a host share, and in seconds of the processor that this one used.
    """

    def __init__(self) -> None:
        self._moments: dict[str, tuple[float, float]] = {}

    def look(self, name: str) -> None:
        self._moments.setdefault(name, (time.monotonic(), time.process_time()))

    def on_train_batch_start(self, *_: Any) -> None:
        self.look("begin")

    def on_train_batch_end(self, *_: Any) -> None:
        self.look("end")

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        Path(os.environ["RESULTS"], f"{trainer.global_rank}.json").write_text(json.dumps(self._moments))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("strategy")
    parser.add_argument("--together", action="store_true", help="say when ready, then wait for a line to begin")
    arguments = parser.parse_args()
    clock = Clock()
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        strategy=arguments.strategy,
        max_steps=3,
        callbacks=clock,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Regression()
    if arguments.together:
        print("ready", flush=True)
        input()
    clock.look("fit")
    trainer.fit(module)


if __name__ == "__main__":
    main()
