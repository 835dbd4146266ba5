"""Modules that cannot be trained data-parallel are refused in words."""

from __future__ import annotations

import pytest
from torch import nn

from tests.jobs.reducing import setup_error
from tests.ranks import run_on_ranks


def frozen() -> nn.Module:
    return nn.Linear(2, 2).requires_grad_(False)


def lazy() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), nn.LazyLinear(2))


def on_two_devices() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))


def with_many_on_another_device() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), *[nn.Linear(2, 2, device="meta") for _ in range(3)])


@pytest.mark.parametrize(
    ("build", "expected"),
    [
        (frozen, "`Linear` has no parameter that requires a gradient, so there is nothing to train. Unfreeze"),
        (lazy, "`Sequential` has parameters without a shape yet: `1.weight`, `1.bias`. Run one batch through"),
        (on_two_devices, "parameters on several devices: `0.weight`, `0.bias` on cpu; `1.weight`, `1.bias` on meta."),
        (with_many_on_another_device, "`1.weight`, `1.bias`, `2.weight` and 3 more on meta. Each process trains on"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_bad_modules_are_refused(build: object, expected: str) -> None:
    errors = run_on_ranks(setup_error, build=build)
    assert all(expected in error for error in errors), errors
