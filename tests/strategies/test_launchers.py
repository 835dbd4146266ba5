"""Every way to start processes that Lightning has, as a user does it. No script here imports our package."""

from __future__ import annotations

import platform
import re
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]
from lightning_utilities.core.imports import RequirementCache

from tests.support.programs import REPOSITORY, SCRIPTS, assert_trained, run, weights_on_one_host
from tests.support.ranks import run_on_ranks
from tests.support.scripts.one_host import print_config, train_by_command_line


def test_a_script_starts_its_processes(tmp_path: Path) -> None:
    finished = run(SCRIPTS / "fit.py", "bucketddp", root="lightning.pytorch", directory=tmp_path)
    assert_trained(finished, root="lightning.pytorch", name="bucketddp")
    # Those of Lightning stay in the environment of rank 0, which has launched rank 1.
    assert not [name for name in finished.results["bucketddp.variables0"] if "BUCKETDDP" in name]


def test_a_program_may_destroy_the_process_group_between_two_fits(tmp_path: Path) -> None:
    command = (SCRIPTS / "fit.py", "bucketddp", "ddp", "bucketddp", "--destroy-group")
    finished = run(*command, root="lightning.pytorch", directory=tmp_path)
    assert_trained(finished, root="lightning.pytorch", name="bucketddp")
    assert finished.results["ddp.rank1"]["weights"] == finished.results["bucketddp.rank1"]["weights"]


def test_a_module_starts_its_processes(tmp_path: Path) -> None:
    finished = run(
        "-m", "tests.support.scripts.fit", "bucketddp", root="pytorch_lightning", directory=tmp_path, cwd=REPOSITORY
    )
    assert_trained(finished, root="pytorch_lightning", name="bucketddp")


def test_processes_are_forked_and_spawned_and_hand_their_weights_back(tmp_path: Path) -> None:
    names = ["bucketddp_fork", "bucketddp_spawn"]
    finished = run(SCRIPTS / "fit.py", *names, root="lightning.pytorch", directory=tmp_path)
    for name in names:
        ranks = assert_trained(finished, root="lightning.pytorch", name=name)
        assert [rank["samples"] for rank in ranks] == [16, 16]  # no rank counts those of another one
        assert finished.results[f"{name}.main0"] == finished.results[f"{name}.rank0"]["weights"]
        assert finished.results[f"{name}.variables0"] == []


# This OpenMP cannot end its threads before a fork: forked ranks wait for them, as with ddp, and the log says so.
HAS_OLD_OPENMP = bool(RequirementCache("torch<2.7")) and platform.machine() == "x86_64"


@pytest.mark.parametrize("num_threads", [2, *([1] if HAS_OLD_OPENMP else [])])
def test_forked_ranks_compute_with_threads_as_the_process_did_that_has_launched_them(
    num_threads: int, tmp_path: Path
) -> None:
    finished = run(SCRIPTS / "forked_threads.py", str(num_threads), root="lightning.pytorch", directory=tmp_path)
    hangs = HAS_OLD_OPENMP and num_threads > 1
    assert ("Call `torch.set_num_threads(1)`" in " ".join(finished.output.split())) == hangs, finished.output
    assert (finished.returncode != 0) == hangs == ("in compute" in finished.output), finished.output
    assert sorted(re.findall("rank . has computed .*", finished.output)) == [
        f"rank {rank} has computed [4096, 256]" for rank in range(0 if hangs else 2)
    ]


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
    "class_path": "BucketDDPStrategy",  # as one may name Lightning's own
    "init_args": {
        **{"bucket_cap_mb": 5, "find_unused_parameters": True, "check_reduction": True, "timeout": 90},
        "timeouts": {"stall_s": 60},
        "replica_checks": {"class_path": "lightning_bucketddp.ReplicaChecks", "init_args": {"on_divergence": "heal"}},
        "local_steps": {"steps": 5},
    },
}


def test_a_config_gives_the_class_path_and_options_and_is_printed_with_all(tmp_path: Path) -> None:
    program, root = SCRIPTS / "cli.py", "pytorch_lightning"
    config = write_config(tmp_path, strategy=BY_CLASS_PATH)
    finished = run(program, "fit", "--config", config, "--print_config", root=root, directory=tmp_path)
    assert finished.returncode == 0, finished.output
    text = finished.output[finished.output.index("seed_everything:") :]
    text = text.partition("nanobind:")[0]  # a library of torch 2.15 tells at the end what it has leaked
    printed = yaml.safe_load(text)["trainer"]["strategy"]
    assert printed["class_path"].endswith("BucketDDPStrategy")
    expected = {
        **{"bucket_cap_mb": 5.0, "find_unused_parameters": True, "overlap": True, "timeout": 90},
        "timeouts": {"start_s": 300.0, "stall_warning_s": 30.0, "stall_s": 60.0, "rejoin_s": 300.0},
        "replica_checks": {"every_n_steps": 100, "on_divergence": "heal"},
        "local_steps": {"steps": 5, "islands": "host", "outer_lr": 0.7, "outer_momentum": 0.9},
    }
    assert {option: printed["init_args"][option] for option in expected} == expected
    config.write_text(text)
    finished = run(program, "fit", "--config", config, root=root, directory=tmp_path)
    assert_trained(finished, root=root, bucket_cap_mb=5)
    assert " ".join(finished.output.split()).count("; no effect: find_unused_parameters, check_reduction.") == 1


BY_ARGUMENTS = [
    *("--trainer.accelerator=cpu", "--trainer.devices=2", "--trainer.max_epochs=2"),
    *("--trainer.logger=false", "--trainer.enable_checkpointing=false", "--trainer.enable_progress_bar=false"),
]


def test_arguments_and_the_config_printed_for_them_train_the_same(tmp_path: Path) -> None:
    arguments = ["fit", *BY_ARGUMENTS, "--trainer.strategy=bucketddp"]
    expected = {"bucket_cap_mb": "auto", "weights": weights_on_one_host()}
    assert run_on_ranks(train_by_command_line, arguments=arguments) == [expected] * 2
    [printed, _] = run_on_ranks(print_config, arguments=[*arguments, "--print_config"])
    config = tmp_path / "printed.yaml"
    config.write_text(printed)
    assert run_on_ranks(train_by_command_line, arguments=["fit", "--config", str(config)]) == [expected] * 2


def test_an_argument_overrides_the_strategy_of_a_config(tmp_path: Path) -> None:
    config = write_config(tmp_path, strategy=BY_CLASS_PATH)
    arguments = ["fit", "--config", str(config), "--trainer.strategy.bucket_cap_mb", "[1, 7.5]"]
    expected = {"bucket_cap_mb": [1, 7.5], "weights": weights_on_one_host()}
    assert run_on_ranks(train_by_command_line, arguments=arguments) == [expected] * 2


# --- Failures


def test_ranks_that_differ_end_every_process(tmp_path: Path) -> None:
    config = write_config(tmp_path, strategy="bucketddp")
    command: list[str | Path] = [SCRIPTS / "cli.py", "fit", "--config", config, "--model.extra_layer_on_rank", "1"]
    finished = run(*command, root="lightning.pytorch", directory=tmp_path)
    assert finished.returncode != 0
    # Once from each rank.
    assert finished.output.count("ReplicaMismatchError: `extra.weight` exists on rank 1 but not on rank 0.") == 2
