"""Settings of users, which are frozen, and validated once."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch

from lightning_bucketddp.wording import list_names

MIB = 2**20

NONFINITE_RESPONSES = ("warn", "raise", "skip")

REDUCE_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "int8": torch.int8}
NAME_OF_DTYPE = {dtype: name for name, dtype in REDUCE_DTYPES.items()}
# How many numbers share a scale in `int8`.
BLOCK_NUMEL = 256

# The value of `bucket_cap_mb` for sizes computed from measurements.
AUTO: Literal["auto"] = "auto"

_DEFAULT_CAP_MB = 25.0
# The first bucket should leave early; the last one, which nothing hides, should be short.
_EDGE_BUCKET_MB = 1.0


@dataclass(frozen=True, kw_only=True)
class ReducerConfig:
    """Settings of a `Reducer`, which are options of the strategy."""

    # A list has the caps of the buckets one by one, in the order in which they leave; its last value repeats.
    # None: 25 MiB. `auto`: 25 at first, then sizes computed from the first backwards.
    bucket_cap_mb: float | Sequence[float] | Literal["auto"] | None = AUTO
    overlap: bool = True
    reduce_dtype: str | None = None
    comm_hook: Callable[..., Any] | None = None  # as torch DDP takes it, `(state, bucket) -> Future[Tensor]`
    comm_state: object = None  # the first argument of `comm_hook`
    on_nonfinite: str | None = "warn"

    def __post_init__(self) -> None:
        caps = self.bucket_cap_mb if isinstance(self.bucket_cap_mb, Sequence) else [self.bucket_cap_mb]
        is_valid = bool(caps) and all(_is_positive_number(cap) for cap in caps)
        if self.bucket_cap_mb not in (None, AUTO) and not is_valid:
            raise ValueError(
                f"`bucket_cap_mb` must be '{AUTO}', a positive number of MiB or a non-empty list of them, got"
                f" {self.bucket_cap_mb!r}. The default is '{AUTO}'."
            )
        if self.reduce_dtype is not None and self.reduce_dtype not in REDUCE_DTYPES:
            raise ValueError(
                f"`reduce_dtype` must be one of {', '.join(REDUCE_DTYPES)}, or a dtype of torch that they stand for,"
                f" got {self.reduce_dtype!r}."
            )
        if self.reduce_dtype is not None and self.comm_hook is not None:
            raise ValueError("`reduce_dtype` and a communication hook both say what travels: pass one of them.")
        if self.on_nonfinite not in (*NONFINITE_RESPONSES, None):
            raise ValueError(
                f"`on_nonfinite` must be one of {', '.join(NONFINITE_RESPONSES)}, or None, got {self.on_nonfinite!r}."
            )

    @property
    def trains_on(self) -> bool:
        """Whether steps are taken also with non-finite gradients."""
        return self.on_nonfinite in ("warn", None)

    @property
    def alignment(self) -> int:
        """Return the multiple, in elements, at which gradients begin in a bucket, so that no two share a block."""
        return BLOCK_NUMEL if self.reduce_dtype == "int8" else 1

    @property
    def caps(self) -> BucketCaps:
        if isinstance(self.bucket_cap_mb, Sequence) and self.bucket_cap_mb != AUTO:
            return BucketCaps(by_position=tuple(int(cap * MIB) for cap in self.bucket_cap_mb), last=None)
        cap = _DEFAULT_CAP_MB if self.bucket_cap_mb in (None, AUTO) else self.bucket_cap_mb
        edge = min(_EDGE_BUCKET_MB, cap)
        return BucketCaps(by_position=(int(edge * MIB), int(cap * MIB)), last=int(edge * MIB))


IslandsOption = Literal["host", "rank"] | int


@dataclass(frozen=True)
class LocalSteps:
    """Train islands of ranks apart, and average their weights now and then (DiLoCo), for slow networks.

    Args:
        steps: How many steps of the optimizers each island takes without the others, before all ranks average the
            changes of the weights.
        islands: Which ranks still average their gradients in each step: those of a `host`, none (`rank`), or those of
            each island, if this is a number of islands of equal size with consecutive ranks.
        outer_lr: Learning rate of the step that all islands take together.
        outer_momentum: Its Nesterov momentum.
    """

    steps: int
    islands: IslandsOption = "host"
    outer_lr: float = 0.7
    outer_momentum: float = 0.9

    def __post_init__(self) -> None:
        if not is_count(self.steps):
            raise ValueError(f"`local_steps` must be a positive number of steps, got {self.steps!r}.")
        if self.islands not in ("host", "rank") and not is_count(self.islands):
            raise ValueError(f"`islands` must be 'host', 'rank' or a positive number of islands, got {self.islands!r}.")
        if not _is_positive_number(self.outer_lr):
            raise ValueError(f"`outer_lr` must be a positive number, got {self.outer_lr!r}.")
        if not _is_number(self.outer_momentum) or not 0 <= self.outer_momentum < 1:
            raise ValueError(f"`outer_momentum` must be a number from 0 to less than 1, got {self.outer_momentum!r}.")


OnDivergence = Literal["raise", "heal", "log"]


@dataclass(frozen=True)
class ReplicaChecks:
    """How often the ranks compare their weights and optimizer state, and what is done if they differ.

    Args:
        every_n_steps: Synchronised backwards between two comparisons, beside the one before each checkpoint; None or 0:
            only then.
        on_divergence: What to do if they differ: `raise` on every rank, `heal` by the values of most ranks, or `log`.
    """

    every_n_steps: int | None = 100
    on_divergence: OnDivergence = "raise"

    def __post_init__(self) -> None:
        number = self.every_n_steps
        if number is not None and (not isinstance(number, int) or isinstance(number, bool) or number < 0):
            raise ValueError(
                "`replica_checks` must be a number of steps, or None to compare replicas only before checkpoints are"
                f" written, got {number!r}."
            )
        if self.on_divergence not in get_args(OnDivergence):
            raise ValueError(
                f"`on_divergence` must be one of {list_names(get_args(OnDivergence))}, got {self.on_divergence!r}."
            )


@dataclass(frozen=True)
class MaxRestarts:
    """How often a fit goes on after a failure, and with how few ranks.

    Args:
        number: How often at most.
        min_ranks: With how many ranks at least, if the others do not return within `Timeouts(rejoin_s=...)`; None: with
            all of them.
    """

    number: int
    min_ranks: int | None = None

    def __post_init__(self) -> None:
        if self.number != 0 and not is_count(self.number):
            raise ValueError(f"`max_restarts` must be 0 or a positive number of restarts, got {self.number!r}.")
        if self.min_ranks is not None and not is_count(self.min_ranks):
            raise ValueError(f"`min_ranks` must be a positive number of ranks, got {self.min_ranks!r}.")


@dataclass(frozen=True)
class Timeouts:
    """How many seconds ranks wait for each other.

    Args:
        start_s: At the start.
        stall_warning_s: Until the rank that is behind, and what it does, is logged.
        stall_s: Until a rank that stands still, and for which others wait, ends the run; None: at `timeout`.
        rejoin_s: After a failure, for one that is started again (`max_restarts`).
    """

    start_s: float = 300.0
    stall_warning_s: float = 30.0
    stall_s: float | None = None
    rejoin_s: float = 300.0

    def __post_init__(self) -> None:
        check_seconds("start_s", self.start_s)
        check_seconds("rejoin_s", self.rejoin_s)
        check_seconds("stall_warning_s", self.stall_warning_s, may_be_endless=True)
        if self.stall_s is not None:
            check_seconds("stall_s", self.stall_s)


@dataclass(frozen=True)
class BucketCaps:
    """Bucket sizes in bytes: by position (the last value repeats), and of the very last bucket if it is special."""

    by_position: tuple[int, ...]
    last: int | None

    def at(self, position: int) -> int:
        return self.by_position[min(position, len(self.by_position) - 1)]


def check_seconds(name: str, seconds: Any, *, may_be_endless: bool = False) -> None:
    """Raise if `seconds`, the value of the option `name`, is not a positive number."""
    if not _is_positive_number(seconds) and not (may_be_endless and seconds == math.inf):
        raise ValueError(f"`{name}` must be a positive number of seconds, got {seconds!r}.")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_positive_number(value: Any) -> bool:
    return _is_number(value) and math.isfinite(value) and value > 0


def is_count(value: Any) -> bool:
    """Return whether `value` is a positive number of something."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
