"""pytorch-forecasting: a temporal fusion transformer on synthetic series."""

from __future__ import annotations

import lightning
import numpy as np
import pandas as pd
import torch
from pytorch_forecasting import QuantileLoss, TemporalFusionTransformer, TimeSeriesDataSet


def train(strategy: str) -> torch.nn.Module:
    table = pd.DataFrame({"time": np.tile(np.arange(60), 8), "series": np.repeat(list("abcdefgh"), 60)})
    table["value"] = np.random.randn(len(table))
    data = TimeSeriesDataSet(
        table,
        time_idx="time",
        target="value",
        group_ids=["series"],
        static_categoricals=["series"],
        time_varying_known_reals=["time"],
        time_varying_unknown_reals=["value"],
        max_encoder_length=20,
        max_prediction_length=5,
    )
    model = TemporalFusionTransformer.from_dataset(data, hidden_size=8, loss=QuantileLoss(), learning_rate=0.01)
    trainer = lightning.Trainer(max_steps=12, accelerator="cpu", devices=2, strategy=strategy, gradient_clip_val=0.1)
    trainer.fit(model, data.to_dataloader(train=True, batch_size=8))
    return model
