"""Trains on ranks that have trouble before they train.

LIGHTNING_ROOT=lightning.pytorch RESULTS=directory python starts.py --rank-1 exit
"""

import argparse
import os
import signal
import sys

from lightning_bucketddp.config import Timeouts

parser = argparse.ArgumentParser()
parser.add_argument("--rank-1", choices=["exit", "kill_launcher"])
parser.add_argument("--fabric", action="store_true")
parser.add_argument("--num-nodes", type=int, default=1)
parser.add_argument("--start-timeout-s", type=float, default=300)
parser.add_argument("--fail-first", action="store_true")
arguments = parser.parse_args()

print("started", flush=True)
if os.environ.get("LOCAL_RANK") == "1" and arguments.rank_1 == "exit":
    sys.exit(3)

from lightning.fabric import Fabric  # noqa: E402

from lightning_bucketddp import BucketDDPStrategy  # noqa: E402
from lightning_bucketddp.bindings.fabric_lightning import BucketDDPStrategy as FabricStrategy  # noqa: E402
from tests.support.scripts.fit import Regression, Report, lightning  # noqa: E402

if os.environ.get("LOCAL_RANK") == "1" and arguments.rank_1 == "kill_launcher":
    os.kill(os.getppid(), signal.SIGKILL)
options = {"accelerator": "cpu", "devices": 2, "num_nodes": arguments.num_nodes}
if arguments.fabric:
    Fabric(strategy=FabricStrategy(timeouts=Timeouts(start_s=arguments.start_timeout_s)), **options).launch()
    sys.exit()
trainer = lightning.Trainer(
    strategy=BucketDDPStrategy(timeouts=Timeouts(start_s=arguments.start_timeout_s)),
    max_epochs=2,
    callbacks=Report(),
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    **options,
)
trainer.fit(Regression())
if arguments.fail_first and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    raise RuntimeError("the first attempt fails")
