"""Every way to start processes that Lightning has, as a user does it. No script here imports our package."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

REPOSITORY = Path(__file__).parents[1]
SCRIPTS = REPOSITORY / "tests" / "scripts"
STRATEGY_MODULE_OF = {
    "lightning.pytorch": "lightning_bucketddp.strategies.trainer_lightning",
    "pytorch_lightning": "lightning_bucketddp.strategies.trainer_pytorch_lightning",
}
TIMEOUT_S = 120
# What a process that ends by itself may need for it after its parent has ended.
GRACE_S = 10


@dataclass(frozen=True)
class Run:
    """A program that has ended, with all its processes."""

    returncode: int
    output: str
    results: dict[str, Any]


def run(*command: str | Path, root: str, directory: Path, cwd: Path | None = None) -> Run:
    """Run `python <command>` and wait until no process of it is left, or fail."""
    run_id = str(uuid.uuid4())
    variables = {"LIGHTNING_ROOT": root, "RESULTS": str(directory), "BUCKETDDP_TEST_RUN": run_id}
    output = directory / "output.txt"  # not a pipe, which a process left behind would keep open
    try:
        with output.open("w") as file:
            process = subprocess.run(
                [sys.executable, *map(str, command)],
                env={**os.environ, **variables},
                cwd=cwd or directory,
                stdout=file,
                stderr=subprocess.STDOUT,
                timeout=TIMEOUT_S,
                check=False,
            )
        left_behind = _wait_for_end(run_id)
    finally:
        for pid in _processes(run_id):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    assert left_behind == [], output.read_text()
    results = {file.stem: json.loads(file.read_text()) for file in directory.glob("*.json")}
    return Run(process.returncode, output.read_text(), results)


def _processes(run_id: str) -> list[int]:
    """The processes that have `run_id` in their environment; torchrun's are in no common session or group."""
    variable = f"BUCKETDDP_TEST_RUN={run_id}".encode()
    found = []
    for environment in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            if variable in environment.read_bytes().split(b"\0"):
                found.append(int(environment.parent.name))
    return found


def _wait_for_end(run_id: str) -> list[int]:
    """The processes that do not end by themselves."""
    deadline = time.monotonic() + GRACE_S
    while (processes := _processes(run_id)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return processes


def assert_trained(finished: Run, *, root: str, name: str = "run", bucket_cap_mb: float = 25) -> None:
    """Two processes have trained together with our strategy."""
    assert finished.returncode == 0, finished.output
    ranks = [finished.results[f"{name}.rank{rank}"] for rank in range(2)]
    for rank in ranks:
        assert rank["world_size"] == 2
        assert rank["steps"] == 8
        assert rank["strategy"] == STRATEGY_MODULE_OF[root]
        assert rank["bucket_cap_mb"] == bucket_cap_mb
        assert rank["weights"] == ranks[0]["weights"]
    assert ranks[0]["pid"] != ranks[1]["pid"]


def test_a_script_starts_its_processes(tmp_path: Path) -> None:
    finished = run(SCRIPTS / "fit.py", "bucketddp", root="lightning.pytorch", directory=tmp_path)
    assert_trained(finished, root="lightning.pytorch", name="bucketddp")


def test_a_module_starts_its_processes(tmp_path: Path) -> None:
    finished = run("-m", "tests.scripts.fit", "bucketddp", root="pytorch_lightning", directory=tmp_path, cwd=REPOSITORY)
    assert_trained(finished, root="pytorch_lightning", name="bucketddp")


def test_processes_are_forked_and_spawned_and_hand_their_weights_back(tmp_path: Path) -> None:
    names = ["bucketddp_fork", "bucketddp_spawn"]
    finished = run(SCRIPTS / "fit.py", *names, root="lightning.pytorch", directory=tmp_path)
    for name in names:
        assert_trained(finished, root="lightning.pytorch", name=name)
        assert finished.results[f"{name}.main0"] == finished.results[f"{name}.rank0"]["weights"]


def test_torchrun_starts_the_processes(tmp_path: Path) -> None:
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    finished = run(*torchrun, SCRIPTS / "fit.py", "bucketddp", root="pytorch_lightning", directory=tmp_path)
    assert_trained(finished, root="pytorch_lightning", name="bucketddp")


# --- LightningCLI


def write_config(directory: Path, **changes: Any) -> Path:
    trainer = {"accelerator": "cpu", "devices": 2, "max_epochs": 2, "logger": False, "enable_checkpointing": False}
    config = directory / "config.yaml"
    config.write_text(yaml.safe_dump({"trainer": {**trainer, **changes}}))
    return config


BY_CLASS_PATH = {
    "class_path": "lightning_bucketddp.BucketDDPStrategy",
    "init_args": {"bucket_cap_mb": 5, "find_unused_parameters": True},
}


def test_a_config_names_the_strategy(tmp_path: Path) -> None:
    config = write_config(tmp_path, strategy="bucketddp")
    finished = run(SCRIPTS / "cli.py", "fit", "--config", config, root="lightning.pytorch", directory=tmp_path)
    assert_trained(finished, root="lightning.pytorch")


def test_a_config_gives_the_class_path_and_options(tmp_path: Path) -> None:
    config = write_config(tmp_path, strategy=BY_CLASS_PATH)
    finished = run(SCRIPTS / "cli.py", "fit", "--config", config, root="pytorch_lightning", directory=tmp_path)
    assert_trained(finished, root="pytorch_lightning", bucket_cap_mb=5)
    assert finished.output.count("bucketddp: no effect, and no need to set: `find_unused_parameters`") == 1


def test_print_config_shows_every_option(tmp_path: Path) -> None:
    config = write_config(tmp_path, strategy=BY_CLASS_PATH)
    command = [SCRIPTS / "cli.py", "fit", "--config", config, "--print_config"]
    finished = run(*command, root="lightning.pytorch", directory=tmp_path)
    assert finished.returncode == 0, finished.output
    printed = yaml.safe_load(finished.output[finished.output.index("seed_everything:") :])["trainer"]["strategy"]
    assert printed["class_path"].endswith("BucketDDPStrategy")
    expected = {"bucket_cap_mb": 5.0, "find_unused_parameters": True, "overlap": True, "start_method": "popen"}
    assert {option: printed["init_args"][option] for option in expected} == expected


# --- Failures


def test_ranks_that_differ_end_every_process(tmp_path: Path) -> None:
    config = write_config(tmp_path, strategy="bucketddp")
    command = [SCRIPTS / "cli.py", "fit", "--config", config, "--model.extra_layer_on_rank", "1"]
    finished = run(*command, root="lightning.pytorch", directory=tmp_path)
    assert finished.returncode != 0
    # Once from each rank.
    assert finished.output.count("ReplicaMismatchError: `extra.weight` exists on rank 1 but not on rank 0.") == 2


def test_a_checkpoint_that_cannot_be_written_ends_every_process(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    config = write_config(
        tmp_path,
        strategy="bucketddp_fork",
        enable_checkpointing=True,
        default_root_dir=str(tmp_path / "file" / "below"),
    )
    finished = run(SCRIPTS / "cli.py", "fit", "--config", config, root="lightning.pytorch", directory=tmp_path)
    assert finished.returncode != 0
    assert f"CheckpointWriteError: Could not write checkpoint `{tmp_path}/file/below/" in finished.output
