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
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, post_localSGD_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from lightning_bucketddp.bindings.registration import strategy_class
from lightning_bucketddp.config import LocalSteps, Timeouts
from lightning_bucketddp.strategies.options import check_devices, option_defaults
from tests.support.ranks import on_ranks
from tests.support.scripts.fit import Regression
from tests.support.scripts.trainers import like_torchrun, make_trainer

TRAINER_ROOTS = ["lightning.pytorch", "pytorch_lightning"]
FABRIC_ROOTS = ["lightning.fabric", "lightning_fabric"]
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


@pytest.mark.parametrize("suffix", ["", "_find_unused_parameters_false", "_find_unused_parameters_true"])
@pytest.mark.parametrize("name", START_METHOD_OF)
@pytest.mark.parametrize("root", TRAINER_ROOTS + FABRIC_ROOTS)
@pytest.mark.sampled(16)
def test_each_name_starts_processes_its_own_way(root: str, name: str, suffix: str) -> None:
    strategy = strategy_of(root, f"bucketddp{name}{suffix}")
    assert type(strategy) is strategy_class(root)
    assert launched_by(strategy) == START_METHOD_OF[name]


@pytest.mark.parametrize("root", TRAINER_ROOTS + FABRIC_ROOTS)
def test_an_interactive_session_forks(root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    assert launched_by(strategy_of(root, "bucketddp")) == "fork"


def test_a_start_method_that_was_asked_for_is_used_in_an_interactive_session(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    assert BucketDDPStrategy(start_method="spawn")._start_method == "spawn"


# --- Keywords


@pytest.mark.parametrize("root", TRAINER_ROOTS + FABRIC_ROOTS)
def test_a_strategy_is_made_of_few_classes(root: str) -> None:
    ours = [cls for cls in strategy_class(root).__mro__ if cls.__module__.startswith("lightning_bucketddp.")]
    assert len(ours[2:]) <= 3  # behind the class of the root, and the one that all roots share


@pytest.mark.parametrize("root", TRAINER_ROOTS + FABRIC_ROOTS)
def test_keywords_are_those_of_ddp(root: str) -> None:
    strategy = strategy_class(root)
    ours = inspect.signature(strategy).parameters
    lightning_ddp = inspect.signature(importlib.import_module(f"{root}.strategies").DDPStrategy).parameters
    torch_ddp = inspect.signature(DistributedDataParallel.__init__).parameters
    assert set(torch_ddp) - NOT_FOR_USERS_OF_A_STRATEGY <= set(option_defaults(strategy.__init__))
    # In the same order, for who passes them by position.
    assert [name for name in lightning_ddp if name != "kwargs"] == list(ours)[: len(lightning_ddp) - 1]


@pytest.mark.parametrize("root", TRAINER_ROOTS + FABRIC_ROOTS)
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


def test_new_keywords_of_torch_ddp_mean_the_same() -> None:
    options = BucketDDPStrategy(bucket_cap_mb_list=[1, 5], forward_sync_buffers=False).options
    assert (options.reducer.bucket_cap_mb, options.broadcast_buffers) == ([1, 5], False)


def test_a_weight_that_is_no_function_is_refused() -> None:
    with pytest.raises(ValueError, match=r"`gradient_weight` must be `batch_size` or a function .*, got 'tokens'\."):
        BucketDDPStrategy(gradient_weight="tokens")


@pytest.mark.parametrize("root", TRAINER_ROOTS + FABRIC_ROOTS)
@pytest.mark.parametrize("option", [True, False, "parameters"])
def test_optimizers_can_be_sharded_by_slices_and_by_parameters(root: str, option: Any) -> None:
    assert strategy_class(root)(shard_optimizer=option).options.shard_optimizer == option
    assert strategy_class(root)().options.shard_optimizer is False


@pytest.mark.parametrize("root", TRAINER_ROOTS + FABRIC_ROOTS)
@pytest.mark.parametrize("option", ["slices", None, 2, [True]])
def test_another_way_to_shard_optimizers_is_refused(root: str, option: Any) -> None:
    with pytest.raises(ValueError, match="shard_optimizer") as raised:
        strategy_class(root)(shard_optimizer=option)
    assert str(raised.value) == f"`shard_optimizer` must be True, False or 'parameters', got {option!r}."


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"steps": 0}, "`local_steps` must be a positive number of steps, got 0."),
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


