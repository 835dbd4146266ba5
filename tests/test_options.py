"""The strategy's names and keywords: those of `ddp`, checked, and explained where they no longer mean anything."""

from __future__ import annotations

import importlib
import inspect
import logging
import math
import sys
from typing import Any

import pytest
from torch.nn.parallel import DistributedDataParallel

from lightning_bucketddp.strategies.registration import strategy_class

TRAINER_ROOTS = ["lightning.pytorch", "pytorch_lightning"]
FABRIC_ROOTS = ["lightning.fabric", "lightning_fabric"]
START_METHOD_OF = {"": "popen", "_spawn": "spawn", "_fork": "fork", "_notebook": "fork"}
# The strategy knows the device and the processes by itself, and the rest is about torch's own reducer.
NOT_FOR_USERS_OF_A_STRATEGY = {
    "self",
    "module",
    "device_ids",
    "output_device",
    "dim",
    "process_group",
    "device_mesh",
    "check_reduction",
    "delay_all_reduce_named_params",
    "param_to_hook_all_reduce",
    "mixed_precision",
}
NEW_IN_TORCH_2_13 = {"bucket_cap_mb_list", "forward_sync_buffers"}

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
def test_each_name_starts_processes_its_own_way(root: str, name: str, suffix: str) -> None:
    strategy = strategy_of(root, f"bucketddp{name}{suffix}")
    assert type(strategy) is strategy_class(root)
    assert launched_by(strategy) == START_METHOD_OF[name]


@pytest.mark.parametrize("root", TRAINER_ROOTS + FABRIC_ROOTS)
def test_an_interactive_session_forks(
    root: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    with caplog.at_level(logging.INFO):
        assert launched_by(strategy_of(root, "bucketddp")) == "fork"
    assert "bucketddp: starting processes by fork, because this is an interactive session." in caplog.messages


def test_a_start_method_that_was_asked_for_is_used_in_an_interactive_session(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    assert BucketDDPStrategy(start_method="spawn")._start_method == "spawn"


# --- Keywords


@pytest.mark.parametrize("root", TRAINER_ROOTS + FABRIC_ROOTS)
def test_keywords_are_those_of_ddp(root: str) -> None:
    ours = inspect.signature(strategy_class(root)).parameters
    lightning_ddp = inspect.signature(importlib.import_module(f"{root}.strategies").DDPStrategy).parameters
    torch_ddp = inspect.signature(DistributedDataParallel.__init__).parameters
    assert set(torch_ddp) - NOT_FOR_USERS_OF_A_STRATEGY - NEW_IN_TORCH_2_13 <= set(ours)
    # In the same order, for who passes them by position.
    assert [name for name in lightning_ddp if name != "kwargs"] == list(ours)[: len(lightning_ddp) - 1]


def test_new_keywords_of_torch_ddp_mean_the_same() -> None:
    config = BucketDDPStrategy(bucket_cap_mb_list=[1, 5], forward_sync_buffers=False).config
    assert (config.bucket_cap_mb, config.broadcast_buffers) == ([1, 5], False)


def test_a_weight_that_is_no_function_is_refused() -> None:
    with pytest.raises(ValueError, match=r"`gradient_weight` must be `batch_size` or a function .*, got 'tokens'\."):
        BucketDDPStrategy(gradient_weight="tokens")


def test_keywords_without_effect_are_explained_in_one_line(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        BucketDDPStrategy(
            find_unused_parameters=True,
            static_graph=False,
            gradient_as_bucket_view=True,
            batched_grad_copy=True,
            skip_all_reduce_unused_params=True,
        )
    assert caplog.messages == [
        "bucketddp: no effect, and no need to set:"
        " `find_unused_parameters` (unused parameters are always handled; only a step that leaves some out takes"
        " longer),"
        " `static_graph` (how often each parameter is used is learned from the first backward),"
        " `gradient_as_bucket_view` (gradients always live in their buckets),"
        " `batched_grad_copy` (gradients are always copied by one call per bucket),"
        " `skip_all_reduce_unused_params` (unused parameters need no mode of their own)."
    ]


def test_defaults_need_no_explanation(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        BucketDDPStrategy(bucket_cap_mb=5, overlap=False)
    assert caplog.messages == []


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
    listed = ", ".join(inspect.signature(BucketDDPStrategy).parameters)
    assert str(raised.value) == f"`BucketDDPStrategy` has no option `zzz`. It takes: {listed}."


@pytest.mark.parametrize("root", TRAINER_ROOTS + FABRIC_ROOTS)
@pytest.mark.parametrize(
    "value", [0, -1, 0.0, math.nan, math.inf, [], [25, 0], [math.nan], "25", "Auto", ["auto"], True]
)
def test_a_bucket_size_that_is_none_is_refused(root: str, value: Any) -> None:
    with pytest.raises(ValueError, match="bucket_cap_mb") as raised:
        strategy_class(root)(bucket_cap_mb=value)
    assert str(raised.value) == (
        "`bucket_cap_mb` must be 'auto', a positive number of MiB or a non-empty list of them, got"
        f" {value!r}. The default is 'auto'."
    )


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
    with pytest.raises(TypeError, match=r"`OwnKeywordOnly` has no option `flavor`. Did you mean `flavour`\?"):
        OwnKeywordOnly(flavor="sour")  # type: ignore[call-arg]
