"""What every metric class of torchmetrics gives on several ranks, against one process and `ddp`.

python -m tests.metric_classes [NAME ...] [--ranks 2 3]

Each class that can be made with plain arguments is updated in `test_step` with samples that the ranks cannot share
evenly, logged, and computed.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import platform
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, get_origin

import torch
from lightning.pytorch import LightningModule
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchmetrics import Metric

from tests.support.ranks import RankFailed, run_on_ranks
from tests.support.scripts.evaluations import Numbered
from tests.support.scripts.trainers import like_torchrun, make_trainer

# 5 ranks would divide none of them evenly either; two batches of rank 0, and one that others repeat.
NUM_SAMPLES, BATCH_SIZE = 23, 4
PACKAGES = (
    *("aggregation", "audio", "classification", "clustering", "detection", "image", "multimodal", "nominal"),
    *("regression", "retrieval", "segmentation", "shape", "text"),
)
# Of a class, the first that it takes.
ARGUMENTS: tuple[dict[str, Any], ...] = (
    {},
    {"num_classes": 3},
    {"num_labels": 3},
    {"num_outputs": 1},
    {"num_groups": 2},
    {"task": "multiclass", "num_classes": 3},
    {"beta": 1.0},
    {"num_classes": 3, "beta": 1.0},
    {"num_labels": 3, "beta": 1.0},
    {"min_recall": 0.5},
    {"min_precision": 0.5},
    {"min_sensitivity": 0.5},
    {"min_specificity": 0.5},
    *({f"num_{kind}": 3, name: 0.5} for kind in ("classes", "labels") for name in ("min_recall", "min_precision")),
    *({f"num_{kind}": 3, f"min_{of}": 0.5} for kind in ("classes", "labels") for of in ("sensitivity", "specificity")),
    {"task": "multiclass", "num_classes": 3, "min_recall": 0.5},
    {"task": "multiclass", "num_classes": 3, "min_precision": 0.5},
    {"task": "multiclass", "num_classes": 3, "min_sensitivity": 0.5},
    {"task": "multiclass", "num_classes": 3, "min_specificity": 0.5},
    {"threshold": 0.5},
    {"p": 3.0},
    {"data_range": 1.0},
    {"things": {0, 1}, "stuffs": {2}},
    {"zero_division": 0.0},
)
# One process sees the samples in batches like these; what depends on them cannot be the same on several ranks.
GROUPINGS = (
    torch.arange(NUM_SAMPLES).split(BATCH_SIZE),
    torch.arange(NUM_SAMPLES).split(NUM_SAMPLES),
    *(
        (*torch.arange(0, NUM_SAMPLES, 2).split(size), *torch.arange(1, NUM_SAMPLES, 2).split(size))
        for size in (2, 3, 4)
    ),
)
_BY_BATCHES = "depends on the batches, as with ddp"
GOOD = ("one process", "ddp", _BY_BATCHES)
WORDS = ("the", "cat", "sat", "on", "a", "mat", "and", "looked")


def _noise(indices: Tensor, *shape: int) -> Tensor:
    """Numbers in (0, 1) that depend on the sample alone."""
    each = [torch.rand(shape, generator=torch.Generator().manual_seed(int(index))) for index in indices]
    return torch.stack(each) * 0.98 + 0.01


def _text(index: int, offset: int) -> str:
    return " ".join(WORDS[(index * 3 + offset * at) % len(WORDS)] for at in range(6))


def _inputs(indices: Tensor) -> Iterator[Callable[[], tuple[Any, ...]]]:
    """The inputs of some samples, in every form that some metric takes."""
    noise, pairs = partial(_noise, indices), partial(_noise, indices + 1000)
    one, other = noise(), pairs()
    binary, labels, guesses = (other > 0.5).int(), indices % 3, (one * 3).long()
    yield lambda: (one, binary, indices // 4)
    yield lambda: (one, binary)
    yield lambda: (noise(3).softmax(-1), labels)
    yield lambda: (noise(3), (pairs(3) > 0.5).int())
    yield lambda: (noise(3).softmax(-1), pairs(3).softmax(-1))
    yield lambda: (guesses, labels)
    yield lambda: (guesses.double(), labels)
    yield lambda: (noise(2), labels)
    yield lambda: (one, other)
    yield lambda: (one,)
    yield lambda: (noise(5), other)
    yield lambda: (noise(4, 3), pairs(4, 3))
    yield lambda: (noise(3, 32, 32), pairs(3, 32, 32))
    yield lambda: (noise(1, 192, 192), pairs(1, 192, 192))
    yield lambda: (noise(3, 32, 32),)
    yield lambda: (noise(3, 32, 32), {"ms": pairs(3, 16, 16), "pan": pairs(3, 32, 32)})
    yield lambda: ((noise(3, 8, 8) > 0.5).int(), (pairs(3, 8, 8) > 0.5).int())
    yield lambda: (noise(800), pairs(800))
    yield lambda: (noise(2, 800), pairs(2, 800))
    yield lambda: (noise(5, 4, 2), pairs(5, 4, 2))
    yield lambda: (torch.stack([(one * 3).long(), (other * 4).long(), indices % 5], dim=-1),)
    yield lambda: (torch.stack([guesses, guesses], -1)[:, None], torch.stack([labels, labels], -1)[:, None])
    yield lambda: (one, binary, (indices % 2).long())
    texts, references = ([_text(int(index), offset) for index in indices] for offset in (1, 2))
    yield lambda: (texts, references)
    yield lambda: (texts, [[reference] for reference in references])
    yield lambda: (noise(6, 8), (pairs(6) * 8).long())
    ids = [str(int(index)) for index in indices]
    yield lambda: (
        [{"prediction_text": text, "id": at} for text, at in zip(texts, ids, strict=True)],
        [
            {"answers": {"answer_start": [0], "text": [text]}, "id": at}
            for text, at in zip(references, ids, strict=True)
        ],
    )
    boxes = [torch.tensor([[0.0, 0.0, 10.0, 10.0 + 5 * float(value)]]) for value in one]
    truths = [torch.tensor([[0.0, 0.0, 10.0, 10.0 + 5 * float(value)]]) for value in other]
    yield lambda: (
        [{"boxes": box, "scores": torch.tensor([0.5]), "labels": torch.tensor([1])} for box in boxes],
        [{"boxes": box, "labels": torch.tensor([1])} for box in truths],
    )


def metric_classes() -> dict[str, type[Metric]]:
    """All of torchmetrics, by name; wrappers need another metric, and are not among them."""
    found = {}
    for package in PACKAGES:
        module = importlib.import_module(f"torchmetrics.{package}")
        for name, value in vars(module).items():
            is_class = isinstance(value, type) and get_origin(value) is None  # for Python 3.10, `tuple[int]` is one
            is_metric = is_class and issubclass(value, Metric) and not inspect.isabstract(value)
            if is_metric and not name.startswith("Base"):
                found[f"{package}.{name}"] = value
    return found


def find_usage(cls: type[Metric]) -> tuple[dict[str, Any], int] | str:
    """Arguments to make a metric, and which of `_inputs` it takes; or why there are none.

    Preferably inputs of which each sample counts by itself: nothing else can be the same in other batches.
    """
    reason, usages = "", []
    for arguments in ARGUMENTS:
        for number, _ in enumerate(_inputs(torch.arange(1))):
            try:
                values = [_value(cls(**arguments), number, batches) for batches in GROUPINGS]
            except Exception as error:  # of any kind, for any reason
                reason = reason or f"{type(error).__name__}: {error}".splitlines()[0]
                continue
            usages.append((arguments, number))
            if all(are_close(value, values[0]) for value in values):
                return arguments, number
        if usages:
            break
    return usages[0] if usages else reason[:100]


def _value(metric: Metric, number: int, batches: tuple[Tensor, ...]) -> Any:
    for indices in batches:
        metric.update(*list(_inputs(indices))[number]())
    return apply_to_collection(metric.compute(), Tensor, lambda value: value.double())


class Measures(LightningModule):
    def __init__(self, metric: Metric, number: int) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.metric = metric
        self.number = number
        self.value: Any = None

    def test_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.metric.update(*list(_inputs(batch[0]))[self.number]())

    def on_test_epoch_end(self) -> None:
        self.value = apply_to_collection(self.metric.compute(), Tensor, lambda value: value.double())


@like_torchrun()
def measure(cls: type[Metric], arguments: dict[str, Any], number: int, strategy: str) -> Any:
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    module = Measures(cls(**arguments), number)
    trainer = make_trainer(strategy)
    trainer.test(module, DataLoader(Numbered(NUM_SAMPLES), batch_size=BATCH_SIZE), verbose=False)
    return module.value


def are_close(value: Any, expected: Any) -> bool:
    """Whether two results are the same, but for the order in which numbers were added."""
    if isinstance(value, dict):
        return value.keys() == expected.keys() and all(are_close(value[key], expected[key]) for key in value)
    if isinstance(value, list | tuple):
        return len(value) == len(expected) and all(map(are_close, value, expected))
    if isinstance(value, Tensor):
        if value.shape == expected.shape == (NUM_SAMPLES,):  # each sample's, in the order of the ranks
            value, expected = value.sort().values, expected.sort().values
        return value.shape == expected.shape and torch.allclose(value, expected, rtol=1e-4, atol=1e-6, equal_nan=True)
    return bool(value == expected)


def run(cls: type[Metric], usage: tuple[dict[str, Any], int], world_size: int, strategy: str) -> Any:
    arguments, number = usage
    try:
        job: dict[str, Any] = {"cls": cls, "arguments": arguments, "number": number, "strategy": strategy}
        return run_on_ranks(measure, world_size=world_size, grace_s=2, **job)
    except RankFailed as failed:
        return f"fails: {str(failed).strip().splitlines()[-1][:80]}"


def verdict(cls: type[Metric], usage: tuple[dict[str, Any], int], world_size: int) -> str:
    """How what the ranks give compares with one process, and where it differs with `ddp`."""
    [expected] = run(cls, usage, 1, "bucketddp")
    ours = run(cls, usage, world_size, "bucketddp")
    if not isinstance(ours, str) and all(are_close(value, expected) for value in ours):
        return "one process"
    of_ddp = run(cls, usage, world_size, "ddp")
    if isinstance(ours, str) or isinstance(of_ddp, str):
        told = [value if isinstance(value, str) else "runs" for value in (ours, of_ddp)]
        return f"bucketddp {told[0]}; ddp {told[1]}"
    if are_close(ours[0], of_ddp[0]):
        return "ddp"
    arguments, number = usage
    if not all(are_close(_value(cls(**arguments), number, batches), expected) for batches in GROUPINGS):
        return _BY_BATCHES
    return f"differs: {ours[0]} for {expected} (ddp {of_ddp[0]})".replace("\n", " ")[:160]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.metric_classes", description=__doc__)
    parser.add_argument("names", nargs="*", help="only classes whose names contain one of these")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 3])
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    print(f"{platform.machine()}, Python {platform.python_version()}, torch {torch.__version__}.", file=sys.stderr)
    counts: Counter[str] = Counter()
    for name, cls in metric_classes().items():
        if args.names and not any(part in name for part in args.names):
            continue
        usage = find_usage(cls)
        # Some cannot be made with plain arguments and inputs.
        verdicts = [usage] if isinstance(usage, str) else [verdict(cls, usage, number) for number in args.ranks]
        counts.update(text if text in GOOD else "other" for text in verdicts)
        print(f"| {name} | {' | '.join(verdicts)} |", flush=True)
    print(*counts.items(), sep="\n", file=sys.stderr)


if __name__ == "__main__":
    main()
