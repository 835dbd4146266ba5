"""Parts of a run: each hook is called, in the order of the list, and one more part is a file and a line."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any
from unittest.mock import patch

from lightning_bucketddp import BucketDDPStrategy
from lightning_bucketddp.part import RunPart
from lightning_bucketddp.strategies.trainer import TrainerStrategy
from tests.support.ranks import run_on_ranks
from tests.support.scripts.models import Regression, loader
from tests.support.scripts.trainers import like_torchrun, make_trainer

CONTRIBUTING = Path(__file__).parents[2] / "CONTRIBUTING.md"
HOOKS = [name for name, _ in inspect.getmembers(RunPart, inspect.isfunction)]


def train_with(part: RunPart, path: Path) -> list[str]:
    """Train, save, test and predict with one more part; return what the strategy says at the end of a training."""
    parts: Any = TrainerStrategy._parts
    with patch.object(TrainerStrategy, "_parts", property(lambda strategy: [*parts.fget(strategy), part])):
        trainer = make_trainer(BucketDDPStrategy(), max_epochs=1)
        said: list[str] = []
        with patch("lightning_bucketddp.strategies.trainer.rank_zero_info", said.append):
            trainer.fit(module := Regression(), loader(), loader())
        trainer.save_checkpoint(path)
        trainer.test(module, loader(), verbose=False)
        trainer.predict(module, loader())
    return said


@like_torchrun()
def hooks_called(path: Path) -> list[str]:
    called: list[str] = []

    class Listening(RunPart):
        def __getattribute__(self, name: str) -> Any:
            if name in HOOKS:
                called.append(name)
            return super().__getattribute__(name)

    train_with(Listening(), path)
    return called


@like_torchrun()
def said_with(code: str, name: str, path: Path) -> list[str]:
    namespace: dict[str, Any] = {}
    exec(code, namespace)
    return train_with(namespace[name](), path)


def test_every_hook_is_called_in_the_order_of_the_class(tmp_path: Path) -> None:
    rank_zero, rank_one = run_on_ranks(hooks_called, path=tmp_path / "saved.ckpt")
    assert rank_zero == rank_one
    assert set(rank_zero) == set(HOOKS)
    of_a_batch = ["inspect_batch", "begin_batch", "before_forward", "weigh", "complete_step"]
    begin = rank_zero.index("inspect_batch")
    assert rank_zero[begin : begin + len(of_a_batch)] == of_a_batch


def test_the_part_of_the_first_change_is_in_the_summary(tmp_path: Path) -> None:
    [code] = re.findall(r'```python\n(   """Which training batch.*?)```', CONTRIBUTING.read_text(), re.DOTALL)
    code = "\n".join(line[3:] for line in code.splitlines())
    [said, _] = run_on_ranks(said_with, code=code, name="LongestBatch", path=tmp_path / "saved.ckpt")
    assert re.search(r"10 optimizer steps;.*; batch \d took longest, \d+\.\d\d s", " ".join(said[-1].split()))
