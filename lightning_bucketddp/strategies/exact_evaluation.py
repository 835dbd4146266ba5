"""Evaluation in which every sample counts once: what Lightning would pad is divided by us.

Note: all samples first
    Lightning gives each rank a `DistributedSampler`, which repeats samples until all ranks have as many. It asks the
    strategy how many ranks there are. For evaluation we say one: its sampler then gives every sample, in the order that
    one process would see, also through a batch sampler of the user's. Of that, `data/evaluation` takes this rank's
    part. What Lightning leaves alone (a sampler that is distributed already, `use_distributed_sampler=False`, a
    stream) we never see.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch.utils.data import DistributedSampler

from lightning_bucketddp.comm.collectives import Collectives
from lightning_bucketddp.data.evaluation import Part, divide, share_of
from lightning_bucketddp.strategies.metric_rollback import rolled_back

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

_TRAINING = "train"
_PREDICTING = "predict"


class ExactEvaluation:
    """Divides the data that Lightning prepares for evaluation, and takes back what is repeated.

    Args:
        pads: leave validation and test to Lightning.
        keeps_batches: deal out whole batches in a prediction, so that it can be put together again.
    """

    def __init__(self, trainer: Trainer, collectives: Collectives, *, pads: bool, keeps_batches: bool) -> None:
        self._trainer: Any = trainer
        self.part = Part(collectives.rank, collectives.world_size, common_seed(collectives))
        self._pads = pads
        self._keeps_batches = keeps_batches
        self._gives_all = False
        self._was_asked = False
        # Nothing else tells for what a sampler is (validation data is prepared in the middle of training), and which
        # batch of which loader a step and its hooks are about.
        self._replaced: list[tuple[Any, str]] = []
        self._replace(self._trainer._data_connector, "_prepare_dataloader", self._prepare)
        fit_loop = self._trainer.fit_loop.epoch_loop.val_loop
        for loop in (fit_loop, self._trainer.validate_loop, self._trainer.test_loop):
            self._replace(loop, "_evaluation_step", self._evaluation_step(loop))
        self._replace(self._trainer.predict_loop, "_predict_step", self._predict_step)

    def _replace(self, owner: Any, name: str, method: Callable[..., Any]) -> None:
        vars(owner)[name] = method
        self._replaced.append((owner, name))

    def close(self) -> None:
        """Leave the Trainer as it was."""
        for owner, name in self._replaced:
            vars(owner).pop(name, None)

    def sampler_kwargs(self) -> dict[str, Any] | None:
        """Return what Lightning shall make the sampler with that it asks for; None: for this rank's data."""
        self._was_asked = True
        return {"num_replicas": 1, "rank": 0, "seed": self.part.seed} if self._gives_all else None

    def _prepare(self, dataloader: Any, shuffle: bool, mode: Any) -> Any:
        connector = self._trainer._data_connector
        self._gives_all = mode != _TRAINING and not (self._pads and mode != _PREDICTING)
        self._was_asked = False
        try:
            loader = type(connector)._prepare_dataloader(connector, dataloader, shuffle, mode)
            if self._gives_all and self._was_asked:
                divide(loader, self.part, keeps_batches=self._keeps_batches and mode == _PREDICTING)
        finally:
            self._gives_all = False
        return loader

    def _evaluation_step(self, loop: Any) -> Callable[..., None]:
        def step(batch: Any, batch_idx: int, dataloader_idx: int, dataloader_iter: Any) -> None:
            run = type(loop)._evaluation_step
            repeated = [] if dataloader_iter is not None else _shares_repeated(loop, batch_idx, dataloader_idx)
            if not repeated:
                run(loop, batch, batch_idx, dataloader_idx, dataloader_iter)
                return
            # One that has nothing of its own would log nan for itself, which callbacks of this rank compare.
            has_nothing = all(share.num_own_batches == 0 for share in repeated)
            with rolled_back(self._trainer._results, keeps_own_values=has_nothing):
                run(loop, batch, batch_idx, dataloader_idx, dataloader_iter)

        return step

    def _predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int, dataloader_iter: Any) -> None:
        loop = self._trainer.predict_loop
        if dataloader_iter is not None or not _shares_repeated(loop, batch_idx, dataloader_idx):
            type(loop)._predict_step(loop, batch, batch_idx, dataloader_idx, dataloader_iter)
            return
        # For collectives in the step. Nobody else is told, because nobody could take back what he writes.
        strategy, module = self._trainer.strategy, self._trainer.lightning_module
        batch = strategy.precision_plugin.convert_input(batch)
        batch = module._on_before_batch_transfer(batch, dataloader_idx=dataloader_idx)
        batch = strategy.batch_to_device(batch, dataloader_idx=dataloader_idx)
        arguments = loop._build_kwargs(batch, batch_idx, dataloader_idx if loop.num_dataloaders > 1 else None)
        strategy.predict_step(*loop._build_step_args_from_hook_kwargs(arguments, "predict_step"))


def divided_loaders(loop: Any) -> list[bool]:
    """Return for each dataloader of a prediction whether we have divided it; what others give, every rank has.

    Raises:
        ValueError: the user's own sampler has divided one.
    """
    loaders = loop._combined_loader.flattened
    for number, loader in enumerate(loaders):
        # Lightning's sampler that remembers the indices is beside it.
        sampler = getattr(getattr(loader, "batch_sampler", None), "sampler", getattr(loader, "sampler", None))
        if isinstance(sampler, DistributedSampler) and share_of(loader) is None:
            raise ValueError(
                f"`gather_predictions=True` puts together what it has divided itself, and dataloader {number} has a"
                f" `{type(sampler).__name__}` already, so nobody knows the order of its samples. Pass the loader"
                " without it; or leave `gather_predictions` out."
            )
    are_divided = [share_of(loader) is not None for loader in loaders]
    if not all(are_divided):
        rank_zero_warn(
            "bucketddp: `gather_predictions=True` returns rank zero's own predictions of a dataloader that every rank"
            " reads in full (`use_distributed_sampler=False`, or a stream without `shard_iterable=True`)."
        )
    return are_divided


def _shares_repeated(loop: Any, batch_idx: int, dataloader_idx: int) -> list[Any]:
    """Return the shares of data that a batch repeats; none: something in it is this rank's own."""
    combined = loop._combined_loader
    # In other modes a step takes a batch of each loader that has one left.
    loaders = [combined.flattened[dataloader_idx]] if combined._mode == "sequential" else combined.flattened
    shares = [share_of(loader) for loader in loaders]
    has_own = any(share is None or batch_idx < share.num_own_batches for share in shares)
    return [] if has_own else shares


def common_seed(collectives: Collectives) -> int:
    """Return the seed of rank zero; others may have been seeded in another way."""
    seed = os.environ.get("PL_GLOBAL_SEED")
    own = zlib.crc32(torch.default_generator.get_state().numpy().tobytes()) if seed is None else int(seed)
    common: int = collectives.broadcast_json(own)
    return common
