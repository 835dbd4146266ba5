"""neuralforecast: NHITS on synthetic series."""

from __future__ import annotations

import numpy as np
import pandas as pd
import torch
from neuralforecast import NeuralForecast
from neuralforecast.models import NHITS


def train(strategy: str) -> torch.nn.Module:
    days = pd.date_range("2024-01-01", periods=100)
    series = [pd.DataFrame({"unique_id": str(i), "ds": days, "y": np.random.randn(100).cumsum()}) for i in range(8)]
    model = NHITS(h=7, input_size=14, max_steps=10, batch_size=2, accelerator="cpu", devices=2, strategy=strategy)
    forecast = NeuralForecast(models=[model], freq="D")
    forecast.fit(pd.concat(series))
    return forecast.models[0]
