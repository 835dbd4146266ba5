"""transformers: a BERT of Hugging Face with random weights that classifies sequences."""

from __future__ import annotations

from typing import Any

import lightning
import torch
from torch.utils.data import DataLoader, TensorDataset
from transformers import BertConfig, BertForSequenceClassification, get_linear_schedule_with_warmup


class Classifier(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        config = BertConfig(
            vocab_size=128, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64
        )
        self.model = BertForSequenceClassification(config)

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        tokens, labels = batch
        return self.model(input_ids=tokens, labels=labels).loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
        schedule = get_linear_schedule_with_warmup(optimizer, num_warmup_steps=4, num_training_steps=16)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def train(strategy: str) -> torch.nn.Module:
    data = TensorDataset(torch.randint(0, 128, (64, 32)), torch.randint(0, 2, (64,)))
    model = Classifier()
    trainer = lightning.Trainer(max_epochs=2, accelerator="cpu", devices=2, strategy=strategy, logger=False)
    trainer.fit(model, DataLoader(data, batch_size=4, shuffle=True))
    return model
