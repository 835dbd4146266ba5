"""Counts the collectives in a process group that are not ours."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class ForeignCollectives:
    """Counts what others launch in `group`, by its sequence number, which advances with each collective.

    `num_seen` are those up to the last call of anything here. Only differences mean something: what was launched before
    the first call is counted, ours or not.

    Args:
        group: a `ProcessGroup`; None: there is nothing to count.
    """

    def __init__(self, group: Any) -> None:
        self.num_seen = 0
        self._group = group
        self._counted_up_to = 0

    def count(self) -> int:
        """Return how many there were so far."""
        launched = self._num_launched()
        self.num_seen += launched - self._counted_up_to
        self._counted_up_to = launched
        return self.num_seen

    @contextmanager
    def left_out(self) -> Iterator[None]:
        """Leave out what is launched inside: it is ours. Not to be nested."""
        self.count()
        try:
            yield
        finally:
            self._counted_up_to = self._num_launched()

    def _num_launched(self) -> int:
        if self._group is None:
            return 0
        try:
            return int(self._group._get_sequence_number_for_group())
        except RuntimeError:  # a backend that does not count
            self._group = None
            return self._counted_up_to
