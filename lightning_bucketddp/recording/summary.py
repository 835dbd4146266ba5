"""The summary at the end of a fit: where a step spends its time, and what to change.

Note: advice and measurement
    A simulation never overrules a measurement: it does not know that reductions slow backward down
    (docs/design/optimal-plan.md). With `bucket_cap_mb="auto"`, which measures, no bucket size is suggested; without it,
    "auto" is the suggestion. Only deterministic and sharded runs, which may not measure, get a simulated size.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.table import Column, Table

from lightning_bucketddp.config import AUTO, MIB, ReducerConfig
from lightning_bucketddp.planning.cost import AllReduceCost, Profile, Wire, simulate
from lightning_bucketddp.planning.optimal_plan import best_dtype, in_ms, predict
from lightning_bucketddp.planning.plan import BucketSpec
from lightning_bucketddp.recording.schema import WAITS, RecordedPlan
from lightning_bucketddp.recording.typical_step import TypicalStep, mean_phases, plan_in
from lightning_bucketddp.reducer.observer import OuterStepStats
from lightning_bucketddp.wording import list_names, pluralize

PHASE_IN_WORDS = {
    "data": "waiting for data",
    "weights": "waiting for weights",
    "forward": "forward",
    "backward": "backward",
    "exposed": "exposed communication",
    "optimizer": "optimizer",
}


@dataclass(frozen=True, slots=True)
class Summary:
    """A table of the phases of a step, and the lines below it."""

    title: str
    seconds: dict[str, float]
    lines: Sequence[str]

    @classmethod
    def of(
        cls,
        typical: TypicalStep,
        *,
        suggestions: Sequence[str],
        state_bytes: tuple[int, int] | None = None,
        outer_steps: Sequence[OuterStepStats] = (),
    ) -> Summary:
        """Return the summary of a fit; `state_bytes` is the optimizers' state on rank 0, with and without sharding."""
        lines = [] if typical.plan is None else _describe_communication(typical, typical.plan)
        if num_replayed := typical.ranks[0].num_replayed:
            lines.append(f"CUDA graphs: {num_replayed} of {typical.ranks[0].num_steps} recorded steps were replayed.")
        if typical.is_host_bound:
            lines.append("Bound by the host: the GPU waits for Python in forward and backward.")
        if typical.exchange_s > 0:
            lines.append(
                f"Weights: their exchange ends a step and takes {in_ms(typical.exchange_s)} of that; the step waits"
                f" {in_ms(typical.phases.get('weights', 0.0))} for it."
            )
        if number := len(outer_steps):
            mib, seconds = sum(one.num_bytes for one in outer_steps) / MIB, sum(one.seconds for one in outer_steps)
            lines.append(
                f"Outer steps between islands: {number}, the last after step {outer_steps[-1].step}; each takes"
                f" {in_ms(seconds / number)} and {mib / number:.2f} MiB of each rank."
            )
        if typical.straggler is not None:
            rank, by_s = typical.straggler
            lines.append(
                f"Slowest rank: {rank.rank} on {rank.host}, {in_ms(by_s)} ({by_s / typical.step_s:.0%} of the step)"
                f" slower than the others. It waits {in_ms(rank.exposed_s)}, for the network alone."
            )
        elif len(typical.ranks) > 1:
            lines.append("Slowest rank: none; all take about the same time.")
        largest = max(typical.ranks, key=lambda rank: rank.memory_bytes)
        lines.append(f"Memory: {largest.memory_bytes / MIB:,.0f} MiB at most, on rank {largest.rank}.")
        if state_bytes is not None:
            own_mib, whole_mib = (num_bytes / MIB for num_bytes in state_bytes)
            lines.append(
                f"Optimizer state: {own_mib:.2f} MiB on rank 0, {whole_mib:.2f} MiB without `shard_optimizer`."
            )
        lines += [f"Suggestion {n}: {text}" for n, text in enumerate(suggestions, start=1)]
        num_steps = pluralize(typical.ranks[0].num_steps, "recorded step")
        return cls(f"bucketddp: {num_steps} on {pluralize(len(typical.ranks), 'rank')}", typical.phases, lines)


