"""What came of all programs, by outcome and by block."""

from __future__ import annotations

from collections import Counter
from itertools import combinations

from tests.fuzz.shrink import Finding


class Tally:
    """Counts programs."""

    def __init__(self) -> None:
        self.num_programs = 0
        self.failures: dict[int, Finding] = {}
        self._outcomes: Counter[tuple[str, str]] = Counter()
        self._refusals: Counter[str] = Counter()
        self._blocks: Counter[str] = Counter()
        self._pairs: set[tuple[str, str]] = set()

    def add(self, seed: int, finding: Finding) -> None:
        program, verdict = finding.program, finding.verdict
        self.num_programs += 1
        self._outcomes[verdict.kind, verdict.oracle] += 1
        self._blocks.update(set(program.blocks))
        self._pairs.update(combinations(sorted(set(program.blocks)), 2))
        if verdict.is_failure:
            self.failures[seed] = finding
        if verdict.kind == "refused":
            self._refusals[_last_line(verdict.details)] += 1

    def document(self) -> str:
        """Return all counts, in Markdown."""
        lines = [f"{self.num_programs} programs, {len(self._pairs)} pairs of blocks.", ""]
        lines += ["| outcome | compared with | programs |", "|---|---|--:|"]
        lines += [f"| {kind} | {oracle} | {count} |" for (kind, oracle), count in sorted(self._outcomes.items())]
        lines += ["", "| block | programs |", "|---|--:|"]
        lines += [f"| {block} | {count} |" for block, count in sorted(self._blocks.items())]
        if self._refusals:
            lines += ["", "| refused by | programs |", "|---|--:|"]
            lines += [f"| {words} | {count} |" for words, count in self._refusals.most_common()]
        if self.failures:
            lines += ["", "Failures:", ""]
            lines += [f"* {seed}: {found.verdict.kind}: `{found.program}`" for seed, found in self.failures.items()]
        return "\n".join([*lines, ""])


def _last_line(details: list[str]) -> str:
    """Return what a rank has raised that was not told of it by another."""
    raised = [line for text in details for line in text.splitlines() if "Error: " in line and not line.startswith(" ")]
    own = [line for line in raised if "RankFailedError" not in line]
    return (own or raised or ["?"])[-1][:160]
