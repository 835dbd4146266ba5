"""The benchmark of growth: what it fits, and that its command measures against all that it says."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.scaling import Costs, exponent, tables_of
from tests.support.cases import for_each
from tests.support.programs import REPOSITORY, run

SMALLEST = ["--parameters", "4", "8", "--bytes", "1", "--buckets", "2", "64", "--processes", "2"]


@for_each("k", [0.5, 1, 2])
def test_the_exponent_of_a_power_is_found(k: float) -> None:
    assert exponent({size: 3e-6 * size**k for size in (100, 300, 1000, 10000)}) == pytest.approx(k)


def test_tables_tell_the_cost_of_a_unit_at_each_size() -> None:
    total, each = tables_of(
        "parameters", "here", Costs(ours={10: 1e-3, 100: 1e-2}, ddp={10: 1e-3, 100: 0.1}, samples={})
    )
    assert total.title == "ms against here: cost grows as parameters^1.00 (bucketddp) and ^2.00 (best ddp)"
    assert total.rows == {"10": pytest.approx([1, 1]), "100": pytest.approx([10, 100])}
    assert each.title == "us per parameter against here"
    assert each.rows == {"10": pytest.approx([100, 100]), "100": pytest.approx([100, 1000])}


@pytest.mark.long
def test_the_command_measures_against_everything(tmp_path: Path) -> None:
    options = ["--repetitions", "1", "--steps", "1", "--settle", "2", "--json", str(tmp_path / "found.json")]
    command = ["-m", "benchmarks.scaling", *SMALLEST, *options]
    finished = run(*command, root="lightning.pytorch", directory=tmp_path, cwd=REPOSITORY)
    assert finished.returncode == 0, finished.output
    tables = finished.results["found"]["tables"]
    assert all(table["title"] in finished.output for table in tables)
    # Each twice: in all, and for each unit.
    assert [list(table["rows"]) for table in tables[::2]] == [["4", "8"], ["1"], ["2", "64"], ["2"]]
    assert [list(table["rows"]) for table in tables[1::2]] == [["4", "8"], ["1"], ["2", "64"], ["2"]]
    variants = ("no communication", "bucketddp", "ddp")
    assert all(len(tables[0]["samples"][f"{size} {name}"]) == 1 for size in (4, 8) for name in variants)
