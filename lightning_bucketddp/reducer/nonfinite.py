"""Losses and gradients that are not finite: which rank has them, and what is done about it.

Note: digests
    Behind the used-flags the last bucket carries one element per bucket and two per rank. A rank writes the digest of
    its loss and that of its gradients into its own two, those of its buckets into theirs, and one into the others. A
    digest is finite if, and only if, all numbers behind it are; it is so small that it stays finite in whatever dtype
    travels. A mean over the ranks leaves an element infinite or nan if it was so on one rank, and finite otherwise. So
    all ranks come to the same conclusion from numbers that travel anyway.

    With `raise` and `skip` the host waits for the device and reads them, because the next step depends on it. With
    `warn` on a GPU they are copied without waiting, and read when the next backward begins. By then gradients may have
    been clipped, but the buckets are not filled again yet. A replay is launched first, so that the device does not wait
    for the host: it overwrites gradients, so the names are found in the weights, which are not finite either now.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_bucketddp.comm.step_exchange import zero_in_place
from lightning_bucketddp.config import REDUCE_DTYPES, ReducerConfig
from lightning_bucketddp.reducer.bucket import Bucket
from lightning_bucketddp.reducer.bucket_set import BucketSet, Flags
from lightning_bucketddp.reducer.observer import ReducerStats, is_being_captured
from lightning_bucketddp.replicas.replicas import Replicas
from lightning_bucketddp.wording import list_names, list_ranks, wrap

log = logging.getLogger(__name__)

# The digest of the largest number: a sum over 2,000 buckets fits into fp16, and no factor is too small for its dtype.
_DIGEST_OF_LARGEST = 16.0

_OUTCOMES: dict[str | None, str] = {
    "warn": "It goes into the weights of all ranks; `on_nonfinite='raise'` or `on_nonfinite='skip'` prevents that.",
    "scaler": "The GradScaler skips the step if gradients are not finite, either.",
    "skip": "The optimizer's step is skipped on all ranks.",
}
_WHAT_HELPS = "look at the data of that rank, clip gradients or lower the learning rate"


class NonFiniteError(RuntimeError):
    """A loss or a gradient is infinite or nan."""


@dataclass(eq=False)
class Finiteness:
    """Checks losses and gradients of this rank, and the digests of those of all ranks."""

    replicas: Replicas
    config: ReducerConfig
    where: Callable[[], str] | None = None  # names the current step; None: backwards are counted
    # A GradScaler causes infinite gradients, checks for them and skips their steps: they are left to it.
    has_scaler: bool = False

    def __post_init__(self) -> None:
        config = self.config
        self._collectives = self.replicas.collectives
        self._rank = self._collectives.rank
        self._device = self._collectives.device
        self._response = config.on_nonfinite
        self._checks_gradients = self._response is not None and not self.has_scaler
        # A large number must fit into what travels; with `int8`, into the scale of its block.
        self._travels_as = (
            torch.float32 if config.reduce_dtype == "int8" else REDUCE_DTYPES.get(config.reduce_dtype or "")
        )
        # A hook with a memory (PowerSGD) would repeat what is not finite in all further steps.
        self._spares_hook = config.comm_state is not None and config.on_nonfinite == "skip"
        self.loss_digest: Tensor | None = None
        # The largest number by bucket, without its sign; None: all are finite.
        self._largest: list[Tensor | None] = []
        self.reads_late = config.on_nonfinite == "warn" and self._device.type == "cuda"
        self._on_host: Tensor | None = None
        self._arrived = torch.cuda.Event() if self.reads_late else None  # type: ignore[no-untyped-call]
        # Digests are in flight to `_on_host`: their buckets, and the name of their step.
        self._unread: tuple[BucketSet | None, str] | None = None
        self._nonfinite: dict[int, Tensor] = {}

    def check_loss(self, loss: Tensor) -> None:
        """Check the loss of the next backward, as the user computed it."""
        if self._response is not None and loss.is_floating_point():
            digest = loss.detach().sum() * _scale(loss.dtype)
            # Those of earlier micro-batches, which have not been reduced, count too.
            self.loss_digest = digest if self.loss_digest is None else self.loss_digest + digest

    def begin(self) -> None:
        """Forget what an unfinished backward has left."""
        self._largest.clear()
        # A gradient that is gone cannot be stepped with any more.
        self._nonfinite = {key: param for key, param in self._nonfinite.items() if param.grad is not None}

    def check_bucket(self, bucket: Bucket) -> None:
        """Check what this rank contributes to a bucket."""
        if not self._checks_gradients:
            return
        numbers = bucket.numbers
        self._largest.append(_largest_of(numbers, dtype=self._travels_as or numbers.dtype))
        if self._spares_hook:
            numbers.nan_to_num_(nan=0, posinf=0, neginf=0)

    def write(self, bucket_set: BucketSet) -> None:
        """Write this rank's digests into the flags of the last bucket, which are all one."""
        flags = bucket_set.flags
        if any(largest is not None for largest in self._largest):
            zero = flags.elements.new_zeros(())
            digests = _digests([zero if largest is None else largest for largest in self._largest])
            flags.of_buckets.copy_(digests)
            flags.of_gradients[self._rank].copy_(digests.sum())
        self._largest.clear()
        if self.loss_digest is not None:
            flags.of_losses[self._rank].copy_(self.loss_digest)
            self.loss_digest = None

    def read(self, bucket_set: BucketSet | None, stats: ReducerStats) -> None:
        """Act, now or later, on the digests of all ranks, which came with the gradients.

        Without a `bucket_set`: on the loss of a rank that is alone, whose gradients are not checked.
        """
        if bucket_set is not None:
            digests = bucket_set.flags.digests
        elif self.loss_digest is not None:
            digests = torch.stack([self.loss_digest, torch.zeros_like(self.loss_digest)])
            self.loss_digest = None
        else:
            return
        if self._response is None or is_being_captured(self._device):
            return
        if not self.reads_late:
            self._act_on(digests, bucket_set, stats)
            return
        if self._on_host is None or self._on_host.shape != digests.shape:
            self._on_host = torch.empty(digests.shape, dtype=digests.dtype, pin_memory=digests.is_cuda)
        self._on_host.copy_(digests, non_blocking=True)
        if self._arrived is not None and digests.is_cuda:
            self._arrived.record(torch.cuda.current_stream(digests.device))
        self._unread = bucket_set, self._name_step(stats)

    def catch_up(self, stats: ReducerStats, *, has_gradients: bool = True) -> None:
        """Act on digests that had not arrived; `has_gradients`: their gradients have not been overwritten since."""
        unread, self._unread = self._unread, None
        if unread is None or is_being_captured(self._device):
            return
        if self._arrived is not None:
            self._arrived.synchronize()
        assert self._on_host is not None  # the digests are in flight to it
        bucket_set, where = unread
        self._act_on(self._on_host, bucket_set, stats, where=where, has_gradients=has_gradients)

    def withholds(self, optimizer: Optimizer) -> bool:
        """Return whether `optimizer` must not use its gradients. Ask once: they are expected to be gone then."""
        if not self._nonfinite:
            return False
        params = [id(param) for group in optimizer.param_groups for param in group["params"]]
        withheld = not self._nonfinite.keys().isdisjoint(params)
        for param in params:
            self._nonfinite.pop(param, None)
        return withheld

    def _name_step(self, stats: ReducerStats) -> str:
        return f"backward {stats.num_backwards}" if self.where is None else self.where()

    def _act_on(
        self,
        digests: Tensor,
        bucket_set: BucketSet | None,
        stats: ReducerStats,
        *,
        where: str | None = None,
        has_gradients: bool = True,
    ) -> None:
        if math.isfinite(digests.sum().item()):
            return
        num_buckets = 0 if bucket_set is None else len(bucket_set.buckets)
        flags = Flags(digests.cpu(), num_params=0, num_buckets=num_buckets)
        of_losses, of_gradients = flags.of_losses.tolist(), flags.of_gradients.tolist()
        by_rank = list(zip(self._collectives.global_ranks, of_losses, of_gradients, strict=True))
        losses = {rank: loss for rank, loss, _ in by_rank if not math.isfinite(loss)}
        ranks = [rank for rank, _, digest in by_rank if not math.isfinite(digest) and rank not in losses]
        if not losses and not ranks:
            return  # the sum of finite numbers has overflowed
        stats.num_nonfinite += 1
        is_power_of_ten = str(stats.num_nonfinite).strip("0") == "1"
        is_reported = self._response == "raise" or is_power_of_ten
        # A loss that is not finite has made all gradients so: no names.
        names = []
        if bucket_set is not None and is_reported and not losses:
            names = self._find_names(bucket_set, flags.of_buckets.tolist(), has_gradients=has_gradients)
        if bucket_set is not None and self._response == "skip":  # no optimizer may use these gradients
            for bucket in bucket_set.buckets:
                bucket.clear()
            params = [param for bucket in bucket_set.buckets for param in bucket.params]
            self._nonfinite.update({id(param): param for param in params if param.grad is not None})
        if is_reported:
            self._report(where or self._name_step(stats), _explain(losses, ranks, names), stats.num_nonfinite)

    def _find_names(self, bucket_set: BucketSet, of_buckets: Sequence[float], *, has_gradients: bool) -> list[str]:
        """Return the names of parameters whose gradients are not finite; the reduction has spread these to all ranks.

        All parameters of a bucket are named where they are mixed: by clipping before a late reading, or because a
        communication hook got finite numbers instead.
        """
        names, named = list(self.replicas.parameters), []
        for bucket, plan, digest in zip(bucket_set.buckets, bucket_set.plan, of_buckets, strict=True):
            if not math.isfinite(digest):
                # Without gradients: they have been added to the weights.
                tensors = (has_gradients and bucket.gradients) or bucket.params
                nonfinite = [not tensor.isfinite().all() for tensor in tensors]
                if plan.sharded is not None and nonfinite:
                    of_all_ranks = torch.tensor(nonfinite, dtype=torch.float32, device=self._device)
                    self._collectives.maximum(of_all_ranks)
                    nonfinite = of_all_ranks.tolist()
                found = [i for i, is_nonfinite in zip(plan.members, nonfinite, strict=True) if is_nonfinite]
                named += [names[i] for i in found or plan.members]
        return named

    def _report(self, where: str, what: str, count: int) -> None:
        if self._response == "raise":
            raise NonFiniteError(
                f"Not finite in {where}: {what}. No optimizer has used it, the weights are as they were. To find the"
                f" cause, {_WHAT_HELPS}; or pass `on_nonfinite='skip'` to the strategy to leave such steps out."
            )
        if self._rank == 0:
            so_far = "" if count == 1 else f" ({count} steps so far)"
            outcome = _OUTCOMES["scaler" if self.has_scaler and self._response == "warn" else self._response]
            found = f"bucketddp: not finite in {where}{so_far}: {what}."
            log.warning(wrap(f"{found} {outcome} To find the cause, {_WHAT_HELPS}."))


