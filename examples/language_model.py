"""Trains a small GPT, character by character, on the manual that comes with Python.

python examples/language_model.py
python examples/language_model.py --text a_book.txt --max-steps 2000
python examples/language_model.py --shard-optimizer
python examples/language_model.py --accelerator gpu --width 2048 --shard-optimizer
"""

import argparse
from pathlib import Path
from pydoc_data.topics import topics

import torch
from lightning import LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset

from lightning_bucketddp import BucketDDPStrategy


class Block(nn.Module):
    """Attention to the characters before, then a small network on each of them."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.num_heads = num_heads
        self.queries_keys_values = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.network = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        heads = self.queries_keys_values(self.norms[0](x)).unflatten(-1, (3, self.num_heads, -1))
        queries, keys, values = (part.transpose(1, 2) for part in heads.unbind(dim=2))
        seen = nn.functional.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).flatten(start_dim=2))
        return x + self.network(self.norms[1](x))


class CharacterGPT(LightningModule):
    def __init__(self, num_characters: int, *, context: int, width: int = 96, num_blocks: int = 3) -> None:
        super().__init__()
        self.context = context
        self.characters = nn.Embedding(num_characters, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, num_heads=4) for _ in range(num_blocks)))
        self.norm = nn.LayerNorm(width)
        self.losses: list[float] = []

    def forward(self, characters: Tensor) -> Tensor:
        positions = torch.arange(characters.shape[1], device=characters.device)
        x = self.norm(self.blocks(self.characters(characters) + self.positions(positions)))
        # The same weights read characters and write them: a parameter that is used twice in each step.
        return x @ self.characters.weight.T / x.shape[-1] ** 0.5

    def training_step(self, batch: Tensor) -> Tensor:
        loss = cross_entropy(self(batch[:, :-1]).flatten(end_dim=1), batch[:, 1:].flatten())
        self.log("loss", loss, prog_bar=True)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3, betas=(0.9, 0.95))

    @torch.no_grad()
    def write(self, start: Tensor, num_characters: int) -> Tensor:
        """Continue `start`."""
        text = start
        for _ in range(num_characters):
            chances = self(text[None, -self.context :])[0, -1].softmax(dim=-1)
            text = torch.cat([text, torch.multinomial(chances, 1)])
        return text


class Windows(Dataset[Tensor]):
    """Pieces of a text, each with one character more than a model can see."""

    def __init__(self, text: Tensor, context: int) -> None:
        self._windows = text.unfold(0, context + 1, context)

    def __len__(self) -> int:
        return len(self._windows)

    def __getitem__(self, index: int) -> Tensor:
        return self._windows[index]


def memory(trainer: Trainer) -> str:
    """Say how much memory the optimizer's state takes in this process, and how much the GPU has needed for all."""
    state = [value for of_weight in trainer.optimizers[0].state.values() for value in of_weight.values()]
    text = f"optimizer state on rank {trainer.global_rank}: {sum(value.nbytes for value in state) / 2**20:.2f} MiB"
    if torch.cuda.is_initialized():
        text += f", at most in use on its GPU: {torch.cuda.max_memory_allocated() / 2**20:.0f} MiB"
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, help="a file; by default the manual that comes with Python")
    parser.add_argument("--max-steps", type=int, default=400)
    parser.add_argument("--context", type=int, default=64, help="how many characters the model sees")
    parser.add_argument("--width", type=int, default=96, help="numbers for each character, a multiple of 4")
    parser.add_argument("--accelerator", default="cpu")
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--shard-optimizer", action="store_true", help="divide AdamW's state among the ranks")
    arguments = parser.parse_args()

    text = arguments.text.read_text() if arguments.text else "\n".join(topics.values())
    alphabet = sorted(set(text))
    number_of = {character: number for number, character in enumerate(alphabet)}
    numbers = torch.tensor([number_of[character] for character in text])

    seed_everything(0)
    model = CharacterGPT(len(alphabet), context=arguments.context, width=arguments.width)
    trainer = Trainer(
        accelerator=arguments.accelerator,
        devices=arguments.devices,
        # Gradients travel as bf16: half the bytes. They are bf16 nowhere else.
        strategy=BucketDDPStrategy(reduce_dtype="bf16", shard_optimizer=arguments.shard_optimizer),
        gradient_clip_val=1.0,
        max_steps=arguments.max_steps,
        logger=False,
        enable_checkpointing=False,
    )
    trainer.fit(model, DataLoader(Windows(numbers, arguments.context), batch_size=16, shuffle=True))

    if trainer.is_global_zero:
        written = model.eval().write(torch.tensor([number_of["\n"]]), num_characters=300)
        print("".join(alphabet[number] for number in written))
        last = model.losses[-20:]
        print(f"loss: {model.losses[0]:.2f} -> {sum(last) / len(last):.2f}, {memory(trainer)}")


if __name__ == "__main__":
    main()
