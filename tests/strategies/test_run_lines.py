"""What a run writes to the log: one line at its start, one at its end, and neither into a progress bar."""

from __future__ import annotations

import fcntl
import logging
import os
import re
import struct
import sys
import tempfile
import termios
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from lightning_utilities.core import rank_zero
from torch import Tensor, nn

from lightning_bucketddp.bindings.registration import strategy_class
from tests.support.ranks import run_on_ranks
from tests.support.scripts.trainers import like_torchrun

# Settles the plan, whatever it is.
NUM_STEPS = 20


@like_torchrun()
def lines_on_terminal(*, root: str, directory: str) -> list[str]:
    """Train with `bucket_cap_mb="auto"`, save a checkpoint; return what was written to the terminal about it."""
    train = _train_with_fabric if root.endswith("fabric") else _train_with_trainer
    # A process that has imported several roots sends such lines to the last one.
    log = logging.getLogger(f"{root}.utilities.rank_zero")
    with patch.object(rank_zero, "log", log), _written_to_terminal() as lines:
        train(import_module(root), strategy_class(root)(), directory)
    ours = [line for line in lines if line.startswith(("bucketddp: ", "  "))]
    assert all(len(line) <= 100 for line in ours if root.endswith("pytorch")), ours
    return "\n".join(ours).replace("\n  ", " ").splitlines()


@like_torchrun()
def lines_of_fits(*, directory: str) -> dict[str, list[str]]:
    """Return what we write about several uses of one Trainer, by what was done."""
    lightning = import_module("lightning.pytorch")
    strategy = strategy_class("lightning.pytorch")(
        bucket_cap_mb=[1, 2], on_nonfinite="skip", find_unused_parameters=True, static_graph=True
    )
    trainer = _trainer(lightning, strategy, directory, enable_checkpointing=False, max_epochs=-1)
    module, loader = _module(lightning), _loader(2 * NUM_STEPS)
    shown: dict[str, list[str]] = {}

    def show(what: str, use: Callable[..., Any], *args: Any, **options: Any) -> None:
        log = logging.getLogger("lightning.pytorch")
        with patch.object(rank_zero, "log", log), _written_to_terminal() as lines, suppress(ZeroDivisionError):
            use(*args, **options)
        shown[what] = [line for line in lines if line.startswith(("bucketddp: ", "  "))]

    tuner = import_module("lightning.pytorch.tuner").Tuner(trainer)
    show("validate", trainer.validate, module, loader, verbose=False)
    show("lr_find", tuner.lr_find, module, loader, num_training=4, update_attr=False)
    trainer.fit_loop.epoch_loop.max_steps = NUM_STEPS
    show("fit", trainer.fit, module, loader)
    trainer.fit_loop.epoch_loop.max_steps = NUM_STEPS + 5
    show("again", trainer.fit, module, loader)
    trainer.fit_loop.epoch_loop.max_steps = NUM_STEPS + 8
    train, bad = module.training_step, trainer.global_step + 1
    module.training_step = lambda batch: train(batch) * (torch.nan if trainer.global_step == bad else 1)
    show("skipped", trainer.fit, module, loader)
    own = logging.getLogger("lightning_bucketddp")
    own.setLevel(logging.WARNING)
    trainer.fit_loop.epoch_loop.max_steps = NUM_STEPS + 11
    show("silenced", trainer.fit, module, loader)
    own.setLevel(logging.NOTSET)
    trainer.fit_loop.epoch_loop.max_steps = NUM_STEPS + 15
    module.training_step = lambda batch: 1 / 0
    show("failed", trainer.fit, module, loader)
    return shown


@like_torchrun()
def on_a_terminal(*, bar: str, directory: str) -> str:
    """Return all that a fit writes to a terminal of 100 columns, with a progress bar."""
    lightning = import_module("lightning.pytorch")
    callbacks = import_module("lightning.pytorch.callbacks")
    kept = [os.dup(1), os.dup(2)]
    ours, theirs = os.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, 100, 0, 0))
    written: list[bytes] = []

    def read() -> None:
        with suppress(OSError):  # the terminal is closed
            while some := os.read(ours, 4096):
                written.append(some)

    reader = threading.Thread(target=read)
    reader.start()
    log = logging.getLogger("lightning.pytorch")
    try:
        for stream in (1, 2):
            os.dup2(theirs, stream)
        os.close(theirs)
        with patch.object(rank_zero, "log", log):
            strategy = strategy_class("lightning.pytorch")()
            options: dict[str, Any] = {"enable_progress_bar": True, "callbacks": [getattr(callbacks, bar)()]}
            trainer = _trainer(lightning, strategy, directory, **options)
            trainer.fit(_module(lightning), _loader(2 * NUM_STEPS), _loader(3))
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for stream, old in zip((1, 2), kept, strict=True):
            os.dup2(old, stream)
            os.close(old)
        reader.join(timeout=60)
        os.close(ours)
    return b"".join(written).decode()


