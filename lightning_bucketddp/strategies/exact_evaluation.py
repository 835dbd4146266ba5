"""Evaluation in which every sample counts once: what Lightning would pad is divided by us.

Note: all samples first
    Lightning gives each rank a `DistributedSampler`, which repeats samples until all ranks have as many. It asks the
    strategy how many ranks there are. For evaluation we say one: its sampler then gives every sample, in the order that
    one process would see, also through a batch sampler of the user's. Of that, `data/evaluation` takes this rank's
    part. What Lightning leaves alone (a sampler that is distributed already, `use_distributed_sampler=False`, a
    stream) we never see.
"""

from __future__ import annotations

import io
import os
import pickle
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torch.utils.data import DistributedSampler

from lightning_bucketddp.checkpoint.checkpoint_io import safe_globals_allowed
from lightning_bucketddp.comm.collectives import Collectives
from lightning_bucketddp.data.evaluation import Part, divided, share_of
from lightning_bucketddp.part import RunPart
from lightning_bucketddp.processes import rank_zero_warn
from lightning_bucketddp.strategies.options import StrategyOptions
from lightning_bucketddp.trainer_internals import (
    combined_loader,
    logged_results,
    mode_of,
    predict_unseen,
    replace_preparation,
    replace_step,
    return_predictions,
)

if TYPE_CHECKING:
    from lightning.pytorch import Trainer
    from torchmetrics import Metric


class _Before:
    """The states of a metric before the batch; of one that is new, or just being made, its defaults."""

    def __init__(self, metric: Metric, *, is_new: bool = False) -> None:
        self.metric = metric
        defaults = {} if is_new else vars(metric).get("_defaults", {})
        self._states = {name: _copied(getattr(metric, name)) for name in defaults if hasattr(metric, name)}
        self._num_updates: int = 0 if is_new else vars(metric).get("_update_count", 0)

    def restore(self) -> None:
        """Have the metric forget the batch."""
        from torchmetrics.utilities import dim_zero_cat

        metric = self.metric
        was_reset = metric._update_count < self._num_updates
        states = metric._defaults if was_reset else {**metric._defaults, **self._states}
        for name, before in states.items():
            is_joined = metric._reductions.get(name) is dim_zero_cat
            setattr(metric, name, _without_batch(getattr(metric, name), before, is_joined=is_joined))
        metric._computed = None


@contextmanager
def rolled_back(logged: dict[str, Any], *, repeats: bool, keeps_own_values: bool) -> Iterator[None]:
    """Take back what any metric of torchmetrics counts inside, those of `logged`, Lightning's results of an epoch, too.

    `repeats`: otherwise only what a metric has computed, because other ranks take something back, and all compute anew.
    `keeps_own_values`: but for what is logged for this rank alone, without `sync_dist`.
    """
    from torchmetrics import Metric

    before = {id(result): _Before(result) for result in logged.values()}
    set_attribute = Metric.__setattr__

    def set_and_note(metric: Metric, name: str, value: Any) -> None:
        # An update sets its counter before it changes a state.
        if id(metric) not in before:
            before[id(metric)] = _Before(metric)
        set_attribute(metric, name, value)

    Metric.__setattr__ = set_and_note  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        Metric.__setattr__ = set_attribute  # type: ignore[method-assign]
    before.update({id(result): _Before(result, is_new=True) for result in logged.values() if id(result) not in before})
    for states in before.values():
        meta = getattr(states.metric, "meta", None)  # of what `self.log` keeps
        if not repeats:
            states.metric._computed = None
        elif not (keeps_own_values and meta is not None and not meta.sync.should):
            states.restore()


def _copied(state: Any) -> Any:
    return state.clone() if isinstance(state, Tensor) else list(state)


