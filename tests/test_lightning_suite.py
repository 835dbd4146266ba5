"""`python -m tests.lightning_suite` runs tests of Lightning with our strategy on every rank, and compares."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.support import warm
from tests.support.programs import REPOSITORY

# Ways in which Lightning's tests ask for `ddp`, and one that does not. The class of each rank goes to a file.
LIGHTNING_TESTS = """
from pathlib import Path

import pytest
from lightning.fabric import Fabric
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.strategies import DDPStrategy


def note(name, strategy):
    with Path(__file__).with_name("seen").open("a") as file:
        file.write(f"{name} {strategy.global_rank} {type(strategy).__module__.partition('.')[0]}\\n")


class Model(BoringModel):
    def on_train_start(self):
        note(self.case, self.trainer.strategy)


def test_fabric():
    Fabric(accelerator="cpu", devices=2, strategy="ddp_fork").launch(lambda fabric: note("fabric", fabric.strategy))


def test_wrapper():
    assert DDPStrategy.__module__ == "lightning.pytorch.strategies.ddp"
    DDPStrategy()


def test_without_ddp():
    Trainer(accelerator="cpu", devices=1, logger=False)


@pytest.mark.parametrize("case", ["name", "class", "script"])  # the last: it leaves a process group
def test_fit(case, tmp_path):
    model = Model()
    model.case = case
    strategies = {"script": "ddp", "name": "ddp_fork_find_unused_parameters_false"}
    strategy = strategies.get(case) or DDPStrategy(start_method="fork")
    options = {"accelerator": "cpu", "devices": 2, "default_root_dir": tmp_path, "logger": False}
    Trainer(fast_dev_run=True, enable_progress_bar=False, strategy=strategy, **options).fit(model)
"""


@pytest.mark.long
def test_lightnings_tests_run_with_our_strategy_on_every_rank(tmp_path: Path) -> None:
    suite = tmp_path / "tests" / "tests_pytorch"
    suite.mkdir(parents=True)
    suite.joinpath("test_small.py").write_text(LIGHTNING_TESTS)
    command = [warm.python(), "-m", "tests.lightning_suite", str(tmp_path), "-q"]
    ended = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=280, check=False)
    cases = ["script", "name", "class", "fabric"]
    packages = ["lightning", "lightning_bucketddp"]
    expected = {f"{case} {rank} {package}" for case in cases for rank in (0, 1) for package in packages}
    assert set(suite.joinpath("seen").read_text().splitlines()) == expected, ended.stdout
    # What fails only with our strategy is told, and is the exit status; what makes no `ddp` strategy does not count.
    assert "4 passed\n1 failed\n" in ended.stdout
    assert "test_small.py::test_wrapper` | failed | " in ended.stdout
    assert "test_without_ddp" not in ended.stdout
    assert ended.returncode == 1


def test_a_directory_without_lightnings_tests_is_refused(tmp_path: Path) -> None:
    from tests.lightning_suite.__main__ import main

    with pytest.raises(SystemExit, match="is no checkout of Lightning"):
        main([str(tmp_path)])
