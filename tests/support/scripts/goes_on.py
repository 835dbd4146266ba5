"""Trains under faults, with `max_restarts`.

RESULTS=directory python goes_on.py '{"start_method": "popen", "faults": [{"what": "kill", "rank": 1, "step": 3}]}'

What is in the command makes a run: its number of ranks is in RANKS, if another number shall go on with it.

Faults come one after the other, each once, when its rank begins the step: `kill`, `raise` or the name of an exception,
`stuck` (in Python), `exit`, `full disk` (which the callbacks find, too), `validation` or `epoch` (an exception in one,
or as one begins), `setup` (an exception there, after the fault before, at step 0), `no checkpoints` (are left), `await`
(of a rank that knocks), `SIGINT`, `SIGTERM`, `SIGUSR1` (an exception, and the signal in the pause of 2 s before a
restart), `interrupt` or `requeue` (the signal alone); rank None means every rank. A fault that has a `fit` comes in
that one of several.
"""

from __future__ import annotations

import builtins
import contextlib
import inspect
import json
import multiprocessing
import os
import shutil
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import (
    GradientAccumulationScheduler,
    ModelCheckpoint,
    OnExceptionCheckpoint,
    StochasticWeightAveraging,
)
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor, nn
from torch.fx.immutable_collections import immutable_list
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import SumMetric

from lightning_bucketddp import BucketDDPMonitor, BucketDDPStrategy, LocalSteps, MaxRestarts, Timeouts
from lightning_bucketddp.checkpoint.checkpoint_io import CheckpointWriteError

RESULTS = Path(os.environ.get("RESULTS", "."))
STEPS_PER_EPOCH = 8
NUM_SAMPLES = 64
SIGNALS = {"kill": signal.SIGKILL, "interrupt": signal.SIGINT, "requeue": signal.SIGUSR1}


def is_first(name: str) -> bool:
    """Whether nobody has been here under this name."""
    with contextlib.suppress(FileExistsError), (RESULTS / name).open("x"):
        return True
    return False


class Learner(LightningModule):
    """Has state in each place that a restart must put back: buffers, modes, a parameter that training unfreezes."""

    def __init__(self, faults: list[dict[str, Any]], fit: int, *, drops: bool = False) -> None:
        super().__init__()
        self.dropout = nn.Dropout() if drops else nn.Identity()
        self.layers = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.Linear(16, 1))
        self.frozen = nn.Parameter(torch.ones(()))
        self.frozen.requires_grad = False
        self.num_validated = SumMetric()
        self.counted: dict[str, list[int]] = {"batches": []}
        self._faults = {number: fault for number, fault in enumerate(faults) if fault.get("fit", fit) == fit}

    def training_step(self, batch: list[Tensor]) -> Tensor:
        self._meet_fault()
        inputs, targets, index = batch
        note("batches", [self.current_epoch, self.global_step, index.tolist()], self.global_rank)
        return F.mse_loss(self.frozen * self.layers(self.dropout(inputs)), targets)

    def validation_step(self, batch: list[Tensor]) -> None:
        self.num_validated.update(len(batch[0]))
        self._meet_fault("validation")
        self.log("loss", F.mse_loss(self.layers(batch[0]), batch[1]), sync_dist=True)

    def on_validation_epoch_end(self) -> None:
        if not self.trainer.sanity_checking:
            note("validated", self.num_validated.compute().item(), self.global_rank)
        self.num_validated.reset()

    def setup(self, stage: str) -> None:
        self._meet_fault("setup")

    def on_train_epoch_start(self) -> None:
        self._meet_fault("epoch")

    def on_train_batch_start(self, *args: Any) -> None:
        self.frozen.requires_grad = self.global_step >= 14

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.05)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9), "interval": "step"}]

    def on_train_start(self) -> None:
        note(
            "attempts",
            {
                "step": self.global_step,
                "at": time.monotonic(),
                "pid": os.getpid(),
                **what_stays(),
                "memory": int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE"),
                "handlers": str(signal.getsignal(signal.SIGUSR2)),
            },
            self.global_rank,
        )

    def _meet_fault(self, where: str = "training") -> None:
        for number, fault in self._faults.items():
            is_here = where == (fault["what"] if fault["what"] in ("validation", "epoch", "setup") else "training")
            if fault["what"] == "setup" and not list(RESULTS.glob(f"fault{number - 1}.*")):
                continue
            is_due = is_here and self.global_step == fault["step"] and fault["rank"] in (self.global_rank, None)
            if is_due and (fault.get("always") or is_first(f"fault{number}.{self.global_rank}")):
                meet(fault["what"])


def meet(what: str) -> None:
    if what in SIGNALS:
        os.kill(os.getpid(), SIGNALS[what])
    elif what == "stuck":
        time.sleep(1000)
    elif what in ("exit", "exit with 0"):
        sys.exit(0 if "0" in what else 3)
    elif what in ("SIGINT", "SIGTERM", "SIGUSR1"):
        threading.Thread(target=kill_in_pause, args=(getattr(signal, what),), daemon=True).start()
        raise RuntimeError(f"by chance: {what}")
    elif what == "no checkpoints":
        shutil.rmtree(RESULTS / ".bucketddp")
        raise RuntimeError(f"by chance: {what}")
    elif what == "full disk":
        raise CheckpointWriteError("by chance: full disk")
    elif what == "await":
        while "waits for a checkpoint" not in (RESULTS / "output.txt").read_text():
            time.sleep(0.1)
    else:
        raise getattr(builtins, what, ValueError)(f"by chance: {what}")