def _without_batch(after: Any, before: Any, *, is_joined: bool) -> Any:
    """Return the state of a metric that was `before`, in the form that the batch has given it on all ranks.

    `is_joined`: a list of more than one element is joined before ranks exchange it.
    """
    if isinstance(after, list) and isinstance(before, list):
        is_joined = is_joined and len(after) > 1
        return [*before, *(_emptied(value, is_joined=is_joined) for value in after[len(before) :])]
    if isinstance(after, Tensor) and isinstance(before, Tensor):
        before = before.to(after)
        return (before.expand_as(after) if before.ndim == 0 else before).clone()
    return _copied(before)


def _emptied(value: Any, *, is_joined: bool) -> Any:
    """Return what stands in a list for `value` that no longer counts, so that all ranks exchange as many elements."""
    if isinstance(value, Tensor) and value.ndim == 0:
        # Exchanged by itself it cannot be empty, and counts as it does with `ddp`.
        return value.reshape(1)[:0] if is_joined else value
    return value[:0] if isinstance(value, Tensor | list | tuple) else value


class ExactEvaluation(RunPart):
    """Divides the data that Lightning prepares for evaluation, takes back what is repeated, and gathers predictions."""

    def __init__(self, trainer: Trainer, collectives: Collectives, options: StrategyOptions) -> None:
        self._trainer = trainer
        self._collectives = collectives
        self._options = options
        self._part = Part(collectives.rank, collectives.world_size, common_seed(collectives))
        # By dataloader of the prediction that runs.
        self._are_divided: list[bool] = []
        self._gives_all = False
        self._was_asked = False
        # Nothing else tells what a sampler is for, and which batch of which loader a step is about.
        self._replaced = ExitStack()
        self._replaced.callback(replace_preparation(trainer, self._prepare))
        val_loop = trainer.fit_loop.epoch_loop.val_loop
        for loop in (val_loop, trainer.validate_loop, trainer.test_loop):
            self._replaced.callback(replace_step(loop, partial(self._evaluation_step, loop)))
        self._replaced.callback(replace_step(trainer.predict_loop, self._predict_step))

    def close(self) -> None:
        """Leave the Trainer as it was."""
        self._replaced.close()

    def sampler_kwargs(self) -> dict[str, Any] | None:
        """Return what Lightning shall make the sampler with that it asks for; None: for this rank's data."""
        self._was_asked = True
        return {"num_replicas": 1, "rank": 0, "seed": self._part.seed} if self._gives_all else None

    def _prepare(self, prepare: Callable[..., Any], dataloader: Any, shuffle: bool, mode: Any) -> Any:
        self._gives_all = mode == "predict" or (mode != "train" and self._options.exact_evaluation)
        self._was_asked = False
        try:
            loader = prepare(dataloader, shuffle, mode)
            if self._gives_all and self._was_asked:
                # A prediction is put together again from whole batches.
                keeps_batches = self._options.gather_predictions and mode == "predict"
                loader = divided(loader, self._part, keeps_batches=keeps_batches)
        finally:
            self._gives_all = False
        return loader

    def _evaluation_step(
        self, loop: Any, run: Callable[..., None], batch: Any, batch_idx: int, dataloader_idx: int, dataloader_iter: Any
    ) -> None:
        repeated = [] if dataloader_iter is not None else _shares_repeated(loop, batch_idx, dataloader_idx)
        if not repeated:
            run(batch, batch_idx, dataloader_idx, dataloader_iter)
            return
        # One that has nothing of its own would log nan for itself, which callbacks of this rank compare.
        has_nothing = all(share.num_own_batches == 0 for share in repeated)
        repeats = _are_repeated_here(repeated, batch_idx)
        with rolled_back(logged_results(self._trainer), repeats=repeats, keeps_own_values=has_nothing):
            run(batch, batch_idx, dataloader_idx, dataloader_iter)

    def _predict_step(
        self, run: Callable[..., None], batch: Any, batch_idx: int, dataloader_idx: int, dataloader_iter: Any
    ) -> None:
        loop = self._trainer.predict_loop
        repeated = [] if dataloader_iter is not None else _shares_repeated(loop, batch_idx, dataloader_idx)
        if repeated and _are_repeated_here(repeated, batch_idx):
            # For collectives in the step. Nobody could take back what others write who see it.
            predict_unseen(self._trainer, batch, batch_idx, dataloader_idx)
        else:
            run(batch, batch_idx, dataloader_idx, dataloader_iter)

    def begin_prediction(self) -> None:
        if self._options.gather_predictions:
            self._are_divided = divided_loaders(self._trainer.predict_loop)
            # Lightning returns none where it has launched processes by itself.
            if self._options.start_method != "popen":
                return_predictions(self._trainer)

    def end_prediction(self) -> None:
        loop = self._trainer.predict_loop
        if self._options.gather_predictions and loop.return_predictions:
            by_loader = [loop.predictions] if loop.num_dataloaders == 1 else loop.predictions
            divided = [batches for batches, is_divided in zip(by_loader, self._are_divided, strict=True) if is_divided]
            gather_predictions(divided, self._collectives)


