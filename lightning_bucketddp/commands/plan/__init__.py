"""`bucketddp plan`: how the gradients of a module will be reduced, and how it will scale, without training it."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.table import Column, Table
from rich.text import Text

from lightning_bucketddp.commands import UsageError, trimmed_console
from lightning_bucketddp.commands.plan.named_module import BackwardTimes, NamedModule, estimated, measured, recorded
from lightning_bucketddp.commands.plan.scaling import MEASURED, ModulePlan, Scaling, find_network
from lightning_bucketddp.config import AUTO, MIB, REDUCE_DTYPES, ReducerConfig
from lightning_bucketddp.planning.cost import NO_CODECS, Timeline
from lightning_bucketddp.planning.optimal_plan import (
    NETWORKS,
    STATE_TENSORS,
    StateByRank,
    WireOptions,
    first_plan,
    in_ms,
    predict,
)
from lightning_bucketddp.reducer.quantization import GPU_CODECS, measure_codecs
from lightning_bucketddp.wording import list_names, pluralize

HELP = """Show the buckets that a module's gradients are reduced in, without training it, and predict steps and scaling.

Times of a backward come from --profile; else from --backward-ms, spread over the parameters by size; else they are
measured here, if the module has an `example_input_array`. The output says which. What is measured on a CPU says nothing
about training on GPUs."""

_DEFAULT_NETWORK = "eth-100g"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "module",
        metavar="MODULE:CLASS",
        help="for example my_project.models:LitNet, a function that makes a module (torchvision.models:resnet50), or"
        " the config.yaml of a LightningCLI",
    )
    parser.add_argument(
        "--args", nargs="+", default=[], metavar="KEY=VALUE", help="for the constructor or function; or one JSON object"
    )
    parser.add_argument(
        "--config", type=Path, metavar="FILE", help="config.yaml of a LightningCLI that has MODULE:CLASS as its model"
    )
    parser.add_argument(
        "--bucket-cap-mb", default=AUTO, metavar="MIB", help="as for the strategy: auto (default), 25, or a list: 1,25"
    )
    parser.add_argument("--reduce-dtype", choices=list(REDUCE_DTYPES), help="what travels; default: what gradients are")
    parser.add_argument(
        "--shard-optimizer", action="store_true", help="as for the strategy: divide optimizer state among the ranks"
    )
    parser.add_argument(
        "--state-tensors",
        type=int,
        default=STATE_TENSORS,
        metavar="N",
        help=f"how many of a parameter's size an optimizer has for it (default: {STATE_TENSORS}, as AdamW)",
    )
    parser.add_argument("--ranks", type=int, default=8, metavar="N", help="how many the plan is for (default: 8)")
    parser.add_argument(
        "--network",
        action="append",
        metavar="NAME",
        help=f"{', '.join(NETWORKS)}, {MEASURED} (the one of the profile), what `bucketddp doctor --json` has printed"
        " (FILE.json) or GBIT,LATENCY_US; may be given several times (default:"
        f" {MEASURED} with --profile, else {_DEFAULT_NETWORK})",
    )
    parser.add_argument(
        "--profile", type=Path, metavar="FILE", help="rank-0.jsonl of a recorded run, or a profile as JSON"
    )
    parser.add_argument("--backward-ms", type=float, metavar="MS", help="how long a backward takes")
    parser.add_argument(
        "--device",
        choices=["cuda", "cpu"],
        help="what the module will train on (default: cuda if it is here, else cpu)",
    )
    parser.add_argument("--svg", type=Path, metavar="FILE", help="plot scaling efficiency to this file")
    parser.add_argument("--json", action="store_true", help="print everything as one JSON object")


def run(arguments: argparse.Namespace) -> int:
    config = _config(arguments)
    if arguments.ranks < 1:
        raise UsageError(f"--ranks must be at least 1, got {arguments.ranks}.")
    if arguments.state_tensors < 1:
        raise UsageError(f"--state-tensors must be at least 1, got {arguments.state_tensors}.")
    device = torch.device(arguments.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    named = NamedModule.find(arguments.module, arguments.args, config=arguments.config)
    plan = _plan(named, config, device, arguments)
    if arguments.svg is not None:
        if not plan.scalings:
            raise UsageError("--svg needs times: pass --profile or --backward-ms.")
        try:
            arguments.svg.write_text(plan.to_svg(), encoding="utf-8")
        except OSError as error:
            raise UsageError(f"{arguments.svg} cannot be written: {error.strerror}.") from error
    if arguments.json:
        print(json.dumps(plan.to_json(), indent=1))
    else:
        print_plan(plan)
    return 0


def _plan(named: NamedModule, config: ReducerConfig, device: torch.device, arguments: argparse.Namespace) -> ModulePlan:
    times = _times(named, device, arguments)
    profile = times.profile
    networks = arguments.network or [_DEFAULT_NETWORK if profile.cost is None else MEASURED]
    codecs, codec_origin = NO_CODECS, ""
    # Measure on no device that the profile names: anyone may have written the file.
    is_cpu = profile.specs[0].kind.endswith(" cpu")
    if profile.backward_s > 0:
        codecs, codec_origin = GPU_CODECS, "what it takes on an H200, because there is no GPU here"
        if times.codecs:
            codecs, codec_origin = times.codecs, "what was measured when the profile was recorded"
        elif is_cpu or torch.cuda.is_available():
            codecs, codec_origin = measure_codecs(torch.device("cpu" if is_cpu else "cuda")), "what was measured here"
    num_ranks: int = arguments.ranks
    is_sharded: bool = arguments.shard_optimizer
    scalings: list[Scaling] = []
    for name in networks:
        network, origin, between = find_network(name, profile, codecs)
        if profile.backward_s <= 0:
            continue
        by_ranks: dict[int, Timeline] = {}
        for n in sorted({*(2**power for power in range(11)), num_ranks}):
            shards = n if is_sharded else 1
            by_ranks[n] = predict(profile, config, network.all_reduce(n), codecs=between, num_shards=shards)
        options = None
        if num_ranks > 1:
            cost = network.all_reduce(num_ranks)
            options = WireOptions.predict(
                profile, config, cost, num_ranks=num_ranks, codecs=between, is_sharded=is_sharded
            )
        is_judged = not is_cpu or bool(times.codecs) or between is not codecs
        scalings.append(Scaling(network, origin, by_ranks, options, is_judged))
    if scalings:
        buckets = scalings[0].by_ranks[num_ranks].plan
    else:
        buckets = first_plan(profile, config, num_shards=num_ranks if is_sharded else 1)
    return ModulePlan(
        module=named.name,
        device=profile.specs[0].kind.split()[-1],
        times=times,
        buckets=buckets,
        origin=_origin(config, [] if is_sharded else scalings, num_ranks=num_ranks, is_sharded=is_sharded),
        num_ranks=num_ranks,
        scalings=scalings,
        codec_origin=codec_origin,
        state_tensors=arguments.state_tensors if is_sharded else None,
    )


def _origin(config: ReducerConfig, scalings: Sequence[Scaling], *, num_ranks: int, is_sharded: bool) -> str:
    cap = config.bucket_cap_mb
    if cap != AUTO:
        return f"bucket_cap_mb={cap}"
    if is_sharded:
        return "bucket_cap_mb=auto keeps its first buckets, of up to 25 MiB, where optimizer state is divided by them"
    if not scalings:
        return "bucket_cap_mb=auto begins with buckets of up to 25 MiB; after 17 backwards it computes its own"
    network = scalings[0].network
    return f"bucket_cap_mb=auto, computed for {num_ranks:,} ranks on {network.name}; training measures its own network"


def _times(named: NamedModule, device: torch.device, arguments: argparse.Namespace) -> BackwardTimes:
    module = named.without_memory()
    if arguments.profile is not None:
        return recorded(arguments.profile, module, device=device)
    if arguments.backward_ms is not None:
        if not (math.isfinite(arguments.backward_ms) and arguments.backward_ms > 0):
            raise UsageError(f"--backward-ms must be a positive number, got {arguments.backward_ms:g}.")
        return estimated(module, backward_s=arguments.backward_ms / 1e3, device=device)
    if getattr(module, "example_input_array", None) is not None:
        return measured(named.make(), device=device)
    return estimated(module, backward_s=0.0, device=device)


def _config(arguments: argparse.Namespace) -> ReducerConfig:
    cap: Any = arguments.bucket_cap_mb
    try:
        if cap != AUTO:
            numbers = [float(number) for number in cap.split(",")]
            cap = numbers if len(numbers) > 1 else numbers[0]
        return ReducerConfig(bucket_cap_mb=cap, reduce_dtype=arguments.reduce_dtype)
    except ValueError:
        raise UsageError(f"--bucket-cap-mb must be {AUTO} or positive numbers of MiB, got {cap!r}.") from None


def print_plan(plan: ModulePlan) -> None:
    specs = plan.profile.specs
    mib = sum(spec.num_bytes for spec in specs) / MIB
    title = (
        f"{plan.module}: {len(specs):,} parameter tensors, {mib:,.2f} MiB of gradients in"
        f" {pluralize(len(plan.buckets), 'bucket')}, for training on {plan.device}"
    )
    with trimmed_console() as console:
        console.print(Text(title, style="bold"))
        console.print(f"({plan.origin})", markup=False)
        console.print(_bucket_table(plan))
        if plan.state is not None:
            console.print(f"\n{_describe_state(plan, plan.state)}", markup=False)
        console.print(f"\nTimes: {_describe_times(plan)}", markup=False)
        if plan.scalings and plan.times.is_of_cpu:
            about_cpus = (
                "These are times of a CPU. The efficiency below holds for training on such CPUs and says nothing about"
                " GPUs: they compute far faster, and wait as long for the network. For GPUs run this on one, or pass"
                " --profile or --backward-ms of one."
            )
            console.print(Text(about_cpus, style="bold yellow"))
        for scaling in plan.scalings:
            network = scaling.network
            speed = f"{network.bytes_per_s / 1e9:.4g} GB/s from each rank, {network.hop_s * 1e6:.3g} us per hop"
            console.print(Text(f"\n{network.name}: {speed} ({scaling.origin})", style="bold"))
            console.print(_describe_step(scaling.by_ranks[plan.num_ranks], plan.num_ranks), markup=False)
            console.print(_scaling_table(plan, scaling))
            if scaling.wire_options is not None:
                console.print(f"\nOn {plan.num_ranks:,} ranks with other options:", markup=False)
                console.print(_option_table(scaling.wire_options))
                console.print(scaling.advice, markup=False)
        if plan.scalings:
            weights = "" if plan.state is None else " weights sent when the optimizer has stepped,"
            console.print(
                f"\nAll of it is simulated: reductions one after the other,{weights} a link of its own for each rank,"
                " nobody late. Efficiency is the share of a step that is not spent waiting. Encoding gradients as"
                f" another dtype counts as {plan.codec_origin}. With `local_steps` each rank trains alone between"
                " exchanges.",
                markup=False,
            )


def _describe_state(plan: ModulePlan, state: StateByRank) -> str:
    tensors = pluralize(plan.state_tensors or 0, "tensor")
    text = (
        f"Optimizer state ({tensors} like each parameter): {state.most_bytes / MIB:,.2f} MiB at most on each of"
        f" {pluralize(plan.num_ranks, 'rank')}, {state.unsharded_bytes / MIB:,.2f} MiB without --shard-optimizer."
    )
    if state.whole_bytes and plan.num_ranks > 1:
        names = list_names([name for bucket in plan.buckets if bucket.sparse for name in plan.names_in(bucket)])
        text += f" {state.whole_bytes / MIB:,.2f} MiB of it cannot be divided, because gradients are sparse: {names}."
    return text


def _describe_times(plan: ModulePlan) -> str:
    if not plan.scalings:
        return (
            f"{plan.times.origin}. So nothing is predicted: pass --profile FILE of a run or --backward-ms MS, or give"
            " the module an `example_input_array`."
        )
    profile = plan.profile
    parts = {"forward": profile.forward_s, "backward": profile.backward_s, "optimizer": profile.optimizer_s}
    known = ", ".join(f"{name} {seconds * 1e3:.2f} ms" for name, seconds in parts.items() if seconds > 0)
    unknown = " and ".join(name for name, seconds in parts.items() if seconds <= 0)
    text = f"{known}; {plan.times.origin}." + (f" Not known, and counted as nothing: {unknown}." if unknown else "")
    if plan.times.without_and_with_graph_s is None:
        return text
    without_s, with_s = plan.times.without_and_with_graph_s
    if with_s > without_s / 1.1:
        return f"{text} Bound by the GPU: forward and backward take {in_ms(with_s)} as a CUDA graph, too."
    return (
        f"{text} Bound by the host: with `cuda_graphs=True` forward and backward take {1e3 * with_s:.2f} instead of"
        f" {in_ms(without_s)}."
    )


def _describe_step(step: Timeline, num_ranks: int) -> str:
    if num_ranks == 1:
        return f"On 1 rank a step takes {in_ms(step.step_s)}, and there is nothing to wait for."
    waits = f"{in_ms(step.exposed_s)} of it are spent waiting for reductions"
    if step.weights_s:
        waits = f"waits {in_ms(step.exposed_s - step.weights_s)} for reductions and {in_ms(step.weights_s)} for weights"
    return (
        f"On {num_ranks:,} ranks a step takes {in_ms(step.step_s)}, and {waits}: {step.overlap:.0%} of"
        f" {in_ms(step.communication_s)} of communication are hidden."
    )


def _table(*columns: Column | str) -> Table:
    """Return a table without lines; columns that are given by name are for numbers."""
    right = [Column(column, justify="right") if isinstance(column, str) else column for column in columns]
    return Table(*right, box=None, padding=(0, 2), pad_edge=False)


def _bucket_table(plan: ModulePlan) -> Table:
    last = Column("from the first to the last gradient that arrives", overflow="fold")
    table = _table("bucket", "MiB", "tensors", last)
    for index, bucket in enumerate(plan.buckets):
        size = "sparse" if bucket.sparse else f"{plan.bytes_of(bucket) / MIB:.2f}"
        names = plan.names_in(bucket)
        text = " ... ".join(dict.fromkeys((names[0], names[-1]))) if names else "(flags only)"
        table.add_row(str(index), size, str(len(names)), Text(text + " (reduced where it is)" * bucket.alone))
    return table


def _scaling_table(plan: ModulePlan, scaling: Scaling) -> Table:
    state = ["state MiB"] if plan.state is not None else []
    table = _table("ranks", "buckets", *state, "waits ms", "step ms", "overlap", "efficiency", Column())
    for num_ranks, step in scaling.by_ranks.items():
        is_alone = num_ranks == 1
        table.add_row(
            f"{num_ranks:,}",
            "-" if is_alone else str(len(step.plan)),
            *[f"{plan.state_of(step.plan, num_ranks).most_bytes / MIB:,.2f}" for _ in state],
            f"{step.exposed_s * 1e3:.2f}",
            f"{step.step_s * 1e3:.2f}",
            "-" if is_alone else f"{step.overlap:.0%}",
            f"{step.scaling_efficiency:.1%}",
            Text("█" * round(30 * step.scaling_efficiency), style="blue"),
        )
    return table


def _option_table(options: WireOptions) -> Table:
    table = _table(Column("option"), "MiB sent", "waits ms", "step ms", "speed-up")
    for option in options.all:
        table.add_row(
            option.option,
            f"{option.sent_bytes / MIB:,.2f}",
            f"{option.exposed_s * 1e3:,.2f}",
            f"{option.step_s * 1e3:,.2f}",
            f"{options.own.step_s / option.step_s:.2f}x",
        )
    return table
