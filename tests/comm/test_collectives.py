"""What is between the ranks, and its end."""

from __future__ import annotations

import pytest

from tests.support.jobs.closing import is_closed_while_a_tensor_is_lent, tensors_held
from tests.support.jobs.json_messages import share_texts
from tests.support.ranks import run_on_ranks


def test_a_group_is_closed_when_gloo_has_let_go_of_all_tensors() -> None:
    # Before that, a thread of gloo's may wait for the interpreter while the interpreter waits for that thread.
    assert run_on_ranks(is_closed_while_a_tensor_is_lent) == [(False, True)] * 2


@pytest.mark.parametrize("operation", ["sum", "gather", "start_gather"])
def test_all_tensors_of_an_operation_are_held(operation: str) -> None:
    for given, held in run_on_ranks(tensors_held, operation=operation):
        assert held == given


def test_short_json_needs_one_round_trip_and_long_json_two() -> None:
    # With its quotation marks a text of 242 characters just fits.
    sizes = [[0, 1], [242, 242], [243, 0], [0, 243], [5000, 300]]
    gathers, broadcasts = [1, 1, 2, 2, 2], [1, 1, 1, 2, 2]
    expected = [
        (["0" * of_0, "1" * of_1], "1" * of_1, [gather, broadcast])
        for (of_0, of_1), gather, broadcast in zip(sizes, gathers, broadcasts, strict=True)
    ]
    assert run_on_ranks(share_texts, num_chars=sizes) == [expected] * 2
