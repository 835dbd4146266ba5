"""darts: N-BEATS on a synthetic series."""

from __future__ import annotations

import numpy as np
import torch
from darts import TimeSeries
from darts.models import NBEATSModel


def train(strategy: str) -> torch.nn.Module:
    time = np.arange(200, dtype=np.float32)
    series = TimeSeries.from_values(np.sin(time / 5) + 0.1 * np.random.randn(200).astype(np.float32))
    model = NBEATSModel(
        input_chunk_length=24,
        output_chunk_length=12,
        num_stacks=4,
        layer_widths=32,
        batch_size=16,
        n_epochs=2,
        pl_trainer_kwargs={"accelerator": "cpu", "devices": 2, "strategy": strategy},
    )
    model.fit(series)
    return model.model
