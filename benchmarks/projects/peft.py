"""PEFT: LoRA adapters on a frozen language model of Hugging Face, with random weights."""

from __future__ import annotations

import lightning
import torch
from peft import LoraConfig, get_peft_model
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel


class Adapted(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        base = GPT2LMHeadModel(GPT2Config(vocab_size=128, n_positions=32, n_embd=32, n_layer=2, n_head=4))
        self.model = get_peft_model(base, LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True))

    def training_step(self, tokens: torch.Tensor, index: int) -> torch.Tensor:
        return self.model(input_ids=tokens, labels=tokens).loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def train(strategy: str) -> torch.nn.Module:
    loader = DataLoader(torch.randint(0, 128, (64, 32)), batch_size=4, shuffle=True)
    model = Adapted()
    trainer = lightning.Trainer(max_epochs=2, accelerator="cpu", devices=2, strategy=strategy, logger=False)
    trainer.fit(model, loader)
    return model
