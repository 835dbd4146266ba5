"""Tests of Lightning that cannot pass with `bucketddp`, and why."""

from __future__ import annotations

# By file and function: all parameters of the test.
DIFFERENCES: dict[str, str] = {}


def difference_of(test: str) -> str | None:
    """Return why `test` cannot pass, if it is one of them."""
    return DIFFERENCES.get(test.partition("[")[0])
