"""Which ranks make an island: worked out by hand."""

from __future__ import annotations

import re

import pytest

from lightning_bucketddp.local_steps.islands import IslandsOption, divide


@pytest.mark.parametrize(
    ("option", "members"),
    [
        ("host", [[0, 1], [2, 3]]),
        ("rank", [[0], [1], [2], [3]]),
        (1, [[0, 1, 2, 3]]),
        (2, [[0, 1], [2, 3]]),
        (4, [[0], [1], [2], [3]]),
    ],
)
def test_islands_are_of_equal_size_and_of_ranks_that_follow_each_other(
    option: IslandsOption, members: list[list[int]]
) -> None:
    assert divide(option, hosts=["a", "a", "b", "b"]) == members


@pytest.mark.parametrize(
    ("option", "hosts", "text"),
    [
        (
            3,
            "aabb",
            "`islands=3` cannot divide 4 ranks into islands of equal size. Pass a number that divides 4: 2, 4;",
        ),
        (
            "host",
            "aaab",
            "`islands='host'` needs as many ranks on each host, but there are ranks 0, 1, 2 on host 0; rank",
        ),
        (
            "host",
            "abab",
            "`islands='host'` needs the ranks of each host to follow each other, but there are ranks 0, 2",
        ),
    ],
)
def test_what_cannot_be_divided_is_refused(option: IslandsOption, hosts: str, text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(text)):
        divide(option, hosts=list(hosts))
