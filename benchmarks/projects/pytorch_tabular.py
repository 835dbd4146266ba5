"""pytorch-tabular: an FT-Transformer on a synthetic table."""

from __future__ import annotations

import numpy as np
import pandas as pd
import torch
from pytorch_tabular import TabularModel
from pytorch_tabular.config import DataConfig, OptimizerConfig, TrainerConfig
from pytorch_tabular.models import FTTransformerConfig


def train(strategy: str) -> torch.nn.Module:
    table = pd.DataFrame(np.random.randn(128, 4), columns=["a", "b", "c", "d"])
    table["kind"] = np.random.choice(["x", "y", "z"], len(table))
    table["target"] = table["a"] + table["b"] * (table["kind"] == "x")
    model = TabularModel(
        data_config=DataConfig(target=["target"], continuous_cols=["a", "b", "c", "d"], categorical_cols=["kind"]),
        model_config=FTTransformerConfig(task="regression", input_embed_dim=16, num_heads=4, num_attn_blocks=2),
        optimizer_config=OptimizerConfig(),
        trainer_config=TrainerConfig(
            batch_size=8,
            max_epochs=2,
            accelerator="cpu",
            devices=2,
            load_best=False,
            checkpoints=None,
            early_stopping=None,
            trainer_kwargs={"strategy": strategy},
        ),
    )
    model.fit(train=table)
    return model.model