def _layers() -> nn.Module:
    """Of 2 MiB, which need three buckets."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(300, 300) for _ in range(6)))


def _module(lightning: Any) -> Any:
    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layers = _layers()

        def training_step(self, batch: Tensor) -> Tensor:
            return self.layers(batch).square().mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

        def validation_step(self, batch: Tensor) -> None:
            self.log("loss", self.layers(batch).square().mean(), sync_dist=True)

    return Module()


def _trainer(lightning: Any, strategy: Any, directory: str, **options: Any) -> Any:
    given = {"enable_progress_bar": False, "max_steps": NUM_STEPS, **options}
    return lightning.Trainer(
        accelerator="cpu",
        devices=dist.get_world_size(),
        strategy=strategy,
        logger=False,
        default_root_dir=directory,
        enable_model_summary=False,
        **given,
    )


def _loader(num_samples: int) -> Any:
    samples: Any = torch.ones(num_samples, 300)
    return torch.utils.data.DataLoader(samples)


def _train_with_trainer(lightning: Any, strategy: Any, directory: str) -> None:
    _trainer(lightning, strategy, directory).fit(_module(lightning), _loader(2 * NUM_STEPS))


def _train_with_fabric(lightning: Any, strategy: Any, directory: str) -> None:
    fabric = lightning.Fabric(accelerator="cpu", devices=dist.get_world_size(), strategy=strategy)
    fabric.launch()
    layers = _layers()
    module, optimizer = fabric.setup(layers, torch.optim.SGD(layers.parameters(), lr=0.1))
    for _ in range(NUM_STEPS):
        fabric.backward(module(torch.ones(1, 300)).square().mean())
        optimizer.step()
        optimizer.zero_grad()


@contextmanager
def _written_to_terminal() -> Iterator[list[str]]:
    """What this process writes to its standard error stream, whoever holds it."""
    lines: list[str] = []
    sys.stderr.flush()
    kept = os.dup(2)
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 2)
        try:
            yield lines
        finally:
            sys.stderr.flush()
            os.dup2(kept, 2)
            os.close(kept)
            file.seek(0)
            lines += file.read().decode().splitlines()


def test_a_fit_begins_and_ends_with_one_line(tmp_path: Path) -> None:
    shown, on_rank_one = run_on_ranks(lines_of_fits, directory=str(tmp_path))
    assert not any(on_rank_one.values())
    *warning, done = shown["skipped"]
    assert warning[0].startswith("bucketddp: not finite in step 26 ")
    assert done == "bucketddp: 2 optimizer steps and 1 skipped; 6.2 MiB sent per rank in 6 reductions."
    assert [line for lines in shown.values() for line in lines if len(line) > 100] == []
    del shown["skipped"]
    start = [
        "bucketddp: 2 ranks (gloo); 2 buckets planned for 2.07 MiB of gradients, sent as fp32;",
        "  bucket_cap_mb=[1, 2], on_nonfinite=skip; no effect: find_unused_parameters, static_graph.",
    ]
    # Its trials are no fit that a user has asked for, and the fit that follows was described already.
    assert shown == {
        "validate": [],
        "lr_find": start,
        "fit": [end_of(steps=20)],
        "again": [end_of(steps=5)],
        "silenced": [],
        "failed": [],
    }


def end_of(steps: int) -> str:
    return f"bucketddp: {steps} optimizer steps; {2.067 * steps:.1f} MiB sent per rank in {2 * steps} reductions."


@pytest.mark.parametrize("bar", ["TQDMProgressBar", "RichProgressBar"])
def test_no_line_tears_a_progress_bar(bar: str, tmp_path: Path) -> None:
    written, _ = run_on_ranks(on_a_terminal, bar=bar, directory=str(tmp_path))
    assert "\x1b[" in written  # a terminal that shows colours, or moves its cursor
    # Alone on their line, and plain; where a bar was above, the cursor is shown again.
    alone = r"(?:^|\n)(?:\x1b\[\?25h)?(bucketddp: [^\x1b\r]*)\r\n"
    lines = re.findall(alone, written)
    assert written.count("bucketddp: ") == len(lines) == 2, written
    # Rich draws its bar again and again for as long as it hides the cursor.
    begin, end = ("\x1b[?25l", "\x1b[?25h") if bar == "RichProgressBar" else ("Sanity Checking", "Epoch 0: 100%")
    assert "bucketddp: " not in written[written.index(begin) : written.rindex(end)]
    assert "planned" in lines[0]
    assert "20 optimizer steps" in lines[1]
