"""What the rounds have come to, in words."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median

from tests.soak.round import Effect, Outcome


class Tally:
    """Counts outcomes; `replay` returns the command that repeats a round."""

    def __init__(self, replay: Callable[[Outcome], str]) -> None:
        self.outcomes: list[Outcome] = []
        self._replay = replay

    def add(self, outcome: Outcome) -> str:
        """Return one line for each fault of `outcome`, and one for each finding."""
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

    def summary(self) -> str:
        """Return a table by fault, and what was wrong."""
        wrong = [
            f"* {outcome.trial.seed}: {finding.kind}: {finding.what} (`{self._replay(outcome)}`)"
            for outcome in self.failed
            for finding in outcome.findings
        ]
        too_late = sum(outcome.came_too_late for outcome in self.outcomes)
        counts = f"{len(self.outcomes)} rounds with {len(self.effects)} faults; {too_late} came too late."
        return "\n".join([counts, "", *self._by_fault(), "", "## What was wrong\n", *(wrong or ["Nothing."]), ""])

    def document(self, about: str) -> str:
        """Return the text of the result file."""
        return f"# Faults of a soak\n\n{about}\n\n{self.summary()}"

    def _by_fault(self) -> list[str]:
        rows = ["| fault | seconds until | number | median s | max s | max steps lost | rounds that went wrong |"]
        rows.append("|---|---|---|---|---|---|---|")
        for name, until in sorted({(effect.fault.what, _until(effect)) for _, effect in self.effects}):
            found = [(o, effect) for o, effect in self.effects if (effect.fault.what, _until(effect)) == (name, until)]
            seconds = [effect.seconds for _, effect in found]
            lost = [effect.steps_lost for _, effect in found if effect.steps_lost is not None]
            wrong = len({outcome.trial.seed for outcome, _ in found if outcome.findings})
            rows.append(
                f"| `{name}` | {until} | {len(found)} | {median(seconds):.1f} |"
                f" {max(seconds):.1f} | {max(lost, default='')} | {wrong} |"
            )
        return rows


def _until(effect: Effect) -> str:
    return "next step" if effect.goes_on else "end of all"


def _words(effect: Effect) -> str:
    lost = "" if effect.steps_lost is None else f", {effect.steps_lost} lost"
    return f"{effect.seconds:5.1f} s to {_until(effect)}{lost}"
