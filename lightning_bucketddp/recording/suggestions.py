"""What to change so that steps get shorter, and by how much. Pure.

Note: expected gains
    The simulation of the plan (Note: timeline) is scaled until it ends when the reductions have ended in the run, on
    the straggler if there is one: that rank waits for nobody but the network. What another option would do to it is
    simulated, too. Each gain is that of one change alone; several changes together gain less than the sum.

Note: advice and measurement
    The simulation knows neither that reductions take time from backward, nor how much the machine does besides. Where
    as many ranks as cores train on CPUs, nothing is hidden for free: in a small GPT on two of them, a backward without
    reductions took 105 ms of processor time, one with 9 buckets 115 and one with 25 buckets 127, while the simulation
    saw them wait equally long. So there is no simulated advice about what the run has measured. `bucket_cap_mb="auto"`
    has tried the plan that the simulation thinks best and kept the better one: where it was set, and could measure, no
    size of buckets is suggested. Where it was not, it is what is suggested, since it measures before it decides;
    unless the run is deterministic, in which it may not measure. Then it is a size, and only a simulated one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_bucketddp.config import AUTO, ReducerConfig
from lightning_bucketddp.planning.all_reduce_cost import AllReduceCost
from lightning_bucketddp.planning.backward_profile import Profile
from lightning_bucketddp.planning.optimal_plan import predict
from lightning_bucketddp.planning.simulation import simulate
from lightning_bucketddp.recording.profiles import plan_in
from lightning_bucketddp.recording.record import RecordedPlan
from lightning_bucketddp.recording.typical_step import RankNumbers, Straggler, TypicalStep

_NUM_SUGGESTIONS = 3
# What gains less than this share of a step is not worth a change.
_WORTHWHILE = 0.02
_MUCH_DATA = 0.1
_CAPS_MB = (1, 5, 10, 25, 50, 100)


@dataclass(frozen=True, slots=True)
class _Suggestion:
    text: str
    gain_s: float


def suggestions(
    typical: TypicalStep, plan: RecordedPlan | None, measured: Profile | None, *, options: Mapping[str, Any]
) -> list[str]:
    """The best changes, with the option to set and what it gains (Note: expected gains).

    Args:
        typical: the step that was recorded.
        plan: the plan in use.
        measured: the backward that `bucket_cap_mb="auto"` has measured.
        options: of the run, as it was recorded.
    """
    found = [*_about_data(typical, options), *_about_straggler(typical)]
    if plan is not None:
        wait = _Wait(typical.network_wait_s, typical.straggler)
        profile = typical.profile(plan, measured)
        if profile is not None:
            found += _about_network(wait, typical.fitted(profile, plan), plan, options)
        found += _about_accumulation(wait, options)
    worthwhile = [suggestion for suggestion in found if suggestion.gain_s > _WORTHWHILE * typical.step_s]
    best = sorted(worthwhile, key=lambda suggestion: -suggestion.gain_s)[:_NUM_SUGGESTIONS]
    return [f"{suggestion.text} ({suggestion.gain_s / typical.step_s:.0%} of the step)." for suggestion in best]


@dataclass(frozen=True, slots=True)
class _Wait:
    """How long steps wait for the network, and whose wait that is; None: everybody's."""

    seconds: float
    straggler: Straggler | None

    def __str__(self) -> str:
        if self.straggler is None:
            return f"the {_ms(self.seconds)} exposed"
        return f"the {_ms(self.seconds)} that rank {self.straggler.rank.rank}, the slowest, waits"


def _about_data(typical: TypicalStep, options: Mapping[str, Any]) -> list[_Suggestion]:
    data_s = typical.phases["data"]
    if data_s <= _MUCH_DATA * typical.step_s:
        return []
    num_workers = options.get("num_workers")
    now = "" if num_workers is None else f", which is {num_workers} now"
    return [_Suggestion(f"a larger `num_workers` of the `DataLoader`{now}, would save up to {_ms(data_s)}", data_s)]


def _about_straggler(typical: TypicalStep) -> list[_Suggestion]:
    straggler = typical.straggler
    if straggler is None:
        return []
    rank, by_s = straggler.rank, straggler.by_s
    phase, more_s = _largest_excess(rank, typical.ranks)
    return [
        _Suggestion(
            f"rank {rank.rank} on {rank.host} makes the others wait {_ms(by_s)}, most of it in {phase} ({_ms(more_s)}):"
            " see what else runs there, and whether its batches are larger",
            by_s,
        )
    ]


def _largest_excess(slowest: RankNumbers, ranks: Sequence[RankNumbers]) -> tuple[str, float]:
    others = TypicalStep([rank for rank in ranks if rank is not slowest], num_ranks=len(ranks) - 1).phases
    excess = {phase: seconds - others[phase] for phase, seconds in slowest.phases.items() if phase != "exposed"}
    phase = max(excess, key=lambda name: excess[name])
    return phase, excess[phase]


def _about_accumulation(wait: _Wait, options: Mapping[str, Any]) -> list[_Suggestion]:
    num_batches = options.get("accumulate_grad_batches", 1)
    text = f"`accumulate_grad_batches={2 * num_batches}`, with twice the global batch, would halve {wait}"
    return [_Suggestion(text, wait.seconds / 2)]


def _about_network(wait: _Wait, profile: Profile, plan: RecordedPlan, options: Mapping[str, Any]) -> list[_Suggestion]:
    positions, cost = plan_in(profile, plan), profile.cost
    if positions is None or cost is None:
        return []
    # What the simulation cannot explain, no change of it can gain.
    waits_s = min(simulate(profile, positions, cost).exposed_s, wait.seconds)

    def suggest(text: str, exposed_s: float) -> _Suggestion:
        gain_s = waits_s - exposed_s
        return _Suggestion(f"{text} would hide {1e3 * gain_s:.2f} of {wait}", gain_s)

    found = []
    if _takes_dtype(options):
        halved = AllReduceCost(cost.latency_s, cost.s_per_byte / 2)
        found.append(suggest('`reduce_dtype="bf16"`', simulate(profile, positions, halved).exposed_s))
    predicted = {option: predict(profile, config, cost) for option, config in _other_sizes(options).items()}
    if predicted:
        option, best = min(predicted.items(), key=lambda item: item[1].timeline.exposed_s)
        num_buckets = f"{len(best.plan)} instead of {len(plan.buckets)} buckets"
        found.append(suggest(f"`{option}` ({num_buckets})", best.timeline.exposed_s))
    return found


def _takes_dtype(options: Mapping[str, Any]) -> bool:
    is_free = options.get("reduce_dtype") is None and options.get("ddp_comm_hook") is None
    return is_free and options.get("gradient_dtype") == "torch.float32"


def _other_sizes(options: Mapping[str, Any]) -> dict[str, ReducerConfig]:
    """What may be suggested about the sizes of buckets (Note: advice and measurement)."""
    if options.get("ddp_comm_hook") is not None or not options.get("overlap", True):
        return {}
    if options.get("deterministic", False):
        return {f"bucket_cap_mb={cap}": ReducerConfig(bucket_cap_mb=cap) for cap in _CAPS_MB}
    return {} if options.get("bucket_cap_mb") == AUTO else {f'bucket_cap_mb="{AUTO}"': ReducerConfig()}


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.2f} ms"
