"""Faults on NCCL: `python -m tests.on_gpu.faults [captured]`. Two ranks share a GPU; each fault ends both, explained.

Prints one line per fault with the seconds from the fault until both processes were gone. `captured`: only those that
happen when steps are replayed as CUDA graphs.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from lightning_bucketddp.config import Timeouts

NUM_AT_ONCE = 4
TIMEOUT_S = 15
SIGNAL_AFTER_S = 3
SOON_S = 20


@dataclass(frozen=True)
class Fault:
    """What `rank` does in a step, how the ranks must end, and what the other one must say.

    Every second step is saved in any case; `saves` tells whether the other rank saves when it ends, one more step.
    `captured`: the step is replayed, and the other rank waits in its replay.
    """

    what: str
    exit_codes: tuple[int, int]
    said: str
    after_s: float = 0
    rank: int = 1
    saves: bool = True
    captured: bool = False

    @property
    def batch(self) -> int:
        """The number of the batch in which it happens."""
        return 41 if self.captured else 3

    def run(self) -> bool:
        """Whether both ranks end as they should."""
        with tempfile.TemporaryDirectory() as directory:
            started = [self._start(rank, directory) for rank in range(2)]
            try:
                outputs = [process.communicate(timeout=120)[0] for process in started]
            except subprocess.TimeoutExpired:
                for process in started:
                    process.send_signal(signal.SIGABRT)  # shows all threads
                print(f"FAILED {self.what}: still running\n{[p.communicate()[0][-6000:] for p in started]}")
                return False
            ended_at = time.time()
            seconds = ended_at - float(Path(directory, "fault").read_text()) - self.after_s
            saved = sorted(path.name for path in Path(directory, "saved").glob("*.ckpt"))
            steps = [torch.load(Path(directory, "saved", name), weights_only=True)["global_step"] for name in saved]
        codes = tuple(process.returncode for process in started)
        told = " ".join(outputs[1 - self.rank].split())  # log lines are wrapped
        has_saved = max(steps, default=0) >= self.batch
        is_well = codes == self.exit_codes and self.said in told and has_saved == self.saves and seconds < SOON_S
        is_well &= not self.captured or f"replaying at batch {self.batch}: True" in outputs[1 - self.rank]
        who = f"{'ok' if is_well else 'FAILED'} {self.what} (rank {self.rank}){' while replaying' * self.captured}"
        print(f"{who}: {seconds:.1f} s, exit codes {codes}, saved steps {steps}")
        if not is_well:
            print(outputs[0][-4000:], outputs[1][-4000:], sep="\n--- rank 1 ---\n")
        return is_well

    def _start(self, rank: int, directory: str) -> subprocess.Popen[str]:
        of_rank = {"NODE_RANK": str(rank), "LOCAL_RANK": "0", "NCCL_HOSTID": f"host{rank}"}
        port = str(29720 + FAULTS.index(self))
        of_run = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "NCCL_SOCKET_IFNAME": "lo"}
        arguments = [self.what, str(self.rank), directory, str(self.batch), str(int(self.captured))]
        return subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "tests.on_gpu.faults", *arguments],
            env={**os.environ, **of_run, **of_rank, "PYTHONFAULTHANDLER": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )


FAULTS = [
    Fault("raise", (1, 1), "ValueError: boom"),
    # How it died is not told by every kernel, except to the parent of both.
    Fault("SIGKILL", (1, -signal.SIGKILL), "died: it "),
    Fault("SIGKILL", (-signal.SIGKILL, 1), "died: it ", rank=0),
    # The other one has asked for the optimizer's step already: what is on its device is not to be saved.
    Fault("SIGKILL in backward", (1, -signal.SIGKILL), "step=2.ckpt`, the last that was saved.", saves=False),
    Fault("SIGKILL in backward", (-signal.SIGKILL, 1), "step=2.ckpt`, the last that was saved.", rank=0, saves=False),
    Fault("out of memory in backward", (1, 1), "OutOfMemoryError", saves=False),
    # Rank zero has taken no step, and saves what it has.
    Fault("out of memory in backward", (1, 1), "OutOfMemoryError", rank=0),
    Fault("loop", (1, 1), "Rank 1", after_s=TIMEOUT_S),
    Fault("SIGSTOP", (1, -signal.SIGKILL), "its process is stopped", after_s=TIMEOUT_S),
    Fault("SIGTERM", (143, 143), ""),
    Fault("signal while rank 0 waits in backward", (143, 143), "rank 0 received SIGTERM", after_s=SIGNAL_AFTER_S),
    Fault(
        "signal while rank 0 waits in a group of its own", (143, 143), "rank 0 received SIGTERM", after_s=SIGNAL_AFTER_S
    ),
    Fault("raise", (1, 1), "ValueError: boom", captured=True),
    Fault("SIGKILL", (1, -signal.SIGKILL), "died: it ", captured=True),
    Fault("SIGKILL", (-signal.SIGKILL, 1), "died: it ", rank=0, captured=True),
    Fault("SIGKILL behind a replay", (1, -signal.SIGKILL), "died: it ", captured=True),
    Fault("loop", (1, 1), "Rank 1", after_s=TIMEOUT_S, captured=True),
    Fault("SIGSTOP", (1, -signal.SIGKILL), "its process is stopped", after_s=TIMEOUT_S, captured=True),
    Fault("SIGTERM", (143, 143), "", captured=True),
    Fault(
        *("signal while rank 0 waits in backward", (143, 143), "rank 0 received SIGTERM"),
        after_s=SIGNAL_AFTER_S,
        captured=True,
    ),
]


def train(what: str, rank: int, directory: str, at_batch: int, *, captures: bool) -> None:
    """Train until `rank` does `what`."""
    import pytorch_lightning as pl
    from pytorch_lightning.callbacks import ModelCheckpoint
    from torch import Tensor, nn
    from torch.utils.data import DataLoader, TensorDataset

    from lightning_bucketddp.bindings.trainer_pytorch_lightning import BucketDDPStrategy

    class Model(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layers: Any = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.Linear(256, 1))

        def setup(self, stage: str) -> None:
            self.own_group = torch.distributed.new_group()
            Path(directory, f"pid{self.global_rank}").write_text(str(os.getpid()))

        def on_train_batch_start(self, batch: list[Tensor], batch_idx: int) -> None:
            if batch_idx == at_batch and captures:
                print(f"replaying at batch {batch_idx}: {strategy._state.graphs.num_replayed > 10}", flush=True)
                if self.global_rank == rank and what != "SIGKILL behind a replay":
                    self.fail()

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            is_behind = self.trainer.fit_loop.epoch_loop.batch_idx == at_batch and captures
            if is_behind and self.global_rank == rank and what == "SIGKILL behind a replay":
                self.fail()

        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            if not captures and batch_idx == at_batch:  # a step that reads it is not captured
                if self.global_rank == 0 and "group of its own" in what:
                    ones = torch.ones(1, device=self.device)
                    torch.distributed.all_reduce(ones, group=self.own_group)
                    ones.item()
                if self.global_rank == rank:
                    self.fail()
            loss: Tensor = self.layers(batch[0]).pow(2).mean()
            return loss

        def fail(self) -> None:
            # What another rank has of the step before is whole then (Note: partial step).
            torch.cuda.synchronize()
            Path(directory, "fault").write_text(str(time.time()))
            # In backward: when the gradients of the last layer have arrived, and nothing was exchanged yet.
            if what == "SIGKILL in backward":
                self.layers[2].weight.register_hook(lambda _: os.kill(os.getpid(), signal.SIGKILL))
                return
            if what == "out of memory in backward":
                self.layers[2].weight.register_hook(lambda _: torch.empty(2**45, device=self.device))
                return
            if what == "raise":
                raise ValueError("boom")
            while what == "loop":
                pass
            if what.startswith("signal while rank 0 waits"):
                time.sleep(SIGNAL_AFTER_S)
                os.kill(int(Path(directory, "pid0").read_text()), signal.SIGTERM)
                time.sleep(1000)
            os.kill(os.getpid(), getattr(signal, what.partition(" ")[0]))

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters())

    strategy = BucketDDPStrategy(
        timeout=timedelta(seconds=TIMEOUT_S),
        timeouts=Timeouts(stall_warning_s=2),
        async_checkpoints=True,
        cuda_graphs=captures,
        **({"bucket_cap_mb": 1} if captures else {}),
    )
    trainer = pl.Trainer(
        accelerator="gpu",
        devices=1,
        num_nodes=2,
        strategy=strategy,
        max_epochs=1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[ModelCheckpoint(Path(directory, "saved"), save_on_exception=True, every_n_train_steps=2)],
    )
    trainer.fit(Model(), DataLoader(TensorDataset(torch.randn(4096, 64)), batch_size=16))
    print(json.dumps({"finished": trainer.global_step}))


def main() -> None:
    if len(sys.argv) > 2:
        what, rank, directory, at_batch, captures = sys.argv[1:]
        train(what, int(rank), directory, int(at_batch), captures=captures == "1")
    else:
        faults = [fault for fault in FAULTS if fault.captured or len(sys.argv) == 1]
        with ThreadPoolExecutor(NUM_AT_ONCE) as pool:
            num_failed = sum(not is_well for is_well in pool.map(Fault.run, faults))
        sys.exit(num_failed > 0)


if __name__ == "__main__":
    main()