def _largest_of(numbers: Tensor, *, dtype: torch.dtype) -> Tensor | None:
    """Return the largest absolute value; None: all are known to be finite, also as `dtype`."""
    if numbers.is_cpu:
        # Three times as fast as anything else. It is also infinite where only the squares are too large.
        if numbers.dim() == 1 and torch.dot(numbers, numbers).item() < _greatest(dtype) * _greatest(dtype):
            return None
        low, high = numbers.aminmax() if numbers.numel() else (numbers.sum(), numbers.sum())
        return torch.maximum(-low, high).to(dtype)
    # `isfinite` takes ten times as long.
    return torch.linalg.vector_norm(numbers, math.inf).to(dtype) if numbers.numel() else numbers.sum()


def _digests(largest: Sequence[Tensor]) -> Tensor:
    """Return a small number for each, which is finite if, and only if, that is."""
    dtype = largest[0].dtype
    if all(number.dtype == dtype for number in largest):
        return (torch.stack(list(largest)) * _scale(dtype)).float()
    return torch.stack([(number * _scale(number.dtype)).float() for number in largest])


@functools.cache
def _greatest(dtype: torch.dtype) -> float:
    return float(torch.finfo(dtype).max)


def _scale(dtype: torch.dtype) -> float:
    return _DIGEST_OF_LARGEST / _greatest(dtype)


