"""Draw programs that a user might write, train them with torch DDP and with `bucketddp`, and compare.

A program that torch DDP trains has the same weights here, bit for bit, or is refused on all ranks; one that fails on a
rank ends on all of them, and no rank has taken the step. The first that does not is shrunk, and printed with the
command that runs it.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import Counter
from pathlib import Path

from tests.fuzz.compare import check
from tests.fuzz.program import draw
from tests.fuzz.shrink import Finding, shrink
from tests.support.ranks import close_pools, use_gpu

# Ranks get slower with all that was done on them.
_PROGRAMS_PER_POOL = 40


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument(
        "--minutes", type=float, default=10, help="begin no program after so long (default: %(default)s)"
    )
    parser.add_argument("--programs", type=int, help="draw at most so many")
    parser.add_argument("--seed", type=int, help="of the first program; each next one has the next number")
    parser.add_argument(
        "--device", choices=["cpu", "cuda"], default="cpu", help="cuda: two NCCL ranks share the first GPU"
    )
    parser.add_argument("--without", action="append", default=[], metavar="EVENT", help="leave out programs with it")
    parser.add_argument("--keep-going", action="store_true", help="list all failures, and shrink none")
    parser.add_argument("--shrink-minutes", type=float, default=5, help="(default: %(default)s)")
    parser.add_argument("--result", type=Path, help="a file for the counts, in Markdown")
    parser.add_argument("--verbose", action="store_true", help="a line for each program")
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> int:
    options = parse(arguments)
    if options.device == "cuda":
        use_gpu()
    seed = random.randrange(10**6) if options.seed is None else options.seed
    print(f"seed {seed}", flush=True)
    outcomes: Counter[str] = Counter()
    failures = []
    until = time.monotonic() + 60 * options.minutes
    while time.monotonic() < until and outcomes.total() != options.programs:
        program = draw(seed)
        if any(program.happens(what) for what in options.without):
            seed += 1
            continue
        began = time.monotonic()
        finding = Finding(program, check(program))
        refused_by = _last_line(finding.verdict.details) if finding.verdict.kind == "refused" else ""
        outcomes[f"{finding.verdict.kind} | {finding.verdict.oracle} | {refused_by}"] += 1
        if options.verbose or finding.verdict.is_failure:
            seconds = f"{time.monotonic() - began:.1f} s"
            print(f"{seed:<8}{seconds:>7}  {finding.verdict.kind:<27}{finding.program}", flush=True)
        if finding.verdict.is_failure:
            failures.append(f"* {seed}: {finding.verdict.kind}: `{finding.program}`")
        if finding.verdict.is_failure and options.keep_going:
            print(finding.verdict, flush=True)
        if finding.verdict.is_failure and not options.keep_going:
            _tell(shrink(check, finding, within_s=60 * options.shrink_minutes))
            break
        seed += 1
        if outcomes.total() % _PROGRAMS_PER_POOL == 0:
            close_pools()
    close_pools()
    lines = ["| outcome | compared with | refused by | programs |", "|---|---|---|--:|"]
    lines += [f"| {outcome} | {count} |" for outcome, count in sorted(outcomes.items())]
    text = "\n".join([f"{outcomes.total()} programs.", "", *lines, "", *failures, ""])
    print(text, flush=True)
    if options.result:
        options.result.write_text(text)
    return 1 if failures else 0


def _last_line(details: list[str]) -> str:
    """Return what a rank has raised that was not told of it by another."""
    raised = [line for text in details for line in text.splitlines() if "Error: " in line and not line.startswith(" ")]
    own = [line for line in raised if "RankFailedError" not in line]
    return (own or raised or ["?"])[-1][:160]


def _tell(finding: Finding) -> None:
    print(f"\n{finding.program}\n{finding.verdict}", flush=True)
    imports = "from tests.fuzz.compare import check; from tests.fuzz.program import Event, Program"
    print(f'\nTo run it: python -c "{imports}; print(check({finding.program!r}))"', flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
