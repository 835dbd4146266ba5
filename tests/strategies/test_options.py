"""The strategy's names and keywords: those of `ddp`, checked, and explained where they no longer mean anything."""

from __future__ import annotations

import importlib
import inspect
import math
import re
import sys
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from jsonargparse import ArgumentParser
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from lightning_bucketddp.bindings.registration import strategy_class
from lightning_bucketddp.config import LocalSteps, Timeouts
from lightning_bucketddp.strategies.options import check_devices, option_defaults
from tests.support.cases import for_each
from tests.support.ranks import on_ranks
from tests.support.scripts.fit import Regression
from tests.support.scripts.trainers import like_torchrun, make_trainer

FABRIC_ROOTS = ["lightning.fabric", "lightning_fabric"]
ROOTS = ["lightning.pytorch", "pytorch_lightning", *FABRIC_ROOTS]
START_METHOD_OF = {"": "popen", "_spawn": "spawn", "_fork": "fork", "_notebook": "fork"}
# The Trainer and Fabric give a strategy the module.
NOT_FOR_USERS_OF_A_STRATEGY = {"self", "module"}

BucketDDPStrategy: Any = strategy_class("lightning.pytorch")


def strategy_of(root: str, name: str) -> Any:
    """The strategy that a Trainer or a Fabric of `root` makes of `name`."""
    front = getattr(importlib.import_module(root), "Fabric" if root in FABRIC_ROOTS else "Trainer")
    quiet = {} if root in FABRIC_ROOTS else {"logger": False, "enable_checkpointing": False}
    return front(accelerator="cpu", devices=2, strategy=name, **quiet).strategy


def launched_by(strategy: Any) -> str:
    """The start method of the launcher that will be used, by what it is and not by what it was asked to be."""
    kinds = {"_ScriptLauncher": "popen", "_ProcessLauncher": ""}
    strategy._configure_launcher()
    return kinds[type(strategy.launcher).__name__] or strategy.launcher._start_method


# --- Names


@for_each("suffix", ["", "_find_unused_parameters_true"])
@for_each("name", START_METHOD_OF)
@for_each("root", ROOTS)
def test_each_name_starts_processes_its_own_way(root: str, name: str, suffix: str) -> None:
    strategy = strategy_of(root, f"bucketddp{name}{suffix}")
    assert type(strategy) is strategy_class(root)
    assert launched_by(strategy) == START_METHOD_OF[name]


def test_an_interactive_session_forks_unless_another_start_method_was_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    assert [launched_by(strategy_of(root, "bucketddp")) for root in ROOTS] == ["fork"] * 4
    assert BucketDDPStrategy(start_method="spawn")._start_method == "spawn"


# --- Keywords


@for_each("root", ROOTS)
def test_keywords_are_those_of_ddp(root: str) -> None:
    strategy = strategy_class(root)
    ours = inspect.signature(strategy).parameters
    lightning_ddp = inspect.signature(importlib.import_module(f"{root}.strategies").DDPStrategy).parameters
    torch_ddp = inspect.signature(DistributedDataParallel.__init__).parameters
    assert set(torch_ddp) - NOT_FOR_USERS_OF_A_STRATEGY <= set(option_defaults(strategy.__init__))
    # In the same order, for who passes them by position.
    assert [name for name in lightning_ddp if name != "kwargs"] == list(ours)[: len(lightning_ddp) - 1]


@for_each("root", ROOTS)
def test_a_command_line_has_every_option_with_its_type_and_a_line_of_help(root: str) -> None:
    parser = ArgumentParser()
    parser.add_class_arguments(strategy_class(root), "trainer.strategy")
    helps = dict(
        re.findall(r"^  --trainer.strategy\.([\w.]+)[^\n]*\n((?: {20}.*\n)*)", parser.format_help(), re.MULTILINE)
    )
    of_lightning = {"accelerator", "parallel_devices", "cluster_environment", "checkpoint_io", "precision"}
    ours = option_defaults(strategy_class(root).__init__).keys() - of_lightning - {"precision_plugin", "timeouts"}
    for name in (*ours, "timeouts.start_s", "timeouts.stall_warning_s", "timeouts.stall_s"):
        about, _, kind = helps[name].partition("(type:")
        assert about.strip(), name
        assert kind, name


@for_each(
    ("given", "taken"),
    [
        # Those of newer torch DDP.
        ({"bucket_cap_mb_list": [1, 5]}, {"bucket_cap_mb": [1, 5]}),
        ({"forward_sync_buffers": False}, {"broadcast_buffers": False}),
        *(({"shard_optimizer": value}, {"shard_optimizer": value}) for value in (True, False, "parameters")),
        ({}, {"shard_optimizer": False}),
        *(({"reduce_dtype": dtype}, {"reduce_dtype": "bf16"}) for dtype in (torch.bfloat16, "bf16")),
        ({"reduce_dtype": torch.int8}, {"reduce_dtype": "int8"}),
        ({"reduce_dtype": None}, {"reduce_dtype": None}),
        *(({"bucket_cap_mb": value}, {"bucket_cap_mb": value}) for value in (1, 0.5, [1, 25.5], "auto", None)),
    ],
)
@for_each("root", ROOTS)
def test_a_value_is_taken(root: str, given: dict[str, Any], taken: dict[str, Any]) -> None:
    options = strategy_class(root)(**given).options
    for name, value in taken.items():
        assert getattr(options if hasattr(options, name) else options.reducer, name) == value


