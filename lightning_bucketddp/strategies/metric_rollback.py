"""What a repeated batch of an evaluation has logged and counted is taken back (Note: rounds)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from torchmetrics import Metric


class _Before:
    """The states of a metric before the batch; of one that is new, or just being made, its defaults."""

    def __init__(self, metric: Metric, *, is_new: bool = False) -> None:
        self._metric = metric
        defaults = {} if is_new else vars(metric).get("_defaults", {})
        self._states = {name: _copied(getattr(metric, name)) for name in defaults if hasattr(metric, name)}
        self._num_updates: int = 0 if is_new else vars(metric).get("_update_count", 0)

    @property
    def is_logged_for_this_rank(self) -> bool:
        """Whether this is a value that `self.log` keeps without `sync_dist`."""
        meta = getattr(self._metric, "meta", None)
        return meta is not None and not meta.sync.should

    def restore(self) -> None:
        """Have the metric forget the batch."""
        from torchmetrics.utilities import dim_zero_cat

        metric = self._metric
        was_reset = metric._update_count < self._num_updates
        states = metric._defaults if was_reset else {**metric._defaults, **self._states}
        for name, before in states.items():
            is_joined = metric._reductions.get(name) is dim_zero_cat
            setattr(metric, name, _without_batch(getattr(metric, name), before, is_joined=is_joined))
        metric._computed = None


@contextmanager
def rolled_back(logged: dict[str, Any], *, keeps_own_values: bool) -> Iterator[None]:
    """Take back what is logged inside, and what any metric of torchmetrics counts there, wherever it is kept.

    Args:
        logged: Lightning's results of the epoch, which are metrics, too.
        keeps_own_values: leave what is logged for this rank alone, without `sync_dist`.
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
        if not (keeps_own_values and states.is_logged_for_this_rank):
            states.restore()


def _copied(state: Any) -> Any:
    return state.clone() if isinstance(state, Tensor) else list(state)


def _without_batch(after: Any, before: Any, *, is_joined: bool) -> Any:
    """Return the state of a metric that was `before`, in the form that the batch has given it on all ranks.

    Args:
        is_joined: a list is joined before ranks exchange it, if it has more than one element.
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
