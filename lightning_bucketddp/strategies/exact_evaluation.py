"""Evaluation in which every sample counts once, where Lightning would repeat some.

Note: all samples first
    Lightning gives each rank a `DistributedSampler`, which repeats samples until all ranks have the same number. It
    takes the number of ranks from the strategy, which answers one for evaluation: the sampler then gives every sample,
    in the order of one process, also through a batch sampler of the user. Of these `data/evaluation` takes those of
    this rank. Data that Lightning does not divide (a sampler that is distributed already,
    `use_distributed_sampler=False`, a stream) stays as it is.
"""

from __future__ import annotations

import io
import os
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import compress
from typing import TYPE_CHECKING, Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torch.utils.data import DistributedSampler

from lightning_bucketddp.comm.collectives import Collectives
from lightning_bucketddp.data.evaluation import Part, divided, share_of, with_selection
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
    """The states of a metric before the batch, or its defaults if it is new or still being made."""

    def __init__(self, metric: Metric, *, is_new: bool = False) -> None:
        self.metric = metric
        defaults = {} if is_new else vars(metric).get("_defaults", {})
        self._states = {name: _copied(getattr(metric, name)) for name in defaults if hasattr(metric, name)}
        self._num_updates: int = 0 if is_new else vars(metric).get("_update_count", 0)

    def restore(self) -> None:
        """Reset the metric to its states before the batch, in a form that all ranks can exchange."""
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
    """Undo the updates of all metrics of torchmetrics inside, and of `logged`, Lightning's results of an epoch.

    `repeats`: otherwise only drop computed values, because other ranks undo updates, and all compute again.
    `keeps_own_values`: keep what is logged for this rank alone, without `sync_dist`.
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
        meta = getattr(states.metric, "meta", None)  # of a result of `self.log`
        if not repeats:
            states.metric._computed = None
        elif not (keeps_own_values and meta is not None and not meta.sync.should):
            states.restore()


def _copied(state: Any) -> Any:
    return state.clone() if isinstance(state, Tensor) else list(state)


def _without_batch(after: Any, before: Any, *, is_joined: bool) -> Any:
    """Return the state `before` of a metric, in the form that the batch has given it on other ranks.

    `is_joined`: a list of more than one element is concatenated before ranks exchange it.
    """
    if isinstance(after, list) and isinstance(before, list):
        is_joined = is_joined and len(after) > 1
        return [*before, *(_emptied(value, is_joined=is_joined) for value in after[len(before) :])]
    if isinstance(after, Tensor) and isinstance(before, Tensor):
        before = before.to(after)
        return (before.expand_as(after) if before.ndim == 0 else before).clone()
    return _copied(before)


def _emptied(value: Any, *, is_joined: bool) -> Any:
    """Return an empty substitute for `value` in a list, so that all ranks exchange the same number of elements."""
    if isinstance(value, Tensor) and value.ndim == 0:
        # Exchanged by itself a scalar cannot be empty, and counts as it does with `ddp`.
        return value.reshape(1)[:0] if is_joined else value
    return value[:0] if isinstance(value, Tensor | list | tuple) else value


class ExactEvaluation(RunPart):
    """Divides the data that Lightning prepares for evaluation, undoes repeated batches, and gathers predictions."""

    def __init__(self, trainer: Trainer, collectives: Collectives, options: StrategyOptions) -> None:
        self._trainer = trainer
        self._collectives = collectives
        self._options = options
        self._part = Part(collectives.rank, collectives.world_size, common_seed(collectives))
        self._gathers = options.gather_predictions and collectives.world_size > 1
        self._are_divided: list[bool] = []  # by dataloader of the current prediction
        self._gives_all = False
        self._was_asked = False
        # Lightning has no hooks that know the purpose of a sampler, or the batch and the loader of a step.
        self._replaced = ExitStack()
        self._replaced.callback(replace_preparation(trainer, self._prepare))
        val_loop = trainer.fit_loop.epoch_loop.val_loop
        for loop in (val_loop, trainer.validate_loop, trainer.test_loop):
            self._replaced.callback(replace_step(loop, partial(self._evaluation_step, loop)))
        self._replaced.callback(replace_step(trainer.predict_loop, self._predict_step))

    def __deepcopy__(self, memo: dict[int, Any]) -> ExactEvaluation:
        return self  # as `StopSignals`

    def close(self) -> None:
        """Leave the Trainer as it was."""
        self._replaced.close()

    def sampler_kwargs(self) -> dict[str, Any] | None:
        """Return the arguments for Lightning's sampler; None: the usual ones, for this rank's data."""
        self._was_asked = True
        return {"num_replicas": 1, "rank": 0, "seed": self._part.seed} if self._gives_all else None

    def _prepare(self, prepare: Callable[..., Any], dataloader: Any, shuffle: bool, mode: Any) -> Any:
        is_exact = mode not in ("train", "predict") and self._options.exact_evaluation
        self._gives_all = self._part.world_size > 1 and (is_exact or mode == "predict")
        self._was_asked = False
        try:
            loader = prepare(with_selection(dataloader) if is_exact else dataloader, shuffle, mode)
            if self._gives_all and self._was_asked:
                # Gathered predictions are put in order by whole batches.
                keeps_batches = self._gathers and mode == "predict"
                loader = divided(loader, self._part, keeps_batches=keeps_batches)
        finally:
            self._gives_all = False
        return loader

    def _evaluation_step(
        self, loop: Any, run: Callable[..., None], batch: Any, batch_idx: int, dataloader_idx: int, dataloader_iter: Any
    ) -> None:
        shares = _repeated_shares(loop, batch_idx, dataloader_idx, dataloader_iter)
        if not shares:
            run(batch, batch_idx, dataloader_idx, dataloader_iter)
            return
        # A rank without batches of its own would log nan for itself, which callbacks of this rank compare.
        has_nothing = all(share.num_own_batches == 0 for share in shares)
        repeats = all(batch_idx >= share.num_own_batches for share in shares)
        with rolled_back(logged_results(self._trainer), repeats=repeats, keeps_own_values=has_nothing):
            run(batch, batch_idx, dataloader_idx, dataloader_iter)

    def _predict_step(
        self, run: Callable[..., None], batch: Any, batch_idx: int, dataloader_idx: int, dataloader_iter: Any
    ) -> None:
        shares = _repeated_shares(self._trainer.predict_loop, batch_idx, dataloader_idx, dataloader_iter)
        if shares and all(batch_idx >= share.num_own_batches for share in shares):
            # The step runs for its collectives, without callbacks, which might write its predictions.
            predict_unseen(self._trainer, batch, batch_idx, dataloader_idx)
        else:
            run(batch, batch_idx, dataloader_idx, dataloader_iter)

    def begin_prediction(self) -> None:
        if self._gathers:
            self._are_divided = divided_loaders(self._trainer.predict_loop)
            # Lightning returns none where it has launched processes.
            if self._options.start_method != "popen":
                return_predictions(self._trainer)

    def end_prediction(self) -> None:
        loop = self._trainer.predict_loop
        if self._gathers and loop.return_predictions:
            by_loader = [loop.predictions] if loop.num_dataloaders == 1 else loop.predictions
            gather_predictions(list(compress(by_loader, self._are_divided)), self._collectives)


def divided_loaders(loop: Any) -> list[bool]:
    """Return for each dataloader of a prediction whether we have divided it; raise if the user's sampler has."""
    loaders = combined_loader(loop).flattened
    for number, loader in enumerate(loaders):
        # The sampler in the batch sampler comes first: Lightning's, which remembers the indices, is beside it.
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


