"""GluonTS: DeepAR on synthetic series."""

from __future__ import annotations

import numpy as np
import pandas as pd
import torch
from gluonts.dataset.common import ListDataset
from gluonts.torch import DeepAREstimator


def train(strategy: str) -> torch.nn.Module:
    start = pd.Period("2024-01-01", freq="D")
    series = [{"start": start, "target": np.random.randn(100).cumsum()} for _ in range(8)]
    estimator = DeepAREstimator(
        freq="D",
        prediction_length=7,
        hidden_size=16,
        batch_size=8,
        num_batches_per_epoch=8,
        trainer_kwargs={"max_epochs": 2, "accelerator": "cpu", "devices": 2, "strategy": strategy},
    )
    trained = estimator.train_model(ListDataset(series, freq="D"))
    return trained.trained_net