@pytest.mark.parametrize("local_steps", [5, LocalSteps(5)])
@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"shard_optimizer": True}, "`local_steps` and `shard_optimizer` do not go together: optimizers whose state"),
        ({"ddp_comm_hook": print}, "`local_steps` and `ddp_comm_hook` do not go together: a hook says what all ranks"),
        ({"gradient_weight": len}, "`local_steps` and `gradient_weight` do not go together: batches are weighed"),
        ({"model_averaging_period": 3}, "`local_steps` and `model_averaging_period` do not go together: both average"),
    ],
)
def test_what_cannot_be_had_with_local_steps_is_refused_by_name(
    local_steps: int | LocalSteps, options: dict[str, Any], text: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(text)):
        BucketDDPStrategy(local_steps=local_steps, **options)


def test_a_number_of_local_steps_is_short_for_all_about_them() -> None:
    assert BucketDDPStrategy(local_steps=5).options == BucketDDPStrategy(local_steps=LocalSteps(5)).options
    with pytest.raises(ValueError, match=r"`local_steps` must be a positive number of steps, got '5'\."):
        BucketDDPStrategy(local_steps="5")


def test_sharded_optimizers_and_a_communication_hook_are_refused() -> None:
    state = post_localSGD_hook.PostLocalSGDState(None, None, start_localSGD_iter=2)
    hooks: list[dict[str, Any]] = [
        {"ddp_comm_hook": default_hooks.fp16_compress_hook},
        {
            "ddp_comm_hook": post_localSGD_hook.post_localSGD_hook,
            "ddp_comm_state": state,
            "model_averaging_period": 4,
        },
    ]
    for hook in hooks:
        with pytest.raises(ValueError, match="shard_optimizer") as raised:
            BucketDDPStrategy(shard_optimizer=True, **hook)
        assert str(raised.value) == (
            "`shard_optimizer` and a communication hook do not go together: a hook gives every rank all gradients, and"
            " with post-localSGD the weights differ between ranks. Pass one of them."
        )


def test_keywords_without_effect_are_taken() -> None:
    given: dict[str, Any] = {
        "find_unused_parameters": True,
        "static_graph": False,
        "gradient_as_bucket_view": True,
        "batched_grad_copy": True,
        "skip_all_reduce_unused_params": True,
        "device_ids": [0],
        "output_device": "cuda:0",
        "dim": 0,
        "check_reduction": False,
        "delay_all_reduce_named_params": [("weight", nn.Parameter(torch.ones(1)))],
        "param_to_hook_all_reduce": nn.Parameter(torch.ones(1)),
    }
    assert BucketDDPStrategy(**given).options.without_effect == tuple(given)
    assert BucketDDPStrategy().options.without_effect == ()


@pytest.mark.parametrize("root", TRAINER_ROOTS + FABRIC_ROOTS)
def test_mixed_precision_of_torch_ddp_is_refused_with_what_to_do(root: str) -> None:
    with pytest.raises(ValueError, match="mixed_precision") as raised:
        strategy_class(root)(mixed_precision=object())
    assert str(raised.value) == (
        "`mixed_precision` of torch DDP is not supported, because Lightning does that: pass `precision` to the"
        ' Trainer or to Fabric, for example "bf16-mixed". What gradients travel as is `reduce_dtype`.'
    )


GPU = torch.device("cuda", 1)


