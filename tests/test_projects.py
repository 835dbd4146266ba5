"""`python -m benchmarks.projects` notices any difference of two trainings; the documents show what it has found."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.projects.__main__ import HEADER, Outcome
from benchmarks.projects.catalog import PROJECTS
from benchmarks.projects.comparison import NUM_RANKS, Training, difference
from benchmarks.projects.training import tensors_in
from tests.support.programs import REPOSITORY


def trained() -> dict[str, torch.Tensor]:
    """Return what a rank ends with after two steps of Adam."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.randn(4, 3)).square().sum().backward()
        optimizer.step()
    return tensors_in(model.state_dict(), "weights") | tensors_in([optimizer.state_dict()], "optimizers")


def written(folder: Path, ranks: list[dict[str, torch.Tensor]]) -> Training:
    folder.mkdir()
    for rank, tensors in enumerate(ranks):
        found = {"tensors": tensors, "num_steps": 2, "num_ranks": NUM_RANKS, "in_torch_ddp": False}
        torch.save(found, folder / f"rank{rank}.pt")
    return Training.load(folder)


def test_the_same_training_is_equal(tmp_path: Path) -> None:
    one, other = (written(tmp_path / name, [trained(), trained()]) for name in ("one", "other"))
    assert str(difference(one, other)) == "equal bit by bit"
    assert {"weights.0.weight", "weights.1.running_var", "optimizers.0.state.0.exp_avg"} <= one.tensors[0].keys()


@pytest.mark.parametrize(
    ("rank", "name"), [(0, "weights.0.weight"), (1, "weights.1.running_mean"), (1, "optimizers.0.state.3.exp_avg_sq")]
)
def test_one_bit_of_one_rank_is_noticed(rank: int, name: str, tmp_path: Path) -> None:
    ranks = [trained(), trained()]
    one = written(tmp_path / "one", ranks)
    ranks[rank][name].view(torch.int32).view(-1)[0] ^= 1
    found = difference(one, written(tmp_path / "other", ranks))
    assert list(found.largest_by_name) == [name]
    assert 0 < found.largest < 1e-6
    assert str(found).startswith(f"1 of {len(ranks[0])} tensors differ, by up to ")
    # Unless the control differs, too, nothing is proven.
    same = difference(one, one)
    assert Outcome(2, len(ranks[0]), same, found, []).is_good
    assert not Outcome(2, len(ranks[0]), found, found, []).is_good
    assert not Outcome(2, len(ranks[0]), same, same, []).is_good


def test_the_page_shows_the_table_of_the_result_file() -> None:
    page = (REPOSITORY / "docs" / "third-party-projects.md").read_text()
    [file] = (REPOSITORY / "benchmarks" / "results").glob("projects_*.md")
    assert file.name in page
    table = file.read_text()[file.read_text().index(HEADER) :].strip()
    assert table in page
    packages = [line.split(" | ")[0].removeprefix("| ") for line in table.splitlines()[2:]]
    assert packages == [project.package for project in PROJECTS]
