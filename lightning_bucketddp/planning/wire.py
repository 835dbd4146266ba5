"""What fewer bits on the wire, or fewer exchanges, would make of a step, and which to take. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from lightning_bucketddp.config import ReducerConfig
from lightning_bucketddp.planning.cost import AllReduceCost, Codecs, Profile, Wire, share_of_a_link
from lightning_bucketddp.planning.optimal_plan import predict

LOCAL_STEPS = (10, 30, 100)
# The share of a step that fewer bits must save.
_WORTH_16_BITS = 0.02
_WORTH_8_BITS = 0.05
_ABOUT = "see docs/slow-networks.md"


def best_dtype(seconds: Mapping[str, float]) -> str:
    """Return what gradients should travel as, by the seconds that steps take with fp32 and with other dtypes.

    The one judgement of all advice. It prefers precision: 16 bits must save 2% of a step, and 8 bits 5% more.
    """
    never = float("inf")
    precise = "bf16" if seconds.get("bf16", never) <= (1 - _WORTH_16_BITS) * seconds["fp32"] else "fp32"
    return "int8" if seconds.get("int8", never) <= (1 - _WORTH_8_BITS) * seconds[precise] else precise


@dataclass(frozen=True, slots=True)
class WireOption:
    """A step with one option of the strategy."""

    option: str  # as one writes it
    sent_bytes: float  # by each rank, in a step
    compute_s: float
    exposed_s: float  # that a step waits
    local_steps: int = 1

    @property
    def step_s(self) -> float:
        return self.compute_s + self.exposed_s

    def saves(self, other: WireOption) -> float:
        """Return the share of a step with `other` that this one saves; negative if it takes longer."""
        return 1 - self.step_s / other.step_s if other.step_s > 0 else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class WireOptions:
    """What a step takes with each option, on one network."""

    own: WireOption  # gradients travel as what they are
    bf16: WireOption | None  # None: they are no larger
    int8: WireOption
    local: Sequence[WireOption]  # the fewest steps first; empty if they cannot be combined with the rest

    @classmethod
    def predict(
        cls,
        profile: Profile,
        config: ReducerConfig,
        cost: AllReduceCost,
        *,
        num_ranks: int,
        codecs: Codecs,
        is_sharded: bool = False,
    ) -> WireOptions:
        """Simulate a step with each option; `cost` is that of an all-reduce of gradients as they are."""
        sent_bytes = share_of_a_link(num_ranks) * sum(spec.num_bytes for spec in profile.specs)

        def with_dtype(reduce_dtype: str | None, option: str) -> WireOption:
            chosen, share = replace(config, reduce_dtype=reduce_dtype), Wire.of(reduce_dtype, profile.specs).share
            step = predict(profile, chosen, cost, codecs=codecs, num_shards=num_ranks if is_sharded else 1)
            if is_sharded:
                share = (share + 1) / 2  # weights travel as what they are
            return WireOption(option, sent_bytes * share, step.compute_s, step.exposed_s)

        own = with_dtype(None, "gradients as they are")
        exchange_s = local_exchange_s(profile, cost)
        local = [WireOption(f"local_steps={n}", sent_bytes / n, own.compute_s, exchange_s / n, n) for n in LOCAL_STEPS]
        return cls(
            own=own,
            bf16=with_dtype("bf16", 'reduce_dtype="bf16"') if Wire.of("bf16", profile.specs).share < 1 else None,
            int8=with_dtype("int8", 'reduce_dtype="int8"'),
            local=[] if is_sharded else local,
        )

    @property
    def all(self) -> list[WireOption]:
        return [self.own, *([self.bf16] if self.bf16 is not None else []), self.int8, *self.local]

    @property
    def best(self) -> WireOption:
        """Return the one to take: what changes the numbers least, if it is enough.

        Local steps, which train differently, are for where a step with int8 still waits longer than it computes; then
        the fewest that end this.
        """
        best = self._of_dtype(best_dtype({**self._precise, "int8": self.int8.step_s}))
        if best.exposed_s <= best.compute_s or not self.local:
            return best
        return next((option for option in self.local if option.exposed_s <= option.compute_s), self.local[-1])

    @property
    def _precise(self) -> dict[str, float]:
        return {"fp32": self.own.step_s, **({} if self.bf16 is None else {"bf16": self.bf16.step_s})}

    def _of_dtype(self, name: str) -> WireOption:
        return {"fp32": self.own, "bf16": self.bf16 or self.own, "int8": self.int8}[name]

    def advice(self, network: str) -> str:
        """Say in a sentence which to take on this network, and why."""
        best, int8 = self.best, self.int8
        saved = f"`{best.option}` saves {best.saves(self.own):.0%} of a step on {network}"
        if best.local_steps > 1:
            return (
                f"{saved}, but trains differently, {_ABOUT}. `{int8.option}` saves {int8.saves(self.own):.0%}, and a"
                f" step still waits {in_ms(int8.exposed_s)} for {in_ms(int8.compute_s)} of computation."
            )
        if best is int8:
            precise = self._of_dtype(best_dtype(self._precise))
            over = "" if precise is self.own else f", and {int8.saves(precise):.0%} of one with bf16"
            return f"{saved}{over}; gradients then have 8 bits, {_ABOUT}."
        more = int8.saves(best)
        instead = (
            f"`{int8.option}` would save {more:.0%} more, which is not worth its 8 bits."
            if more > 0
            else f"`{int8.option}` would take {-more:.0%} longer: do not set it."
        )
        if best is self.own:
            return f"Leave gradients as they are on {network}: a step waits {in_ms(best.exposed_s)}. {instead}"
        return f"{saved}. {instead}"


def local_exchange_s(profile: Profile, cost: AllReduceCost) -> float:
    """Return how long the average of all weights takes, with each rank an island of its own; nothing hides it."""
    return cost.seconds(sum(spec.num_bytes for spec in profile.specs))


def in_ms(seconds: float) -> str:
    return f"{1e3 * seconds:.2f} ms"