@pytest.mark.parametrize(
    ("device", "device_ids", "output_device"),
    [(GPU, [1], 1), (GPU, ["cuda:1"], GPU), (GPU, [], None), (torch.device("cpu"), None, "cpu")],
)
def test_devices_that_lightning_has_chosen_may_be_named(
    device: torch.device, device_ids: list[Any] | None, output_device: Any
) -> None:
    check_devices(device, device_ids, output_device)


@pytest.mark.parametrize(
    ("name", "device", "device_ids", "output_device", "named"),
    [
        ("device_ids", GPU, [0], None, "cuda:0"),
        ("device_ids", GPU, [1, 2], None, "cuda:2"),
        ("output_device", GPU, [1], 0, "cuda:0"),
        ("output_device", torch.device("cpu"), None, "cuda:0", "cuda:0"),
    ],
)
def test_another_device_is_refused(
    name: str, device: torch.device, device_ids: list[Any] | None, output_device: Any, named: str
) -> None:
    with pytest.raises(ValueError, match=name) as raised:
        check_devices(device, device_ids, output_device)
    assert str(raised.value) == (
        f"`{name}` names {named}, but Lightning has given this process {device}. Leave it out, and pass `devices` to"
        " the Trainer or to Fabric."
    )


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


@pytest.mark.parametrize("root", TRAINER_ROOTS + FABRIC_ROOTS)
@pytest.mark.parametrize(
    ("misspelt", "meant"),
    [("bucket_cap", "bucket_cap_mb"), ("find_unused_params", "find_unused_parameters"), ("comm_hook", "ddp_comm_hook")],
)
def test_an_unknown_keyword_is_answered_with_the_nearest(root: str, misspelt: str, meant: str) -> None:
    with pytest.raises(TypeError) as raised:
        strategy_class(root)(**{misspelt: True})
    assert str(raised.value) == f"`BucketDDPStrategy` has no option `{misspelt}`. Did you mean `{meant}`?"


def test_a_keyword_like_no_other_is_answered_with_all() -> None:
    with pytest.raises(TypeError) as raised:
        BucketDDPStrategy(zzz=1)
    listed = ", ".join(option_defaults(BucketDDPStrategy.__init__))
    assert str(raised.value) == f"`BucketDDPStrategy` has no option `zzz`. It takes: {listed}."


@pytest.mark.parametrize("root", TRAINER_ROOTS + FABRIC_ROOTS)
@pytest.mark.parametrize(
    "value", [0, -1, 0.0, math.nan, math.inf, [], [25, 0], [math.nan], "25", "Auto", ["auto"], True]
)
@pytest.mark.sampled(12)
def test_a_bucket_size_that_is_none_is_refused(root: str, value: Any) -> None:
    with pytest.raises(ValueError, match="bucket_cap_mb") as raised:
        strategy_class(root)(bucket_cap_mb=value)
    assert str(raised.value) == (
        "`bucket_cap_mb` must be 'auto', a positive number of MiB or a non-empty list of them, got"
        f" {value!r}. The default is 'auto'."
    )


FLAGS = ["overlap", "broadcast_buffers", "forward_sync_buffers", "init_sync", "async_checkpoints"]
MUST_BE = {
    **dict.fromkeys(FLAGS, ("yes", "True or False")),
    "timeout": ("5", "a positive number of seconds"),
    "timeouts": (5, "`Timeouts(...)`"),
    "ddp_comm_hook": ("bf16_compress_hook", "a function or None"),
    "process_group_backend": (5, "a name, for example 'gloo' or 'nccl'"),
    "start_method": ("thread", "one of popen, spawn, fork, forkserver"),
    "bucket_cap_mb_list": ("auto", "a list of sizes in MiB"),
    "reduce_dtype": (torch.float64, "one of fp32, bf16, fp16, int8, or a dtype of torch that they stand for"),
    "on_nonfinite": ("stop", "one of warn, raise, skip, or None"),
}
MUST_BE_FOR_TRAINER = {
    **dict.fromkeys(["rank_seeds", "uneven_data", "shard_iterable", "auto_resume"], ("yes", "True or False")),
    "ddp_comm_wrapper": ("fp16", "a function or None"),
    "model_averaging_period": (0, "a positive number of steps"),
}