def _repeated_shares(loop: Any, batch_idx: int, dataloader_idx: int, dataloader_iter: Any) -> list[Any]:
    """Return this rank's shares of the data in a step in which some rank repeats a batch; otherwise none."""
    if dataloader_iter is not None:
        return []
    combined = combined_loader(loop)
    # In other modes a step takes a batch of each loader that has one left.
    loaders = [combined.flattened[dataloader_idx]] if mode_of(combined) == "sequential" else combined.flattened
    shares = [share_of(loader) for loader in loaders]
    is_whole = any(share is None or batch_idx < share.num_whole_rounds for share in shares)
    return [] if is_whole else shares


def common_seed(collectives: Collectives) -> int:
    """Return the seed of rank zero; other ranks may have another one."""
    state = torch.default_generator.get_state().numpy().tobytes()
    seed: int = collectives.broadcast_json(int(os.environ.get("PL_GLOBAL_SEED", zlib.crc32(state))))
    return seed


def gather_predictions(predictions: list[list[Any]], collectives: Collectives) -> None:
    """On rank zero, replace its own `predictions`, by dataloader and batch, by those of all ranks.

    Rank r has batches r, r + W, ... of each dataloader. They are sent one by one, so that rank zero holds no more than
    one batch besides the result.
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
    # Cloned, because torch would save the whole tensor of which one is a view.
    torch.save(apply_to_collection(value, Tensor, torch.clone), buffer)
    raw = torch.frombuffer(buffer.getbuffer(), dtype=torch.uint8)
    hosts.send(torch.tensor([raw.numel()]), destination=0)
    hosts.send(raw, destination=0)


def _receive(hosts: Collectives, *, source: int) -> Any:
    size = torch.empty(1, dtype=torch.int64)
    hosts.receive(size, source=source)
    raw = torch.empty(int(size), dtype=torch.uint8)
    hosts.receive(raw, source=source)
    # From a process of the same run, which is trusted, and may send objects of the user's.
    return torch.load(io.BytesIO(raw.numpy().tobytes()), weights_only=False)
