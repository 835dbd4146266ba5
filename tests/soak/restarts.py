"""Runs that go on by themselves: drawn faults under each launcher, and the end of a run without any.

python -m tests.soak.restarts --faults 300 --seed 1 --result FILE
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from tests.strategies.test_max_restarts import TORCHRUN, assert_each_sample_once, train, weights

_LAUNCHERS = ("popen", "fork", "spawn", "torchrun")
_WHAT = ("raise", "kill", "stuck", "exit", "validation")
_PER_RUN = 7
_STEPS = range(1, 16)


def draw(launcher: str, num_ranks: int, rng: random.Random) -> list[dict[str, Any]]:
    """Return faults at different steps; none that only another process could survive."""
    faults, ends = [], [16, 8]
    for step in sorted(rng.sample(_STEPS, _PER_RUN)):
        what = rng.choice(_WHAT)
        if what == "validation" and ends:
            step = ends.pop()
        elif what == "validation":
            what = "raise"
        # torchrun starts everybody again when a process is gone, and a script is rank 0 itself.
        if what in ("kill", "exit") and launcher == "torchrun":
            what = "raise"
        if what in ("kill", "exit"):
            rank = rng.randrange(1 if launcher == "popen" else 0, num_ranks)
        else:
            rank = rng.choice([*range(num_ranks), None])
        if what == "stuck" and rank is None:
            rank = 1  # where all are stuck, nobody waits
        faults.append({"what": what, "rank": rank, "step": step, "always": False})
    return faults


def check_run(directory: Path, launcher: str, num_ranks: int, faults: list[dict[str, Any]], expected: Any) -> None:
    """Train under `faults`; assert that the run ends with the `expected` weights and has seen each sample once."""
    within = TORCHRUN if launcher == "torchrun" else ()
    method = "popen" if launcher == "torchrun" else launcher
    finished = train(directory, *faults, within=within, start_method=method, ranks=num_ranks, max_restarts=20)
    for name, value in weights(finished).items():
        # Beyond two ranks, rounding depends on the plan of the buckets, which is made anew after a restart.
        rtol, atol = (0.0, 0.0) if num_ranks == 2 else (1e-3, 1e-8)
        is_equal = torch.allclose(torch.tensor(value), torch.tensor(expected[name]), rtol=rtol, atol=atol)
        assert is_equal, f"other weights\n{finished.output}"
    assert_each_sample_once(directory, num_ranks=num_ranks)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--faults", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--result", type=Path)
    options = parser.parse_args()
    expected: dict[int, Any] = {}
    counts: Counter[tuple[str, str]] = Counter()
    num_wrong = 0
    num_rounds = -(-options.faults // _PER_RUN)
    for number in range(num_rounds):
        rng = random.Random(f"{options.seed}/{number}")
        launcher, num_ranks = _LAUNCHERS[number % len(_LAUNCHERS)], rng.choice([2, 2, 2, 4])
        if launcher == "torchrun":
            num_ranks = 2
        with tempfile.TemporaryDirectory() as directory:
            if num_ranks not in expected:
                expected[num_ranks] = weights(train(Path(directory, "without"), ranks=num_ranks))
            faults = draw(launcher, num_ranks, rng)
            try:
                check_run(Path(directory, "with"), launcher, num_ranks, faults, expected[num_ranks])
            except AssertionError as error:
                num_wrong += 1
                print(f"round {number}, {launcher}, {num_ranks} ranks, {json.dumps(faults)}: {error}", flush=True)
        counts.update((launcher, fault["what"]) for fault in faults)
        print(f"{number + 1}/{num_rounds} runs, {counts.total()} faults, {num_wrong} wrong", flush=True)
    if options.result is not None:
        rows = [[launcher, *(str(counts[launcher, what]) for what in _WHAT)] for launcher in _LAUNCHERS]
        table = "\n".join(f"| {' | '.join(row)} |" for row in (["launcher", *_WHAT], ["---"] * (1 + len(_WHAT)), *rows))
        options.result.write_text(
            f"# Restarts under drawn faults\n\n`python -m tests.soak.restarts --faults {options.faults} --seed"
            f" {options.seed}`: {num_rounds} runs, {num_wrong} of them wrong.\n\n{table}\n"
        )
    raise SystemExit(bool(num_wrong))


if __name__ == "__main__":
    main()
