"""What the rounds have come to, in words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median

from tests.soak.round import LEFTOVER, WRONGS, Effect, Outcome


@dataclass
class Tally:
    """Counts outcomes, and says how to see the bad ones again.

    Attributes:
        replay: the command that repeats a round.
    """

    replay: Callable[[Outcome], str]
    outcomes: list[Outcome] = field(default_factory=list)

    def add(self, outcome: Outcome) -> str:
        """One line for each fault of `outcome`, and one for each thing that is wrong."""
        self.outcomes = sorted([*self.outcomes, outcome], key=lambda one: one.trial.seed)
        verdict = "WRONG" if outcome.findings else "too late" if outcome.came_too_late else "well"
        begin = f"{outcome.trial.seed:<8}{outcome.trial.launcher:<9}"
        lines = [f"{begin}{effect.fault.describe():<70}{_words(effect)}" for effect in outcome.effects]
        lines = lines or [f"{begin}{outcome.trial.faults[0].describe():<70}"]
        lines[-1] += f"  {verdict}"
        return "\n".join([*lines, *(f"    {finding.kind}: {finding.what}" for finding in outcome.findings)])

    @property
    def failed(self) -> list[Outcome]:
        return [outcome for outcome in self.outcomes if outcome.findings]

    @property
    def effects(self) -> list[tuple[Outcome, Effect]]:
        return [(outcome, effect) for outcome in self.outcomes for effect in outcome.effects]

    def table(self) -> str:
        """All rounds, by fault and by what was wrong."""
        faults = Counter(effect.fault.what for _, effect in self.effects)
        wrongs = Counter(kind for outcome in self.outcomes for kind in {one.kind for one in outcome.findings})
        counts = {"rounds": len(self.outcomes), "faults": len(self.effects)}
        counts |= {"faults that came too late": sum(outcome.came_too_late for outcome in self.outcomes)}
        counts |= {f"fault {fault}": number for fault, number in sorted(faults.items())}
        counts |= {f"wrong: {kind}": wrongs[kind] for kind in WRONGS}
        lines = [f"{name:<28}{number:>6}" for name, number in counts.items()]
        return "\n".join([*lines, *(f"to see it again: {self.replay(outcome)}" for outcome in self.failed)])

    def document(self, about: str) -> str:
        """The result file: a table by fault, and all rounds in the order of their seeds."""
        lines = [f"# Faults of a soak\n\n{about}\n", *self._by_fault(), "", *self._all_faults()]
        wrong = [
            f"* {outcome.trial.seed}: {finding.kind}: {finding.what} (`{self.replay(outcome)}`)"
            for outcome in self.failed
            for finding in outcome.findings
        ]
        return "\n".join([*lines, "", "## What was wrong\n", *(wrong or ["Nothing."]), ""])

    def _by_fault(self) -> list[str]:
        rows = []
        for name in sorted({(effect.fault.what, effect.goes_on) for _, effect in self.effects}):
            found = [
                (outcome, effect) for outcome, effect in self.effects if (effect.fault.what, effect.goes_on) == name
            ]
            seconds = [effect.seconds for _, effect in found]
            lost = [effect.steps_lost for _, effect in found if effect.steps_lost is not None]
            wrong = len({outcome.trial.seed for outcome, _ in found if outcome.findings})
            rows.append(
                f"| `{name[0]}` | {'next step' if name[1] else 'end of all'} | {len(found)} | {median(seconds):.1f} |"
                f" {max(seconds):.1f} | {max(lost, default='')} | {wrong} |"
            )
        head = "| fault | seconds until | number | median s | max s | max steps lost | rounds that went wrong |"
        return [head, "|---|---|---|---|---|---|---|", *rows]

    def _all_faults(self) -> list[str]:
        head = "| seed | launcher | fault | whom, when | s | until | steps lost | replicas equal | left behind |"
        rows = []
        for outcome, effect in self.effects:
            what, rest = effect.fault.describe()[:23].strip(), " ".join(effect.fault.describe()[23:].split())
            equal = {None: "not started again", True: "yes", False: "NO"}[outcome.are_replicas_equal]
            left = "; ".join(one.what for one in outcome.findings if one.kind == LEFTOVER) or "nothing"
            rows.append(
                f"| {outcome.trial.seed} | {outcome.trial.launcher} | `{what}` | {rest} | {effect.seconds:.1f} |"
                f" {'next step' if effect.goes_on else 'end of all'} | {effect.steps_lost} | {equal} | {left} |"
            )
        return ["## All faults\n", head, "|---|---|---|---|---|---|---|---|---|", *rows]


def _words(effect: Effect) -> str:
    until = "next step" if effect.goes_on else "end"
    lost = "" if effect.steps_lost is None else f", {effect.steps_lost} lost"
    return f"{effect.seconds:5.1f} s to {until}{lost}"