@for_each("root", ROOTS)
def test_a_time_out_may_be_a_number_of_seconds(root: str) -> None:
    for given, seconds in ((5, 5), (0.5, 0.5), (timedelta(minutes=1), 60)):
        assert strategy_class(root)(timeout=given)._timeout == timedelta(seconds=seconds)
    assert strategy_class(root)(timeout=None)._timeout is None


GPU = torch.device("cuda", 1)


@for_each(
    ("device", "device_ids", "output_device", "refused"),
    [
        (GPU, [1], 1, None),
        (GPU, ["cuda:1"], GPU, None),
        (GPU, [0], None, "`device_ids` names cuda:0"),
        (GPU, [1, 2], None, "`device_ids` names cuda:2"),
        (torch.device("cpu"), None, "cuda:0", "`output_device` names cuda:0"),
    ],
)
def test_only_devices_that_lightning_has_chosen_may_be_named(
    device: torch.device, device_ids: list[Any] | None, output_device: Any, refused: str | None
) -> None:
    if refused is None:
        check_devices(device, device_ids, output_device)
        return
    text = f"{refused}, but Lightning has given this process {device}. Leave it out, and pass `devices` to the Trainer"
    with pytest.raises(ValueError, match=re.escape(text)):
        check_devices(device, device_ids, output_device)


@on_ranks()
def test_groups_of_all_ranks_have_no_effect_and_others_are_refused() -> None:
    both = BucketDDPStrategy(process_group=dist.group.WORLD, device_mesh=init_device_mesh("cpu", (2,)))
    assert list(both.options.without_effect) == ["process_group", "device_mesh"]
    groups = [dist.new_group([rank]) for rank in range(2)]
    others = {"process_group": groups[dist.get_rank()], "device_mesh": init_device_mesh("cpu", (1, 2))}
    for (name, group), shape in zip(others.items(), ("(1,)", "(1, 2)"), strict=True):
        with pytest.raises(ValueError, match=name) as refused:
            BucketDDPStrategy(**{name: group})
        assert str(refused.value) == (
            f"`{name}` has shape {shape}, but gradients are averaged over all ranks of a run, here (2,). Leave it out."
            " For a model that is split between ranks use Lightning's `ModelParallelStrategy`."
        )


@on_ranks()
@like_torchrun()
def test_another_device_is_refused_at_set_up() -> None:
    text = "^`device_ids` names cpu:7, but Lightning has given this process cpu. Leave it out"
    with pytest.raises(ValueError, match=text):
        make_trainer(BucketDDPStrategy(device_ids=[7]), max_epochs=1).fit(Regression())


@for_each("root", ROOTS)
def test_an_unknown_keyword_is_answered_with_the_nearest_or_with_all(root: str) -> None:
    listed = ", ".join(option_defaults(strategy_class(root).__init__))
    for unknown, answer in {
        "bucket_cap": "Did you mean `bucket_cap_mb`?",
        "find_unused_params": "Did you mean `find_unused_parameters`?",
        "comm_hook": "Did you mean `ddp_comm_hook`?",
        "zzz": f"It takes: {listed}.",
    }.items():
        with pytest.raises(TypeError) as raised:
            strategy_class(root)(**{unknown: True})
        assert str(raised.value) == f"`BucketDDPStrategy` has no option `{unknown}`. {answer}"


# --- Values that are refused


def must_be(name: str, what: str, *values: Any) -> list[tuple[dict[str, Any], str]]:
    """What is said when `name` is one of `values`; torch DDP has two names for one thing."""
    known_as = {"forward_sync_buffers": "broadcast_buffers"}.get(name, name)
    return [({name: value}, f"`{known_as}` must be {what}, got {value!r}.") for value in values]


