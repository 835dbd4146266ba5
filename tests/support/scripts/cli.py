"""The module of `fit.py` with a command line.

LIGHTNING_ROOT=lightning.pytorch RESULTS=directory python cli.py fit --config config.yaml
"""

import os
from importlib import import_module

from fit import Regression, Report

if __name__ == "__main__":
    import_module(f"{os.environ['LIGHTNING_ROOT']}.cli").LightningCLI(
        Regression, save_config_callback=None, trainer_defaults={"callbacks": Report()}
    )
