"""What sending less costs in quality: three tasks, five seeds, wires of fewer bits and steps without an exchange.

    python -m benchmarks.quality --json quality.jsonl                        all of it: 15 minutes on 16 cores
    python -m benchmarks.quality --json quality.jsonl --seconds 500          begins nothing later; go on by the same
    python -m benchmarks.quality --json quality.jsonl --tasks chars --ranks 2 --variants ddp fp32 --seeds 1
    python -m benchmarks.quality --quick                                     a look whether everything runs
    python -m benchmarks.quality --precision                                 int8 against fp8, on real gradients
    python -m benchmarks.quality --json quality.jsonl --table                tables of what there is
    python -m benchmarks.quality --json quality.jsonl --plot                 pictures of it, in docs/images

Everything runs through the Trainer, on CPUs with gloo and one thread per rank. A task has the same global batch, the
same samples in each step and the same number of steps in all variants and on any number of ranks. The wires are
compared on two ranks, steps without an exchange (`local_steps`, all ranks apart) on two, four and eight. A run is
written to the file when it ends, and is not made again: a command that was interrupted goes on.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty, SimpleQueue

from benchmarks.quality_formats import error_table
from benchmarks.quality_results import Result, load, markdown
from benchmarks.quality_tasks import TASKS
from benchmarks.quality_training import LOCAL_STEPS, PLAIN, VARIANTS, WIRES, Run, Trained, Trainings, local
from benchmarks.ranks import Place, RankFailed, Ranks
from benchmarks.report import about

_QUICK_STEPS = 60
_EMULATED = [name for name in VARIANTS if name.endswith("emulated")]
# Early, in the middle, and when little is left to learn.
_GRADIENTS_AT = (10, 100, 400)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="where results are, a line for each run")
    parser.add_argument("--tasks", choices=TASKS, nargs="+", default=list(TASKS), help="(default: all)")
    parser.add_argument("--variants", choices=VARIANTS, nargs="+", help="(default: wires and local steps)")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8], help="(default: 2 4 8)")
    parser.add_argument("--seeds", type=int, default=5, help="how many (default: 5)")
    parser.add_argument("--steps", type=int, default=1200, help="of a run (default: 1200)")
    cores = len(os.sched_getaffinity(0))
    parser.add_argument("--cores", type=int, default=cores, help=f"rank processes at a time (default: {cores})")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="after which no run begins")
    parser.add_argument("--quick", action="store_true", help=f"one seed, {_QUICK_STEPS} steps, two ranks")
    parser.add_argument("--precision", action="store_true", help="errors of gradients, and runs that emulate formats")
    parser.add_argument("--table", action="store_true", help="only show what is in the file")
    parser.add_argument("--plot", action="store_true", help="only make pictures of what is in the file")
    parser.add_argument("--images", type=Path, default=Path("docs/images"), help="where pictures go (docs/images)")
    args = parser.parse_args(arguments)
    if (args.table or args.plot) and args.json is None:
        parser.error("--table and --plot need --json FILE, with results.")
    if args.quick:
        args.seeds, args.steps, args.ranks = 1, _QUICK_STEPS, [2]
    return args


def main(arguments: Sequence[str] | None = None) -> int:
    args = parse(arguments)
    if args.plot:
        from benchmarks.quality_plot import draw  # only here: nothing else needs matplotlib

        draw(load(args.json), args.images)
        return 0
    if args.table:
        print(markdown(load(args.json)))
        return 0
    if args.precision:
        for task in args.tasks:
            print(error_table(task, at=(10, 40) if args.quick else _GRADIENTS_AT), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        file = args.json or Path(folder, "quality.jsonl")
        found = load(file)
        check_data(found)
        done = {result.run for result in found}
        work = Work(file, [run for run in runs_of(args) if run not in done], time.monotonic() + args.seconds)
        for num_ranks in args.ranks:
            work.train_on(num_ranks, num_cores=args.cores)
        print(markdown(load(file)))
    return 1 if work.failed or work.num_ended < len(work.runs) else 0


def check_data(results: Sequence[Result]) -> None:
    """Refuse to go on with results of other data: they cannot be compared."""
    for task, data in {(result.run.task, result.data) for result in results if result.data}:
        if data != TASKS[task].data().digest:
            raise SystemExit(
                f"The file has results of `{task}`, whose data have changed since: they are text of this checkout."
                " Begin a new file, or go on in the checkout that it was begun in."
            )


def runs_of(args: argparse.Namespace) -> Iterator[Run]:
    """Yield what is to be trained. By seed: what is there when the time is over can be compared."""
    for seed in range(args.seeds):
        for num_ranks in args.ranks:
            for variant in args.variants or _variants_on(num_ranks, args):
                for task in args.tasks:
                    yield Run(task, variant, num_ranks, seed, args.steps)


def _variants_on(num_ranks: int, args: argparse.Namespace) -> list[str]:
    if args.precision:
        return _EMULATED if num_ranks == 2 else []
    wires = WIRES if num_ranks == 2 else (PLAIN,)
    return [*wires, *(local(number) for number in LOCAL_STEPS if number <= args.steps)]


@dataclass
class Work:
    """Runs that are to be made, and those that were."""

    file: Path
    runs: Sequence[Run]
    deadline: float
    failed: list[Run] = field(default_factory=list)
    num_ended: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def train_on(self, num_ranks: int, *, num_cores: int) -> None:
        """Make all runs of so many ranks, as many at a time as there are cores for; one, if there are too few."""
        waiting: SimpleQueue[Run] = SimpleQueue()
        for run in self.runs:
            if run.num_ranks == num_ranks:
                waiting.put(run)
        at_once = max(1, min(num_cores // num_ranks, waiting.qsize()))
        threads = [threading.Thread(target=self._take, args=(waiting, num_ranks)) for _ in range(at_once)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _take(self, waiting: SimpleQueue[Run], num_ranks: int) -> None:
        """Take one run after the other, on ranks that stay until one fails."""
        with suppress(Empty):
            while not waiting.empty() and time.monotonic() < self.deadline:
                with Ranks(Trainings, None, Place(num_ranks=num_ranks)) as ranks:
                    while time.monotonic() < self.deadline:
                        run = waiting.get_nowait()
                        try:
                            self._keep(result_of(run, ranks.call("train", run)))
                        except RankFailed as failure:
                            self._fail(run, failure)
                            break

    def _keep(self, result: Result) -> None:
        with self._lock:
            self.num_ended += 1
            with self.file.open("a") as file:
                file.write(result.to_json() + "\n")
            self._say(result.run, f"accuracy {result.accuracy:.4f}, loss {result.loss:.4f}, {result.seconds:.0f} s")

    def _fail(self, run: Run, failure: RankFailed) -> None:
        with self._lock:
            self.failed.append(run)
            self._say(run, f"FAILED: {failure}")

    def _say(self, run: Run, text: str) -> None:
        count = f"{self.num_ended + len(self.failed)}/{len(self.runs)}"
        print(f"{count:>8}  {run.task}, {run.variant}, {run.num_ranks} ranks, seed {run.seed}: {text}", flush=True)


def result_of(run: Run, ranks: Sequence[Trained]) -> Result:
    """Put together what the ranks have."""
    if len({rank.weights for rank in ranks}) > 1:
        raise RankFailed(f"The ranks have different weights at the end of {run}.")
    [score] = [rank.score for rank in ranks if rank.score is not None]
    curve = [round(sum(losses) / len(ranks), 4) for losses in zip(*(rank.curve for rank in ranks), strict=True)]
    seconds = round(max(rank.seconds for rank in ranks), 1)
    where = about("gloo, one thread per rank")
    return Result(run, round(score.loss, 5), round(score.accuracy, 5), curve, seconds, where, ranks[0].data)


if __name__ == "__main__":
    raise SystemExit(main())