def print_summary(summary: Summary) -> None:
    console = Console(highlight=False)
    console.print(summary.title)
    table = Table("one step", Column("ms", justify="right"), Column("%", justify="right"))
    total = sum(summary.seconds.values())
    for phase, seconds in summary.seconds.items():
        table.add_row(PHASE_IN_WORDS[phase], f"{1e3 * seconds:.2f}", f"{100 * seconds / max(total, 1e-9):.1f}")
    table.add_section()
    table.add_row("all", f"{1e3 * total:.2f}", "100.0")
    console.print(Padding(table, (0, 0, 0, 2), expand=False))
    for line in summary.lines:
        console.print(line, markup=False, soft_wrap=True)


def _describe_communication(typical: TypicalStep, plan: RecordedPlan) -> list[str]:
    num_buckets = len(plan.buckets)
    lines = [
        f"Communication: {in_ms(typical.communication_s)}, of which {typical.overlap:.0%} is hidden;"
        f" {typical.bytes_on_wire / MIB:.2f} MiB in {pluralize(num_buckets, 'bucket')} at"
        f" {typical.bandwidth * 8 / 1e9:.2f} Gbit/s."
    ]
    index, wait_s = typical.late_bucket or (num_buckets, 0.0)
    if index < num_buckets:
        bucket = plan.buckets[index]
        lines.append(
            f"Late bucket: {index} of {num_buckets}, {bucket.num_bytes / MIB:.2f} MiB"
            f" ({list_names(bucket.parameters, limit=2)}): {1e3 * wait_s:.2f} of the {in_ms(typical.exposed_s)} exposed"
            " are spent on it."
        )
    return lines


def suggestions(typical: TypicalStep) -> list[str]:
    """Return up to three changes, the best first, with their gains; each gain is that of one change alone."""
    options = typical.run.options
    found = list(_suggest_for_ranks(typical, options))
    against: list[str] = []
    if typical.plan is not None:
        run = _Simulated.of(typical, typical.plan)
        found += _suggest_for_network(typical, run, options)
        against = [] if run is None else run.against_dtype(options.get("reduce_dtype"), typical)
    worthwhile = [(text, gain_s) for text, gain_s in found if gain_s > 0.02 * typical.step_s]
    best = sorted(worthwhile, key=lambda suggestion: -suggestion[1])
    return [*against, *(f"{text} ({gain_s / typical.step_s:.0%} of the step)." for text, gain_s in best)][:3]