SECONDS = "a positive number of seconds"
SIZES = "'auto', a positive number of MiB or a non-empty list of them"
NO_SIZES = [0, -1, 0.0, math.nan, math.inf, [], [25, 0], [math.nan], "25", "Auto", ["auto"], True]
HOOK_AND_SHARDS = "`shard_optimizer` and a communication hook do not go together: a hook gives every rank all gradients"
REFUSED = [
    *(case for name in ("overlap", "broadcast_buffers", "init_sync") for case in must_be(name, "True or False", "yes")),
    *(case for name in ("forward_sync_buffers", "async_checkpoints") for case in must_be(name, "True or False", "yes")),
    *must_be("bucket_cap_mb", SIZES, *NO_SIZES),
    *must_be("bucket_cap_mb_list", "a list of sizes in MiB", "auto"),
    *must_be("shard_optimizer", "True, False or 'parameters'", "slices", None, 2, [True]),
    *must_be("timeout", SECONDS, "5", 0, -1, math.nan, math.inf, True),
    ({"timeout": timedelta(0)}, f"`timeout` must be {SECONDS}, got 0.0."),
    *must_be("timeouts", "`Timeouts(...)`", 5),
    *must_be("ddp_comm_hook", "a function or None", "bf16_compress_hook"),
    *must_be("process_group_backend", "a name, for example 'gloo' or 'nccl'", 5),
    *must_be("start_method", "one of popen, spawn, fork, forkserver", "thread"),
    *must_be("reduce_dtype", "one of fp32, bf16, fp16, int8, or a dtype of torch that they stand for", torch.float64),
    *must_be("on_nonfinite", "one of warn, raise, skip, or None", "stop"),
    (
        {"mixed_precision": object()},
        "`mixed_precision` of torch DDP is not supported, because Lightning does that: pass `precision` to the"
        ' Trainer or to Fabric, for example "bf16-mixed". What gradients travel as is `reduce_dtype`.',
    ),
    (
        {"timeouts": Timeouts(stall_s=1800)},
        "`stall_s` must be less than `timeout`, which ends a run after 1800 s of waiting in any case, got 1800.",
    ),
    ({"shard_optimizer": True, "ddp_comm_hook": default_hooks.fp16_compress_hook}, HOOK_AND_SHARDS),
]
REFUSED_BY_TRAINER = [
    *must_be("rank_seeds", "True or False", "yes"),
    *must_be("uneven_data", "True or False", "yes"),
    *must_be("shard_iterable", "True or False", "yes"),
    *must_be("auto_resume", "True or False", "yes"),
    *must_be("ddp_comm_wrapper", "a function or None", "fp16"),
    *must_be("model_averaging_period", "a positive number of steps", 0),
    ({"gradient_weight": "tokens"}, "`gradient_weight` must be `batch_size` or a function "),
    ({"shard_optimizer": True, "ddp_comm_hook": print, "model_averaging_period": 4}, HOOK_AND_SHARDS),
    *must_be("local_steps", "a positive number of steps", "5", 0),
    *(
        ({"local_steps": steps, **others}, f"`local_steps` and `{next(iter(others))}` do not go together: {why}")
        for steps in (5, LocalSteps(5))
        for others, why in (
            ({"shard_optimizer": True}, "optimizers whose state"),
            ({"ddp_comm_hook": print}, "a hook says what all ranks"),
            ({"gradient_weight": len}, "batches are weighed"),
            ({"model_averaging_period": 3}, "both average"),
        )
    ),
    *(
        ({"auto_resume": True, "max_restarts": wrong}, "`max_restarts` must be 0 or a positive number of restarts")
        for wrong in (-1, 1.5, True)
    ),
]


@for_each("root", ROOTS)
def test_a_value_that_makes_no_sense_is_refused_by_name(root: str) -> None:
    for options, text in REFUSED if root in FABRIC_ROOTS else REFUSED + REFUSED_BY_TRAINER:
        with pytest.raises(ValueError, match=re.escape(text)):
            strategy_class(root)(**options)


@for_each(
    ("options", "text"),
    [
        ({"steps": 2.5}, "`local_steps` must be a positive number of steps, got 2.5."),
        ({"islands": 0}, "`islands` must be 'host', 'rank' or a positive number of islands, got 0."),
        ({"islands": "node"}, "`islands` must be 'host', 'rank' or a positive number of islands, got 'node'."),
        ({"outer_lr": 0.0}, "`outer_lr` must be a positive number, got 0.0."),
        ({"outer_momentum": 1}, "`outer_momentum` must be a number from 0 to less than 1, got 1."),
    ],
)
def test_local_steps_that_make_no_sense_are_refused_by_name(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(text)):
        LocalSteps(**{"steps": 5, **options})


def test_restarts_need_checkpoints_to_go_on_from() -> None:
    with pytest.raises(ValueError, match=r"`max_restarts` .* pass `auto_resume=True` as well"):
        BucketDDPStrategy(max_restarts=3)


# --- Subclasses


class OwnKeyword(BucketDDPStrategy):
    def __init__(self, flavour: str, **options: Any) -> None:
        super().__init__(bucket_cap_mb=3, **options)
        self.flavour = flavour


def test_subclasses_have_keywords_of_their_own() -> None:
    strategy = OwnKeyword("sweet", overlap=False)
    assert (strategy.flavour, strategy.config.bucket_cap_mb, strategy.config.overlap) == ("sweet", 3, False)
    with pytest.raises(TypeError, match=r"`OwnKeyword` has no option `overlaps`. Did you mean `overlap`\?"):
        OwnKeyword("sweet", overlaps=False)
