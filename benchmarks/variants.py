"""What is compared: no communication, bucketddp, and torch DDP with its defaults and with its best flags."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.comm_hooks import HOOKS
from benchmarks.models import Unused
from lightning_bucketddp.comm.collectives import Collectives
from lightning_bucketddp.comm.step_exchange import StepExchange, Weighting
from lightning_bucketddp.config import LocalSteps, ReducerConfig
from lightning_bucketddp.local_steps.islands import OuterStep, make_islands
from lightning_bucketddp.reducer.reducer import Reducer
from lightning_bucketddp.reducer.reduction import MeanReduction
from lightning_bucketddp.replicas.replicas import Replicas
from lightning_bucketddp.sharding.shards import Shards

Wire = Literal["fp32", "bf16", "int8"]
WIRES: dict[Wire, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "int8": torch.int8}


@dataclass(frozen=True)
class Variant:
    """A way to train.

    Attributes:
        name: in tables.
        kind: who reduces the gradients.
        options: keywords of the strategy, or flags of torch DDP.
        wire: what gradients travel as.
        hook: a name in `HOOKS`, of the communication hook that reduces them; empty: none.
        unused: whether every tenth layer is left out, the same ones in each step or others.
        reduces_alone: whether one rank alone does what it does among others, instead of nothing.
        steps_to_settle: after how many steps every further one is like the last.
        local_steps: how many a rank makes alone between two exchanges of weights; None: gradients are exchanged.
        records_every: after how many steps a `BucketDDPMonitor` records one, through the Trainer; None: there is none.
        takes_memory: whether buckets take new memory in each backward, through the Trainer.
        compiled: the mode of `torch.compile` for the model, through the Trainer; None: it is not compiled.
    """

    name: str
    kind: Literal["alone", "ours", "local", "ddp", "fsdp", "fsdp2"]
    options: dict[str, Any] = field(default_factory=dict)
    wire: Wire = "fp32"
    hook: str = ""
    unused: Unused = "none"
    reduces_alone: bool = False
    steps_to_settle: int = 5
    local_steps: int | None = None
    records_every: int | None = None
    takes_memory: bool = False
    compiled: str | None = None


@dataclass(frozen=True)
class Attached:
    """A model that is being trained by a variant in a bare loop."""

    model: nn.Module
    no_sync: Callable[[], AbstractContextManager[None]] = nullcontext
    # Marks a backward, as a strategy does.
    backward: Callable[[], AbstractContextManager[None]] = nullcontext
    # Known after some steps; in the gradients' own dtype.
    bucket_bytes: Callable[[], list[int]] = list
    reducer: Reducer | None = None
    shards: Shards | None = None
    # After each step of the optimizer.
    after_step: Callable[[], None] = lambda: None


ALONE = Variant("no communication", "alone")


def our_variants(
    *, caps: Sequence[float | str] = (), wire: Wire = "fp32", looks_for_nonfinite: bool = True
) -> list[Variant]:
    """bucketddp with its defaults, or with each of `caps` for `bucket_cap_mb`."""
    options: dict[str, Any] = {} if looks_for_nonfinite else {"on_nonfinite": None}
    name = "bucketddp" if looks_for_nonfinite else "bucketddp, on_nonfinite=None"
    if wire != "fp32":
        options["reduce_dtype"] = wire
    by_name = {_with_cap(name, cap): {**options, "bucket_cap_mb": cap} for cap in caps} or {name: options}
    # A plan that is computed from measurements is settled after 20 steps.
    return [Variant(name, "ours", options, wire, steps_to_settle=25) for name, options in by_name.items()]


def captured_variant() -> Variant:
    """bucketddp with steps that are captured as CUDA graphs, and replayed."""
    return Variant("bucketddp, cuda_graphs=True", "ours", {"cuda_graphs": True}, steps_to_settle=40)


def compiled(variant: Variant, mode: str) -> Variant:
    """`variant` with a model that `torch.compile` has compiled in this mode; the first steps capture CUDA graphs."""
    name = f"{variant.name}, compiled" + ("" if mode == "default" else f" {mode}")
    return replace(variant, name=name, compiled=mode, steps_to_settle=max(variant.steps_to_settle, 10))


def sharded_variants() -> list[Variant]:
    """`shard_optimizer`, FSDP and FSDP2, through the Trainer, by what weights and gradients travel as.

    Lightning's FSDP with `precision="bf16-mixed"` has both as bf16.
    """
    ours = {"fp32, fp32": our_variants(), "fp32, bf16": our_variants(wire="bf16")}
    grad_op, full = {"sharding_strategy": "SHARD_GRAD_OP"}, {"sharding_strategy": "FULL_SHARD"}
    theirs: list[tuple[str, Literal["fsdp", "fsdp2"], str, dict[str, Any]]] = [
        ("FSDP SHARD_GRAD_OP", "fsdp", "fp32, fp32", grad_op),
        ("FSDP SHARD_GRAD_OP", "fsdp", "fp32, bf16", grad_op),
        ("FSDP SHARD_GRAD_OP", "fsdp", "bf16, bf16", grad_op),
        ("FSDP FULL_SHARD", "fsdp", "bf16, bf16", full),
        ("FSDP2 reshard_after_forward=False", "fsdp2", "bf16, bf16", {"reshard_after_forward": False}),
        ("FSDP2", "fsdp2", "bf16, bf16", {"reshard_after_forward": True}),
    ]
    return [
        *(
            replace(variant, name=f"shard_optimizer ({wires})", options={**variant.options, "shard_optimizer": True})
            for wires, [variant] in ours.items()
        ),
        *(
            Variant(f"{name} ({wires})", kind, {**options, "wires": [WIRES[wire] for wire in wires.split(", ")]})  # type: ignore[index]
            for name, kind, wires, options in theirs
        ),
    ]


def ddp_variants(*, wire: Wire = "fp32") -> list[Variant]:
    """torch DDP with its defaults and with its best flags, as far as this version has them; it has no int8."""
    if wire == "int8":
        return []
    known = inspect.signature(DistributedDataParallel.__init__).parameters
    view = {"gradient_as_bucket_view": True}
    best = {**view, **{flag: True for flag in ("batched_grad_copy", "lazy_bucket_allocation") if flag in known}}
    flags: list[dict[str, bool]] = [{}, view, best, {**best, "static_graph": True}]
    hook = "bf16_compress_hook" if wire == "bf16" else ""
    # By name: in a torch that has neither two of them are the same.
    named = {" ".join(filter(None, ["ddp", hook, "+".join(some)])): some for some in flags}
    return [Variant(name, "ddp", some, wire, hook) for name, some in named.items()]


def local_variant(local_steps: int) -> Variant:
    """Ranks that train alone for so many steps, and then average what has become of their weights."""
    return Variant(f"local_steps={local_steps}", "local", local_steps=local_steps)


def with_hook(hook: str, variants: Sequence[Variant]) -> list[Variant]:
    """`variants` with a communication hook, a name in `HOOKS`."""
    return [replace(variant, hook=hook) for variant in variants]


def settling_in(steps: int | None, variants: Sequence[Variant]) -> list[Variant]:
    """`variants` that make so many steps before anything is measured; None: as many as each of them needs."""
    return [variant if steps is None else replace(variant, steps_to_settle=steps) for variant in variants]


def can_accumulate(variant: Variant) -> bool:
    """Whether a variant can train with several micro-batches per step."""
    return "static_graph" not in variant.options  # which fails in the first `no_sync`, by an internal assertion


def with_unused(variant: Variant, unused: Unused) -> Variant | None:
    """`variant` for a model with layers that are left out; None if it cannot train that."""
    options = variant.options
    if variant.kind == "ddp":
        if "static_graph" in options and unused == "changing":
            return None
        options = {**options, "find_unused_parameters": True}
    return replace(variant, name=f"{variant.name} (layers unused)", options=options, unused=unused)


def attach(variant: Variant, model: nn.Module, device: torch.device) -> Attached:
    """Have `model` trained by `variant`: the gradients of a backward are the mean over the ranks."""
    if variant.kind == "alone":
        return Attached(model)
    if variant.kind == "ours":
        return _attach_ours(variant, model, device)
    if variant.kind == "local":
        return _attach_local(variant, model, device)
    device_ids = [device] if device.type == "cuda" else None
    ddp = DistributedDataParallel(model, device_ids=device_ids, **variant.options)
    if variant.hook:
        hook, state = HOOKS[variant.hook]()
        ddp.register_comm_hook(state, hook)
    return Attached(ddp, ddp.no_sync, bucket_bytes=lambda: _ddp_bucket_bytes(ddp))


def _attach_ours(variant: Variant, model: nn.Module, device: torch.device) -> Attached:
    collectives = Collectives(device)
    replicas = Replicas(model, collectives)
    replicas.broadcast()
    world_size = collectives.world_size
    if variant.reduces_alone and world_size == 1:
        # So that the reducer has something to do; nothing else shall believe it, nor make a group of two ranks.
        collectives.world_size = 2
        collectives.gradient_group = lambda: collectives  # type: ignore[method-assign]
    options = dict(variant.options)
    if variant.hook:
        options["comm_hook"], options["comm_state"] = HOOKS[variant.hook]()
    shards = Shards(collectives, whole_parameters=False) if options.pop("shard_optimizer", False) else None
    # As the Trainer's strategy has it.
    weighting = None
    if world_size > 1:
        weighting = Weighting(StepExchange(collectives), by_weight=False)
    reducer = Reducer(replicas, ReducerConfig(**options), weighting=weighting, maker=shards)
    model.register_forward_pre_hook(lambda *_: reducer.give_back_memory())
    collectives.world_size = world_size

    def bucket_bytes() -> list[int]:
        return [] if reducer.bucket_set is None else [bucket.num_bytes for bucket in reducer.bucket_set.buckets]

    return Attached(model, reducer.no_sync, reducer.backward, bucket_bytes, reducer, shards)


def _attach_local(variant: Variant, model: nn.Module, device: torch.device) -> Attached:
    collectives = Collectives(device)
    Replicas(model, collectives).broadcast()
    islands = make_islands(collectives, "rank", host="")
    assert islands is not None
    outer = OuterStep(dict(model.named_parameters()), islands, MeanReduction(islands.peers), LocalSteps(1))
    steps = itertools.count(1)

    def after_step() -> None:
        assert variant.local_steps is not None
        if next(steps) % variant.local_steps == 0:
            outer.step(share=1.0)

    return Attached(model, after_step=after_step)


def _ddp_bucket_bytes(ddp: DistributedDataParallel) -> list[int]:
    logged = ddp._get_ddp_logging_data()
    sizes = str(logged.get("rebuilt_bucket_sizes") or logged["bucket_sizes"])
    return [int(size) for size in sizes.split(",")]


def _with_cap(name: str, cap: float | str) -> str:
    return f"{name} {cap} buckets" if isinstance(cap, str) else f"{name} {cap:g} MiB"
