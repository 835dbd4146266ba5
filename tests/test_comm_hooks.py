"""torch's communication hooks run unmodified, on gloo too."""

from __future__ import annotations

import pytest

from tests.jobs import comm_hooks
from tests.ranks import run_on_ranks

# Compressing hooks divide and round in their own order.
TOLERANCE = {"allreduce": 0.0, "fp16": 1e-4, "fp16_wrapper": 1e-4, "power_sgd": 1e-6, "fp16_power_sgd": 5e-3}


@pytest.mark.parametrize("hook_name", list(comm_hooks.HOOKS))
def test_a_hook_gives_what_it_gives_in_torch_ddp(hook_name: str) -> None:
    for distance in run_on_ranks(comm_hooks.distance_from_torch_ddp, hook_name=hook_name):
        assert distance <= TOLERANCE[hook_name]


def test_post_local_sgd_averages_in_its_subgroup() -> None:
    assert run_on_ranks(comm_hooks.post_local_sgd_averages_locally) == [True, False]


def test_unused_parameters_are_known_beside_a_hook() -> None:
    run_on_ranks(comm_hooks.unused_parameters_with_a_hook)