def divided_loaders(loop: Any) -> list[bool]:
    """Return for each dataloader of a prediction whether we have divided it; raise if the user's sampler has."""
    loaders = combined_loader(loop).flattened
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
    """Return the shares of data that some rank repeats in a round; none: every rank has something of its own."""
    combined = combined_loader(loop)
    # In other modes a step takes a batch of each loader that has one left.
    loaders = [combined.flattened[dataloader_idx]] if mode_of(combined) == "sequential" else combined.flattened
    shares = [share_of(loader) for loader in loaders]
    is_whole = any(share is None or batch_idx < share.num_whole_rounds for share in shares)
    return [] if is_whole else shares


def _are_repeated_here(shares: list[Any], batch_idx: int) -> bool:
    return all(batch_idx >= share.num_own_batches for share in shares)


def common_seed(collectives: Collectives) -> int:
    """Return the seed of rank zero; others may have been seeded in another way."""
    seed = os.environ.get("PL_GLOBAL_SEED")
    own = zlib.crc32(torch.default_generator.get_state().numpy().tobytes()) if seed is None else int(seed)
    common: int = collectives.broadcast_json(own)
    return common


def gather_predictions(predictions: list[list[Any]], collectives: Collectives) -> None:
    """On rank zero, replace its own `predictions`, by dataloader and batch, by those of all ranks.

    Rank r has made batches r, r + W, ... of each dataloader. They are sent one by one, so that rank zero holds the
    result and never more than one batch beside it.
    """
    hosts = collectives.host_group()
    nums_by_rank: list[list[int]] = hosts.gather_json([len(batches) for batches in predictions])
    for loader, own in enumerate(predictions):
        nums = [nums[loader] for nums in nums_by_rank]
        gathered = []
        for at, rank in ((at, rank) for at in range(max(nums)) for rank, num in enumerate(nums) if at < num):
            if rank == hosts.rank:
                gathered.append(own[at])
                if rank != 0:
                    _send(own[at], hosts)
            elif hosts.rank == 0:
                gathered.append(_receive(hosts, source=rank))
        own[:] = gathered
    collectives.close_host_groups()


def _send(value: Any, hosts: Collectives) -> None:
    buffer = io.BytesIO()
    # Of a view, torch would save all that it is a view of.
    torch.save(apply_to_collection(value, Tensor, torch.clone), buffer)
    raw = torch.frombuffer(buffer.getbuffer(), dtype=torch.uint8)
    hosts.send(torch.tensor([raw.numel()]), destination=0)
    hosts.send(raw, destination=0)


def _receive(hosts: Collectives, *, source: int) -> Any:
    size = torch.empty(1, dtype=torch.int64)
    hosts.receive(size, source=source)
    raw = torch.empty(int(size), dtype=torch.uint8)
    hosts.receive(raw, source=source)
    buffer = io.BytesIO(raw.numpy().tobytes())
    try:
        with safe_globals_allowed():
            return torch.load(buffer, weights_only=True)
    except pickle.UnpicklingError:
        # An object of the user's. It comes from a process of the same run, which may do here what it likes anyway.
        buffer.seek(0)
        return torch.load(buffer, weights_only=False)
