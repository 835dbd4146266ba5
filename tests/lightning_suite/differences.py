"""Tests of Lightning that cannot pass with `bucketddp`, and why."""

from __future__ import annotations

# By file and function: all parameters of the test.
DIFFERENCES: dict[str, str] = {
    "tests/tests_pytorch/overrides/test_distributed.py::test_params_synced_during_nonfit": (
        "the suite permits no new variable in the environment; `GLOO_SOCKET_IFNAME` says which interface gloo takes"
    ),
}


def difference_of(test: str) -> str | None:
    """Return why `test` cannot pass, if it is one of them."""
    return DIFFERENCES.get(test.partition("[")[0])
