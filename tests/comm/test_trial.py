"""Trials: what fails on one rank fails on all, whatever the others wait in, and leaves the process group as it was."""

from __future__ import annotations

from tests.support.jobs.trials import COLLECTIVES, attempt
from tests.support.ranks import run_on_ranks


def test_a_trial_fails_on_all_ranks_or_on_none() -> None:
    rank_zero, rank_one = run_on_ranks(attempt, kinds=["memory", "hidden", "other"])
    for name in COLLECTIVES:
        told = "RuntimeError: CUDA out of memory, or that of the host, on rank 1."
        assert rank_zero["memory", name] == rank_zero["hidden", name] == told
        assert rank_one["memory", name] == "RuntimeError: out of memory"
        assert rank_one["hidden", name] == told
        failed = "RuntimeError: Rank 1 has failed in what all ranks were trying. Its own error says why."
        assert (rank_zero["other", name], rank_one["other", name]) == (failed, "KeyError: 'other'")
