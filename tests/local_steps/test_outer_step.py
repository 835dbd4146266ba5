"""The outer step: torch's SGD with Nesterov momentum on the mean of what islands have changed."""

from __future__ import annotations

from typing import Any

from tests.support.cases import for_each
from tests.support.jobs.outer_steps import refuse_gaps, step_beside_sgd
from tests.support.ranks import run_on_ranks


@for_each("chunk_numbers", [8, 10**6])
@for_each(("world_size", "counted"), [(2, [0, 1]), (2, [1]), (4, [0, 1])])
def test_an_outer_step_is_one_of_sgd_with_nesterov_momentum(
    world_size: int, counted: list[int], chunk_numbers: int
) -> None:
    options: dict[str, Any] = {"num_islands": 2, "counted": counted, "chunk_numbers": chunk_numbers}
    ranks = run_on_ranks(step_beside_sgd, world_size=world_size, **options)
    assert [len(differences) for differences in ranks] == [3] * world_size


def test_a_weight_with_gaps_in_memory_is_refused_by_name() -> None:
    for text in run_on_ranks(refuse_gaps):
        assert text.startswith("`w` does not lie in one piece of memory (its strides are (6, 1)), which")
