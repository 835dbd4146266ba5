"""What to change so that steps get shorter, and by how much. Pure.

Note: expected gains
    The simulation of the plan (Note: timeline) is scaled until it ends when the slowest rank's reductions have ended:
    that rank waits for nobody but the network. What another option would do to it is simulated, too. Each gain is that
    of one change alone; several changes together gain less than the sum.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_bucketddp.core.config import AUTO, MIB, BucketCaps
from lightning_bucketddp.core.cost import AllReduceCost
from lightning_bucketddp.core.optimum import optimal_plan
from lightning_bucketddp.core.plan import plan_buckets
from lightning_bucketddp.core.profile import Profile
from lightning_bucketddp.core.timeline import cost_until, simulate
from lightning_bucketddp.report.profiles import plan_in
from lightning_bucketddp.report.record import RecordedPlan
from lightning_bucketddp.report.summary import RankNumbers, slowest_of

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
    ranks: Sequence[RankNumbers], plan: RecordedPlan | None, profile: Profile | None, *, options: Mapping[str, Any]
) -> list[str]:
    """The best changes, with the option to set and what it gains (Note: expected gains).

    Args:
        ranks: what was recorded, by rank.
        plan: the plan in use.
        profile: of a backward with it.
        options: of the run, as it was recorded.
    """
    step_s = statistics.fmean(rank.step_s for rank in ranks)
    found = [*_about_data(ranks, step_s, options), *_about_slowest(ranks)]
    if plan is not None and profile is not None and (positions := plan_in(profile, plan)) is not None:
        exposed_s = slowest_of(ranks)[0].exposed_s
        cost = cost_until(profile, positions, end_s=profile.backward_s + exposed_s)
        # What the model cannot explain, no change of the model can gain.
        exposed_s = min(simulate(profile, positions, cost).exposed_s, exposed_s)
        network = _Network(profile, cost, exposed_s, options)
        found += [*network.about_dtype(plan), *network.about_buckets(plan), *network.about_accumulation()]
    worthwhile = [suggestion for suggestion in found if suggestion.gain_s > _WORTHWHILE * step_s]
    best = sorted(worthwhile, key=lambda suggestion: -suggestion.gain_s)[:_NUM_SUGGESTIONS]
    return [f"{suggestion.text} ({suggestion.gain_s / step_s:.0%} of the step)." for suggestion in best]


def _about_data(ranks: Sequence[RankNumbers], step_s: float, options: Mapping[str, Any]) -> list[_Suggestion]:
    data_s = statistics.fmean(rank.phases["data"] for rank in ranks)
    if data_s <= _MUCH_DATA * step_s:
        return []
    num_workers = options.get("num_workers")
    now = "" if num_workers is None else f", which is {num_workers} now"
    return [_Suggestion(f"a larger `num_workers` of the `DataLoader`{now}, would save up to {_ms(data_s)}", data_s)]


def _about_slowest(ranks: Sequence[RankNumbers]) -> list[_Suggestion]:
    slowest, by_s = slowest_of(ranks)
    phase, more_s = _largest_excess(slowest, ranks)
    where = f", most of it in {phase} ({_ms(more_s)})" if more_s > 0 else ""
    return [
        _Suggestion(
            f"rank {slowest.rank} on {slowest.host} makes the others wait {_ms(by_s)}{where}: see what else runs there,"
            " and whether its batches are larger",
            by_s,
        )
    ]


def _largest_excess(slowest: RankNumbers, ranks: Sequence[RankNumbers]) -> tuple[str, float]:
    others = [rank for rank in ranks if rank is not slowest] or [slowest]
    excess = {
        phase: seconds - statistics.median(rank.phases[phase] for rank in others)
        for phase, seconds in slowest.phases.items()
        if phase != "exposed"
    }
    phase = max(excess, key=lambda name: excess[name])
    return phase, excess[phase]


@dataclass(frozen=True, slots=True)
class _Network:
    """What is exposed now, and what would be."""

    profile: Profile
    cost: AllReduceCost
    exposed_s: float
    options: Mapping[str, Any]

    def about_dtype(self, plan: RecordedPlan) -> list[_Suggestion]:
        takes_dtype = self.options.get("reduce_dtype") is None and self.options.get("ddp_comm_hook") is None
        if not takes_dtype or self.options.get("gradient_dtype") != "torch.float32":
            return []
        positions = plan_in(self.profile, plan)
        assert positions is not None
        halved = AllReduceCost(self.cost.latency_s, self.cost.s_per_byte / 2)
        gain_s = self.exposed_s - simulate(self.profile, positions, halved).exposed_s
        return [_Suggestion(f'`reduce_dtype="bf16"` would hide {self._of_exposed(gain_s)}', gain_s)]

    def about_buckets(self, plan: RecordedPlan) -> list[_Suggestion]:
        if self.options.get("ddp_comm_hook") is not None or not self.options.get("overlap", True):
            return []
        profile = self.profile
        plans = {
            f"`bucket_cap_mb={cap}`": plan_buckets(
                profile.specs,
                arrived=profile.arrived,
                missing=profile.missing,
                caps=BucketCaps(by_position=(cap * MIB,), last=None),
            )
            for cap in _CAPS_MB
        }
        if self.options.get("bucket_cap_mb") != AUTO:
            # No fixed size is better than this.
            plans = {f'`bucket_cap_mb="{AUTO}"`': optimal_plan(profile, cost=self.cost)}
        gains = {name: self.exposed_s - simulate(profile, p, self.cost).exposed_s for name, p in plans.items()}
        name = max(gains, key=lambda option: gains[option])
        num_buckets = f"{len(plans[name])} instead of {len(plan.buckets)} buckets"
        return [_Suggestion(f"{name} ({num_buckets}) would hide {self._of_exposed(gains[name])}", gains[name])]

    def about_accumulation(self) -> list[_Suggestion]:
        num_batches = self.options.get("accumulate_grad_batches", 1)
        gain_s = self.exposed_s / 2
        text = (
            f"`accumulate_grad_batches={2 * num_batches}`, with twice the global batch, would halve the"
            f" {_ms(self.exposed_s)} exposed"
        )
        return [_Suggestion(text, gain_s)]

    def _of_exposed(self, gain_s: float) -> str:
        return f"{1e3 * gain_s:.2f} of {_ms(self.exposed_s)} exposed"


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.2f} ms"
