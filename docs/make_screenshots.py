"""Makes the pictures of README.md and docs/where-time-goes.md: records a training, opens its page in a browser.

`make docs-screenshots`, or `python -m docs.make_screenshots`. Needs Debian's chromium and chromium-driver.
"""

from __future__ import annotations

import base64
import tempfile
import time
from pathlib import Path

import torch
from lightning import LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger
from selenium.webdriver import ActionChains, Chrome
from selenium.webdriver.common.by import By
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_bucketddp import BucketDDPStrategy
from lightning_bucketddp.bindings.trainer_lightning import BucketDDPMonitor
from lightning_bucketddp.cli import main
from tests.support.browser import browser, prefer_colour_scheme

IMAGES = Path(__file__).parent / "images"
NUM_RANKS = 3
LATE_RANK, LATE_S = 2, 0.04
WIDTH, MARGIN = 1200, 16


class Reader(LightningModule):
    """A small transformer; one rank is late in every step."""

    def __init__(self) -> None:
        super().__init__()
        torch.set_num_threads(1)
        self.embedding = nn.Embedding(256, 192)
        layer = nn.TransformerEncoderLayer(192, 4, 768, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)
        self.head = nn.Linear(192, 256)

    def training_step(self, batch: list[Tensor], batch_index: int) -> Tensor:
        if self.global_rank == LATE_RANK:
            time.sleep(LATE_S)
        tokens = batch[0]
        logits = self.head(self.layers(self.embedding(tokens)))
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def train(folder: Path) -> Trainer:
    """Train for a moment, and record every second step."""
    trainer = Trainer(
        accelerator="cpu",
        devices=NUM_RANKS,
        strategy=BucketDDPStrategy(bucket_cap_mb=[0.25, 0.75, 2]),
        max_steps=80,
        logger=CSVLogger(folder),
        callbacks=[BucketDDPMonitor(every_n_steps=2)],
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    tokens = torch.randint(256, (960, 40))
    trainer.fit(Reader(), DataLoader(TensorDataset(tokens), batch_size=3))
    return trainer


def take_pictures(page: Path) -> None:
    """What one sees first, what is below, and the wait of one step, in the dark."""
    with browser(width=WIDTH, height=1300) as driver:
        driver.get(page.as_uri())
        driver.implicitly_wait(5)
        driver.find_element(By.CSS_SELECTOR, ".reduction")  # the lanes are there
        _save(driver, "report.png", "header", '[aria-labelledby="one-step"]')
        _save(driver, "timeline.png", '[aria-labelledby="one-step"]', '[aria-labelledby="one-step"]')
        _save(driver, "history-and-plan.png", '[aria-labelledby="history"]', "#sizes")
        prefer_colour_scheme(driver, "dark")
        driver.find_element(By.ID, "zoom-wait").click()
        # In the last lane: the tip is below it.
        reductions = driver.find_elements(By.CSS_SELECTOR, ".rank:last-child .reduction")
        ActionChains(driver).move_to_element(reductions[-1]).perform()
        _save(driver, "wait.png", '[aria-labelledby="one-step"]', "#tip")


def _save(driver: Chrome, name: str, first: str, last: str) -> None:
    """Save what lies between two elements."""
    boxes = [driver.find_element(By.CSS_SELECTOR, selector).rect for selector in (first, last)]
    top = max(boxes[0]["y"] - MARGIN, 0)
    height = max(box["y"] + box["height"] for box in boxes) + MARGIN - top
    clip = {"x": 0, "y": top, "width": WIDTH, "height": height, "scale": 1}
    picture = driver.execute_cdp_cmd("Page.captureScreenshot", {"clip": clip, "captureBeyondViewport": True})
    (IMAGES / name).write_bytes(base64.b64decode(picture["data"]))


def make_all(folder: Path) -> None:
    """Train, and let rank zero take the pictures."""
    trainer = train(folder)
    if trainer.is_global_zero:
        page = folder / "report.html"
        assert main(["report", str(folder), "--output", str(page)]) == 0
        take_pictures(page)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        make_all(Path(temporary))