@pytest.mark.parametrize(
    ("root", "name"),
    [
        *[(root, name) for root in ("lightning.pytorch", "lightning.fabric") for name in MUST_BE],
        *[("lightning.pytorch", name) for name in MUST_BE_FOR_TRAINER],
    ],
)
def test_a_value_of_the_wrong_kind_is_refused_by_name(root: str, name: str) -> None:
    value, must_be = {**MUST_BE, **MUST_BE_FOR_TRAINER}[name]
    # torch DDP has two names for one thing.
    names = {"forward_sync_buffers": "broadcast_buffers"}
    with pytest.raises(ValueError, match=re.escape(f"`{names.get(name, name)}` must be {must_be}, got {value!r}.")):
        strategy_class(root)(**{name: value})


@pytest.mark.parametrize("root", ["lightning.pytorch", "lightning.fabric"])
def test_what_travels_may_be_a_dtype_or_its_name(root: str) -> None:
    given = (torch.bfloat16, "bf16", torch.int8, None)
    assert [strategy_class(root)(reduce_dtype=dtype).config.reduce_dtype for dtype in given] == [
        *("bf16", "bf16", "int8", None),
    ]


@pytest.mark.parametrize("root", ["lightning.pytorch", "lightning.fabric"])
def test_a_time_out_may_be_a_number_of_seconds(root: str) -> None:
    assert [strategy_class(root)(timeout=timeout)._timeout for timeout in (5, 0.5, timedelta(minutes=1), None)] == [
        timedelta(seconds=5),
        timedelta(seconds=0.5),
        timedelta(minutes=1),
        None,
    ]


@pytest.mark.parametrize("root", ["lightning.pytorch", "lightning.fabric"])
def test_a_stall_that_ends_a_run_later_than_the_time_out_is_refused(root: str) -> None:
    text = "`stall_s` must be less than `timeout`, which ends a run after 1800 s of waiting in any case, got 1800."
    with pytest.raises(ValueError, match=re.escape(text)):
        strategy_class(root)(timeouts=Timeouts(stall_s=1800))
    with pytest.raises(ValueError, match="`stall_warning_s` must be a positive number of seconds, got '5'"):
        Timeouts(stall_warning_s="5")  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [0, -1, math.nan, math.inf, True, timedelta(0)])
def test_a_time_out_that_is_no_time_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match="`timeout` must be a positive number of seconds, got "):
        BucketDDPStrategy(timeout=value)


@pytest.mark.parametrize("value", [1, 0.5, [1, 25.5], "auto", None])
def test_a_bucket_size_is_taken_as_given(value: Any) -> None:
    assert BucketDDPStrategy(bucket_cap_mb=value).config.bucket_cap_mb == value


# --- Subclasses


class OwnKeyword(BucketDDPStrategy):
    def __init__(self, flavour: str, **options: Any) -> None:
        super().__init__(bucket_cap_mb=3, **options)
        self.flavour = flavour


class OwnKeywordOnly(BucketDDPStrategy):
    def __init__(self, *, flavour: str = "plain") -> None:
        super().__init__()
        self.flavour = flavour


def test_subclasses_have_keywords_of_their_own() -> None:
    strategy = OwnKeyword("sweet", overlap=False)
    assert (strategy.flavour, strategy.config.bucket_cap_mb, strategy.config.overlap) == ("sweet", 3, False)
    assert OwnKeywordOnly(flavour="sour").flavour == "sour"
    with pytest.raises(TypeError, match=r"`OwnKeyword` has no option `overlaps`. Did you mean `overlap`\?"):
        OwnKeyword("sweet", overlaps=False)
    with pytest.raises(TypeError, match=r"`OwnKeywordOnly` has no option `flavor`. Did you mean `flavour`\?"):
        OwnKeywordOnly(flavor="sour")  # type: ignore[call-arg]