def _suggest_for_ranks(typical: TypicalStep, options: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield changes for waiting for data, for Python and for a straggler, each with the seconds that it gains."""
    data_s, computing_s = typical.phases["data"], typical.computing_s
    if data_s > 0.1 * typical.step_s:
        num_workers = options.get("num_workers")
        now = "" if num_workers is None else f", which is {num_workers} now"
        yield f"a larger `num_workers` of the `DataLoader`{now}, would save up to {in_ms(data_s)}", data_s
    if typical.is_host_bound and options.get("automatic_optimization") and not options.get("cuda_graphs"):
        yield f"`cuda_graphs=True` would save a part of the {in_ms(computing_s)} of forward and backward", computing_s
    if typical.straggler is not None:
        rank, by_s = typical.straggler
        usual = mean_phases(other.phases for other in typical.ranks if other is not rank)
        excess = {phase: seconds - usual[phase] for phase, seconds in rank.phases.items() if phase not in WAITS}
        phase = max(excess, key=lambda name: excess[name])
        text = (
            f"rank {rank.rank} on {rank.host} makes the others wait {in_ms(by_s)}, most of it in {phase}"
            f" ({in_ms(excess[phase])}): see what else runs there, and whether its batches are larger"
        )
        yield text, by_s


def _suggest_for_network(
    typical: TypicalStep, run: _Simulated | None, options: Mapping[str, Any]
) -> Iterator[tuple[str, float]]:
    """Yield options that shorten the wait for the network, each with the seconds that it gains."""
    wait_s = typical.unhindered.exposed_s
    wait = f"the {in_ms(wait_s)} exposed"
    if typical.straggler is not None:
        wait = f"the {in_ms(wait_s)} that rank {typical.straggler[0].rank}, the slowest, waits"
    if run is not None:
        for option, gain_s in _simulate_options(run, typical, options):
            yield f"{option} would hide {1e3 * gain_s:.2f} of {wait}", gain_s
    if options.get("automatic_optimization", True):
        given = "global_batch_size" if options.get("global_batch_size") else "accumulate_grad_batches"
        yield f"`{given}={2 * options.get(given, 1)}`, with twice the global batch, would halve {wait}", wait_s / 2


@dataclass(frozen=True, slots=True)
class _Simulated:
    """The backward of a run, of the straggler if there is one, with a cost that explains how long its steps wait."""

    profile: Profile
    plan: Sequence[BucketSpec]  # by position in the profile
    cost: AllReduceCost
    wait_s: float

    @classmethod
    def of(cls, typical: TypicalStep, plan: RecordedPlan) -> _Simulated | None:
        """Return the simulation of a run; None if the cost of a reduction is not known."""
        profile = typical.profile()
        if profile is None or (positions := plan_in(profile, plan)) is None or profile.cost is None:
            return None
        cost = typical.fitted_cost(profile, positions)
        # A wait that the simulation does not explain cannot be gained by changing the plan.
        wait_s = min(simulate(profile, positions, cost).exposed_s, typical.unhindered.exposed_s)
        return cls(profile, positions, cost, wait_s)

    def steps_by_dtype(self, typical: TypicalStep) -> dict[str, float]:
        """Return how long a step takes with each dtype whose codec is known; {} where none can be chosen."""
        options, codecs, specs = typical.run.options, typical.run.codecs, self.profile.specs
        if options.get("ddp_comm_hook") is not None or options.get("gradient_dtype") != "torch.float32":
            return {}
        now = options.get("reduce_dtype") or "fp32"
        own = Wire.of(now, specs, codecs).own_cost(self.cost)
        steps = {}
        for name in ("fp32", "bf16", "int8"):
            if name != "int8" or name in codecs:
                wire = Wire.of(name, specs, codecs)
                wait_s = simulate(self.profile, self.plan, wire.cost(own), codec=wire.codec).exposed_s
                steps[name] = typical.step_s - self.wait_s + (self.wait_s if name == now else wait_s)
        return steps

    def against_dtype(self, now: str | None, typical: TypicalStep) -> list[str]:
        """Return what to set instead of the dtype `now`, if that does not gain enough for the precision it costs."""
        steps = self.steps_by_dtype(typical)
        # A smaller dtype than now is a suggestion like others.
        if now in (None, "fp32") or now not in steps or (best := best_dtype(steps)) in (now, "int8"):
            return []
        gain_s = steps[best] - typical.step_s
        effect = f"saves {in_ms(gain_s)} only" if gain_s > 0 else f"takes {in_ms(-gain_s)} longer"
        instead = f'`reduce_dtype="{best}"` instead of' if best == "bf16" else "no `reduce_dtype` instead of"
        return [f'{instead} "{now}", which {effect} here and costs precision.']


def _simulate_options(run: _Simulated, typical: TypicalStep, options: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    now, steps = options.get("reduce_dtype"), run.steps_by_dtype(typical)
    precise = {name: seconds for name, seconds in steps.items() if name != "int8"}
    if precise and now is None and best_dtype(precise) == "bf16":
        yield '`reduce_dtype="bf16"`', typical.step_s - steps["bf16"]
    if steps and now != "int8" and best_dtype(steps) == "int8":
        yield '`reduce_dtype="int8"`, with 8 bits for each gradient,', typical.step_s - steps["int8"]
    predicted = {name: predict(run.profile, config, run.cost) for name, config in _other_sizes(options).items()}
    if predicted:
        option, best = min(predicted.items(), key=lambda item: item[1].exposed_s)
        text = f"`{option}` ({len(best.plan)} instead of {len(run.plan)} buckets)"
        yield text, run.wait_s - best.exposed_s


def _other_sizes(options: Mapping[str, Any]) -> dict[str, ReducerConfig]:
    """Return the bucket sizes that may be suggested, by option (Note: advice and measurement)."""
    if options.get("ddp_comm_hook") is not None or not options.get("overlap", True):
        return {}
    if options.get("deterministic", False) or options.get("shard_optimizer"):
        return {f"bucket_cap_mb={cap}": ReducerConfig(bucket_cap_mb=cap) for cap in (1, 5, 10, 25, 50, 100)}
    return {} if options.get("bucket_cap_mb") == AUTO else {f'bucket_cap_mb="{AUTO}"': ReducerConfig()}
