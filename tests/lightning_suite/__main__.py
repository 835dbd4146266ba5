"""Run Lightning's own tests with `ddp`, then with `bucketddp` in its place, and compare.

Tests that make no `ddp` strategy count for neither, and one that fails with `ddp`, too, says nothing about `bucketddp`.
CHECKOUT is one of https://github.com/Lightning-AI/pytorch-lightning at the installed version. What is not an option of
this command goes to pytest.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import lightning
import torch

from tests.lightning_suite.session import RECORD, STRATEGY

REPOSITORY = Path(__file__).parents[2]
_SUITES = ("tests/tests_pytorch", "tests/tests_fabric")
_STANDALONE = "PL_RUN_STANDALONE_TESTS"


@dataclass
class Outcome:
    """How a test ended: `passed`, `failed`, `skipped`, or `died` with its session."""

    outcome: str
    why: str
    uses_ddp: bool


def parse(arguments: list[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(
        prog="python -m tests.lightning_suite",
        usage="%(prog)s CHECKOUT [--result FILE] [pytest arguments]",
        description=__doc__,
    )
    parser.add_argument("checkout", type=Path, metavar="CHECKOUT")
    parser.add_argument("--result", type=Path, help="a file for what was found, in Markdown")
    return parser.parse_known_args(arguments)


def run_tests(checkout: Path, arguments: list[str], *, strategy: str) -> dict[str, Outcome]:
    """Run the tests; those that Lightning runs alone (`standalone`) in a session of their own."""
    outcomes: dict[str, Outcome] = {}
    for standalone in ("0", "1"):
        seen: dict[str, Outcome] = {}
        while True:
            again = [argument for test in seen for argument in ("--deselect", test)]
            variables = {STRATEGY: strategy, _STANDALONE: standalone}
            more, has_finished = _run_session(checkout, [*arguments, *again], variables)
            seen.update(more)
            # A rank that fails can take the session with it: the rest of the tests needs another one.
            if has_finished or not more:
                break
        outcomes.update({test: outcome for test, outcome in seen.items() if outcome.outcome != "skipped"})
        if not any("Standalone" in outcome.why for outcome in seen.values()):
            break
    return outcomes


def _run_session(checkout: Path, arguments: list[str], variables: dict[str, str]) -> tuple[dict[str, Outcome], bool]:
    """Return how the tests ended that have begun, and whether the session came to its end."""
    with tempfile.TemporaryDirectory() as directory:
        record = Path(directory, "record.jsonl")
        record.touch()
        path = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")]))
        environment = {**os.environ, **variables, RECORD: str(record), "PYTHONPATH": path}
        command = [sys.executable, "-m", "tests.lightning_suite.session", "-p", "no:cacheprovider", *arguments]
        print(*(f"{name}={value}" for name, value in variables.items()), flush=True)
        subprocess.run(command, cwd=checkout, env=environment, check=False)
        return read_record(record.read_text()), record.with_suffix(".finished").exists()


def read_record(text: str) -> dict[str, Outcome]:
    """Return the outcome of each test: the worst of all its ranks and phases."""
    outcomes: dict[str, Outcome] = {}
    for line in map(json.loads, text.splitlines()):
        outcome = Outcome(line["outcome"], line["why"], uses_ddp=bool(line["made"]))
        before = outcomes.get(line["test"])
        if line["launched"] and outcome.outcome in ("died", "passed"):
            continue  # the rank that launched it knows
        if before is not None and before.outcome == "failed":
            before.uses_ddp |= outcome.uses_ddp
            continue
        outcomes[line["test"]] = outcome
    return outcomes


def compare(with_ddp: dict[str, Outcome], with_ours: dict[str, Outcome]) -> list[tuple[str, str, str]]:
    """Return each test that uses `ddp`, what it says about `bucketddp`, and why."""
    rows = []
    for test, expected in sorted(with_ddp.items()):
        if not expected.uses_ddp:
            continue
        ours = with_ours.get(test, Outcome("not run", "", uses_ddp=False))
        if expected.outcome != "passed":
            rows.append((test, "fails with ddp", expected.why))
        elif ours.outcome == "passed":
            rows.append((test, "passed", ""))
        else:
            rows.append((test, "failed", ours.why))
    return rows


def report(rows: list[tuple[str, str, str]]) -> str:
    counts = Counter(verdict for _, verdict, _ in rows)
    lines = [f"torch {torch.__version__}, Lightning {lightning.__version__}", ""]
    lines += [f"{count} {verdict}" for verdict, count in counts.most_common()]
    lines += ["", "| test | with `bucketddp` | |", "|---|---|---|"]
    lines += [f"| `{test}` | {verdict} | {' '.join(why.split())[:200]} |" for test, verdict, why in rows]
    return "\n".join(lines) + "\n"


def main(arguments: list[str]) -> int:
    options, rest = parse(arguments)
    checkout = options.checkout.resolve()
    if not any(checkout.joinpath(suite).is_dir() for suite in _SUITES):
        raise SystemExit(f"{checkout} is no checkout of Lightning: it has neither {' nor '.join(_SUITES)}.")
    chosen = any(checkout.joinpath(argument.partition("::")[0]).exists() for argument in rest)
    suites = [] if chosen else [suite for suite in _SUITES if checkout.joinpath(suite).is_dir()]
    with_ddp, with_ours = (
        run_tests(checkout, [*suites, *rest], strategy=strategy) for strategy in ("ddp", "bucketddp")
    )
    rows = compare(with_ddp, with_ours)
    text = report(rows)
    print(text)
    if options.result is not None:
        options.result.write_text(text)
    return int(not rows or any(verdict not in ("passed", "fails with ddp") for _, verdict, _ in rows))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
