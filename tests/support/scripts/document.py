"""Jobs that run the blocks of a document, as they stand, on ranks that are running already."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import patch

from lightning.pytorch import Trainer
from lightning.pytorch.cli import LightningCLI

from tests.support.scripts.trainers import like_torchrun

READER = Path(__file__).parent / "reader"
# What a Trainer takes where a block says nothing: Lightning reads these by itself. Long enough for a plan to be settled
# and for the monitor to record steps.
SHORT_RUNS = {
    "PL_TRAINER_MAX_EPOCHS": "1",
    "PL_TRAINER_LIMIT_TRAIN_BATCHES": "24",
    "PL_TRAINER_LIMIT_VAL_BATCHES": "1",
    "PL_TRAINER_LOG_EVERY_N_STEPS": "1",
    "PL_TRAINER_ENABLE_PROGRESS_BAR": "False",
    "PL_TRAINER_ENABLE_MODEL_SUMMARY": "False",
}


@like_torchrun()
def run_page(*, page: str, blocks: list[tuple[int, str]], directory: Path) -> None:
    """Run the Python blocks of a page one after the other, each from its line on, with all names of those before."""
    with _where_the_reader_is(directory):
        project = import_module("my_project")
        names: dict[str, Any] = {"__name__": "__main__", "model": project.MyModule(), "datamodule": project.MyData()}
        for line, text in blocks:
            before = names.get("strategy")
            exec(compile("\n" * line + text, page, "exec"), names)
            # What a block only makes must train, too.
            if names.get("strategy") is not before and ".fit(" not in text:
                trainer = Trainer(accelerator="cpu", devices=2, strategy=names["strategy"])
                trainer.fit(project.MyModule(), project.MyData())


@like_torchrun()
def train_by_config(*, config: Path, directory: Path) -> str:
    """Train with `config` under LightningCLI; the strategy's class, by name."""
    with _where_the_reader_is(directory):
        project = import_module("my_project")
        options = {name.removeprefix("PL_TRAINER_").lower(): value for name, value in SHORT_RUNS.items()}
        options |= {"accelerator": "cpu", "devices": "2"}
        arguments = [f"--trainer.{name}={value}" for name, value in options.items()]
        arguments = ["fit", *arguments, f"--config={config}"]
        cli = LightningCLI(project.MyModule, project.MyData, args=arguments, save_config_callback=None)
        return type(cli.trainer.strategy).__name__


@contextmanager
def _where_the_reader_is(directory: Path) -> Iterator[None]:
    before = Path.cwd()
    os.chdir(directory)
    try:
        with patch.dict(os.environ, SHORT_RUNS), patch("sys.path", [str(READER), *sys.path]):
            yield
    finally:
        os.chdir(before)
