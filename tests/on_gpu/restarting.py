"""Restarts on NCCL: `python -m tests.on_gpu.restarting [FAULT]`. Three ranks share a GPU; rank 2 fails, and all go on.

Prints one line per fault with the seconds from the fault until all ranks have trained the next step. A process that is
gone is started again at once, as an agent would do it. The weights must be those of a run without a fault.
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
from pathlib import Path
from typing import Any

import torch

NUM_RANKS, NUM_STEPS, FAILS_AT = 3, 64, 41
NOTHING = "nothing"
FAULTS = ["raise", "kill", "raise while steps are replayed", "kill while steps are replayed"]
NUM_AT_ONCE = 2


def start(rank: int, what: str, directory: str) -> subprocess.Popen[str]:
    of_rank = {"NODE_RANK": str(rank), "LOCAL_RANK": "0", "NCCL_HOSTID": f"host{rank}"}
    port = str(29760 + [NOTHING, *FAULTS].index(what))
    of_run = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "NCCL_SOCKET_IFNAME": "lo"}
    with Path(directory, f"said{rank}").open("a") as said:
        return subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "tests.on_gpu.restarting", what],
            env={**os.environ, **of_run, **of_rank, "DIRECTORY": directory},
            stdout=said,
            stderr=subprocess.STDOUT,
            text=True,
        )


def run(what: str, *, within_s: float = 120) -> tuple[Any, str, str]:
    """Return the weights, how long the ranks needed after the fault, and what was said."""
    with tempfile.TemporaryDirectory() as directory:
        ranks = [start(rank, what, directory) for rank in range(NUM_RANKS)]
        deadline = time.monotonic() + within_s
        while any(rank.poll() is None for rank in ranks) and time.monotonic() < deadline:
            for rank, process in enumerate(ranks):
                if process.poll() == -signal.SIGKILL:
                    ranks[rank] = start(rank, what, directory)
            time.sleep(0.05)
        for process in ranks:
            process.kill()
            process.wait()
        said = "".join(f"--- rank {rank}\n{Path(directory, f'said{rank}').read_text()}" for rank in range(NUM_RANKS))
        if any(process.returncode for process in ranks):
            return None, "did not end well", said
        steps = [json.loads(line) for line in Path(directory, "steps").read_text().splitlines()]
        fault = Path(directory, "fault")
        took = ""
        if fault.exists():
            failed_at, ready_at = (float(Path(directory, name).read_text()) for name in ("fault", "ready2"))
            took = f"{max(at for step, at in steps if step == FAILS_AT + 1) - failed_at:.1f} s"
            if ready_at > failed_at:
                took += f", {ready_at - failed_at:.1f} s of them until the new process called `fit`"
        return torch.load(Path(directory, "weights.pt")), took, said


def train(what: str, directory: str) -> None:
    import pytorch_lightning as pl
    from pytorch_lightning.callbacks import ModelCheckpoint
    from torch import Tensor, nn
    from torch.utils.data import DataLoader, TensorDataset

    from lightning_bucketddp.bindings.trainer_pytorch_lightning import BucketDDPStrategy

    class Model(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layers: Any = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.Linear(512, 1))

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            fault = Path(directory, "fault")
            if self.global_rank == 2 and self.global_step == FAILS_AT and what != NOTHING and not fault.exists():
                torch.cuda.synchronize()
                fault.write_text(str(time.time()))
                if what.startswith("kill"):
                    os.kill(os.getpid(), signal.SIGKILL)
                raise ValueError("by chance")

        def on_train_batch_end(self, *args: Any) -> None:
            torch.cuda.synchronize()
            with Path(directory, "steps").open("a") as file:
                file.write(json.dumps([self.global_step, time.time()]) + "\n")

        def training_step(self, batch: list[Tensor]) -> Tensor:
            loss: Tensor = self.layers(batch[0]).pow(2).mean()
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters())

    pl.seed_everything(1)
    trainer = pl.Trainer(
        accelerator="gpu",
        devices=1,
        num_nodes=NUM_RANKS,
        strategy=BucketDDPStrategy(auto_resume=True, max_restarts=2, bucket_cap_mb=1, cuda_graphs="replayed" in what),
        max_steps=NUM_STEPS,
        default_root_dir=directory,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[ModelCheckpoint(Path(directory, "saved"), save_on_exception=True, every_n_train_steps=20)],
    )
    module = Model()
    inputs = torch.randn(4096, 64, generator=torch.Generator().manual_seed(1))
    Path(directory, f"ready{os.environ['NODE_RANK']}").write_text(str(time.time()))
    trainer.fit(module, DataLoader(TensorDataset(inputs), batch_size=16))
    if trainer.is_global_zero:
        torch.save(module.state_dict(), Path(directory, "weights.pt"))


def main() -> None:
    if "DIRECTORY" in os.environ:
        train(sys.argv[1], os.environ["DIRECTORY"])
        return
    chosen = [what for what in FAULTS if not sys.argv[1:] or what in sys.argv[1:]]
    with ThreadPoolExecutor(NUM_AT_ONCE) as pool:
        (expected, _, said), *runs = pool.map(run, [NOTHING, *chosen])
    assert expected is not None, said
    num_failed = 0
    for what, (weights, took, said) in zip(chosen, runs, strict=True):
        is_same = weights is not None and all(torch.equal(weights[name], expected[name]) for name in expected)
        num_failed += not is_same
        print(f"{'ok' if is_same else 'FAILED'} {what}: {took}{'' if is_same else said[-30000:]}", flush=True)
    sys.exit(num_failed > 0)


if __name__ == "__main__":
    main()
