"""What people copy from examples/ runs, and trains."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from benchmarks.ports import own_port
from tests.startup.test_clusters import slurm_job
from tests.support.programs import REPOSITORY, run_commands


@dataclass(frozen=True)
class Example:
    """Command lines that run at once in a copy of examples/, the numbers in their output, and what they must be."""

    commands: list[str]
    numbers: str
    have_trained: Callable[..., bool]
    variables: Callable[[], dict[str, str]] = dict


ACCURACY = r"validation accuracy: ([\d.]+)%"
# Two nodes and SLURM train `digits.py`.
EXAMPLES = {
    "language_model": Example(
        ["for s in '' --shard-optimizer; do python language_model.py --max-steps 60 --context 32 $s; done"],
        numbers=r"loss: ([\d.]+) -> ([\d.]+), optimizer state on rank 0: ([\d.]+) MiB",
        have_trained=lambda before, after, state, *sharded: (
            before > 4 and after < 3 and sharded[:2] == (before, after) and 0.49 < sharded[2] / state < 0.51
        ),
    ),
    "gan": Example(
        ["python gan.py --max-epochs 4"],
        numbers=r"distance to the circle: ([\d.]+) -> ([\d.]+)",
        have_trained=lambda before, after: after < before / 2,
    ),
    "fine_tuning": Example(
        ["python fine_tuning.py --pretrain-epochs 1 --max-epochs 4 --unfreeze-at-epoch 2"],
        numbers=r"([\d.]+)% with the backbone frozen, ([\d.]+)% at the end",
        have_trained=lambda frozen, unfrozen: 20 < frozen < unfrozen - 15,  # without unfreezing the head gains 2
    ),
    "exact_evaluation": Example(
        ["python exact_evaluation.py"],
        # On two ranks, on one, and from what they have predicted.
        numbers=r"(?:103 images, accuracy|rank 0: 103, all in order, accuracy) ([\d.]+)%",
        have_trained=lambda ranks, alone, predicted: 50 < ranks == alone == predicted,
    ),
    "cli": Example(
        ["cd cli && python train.py fit -c config.yaml --trainer.max_epochs 2 && cat lightning_logs/*/metrics.csv"],
        numbers=r"^(0\.\d+),1,,\d+$",  # after the second epoch
        have_trained=lambda accuracy: accuracy > 0.8,
    ),
    "fabric_loop": Example(
        ["for n in 1 2; do python fabric_loop.py --checkpoint digits.ckpt --max-epochs $n; done"],
        numbers=rf"epoch (\d+): {ACCURACY}",
        have_trained=lambda one, before, two, after: (one, two) == (1, 2) and 60 < before < after,
    ),
    "notebook": Example(
        ["jupyter-execute --inplace notebook.ipynb && cat notebook.ipynb"],
        # And the page of the run, in a frame.
        numbers=r"it has not seen: ([\d.]+)%(?=[\s\S]*<iframe srcdoc=)",
        have_trained=lambda accuracy: accuracy > 80,
    ),
    "two_nodes": Example(
        [f"./two_nodes.sh {node} 127.0.0.1 --max-epochs 1" for node in range(2)],
        numbers=ACCURACY,
        have_trained=lambda accuracy: accuracy > 80,
        variables=lambda: {"PORT": str(own_port())},
    ),
    "slurm": Example(
        ["bash slurm.sbatch --max-epochs 1"],
        numbers=ACCURACY,
        have_trained=lambda accuracy: accuracy > 80,
        variables=lambda: slurm_job(num_nodes=2),
    ),
}


# They need as much time as all others together, or run what others do: tests/startup/test_clusters.py has SLURM.
LONG = ("gan", "language_model", "notebook", "slurm")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.long) if name in LONG else name for name in EXAMPLES]
)
def test_an_example_trains(name: str, tmp_path: Path) -> None:
    example, copy = EXAMPLES[name], Path(shutil.copytree(REPOSITORY / "examples", tmp_path / "examples"))
    output = run_commands(*example.commands, cwd=copy, variables=example.variables())
    found = re.finditer(example.numbers, output, flags=re.MULTILINE)
    numbers = [float(number) for match in found for number in match.groups()]
    assert numbers, output
    assert example.have_trained(*numbers), numbers


def test_the_list_of_examples_is_complete() -> None:
    text = (REPOSITORY / "examples" / "README.md").read_text()
    listed = set(re.findall(r"\]\(([^)#.][^)#]*)\)", text))
    there = {path for path in (REPOSITORY / "examples").iterdir() if path.name not in ("README.md", "__pycache__")}
    assert {name.partition("/")[0] for name in listed} == {path.name for path in there}
    assert {path.stem for path in there} == {*EXAMPLES, "digits"}
