"""What tests say about checkpoints that training has saved, or has not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

STATE = ["state_dict", "optimizer_states", "lr_schedulers", "epoch", "global_step"]
ADVICE = "Check the free space, the quota and the permissions of its directory, or save to another one."


def state_in(path: Path) -> dict[str, Any]:
    checkpoint = torch.load(path, weights_only=False)
    return {name: checkpoint[name] for name in STATE}


def assert_same_state(path: Path, expected: Path) -> None:
    torch.testing.assert_close(state_in(path), state_in(expected), rtol=0, atol=0)
