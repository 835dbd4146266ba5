"""Evaluation in which every sample counts once: what Lightning would pad is divided by us.

Note: all samples first
    Lightning gives each rank a `DistributedSampler`, which repeats samples until all ranks have as many. It asks the
    strategy how many ranks there are. For evaluation we say one: its sampler then gives every sample, in the order that
    one process would see, also through a batch sampler of the user's. Of that, `data/exact_batches` takes this rank's
    part. What Lightning leaves alone (a sampler that is distributed already, `use_distributed_sampler=False`, a
    stream) we never see.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from lightning_bucketddp.comm.collectives import Collectives
from lightning_bucketddp.data.exact_batches import Part, divide, share_of

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

_TRAINING = "train"
_PREDICTING = "predict"


class PaddedEvaluation:
    """Lightning divides the data, and there is nothing to add."""

    def sampler_kwargs(self) -> dict[str, Any] | None:
        """Return what Lightning shall make the sampler with that it asks for; None: for this rank's data."""
        return None

    def begin(self) -> None:
        """Begin to count batches."""

    def see_batch(self, dataloader_idx: int) -> None:
        """Count a batch of an evaluation."""

    def step(self) -> AbstractContextManager[None]:
        """Return what a step of an evaluation runs in."""
        return nullcontext()

    def take_notes(self) -> list[str]:
        """Return what is new to say about the data, for the log."""
        return []

    def close(self) -> None:
        """Leave the Trainer as it was."""


class ExactEvaluation(PaddedEvaluation):
    """Divides the data that Lightning prepares for evaluation (Note: all samples first).

    Args:
        pads: leave validation and test to Lightning.
        keeps_batches: deal out whole batches in a prediction, so that it can be put together again.
    """

    def __init__(self, trainer: Trainer, collectives: Collectives, *, pads: bool, keeps_batches: bool) -> None:
        self._trainer: Any = trainer
        self._rank, self._world_size = collectives.rank, collectives.world_size
        self._seed = common_seed(collectives)
        self._pads = pads
        self._keeps_batches = keeps_batches
        self._gives_all = False
        self._was_asked = False
        self._num_seen = Counter[int]()
        self._repeats = False
        # By the name of a dataloader; empty once it was taken.
        self._notes: dict[str, str] = {}
        # Nothing else tells for what a sampler is: validation data is prepared in the middle of training.
        self._connector: Any = self._trainer._data_connector
        vars(self._connector)["_prepare_dataloader"] = self._prepare

    def take_notes(self) -> list[str]:
        notes = [note for note in self._notes.values() if note]
        self._notes = dict.fromkeys(self._notes, "")
        return notes

    def close(self) -> None:
        vars(self._connector).pop("_prepare_dataloader", None)

    def sampler_kwargs(self) -> dict[str, Any] | None:
        self._was_asked = True
        return {"num_replicas": 1, "rank": 0, "seed": self._seed} if self._gives_all else None

    def _prepare(self, dataloader: Any, shuffle: bool, mode: Any) -> Any:
        prepare = type(self._connector)._prepare_dataloader
        self._gives_all = mode != _TRAINING and not (self._pads and mode != _PREDICTING)
        self._was_asked = False
        try:
            loader = prepare(self._connector, dataloader, shuffle, mode)
            if self._gives_all and self._was_asked:
                self._divide(loader, mode)
        finally:
            self._gives_all = False
        return loader

    def _divide(self, loader: Any, mode: Any) -> None:
        # A prediction is returned, and nothing in it can be taken back.
        is_prediction = mode == _PREDICTING
        part = Part(self._rank, self._world_size, self._seed, repeats=not is_prediction)
        divide(loader, part, keeps_batches=self._keeps_batches and is_prediction)
        name, share = f"{mode.dataloader_prefix}_dataloader", share_of(loader)
        sampler = getattr(share, "sampler", None)
        if is_prediction or sampler is None or len(sampler) % self._world_size == 0 or name in self._notes:
            return
        # Not said now: a progress bar may be on the screen.
        self._notes[name] = (
            f"each of the {len(sampler)} samples of `{name}` was evaluated once, on {self._world_size} ranks"
            " (`exact_evaluation=False` repeats some, as `ddp` does)"
        )

    def begin(self) -> None:
        self._num_seen.clear()

    def see_batch(self, dataloader_idx: int) -> None:
        self._num_seen[dataloader_idx] += 1
        combined = self._trainer._evaluation_loop._combined_loader
        share = share_of(combined.flattened[dataloader_idx])
        # Where each step takes batches of several loaders, some of them may be this rank's own.
        is_alone = combined._mode == "sequential"
        self._repeats = is_alone and share is not None and self._num_seen[dataloader_idx] > share.num_own_batches

    def step(self) -> AbstractContextManager[None]:
        if not self._repeats:
            return nullcontext()
        return _taken_back(self._trainer._results, self._trainer.lightning_module)


def common_seed(collectives: Collectives) -> int:
    """Return the seed of rank zero; others may have been seeded in another way."""
    seed: int = collectives.broadcast_json(int(os.environ.get("PL_GLOBAL_SEED", 0)))
    return seed


@contextmanager
def _taken_back(results: dict[str, Any], module: nn.Module) -> Iterator[None]:
    """Take back what is logged into `results`, and what the metrics of `module` count; collectives take place."""
    from torchmetrics import Metric

    def metrics() -> dict[int, Metric]:
        logged = [result.value for result in results.values()]
        found = [metric for metric in (*results.values(), *logged, *module.modules()) if isinstance(metric, Metric)]
        return {id(metric): metric for metric in found}  # their hashes change with their states

    before = {
        key: {name: _copied(value) for name, value in metric.metric_state.items()} for key, metric in metrics().items()
    }
    yield
    for key, metric in metrics().items():
        states = before.get(key, metric._defaults)
        for name, value in metric.metric_state.items():
            setattr(metric, name, _without_samples(value, states[name]))
        metric._computed = None


def _copied(state: Any) -> Any:
    return state.clone() if isinstance(state, Tensor) else list(state)


def _without_samples(state: Any, before: Any) -> Any:
    """Return the state of a metric `before` it became `state`; one that had nothing keeps dtype and shape of nothing.

    The ranks gather such states, and one that has none at all would not take part.
    """
    if isinstance(state, list) and not before:
        return [value.reshape(-1, *value.shape[1:])[:0] for value in state]
    return _copied(before)
