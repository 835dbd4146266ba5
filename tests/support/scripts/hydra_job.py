"""The module of `fit.py` as a job of Hydra.

LIGHTNING_ROOT=lightning.pytorch RESULTS=directory python hydra_job.py +strategy._target_=...
"""

from typing import Any

import hydra
from fit import Regression, Report, lightning


@hydra.main(version_base=None, config_path=None)
def main(config: Any) -> None:
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=hydra.utils.instantiate(config.strategy),
        max_epochs=2,
        callbacks=Report(),
        logger=False,
        enable_progress_bar=False,
    )
    trainer.fit(Regression())


if __name__ == "__main__":
    main()
