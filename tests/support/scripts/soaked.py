"""Trains as a user's script does, with checkpoints, and has the accidents that it is told of, one more in each start.

python soaked.py '{"directory": "/tmp/run", "faults": [{"what": "raise", "rank": 1, "step": 7}], ...}'
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import struct
import sys
import time
import zipfile
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_bucketddp import BucketDDPStrategy
from lightning_bucketddp.config import Timeouts

NUM_EPOCHS = 2
STEPS_PER_EPOCH = 20
SAMPLES_PER_STEP = 2
SAVE_EVERY_N_STEPS = 5
START_TIMEOUT_S = 60
# After so many steps a process dies whose clock has jumped: enough for a checkpoint.
STEPS_AFTER_JUMP = SAVE_EVERY_N_STEPS + 1
# More than the disks that are to be filled can hold; others must not be filled.
FILLER_BYTES = 2**30
_LOCAL_HEADER_BYTES = 30


class Model(LightningModule):
    """Learns from numbers that a sample gives, or its rank and the step."""

    def __init__(self, *, is_by_sample: bool) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
        self._is_by_sample = is_by_sample
        self._attempt = 0.0

    def _loss(self, *numbers: int) -> Tensor:
        rows = [torch.randn(4, 8, generator=torch.Generator().manual_seed(number)) for number in numbers]
        inputs = torch.cat(rows)
        return F.mse_loss(self.layers(inputs), inputs.sin().sum(dim=1, keepdim=True))

    def on_train_start(self) -> None:
        # The same number on all ranks, larger for a later start.
        self._attempt = self.trainer.strategy.broadcast(time.monotonic())
        self._report()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        samples = batch.tolist()
        seen = {"attempt": self._attempt, "step": self.trainer.global_step + 1, "samples": samples}
        append(self.trainer.default_root_dir, f"seen{self.global_rank}", seen)
        if self._is_by_sample:
            return self._loss(*(1000 * self.current_epoch + sample for sample in samples))
        return self._loss(2 * self.trainer.global_step + self.global_rank)

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("loss", self._loss(batch_idx), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.01)

    def on_train_batch_end(self, *_: Any) -> None:
        # After all callbacks, so after the checkpoint of this step.
        self._report()

    def _report(self) -> None:
        report = {
            "attempt": self._attempt,
            "step": self.trainer.global_step,
            "at": time.monotonic(),
            "pid": os.getpid(),
        }
        append(self.trainer.default_root_dir, f"rank{self.global_rank}", report)


class Accident(Callback):
    """What happens on one rank, once: at the first call of a function at or after a step."""

    def __init__(self, directory: str, checkpoints: str, faults: list[dict[str, Any]]) -> None:
        self._directory = directory
        self._checkpoints = checkpoints
        # One for each start; those that have happened are written down.
        self._number = sum(Path(directory, f"fault{number}.json").exists() for number in range(len(faults)))
        self._fault = faults[self._number] if self._number < len(faults) else {}

    def _may_happen(self, where: str, trainer: Trainer) -> None:
        fault = self._fault
        # A host may come late, and the other one begin alone.
        is_meant = fault.get("rank") in (trainer.global_rank, "all") and trainer.world_size > 1
        if is_meant and fault.get("where") == where and trainer.global_step >= fault["step"]:
            self._fault = {}
            if fault["what"] != "clock" or fault["dies"] is None:
                write(self._directory, f"fault{self._number}", {"at": time.monotonic()})
            getattr(self, f"_{fault['what'].replace('-', '_')}")(fault, trainer)

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        self._may_happen("training", trainer)

    def on_before_optimizer_step(self, trainer: Trainer, *_: Any) -> None:
        self._may_happen("optimizer", trainer)

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        self._may_happen("callback", trainer)

    def on_validation_batch_start(self, trainer: Trainer, *_: Any) -> None:
        # Before it has begun to train, nobody knows what this start would have lost.
        if not trainer.sanity_checking:
            self._may_happen("validation", trainer)

    def _raise(self, fault: dict[str, Any], trainer: Trainer) -> None:
        raise ValueError("an accident")

    def _exit(self, fault: dict[str, Any], trainer: Trainer) -> None:
        os._exit(fault["status"])

    def _out_of_memory(self, fault: dict[str, Any], trainer: Trainer) -> None:
        # What the kernel does to a process that is about to use a page that there is none for.
        held = [bytearray(2**20) for _ in range(64)]
        os.kill(os.getpid(), signal.SIGKILL)
        del held

    def _slow(self, fault: dict[str, Any], trainer: Trainer) -> None:
        time.sleep(3)

    def _flip_weight(self, fault: dict[str, Any], trainer: Any) -> None:
        _flip(trainer.lightning_module.layers[0].weight.data, fault["bit"])

    def _flip_gradient(self, fault: dict[str, Any], trainer: Any) -> None:
        # It is the mean over the ranks by now.
        _flip(trainer.lightning_module.layers[0].weight.grad, fault["bit"])

    def _full_disk(self, fault: dict[str, Any], trainer: Trainer) -> None:
        with Path(self._checkpoints, "filler").open("wb", buffering=0) as filler, suppress(OSError):
            while filler.tell() < FILLER_BYTES:
                filler.write(bytes(4096))

    def _full_disk_at_exception(self, fault: dict[str, Any], trainer: Trainer) -> None:
        self._full_disk(fault, trainer)
        raise ValueError("an accident")

    def _clock(self, fault: dict[str, Any], trainer: Trainer) -> None:
        jump_clock(fault["jump_s"])
        if fault["dies"] is not None:
            step = trainer.global_step + STEPS_AFTER_JUMP
            self._fault = {**fault, "what": "out-of-memory", "rank": fault["dies"], "step": step}


def _flip(tensor: Tensor, bit: int) -> None:
    tensor.view(torch.int32)[0, 0] ^= 1 << bit


def jump_clock(seconds: float) -> None:
    """Have this process see and write times of day that are `seconds` later."""
    tell, replace = time.time, os.replace

    def replace_and_date(source: Any, target: Any, **options: Any) -> None:
        replace(source, target, **options)
        with suppress(OSError):
            os.utime(target, (time.time(), time.time()))

    time.time = lambda: tell() + seconds
    os.replace = replace_and_date  # type: ignore[assignment]


class Pace(Callback):
    """So slow that something can happen meanwhile."""

    def __init__(self, pause_s: float) -> None:
        self._pause_s = pause_s

    def on_train_batch_start(self, *_: Any) -> None:
        time.sleep(self._pause_s)

    def on_validation_batch_start(self, *_: Any) -> None:
        time.sleep(self._pause_s)


def write(directory: str, name: str, content: dict[str, Any]) -> None:
    """At once, for a reader that looks while we write."""
    path = Path(directory, f"{name}.json")
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    temporary.write_text(json.dumps(content))
    temporary.replace(path)


def append(directory: str, name: str, content: dict[str, Any]) -> None:
    """Add a line, whole at once."""
    with Path(directory, f"{name}.jsonl").open("ab", buffering=0) as file:
        file.write(f"{json.dumps(content)}\n".encode())


def fingerprint(module: nn.Module) -> str:
    return hashlib.sha256(b"".join(value.numpy().tobytes() for value in module.state_dict().values())).hexdigest()


class Finish(Callback):
    """Writes down what each rank has at the end of a run that is complete."""

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        end = {"at": time.monotonic(), "step": trainer.global_step, "weights": fingerprint(pl_module)}
        write(trainer.default_root_dir, f"finished{trainer.global_rank}", {**end, "world_size": trainer.world_size})


def flip_bit(path: Path, *, place: float, bit: int) -> None:
    """Flip `bit` of a byte of the largest tensor of the checkpoint at `path`; `place` is from 0 to 1."""
    with zipfile.ZipFile(path) as archive:
        record = max(archive.infolist(), key=lambda info: ("/data/" in info.filename, info.file_size))
    with path.open("r+b") as file:
        file.seek(record.header_offset)
        # The lengths of the name and of what follows it, which is padding.
        name, extra = struct.unpack_from("<HH", file.read(_LOCAL_HEADER_BYTES), 26)
        position = record.header_offset + _LOCAL_HEADER_BYTES + name + extra + int(place * record.file_size)
        file.seek(position)
        [value] = file.read(1)
        file.seek(position)
        file.write(bytes([value ^ (1 << bit)]))


def step_in(path: Path) -> int:
    return int(torch.load(path, weights_only=True)["global_step"])


def prepare(directory: str, checkpoints: str, faults: list[dict[str, Any]]) -> None:
    """Do what a disk and its owner do between two starts: lose a bit of the newest checkpoints, make room."""
    with suppress(FileNotFoundError):
        Path(checkpoints, "filler").unlink()
    for number, fault in enumerate(faults):
        if fault["what"] == "flip-file" and Path(directory, f"fault{number}.json").exists():
            with suppress(FileExistsError):  # by another rank; all meet before they look for checkpoints
                Path(directory, f"flipped{number}").touch(exist_ok=False)
                steps = {path: step_in(path) for path in Path(checkpoints).glob("*.ckpt")}
                for path in [path for path, step in steps.items() if step == max(steps.values())]:
                    flip_bit(path, place=fault["place"], bit=fault["bit"])


def main(
    *,
    directory: str,
    checkpoints: str,
    start_method: str,
    strategy: str,
    timeout_s: float,
    pause_s: float,
    resume: str,
    faults: list[dict[str, Any]],
) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(1)
    prepare(directory, checkpoints, faults)
    options: dict[str, Any] = {"start_method": start_method, "timeout": timedelta(seconds=timeout_s)}
    if strategy == "bucketddp":
        options.update(replica_checks=3, timeouts=Timeouts(start_s=START_TIMEOUT_S, stall_warning_s=2))
        options.update(global_batch_size=SAMPLES_PER_STEP)
    if resume == "auto":
        options.update(auto_resume=True)
    trainer = Trainer(
        accelerator="cpu",
        devices=int(os.environ.get("LOCAL_WORLD_SIZE", "2")),
        num_nodes=int(os.environ.get("GROUP_WORLD_SIZE", "1")),
        strategy={"bucketddp": BucketDDPStrategy, "ddp": DDPStrategy}[strategy](**options),
        max_epochs=NUM_EPOCHS,
        val_check_interval=STEPS_PER_EPOCH // 2,
        default_root_dir=directory,
        callbacks=[
            Pace(pause_s),
            Accident(directory, checkpoints, faults),
            # "last" finds it by its name; it is removed when a run is complete.
            OnExceptionCheckpoint(checkpoints, filename="last-on-exception"),
            ModelCheckpoint(
                checkpoints, filename="{step}", every_n_train_steps=SAVE_EVERY_N_STEPS, save_last=True, save_top_k=-1
            ),
            Finish(),
        ],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    numbers: Any = torch.arange(SAMPLES_PER_STEP * STEPS_PER_EPOCH)
    trainer.fit(
        Model(is_by_sample=resume == "auto"),
        DataLoader(numbers, batch_size=SAMPLES_PER_STEP, shuffle=True),
        DataLoader(numbers[:6]),
        ckpt_path=None if resume == "auto" else "last",
    )


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