def kill_in_pause(number: int) -> None:
    while "of 10 in 2 s" not in (RESULTS / "output.txt").read_text():
        time.sleep(0.01)
    time.sleep(number == signal.SIGUSR1)  # until the handlers of the attempt are gone
    os.kill(os.getpid(), number)


def what_stays() -> dict[str, int]:
    """Count what is there all the time: threads of a run open files for a moment, and a closed connection takes one."""
    looks = []
    for _ in range(20):
        threads, children = threading.active_count(), len(multiprocessing.active_children())
        looks.append({"threads": threads, "files": len(os.listdir("/proc/self/fd")), "children": children})
        time.sleep(0.01)
    return {what: min(look[what] for look in looks) for what in looks[0]}


def note(name: str, value: Any, rank: int) -> None:
    with (RESULTS / f"{name}.rank{rank}.jsonl").open("a") as file:
        file.write(json.dumps(value) + "\n")


def main() -> None:
    plan = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # otherwise Lightning sets another number, but not under torchrun
    if plan.get("stays_away") and os.environ.get("LOCAL_RANK") == "1" and list(RESULTS.glob("fault0.*")):
        sys.exit(1)  # the process that takes the place of rank 1
    for number in range(plan.get("fits", 1)):
        with contextlib.suppress(Exception) if plan.get("catches") else contextlib.nullcontext():
            fit(plan, number)


class Counter(Callback):
    """Counts batches in attributes of its own and of the module, which no checkpoint has."""

    def __init__(self) -> None:
        self.num_batches = 0
        self.unchanged = immutable_list([1])

    def on_train_start(self, trainer: Trainer, module: Any) -> None:
        note("counted", [self.num_batches, *module.counted["batches"]], trainer.global_rank)

    def on_train_batch_end(self, trainer: Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.num_batches += 1
        module.counted["batches"].append(batch_idx)

    def on_exception(self, trainer: Trainer, module: Any, exception: BaseException) -> None:
        if "full disk" in str(exception):
            meet("full disk")


class Rescue(OnExceptionCheckpoint):
    def teardown(self, *args: Any, **options: Any) -> None:
        """Keep the file, which Lightning removes when a fit ends well."""


def checkpoints(plan: dict[str, Any]) -> list[Callback]:
    where, when = RESULTS / "checkpoints", {"every_n_train_steps": plan.get("every", 1000), "save_top_k": -1}
    when |= plan.get("saving", {})
    if not plan.get("rescue", True):
        return [ModelCheckpoint(where, **when)]
    if "save_on_exception" in inspect.signature(ModelCheckpoint).parameters:  # Lightning 2.6
        return [ModelCheckpoint(where, **when, save_on_exception=True)]
    return [ModelCheckpoint(where, **when), Rescue(where)]


def fit(plan: dict[str, Any], number: int) -> None:
    seed_everything(1)
    options = plan.get("options", {})
    if "local_steps" in options:
        options["local_steps"] = LocalSteps(**options["local_steps"])
    # On a busy machine a healthy rank may stand still for seconds.
    stall_s = 3 if any(fault["what"] == "stuck" for fault in plan["faults"]) else 200
    num_ranks = int(os.environ.get("RANKS", plan.get("ranks", 2)))
    num_nodes = int(os.environ.get("NODES", 1))
    monitors = [BucketDDPMonitor(dirpath=RESULTS, every_n_steps=1)] if plan.get("monitor") else []
    changing: list[Callback] = []
    if plan.get("changes_settings"):
        changing = [GradientAccumulationScheduler({0: 2, 1: 3}), StochasticWeightAveraging(0.01, swa_epoch_start=1)]
    trainer = Trainer(
        accelerator="cpu",
        devices=num_ranks // num_nodes,
        num_nodes=num_nodes,
        strategy=BucketDDPStrategy(
            auto_resume=True,
            max_restarts=MaxRestarts(plan.get("max_restarts", 10), plan.get("min_ranks")),
            timeouts=Timeouts(stall_s=stall_s, rejoin_s=plan.get("rejoin_s", 300)),
            start_method=plan.get("start_method", "popen"),
            **options,
        ),
        max_epochs=plan.get("epochs", 2),
        default_root_dir=RESULTS,
        callbacks=[*checkpoints(plan), *monitors, *changing, Counter()],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Learner(plan["faults"], number, drops=plan.get("drops", False))
    inputs = torch.linspace(-1, 1, 4 * NUM_SAMPLES).view(-1, 4)
    data = TensorDataset(inputs, inputs.sin().sum(dim=1, keepdim=True), torch.arange(len(inputs)))
    size = plan.get("batch_size", len(inputs) // STEPS_PER_EPOCH // num_ranks)
    workers = plan.get("workers", 0)
    loaders: Any = DataLoader(data, size, shuffle=True, num_workers=workers), DataLoader(data, size)
    if plan.get("combines"):
        loaders = [CombinedLoader(loader) for loader in loaders]
    if plan.get("validates"):
        trainer.validate(module, loaders[1], verbose=False)
    trainer.fit(module, loaders[0], loaders[1], ckpt_path=plan.get("ckpt_path"))
    weights = {name: tensor.tolist() for name, tensor in module.state_dict().items()}
    end = {"weights": weights, "pid": os.getpid(), "world_size": trainer.world_size, "steps": trainer.global_step}
    (RESULTS / f"end.rank{trainer.global_rank}.json").write_text(json.dumps(end))


if __name__ == "__main__":
    main()
