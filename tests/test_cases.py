"""Cases that share a test: each is run, and the one that fails is named."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist

from tests.support.cases import for_each
from tests.support.ranks import RankFailed, on_ranks


def test_all_cases_are_run_with_the_fixtures_of_the_test_and_the_one_that_fails_is_named() -> None:
    seen = []

    @for_each("number", [1, 2, 3])
    @for_each(("name", "size"), [("a", 3), ("b", 4)])
    def test(number: int, name: str, size: int, tmp_path: Path) -> None:
        assert number != 2
        seen.append((number, name, size, tmp_path))

    with pytest.raises(AssertionError, match=r"with \{'number': 2\}"):
        test(tmp_path=Path("here"))
    assert seen == [(1, "a", 3, Path("here")), (1, "b", 4, Path("here"))]
    with pytest.raises(AssertionError):
        for_each("number", [])


@on_ranks()
def fails_on_rank_one(tmp_path: Path) -> None:
    (tmp_path / str(dist.get_rank())).touch()
    assert dist.get_rank() == 0


def test_a_test_runs_on_all_ranks_and_fails_if_it_fails_on_one(tmp_path: Path) -> None:
    with pytest.raises(RankFailed, match="--- rank 1 ---") as failed:
        fails_on_rank_one(tmp_path=tmp_path)
    assert "--- rank 0 ---" not in str(failed.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1"]