def _explain(losses: dict[int, float], ranks: Sequence[int], names: Sequence[str]) -> str:
    parts = []
    if losses:
        parts.append("the loss on " + ", ".join(f"rank {rank} ({loss})" for rank, loss in losses.items()))
    if ranks:
        of_names = f" of {list_names(names)}" if names else ""
        parts.append(f"the gradient{'' if len(names) == 1 else 's'}{of_names} on {list_ranks(ranks)}")
    return " and ".join(parts)


class StepWithheld(Exception):
    """Leaves an optimizer's step.

    Lightning runs forward and backward in the optimizer's closure. An exception at its end skips the optimizer,
    gradient clipping and `on_before_optimizer_step`.
    """


def withhold_nonfinite(optimizer: Optimizer, checks: Iterable[Finiteness]) -> None:
    """Raise `StepWithheld` if one of `checks` has found that a gradient of `optimizer` is not finite on some rank."""
    # A list, not a generator: each check forgets what it is asked for.
    if any([check.withholds(optimizer) for check in checks]):  # noqa: C419
        raise StepWithheld


def drop_gradients(optimizer: Optimizer, precision: Any) -> None:
    """Leave nothing of a step that was withheld; `precision` is the plugin, which may have a GradScaler."""
    for gradient in [param.grad for group in optimizer.param_groups for param in group["params"]]:
        if gradient is not None:
            zero_in_place(gradient)  # it may be in a buffer of the program's
    if (scaler := scaler_of(precision)) is not None:
        # The scale stays: this only resets that these gradients may have been unscaled already, for clipping.
        scaler.update(scaler.get_scale())


def scaler_of(precision: Any) -> torch.amp.GradScaler | None:
    """Return the enabled GradScaler of a precision plugin, if it has one."""
    scaler: torch.amp.GradScaler | None = getattr(precision, "scaler", None)
    return scaler if scaler is not None and scaler.is_enabled() else None
