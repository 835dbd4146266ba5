"""Jobs that train with a `BucketDDPMonitor`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning_bucketddp.callbacks.lightning_callbacks import BucketDDPMonitor
from tests.scripts import models
from tests.scripts.trainers import SMALL_BUCKETS_MB, like_torchrun, make_trainer
from lightning_bucketddp import BucketDDPStrategy

@like_torchrun()
def try_it(directory: Path) -> None:
    trainer = make_trainer(BucketDDPStrategy(bucket_cap_mb=SMALL_BUCKETS_MB), max_epochs=2, default_root_dir=directory, callbacks=[BucketDDPMonitor(every_n_steps=1)])
    trainer.fit(models.Regression(), models.loader(), models.loader())
