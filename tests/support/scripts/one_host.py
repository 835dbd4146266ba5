"""Jobs that train the module of `fit.py` on ranks that are running already, for comparison."""

from __future__ import annotations

import io
from contextlib import redirect_stdout, suppress
from typing import Any

from lightning.pytorch.cli import LightningCLI

from tests.support.scripts.fit import Regression, weights
from tests.support.scripts.trainers import like_torchrun, make_trainer


@like_torchrun()
def train(*, strategy: str, width: int) -> dict[str, str]:
    """The weights at the end."""
    module = Regression(width)
    make_trainer(strategy, max_epochs=2).fit(module)
    return weights(module)


@like_torchrun()
def train_by_command_line(*, arguments: list[str]) -> dict[str, Any]:
    """What `LightningCLI` has trained with `arguments`."""
    cli = LightningCLI(Regression, args=arguments, save_config_callback=None)
    strategy: Any = cli.trainer.strategy
    return {"bucket_cap_mb": strategy.config.bucket_cap_mb, "weights": weights(cli.model)}


@like_torchrun()
def print_config(*, arguments: list[str]) -> str:
    """What `LightningCLI` prints with `arguments`, which end in `--print_config`."""
    output = io.StringIO()
    with redirect_stdout(output), suppress(SystemExit):
        LightningCLI(Regression, args=arguments, save_config_callback=None)
    return output.getvalue()
