"""A gradient that is divided among the ranks can be changed element by element; all else is refused."""

from __future__ import annotations

from tests.support.jobs.changed_gradients import CHANGES, change
from tests.support.ranks import run_on_ranks


def test_a_change_is_what_it_is_without_sharding_or_refused() -> None:
    refused = {"cumsum_", "renorm_", "t_", "data", "addmm_", "addmm_ with itself", "baddbmm_", "permuted", "sort"}
    refused |= {"twice itself", "index_add_"}
    for outcomes in run_on_ranks(change):
        assert outcomes == {name: "refused" if name in refused else "the same" for name in CHANGES}
