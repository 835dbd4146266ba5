"""What the rounds have come to, in words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from tests.soak.round import WRONGS, Outcome


@dataclass
class Tally:
    """Counts outcomes, and says how to see the bad ones again.

    Attributes:
        replay: the command that repeats a round.
    """

    replay: Callable[[Outcome], str]
    num_rounds: int = 0
    num_too_late: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    wrongs: Counter[str] = field(default_factory=Counter)
    failed: list[Outcome] = field(default_factory=list)

    def add(self, outcome: Outcome) -> str:
        """One line about `outcome`, and one for each thing that is wrong."""
        self.num_rounds += 1
        self.num_too_late += outcome.came_too_late
        self.faults[outcome.trial.fault] += 1
        self.wrongs.update({finding.kind for finding in outcome.findings})
        if outcome.findings:
            self.failed.append(outcome)
        verdict = "WRONG" if outcome.findings else "too late" if outcome.came_too_late else "well"
        again = "" if not outcome.trial.is_restarted else ", restarted"
        line = f"{outcome.trial.seed:<11}{outcome.trial.describe():<60}{verdict}{again}, {outcome.seconds:.1f} s"
        return "\n".join([line, *(f"    {finding.kind}: {finding.what}" for finding in outcome.findings)])

    def table(self) -> str:
        """All rounds, by fault and by what was wrong."""
        counts = {"rounds": self.num_rounds, "faults that came too late": self.num_too_late}
        counts |= {f"fault {fault}": number for fault, number in sorted(self.faults.items())}
        counts |= {f"wrong: {kind}": self.wrongs[kind] for kind in WRONGS}
        lines = [f"{name:<28}{number:>6}" for name, number in counts.items()]
        return "\n".join([*lines, *(f"to see it again: {self.replay(outcome)}" for outcome in self.failed)])
