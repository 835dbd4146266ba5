"""Faults on NCCL: `python -m tests.on_gpu.faults`. Two ranks share a GPU; each fault must end both and be explained.

Prints one line per fault with the seconds from the fault until both processes were gone.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from lightning_bucketddp.config import Timeouts

TIMEOUT_S = 15
SIGNAL_AFTER_S = 3
SOON_S = 20


@dataclass(frozen=True)
class Fault:
    """What `rank` does in its fourth step, how the ranks must end, and what the other one must say.

    Steps 2 and 4 are saved in any case; `saves` tells whether the other rank saves when it ends, in step 3 or 4.
    """

    what: str
    exit_codes: tuple[int, int]
    said: str
    after_s: float = 0
    rank: int = 1
    saves: bool = True

    def run(self) -> bool:
        """Whether both ranks end as they should."""
        with tempfile.TemporaryDirectory() as directory:
            started = [self._start(rank, directory) for rank in range(2)]
            try:
                outputs = [process.communicate(timeout=120)[0] for process in started]
            except subprocess.TimeoutExpired:
                for process in started:
                    process.kill()
                print(f"FAILED {self.what}: still running\n{[p.communicate()[0][-3000:] for p in started]}")
                return False
            ended_at = time.time()
            seconds = ended_at - float(Path(directory, "fault").read_text()) - self.after_s
            saved = sorted(path.name for path in Path(directory, "saved").glob("*.ckpt"))
            steps = [torch.load(Path(directory, "saved", name), weights_only=True)["global_step"] for name in saved]
        codes = tuple(process.returncode for process in started)
        told = outputs[1 - self.rank]
        has_saved = max(steps, default=0) > 2
        is_well = codes == self.exit_codes and self.said in told and has_saved == self.saves and seconds < SOON_S
        who = f"{'ok' if is_well else 'FAILED'} {self.what} (rank {self.rank})"
        print(f"{who}: {seconds:.1f} s, exit codes {codes}, saved steps {steps}")
        if not is_well:
            print(outputs[0][-4000:], outputs[1][-4000:], sep="\n--- rank 1 ---\n")
        return is_well

    def _start(self, rank: int, directory: str) -> subprocess.Popen[str]:
        of_rank = {"NODE_RANK": str(rank), "LOCAL_RANK": "0", "NCCL_HOSTID": f"host{rank}"}
        of_run = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29713", "NCCL_SOCKET_IFNAME": "lo"}
        return subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "tests.on_gpu.faults", self.what, str(self.rank), directory],
            env={**os.environ, **of_run, **of_rank},
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
]


def train(what: str, rank: int, directory: str) -> None:
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

        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            if batch_idx == 3 and self.global_rank == 0 and "group of its own" in what:
                ones = torch.ones(1, device=self.device)
                torch.distributed.all_reduce(ones, group=self.own_group)
                ones.item()
            if batch_idx == 3 and self.global_rank == rank:
                # What another rank has of the step before is whole then (Note: partial step).
                torch.cuda.synchronize()
                Path(directory, "fault").write_text(str(time.time()))
                if what == "SIGKILL in backward":
                    # When the gradients of the last layer have arrived, and nothing was exchanged yet.
                    self.layers[2].weight.register_hook(lambda _: os.kill(os.getpid(), signal.SIGKILL))
                    return self.layers(batch[0]).pow(2).mean()
                if what == "out of memory in backward":
                    self.layers[2].weight.register_hook(lambda _: torch.empty(2**45, device=self.device))
                    return self.layers(batch[0]).pow(2).mean()
                if what == "raise":
                    raise ValueError("boom")
                while what == "loop":
                    pass
                if what.startswith("signal while rank 0 waits"):
                    time.sleep(SIGNAL_AFTER_S)
                    os.kill(int(Path(directory, "pid0").read_text()), signal.SIGTERM)
                    time.sleep(1000)
                os.kill(os.getpid(), getattr(signal, what))
            loss: Tensor = self.layers(batch[0]).pow(2).mean()
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters())

    strategy = BucketDDPStrategy(
        timeout=timedelta(seconds=TIMEOUT_S), timeouts=Timeouts(stall_warning_s=2), async_checkpoints=True
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
    if len(sys.argv) > 1:
        what, rank, directory = sys.argv[1:]
        train(what, int(rank), directory)
    else:
        num_failed = sum(not fault.run() for fault in FAULTS)
        sys.exit(num_failed > 0)


if __name__ == "__main__":
    main()
