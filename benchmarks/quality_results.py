"""What trainings have come to: a line of JSON for each, and tables over seeds."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.quality_tasks import TASKS
from benchmarks.quality_training import DDP, LOCAL_STEPS, NUM_POINTS, PLAIN, VARIANTS, WIRES, Run, averaged, local


@dataclass(frozen=True)
class Result:
    """What a run has come to.

    Attributes:
        loss: on the data for the test.
        accuracy: on the same.
        curve: training loss over the run, mean of all ranks, at equal distances.
        seconds: of the fit.
        about: versions and hardware.
        data: a digest of data that change with this repository; 0 for others.
    """

    run: Run
    loss: float
    accuracy: float
    curve: Sequence[float]
    seconds: float
    about: str
    data: int = 0

    @property
    def score(self) -> float:
        """Accuracy in percent, or the loss."""
        return 100 * self.accuracy if TASKS[self.run.task].tells_accuracy else self.loss

    @property
    def samples(self) -> list[int]:
        """Samples that all ranks have seen at each point of the curve."""
        per_point = max(1, self.run.num_steps // NUM_POINTS)
        steps = [min(per_point * (point + 1), self.run.num_steps) for point in range(len(self.curve))]
        return [TASKS[self.run.task].global_batch * step for step in steps]

    def to_json(self) -> str:
        """Return it as a line."""
        values = asdict(self)
        return json.dumps({**values.pop("run"), **values})


def load(file: Path) -> list[Result]:
    """Read the lines of a file; none if there is no file."""
    if not file.exists():
        return []
    results = []
    for line in file.read_text().splitlines():
        values = json.loads(line)
        run = Run(**{name: values.pop(name) for name in Run.__dataclass_fields__})
        results.append(Result(run, **values))
    return results


@dataclass(frozen=True)
class Spread:
    """Scores of one training with several seeds."""

    scores: Sequence[float]
    higher_is_better: bool

    @classmethod
    def of(cls, scores: Sequence[float], task: str) -> Spread:
        """Take scores of `task`."""
        return cls(scores, TASKS[task].tells_accuracy)

    @property
    def mean(self) -> float:
        return statistics.mean(self.scores)

    @property
    def deviation(self) -> float:
        """Return the standard deviation over the seeds; 0 with one."""
        return statistics.stdev(self.scores) if len(self.scores) > 1 else 0.0

    def place_of(self, other: Spread) -> str:
        """Say where the mean of `other` lies: `within` what these seeds have come to, `better` or `worse`."""
        if min(self.scores) <= other.mean <= max(self.scores):
            return "within"
        return "better" if (other.mean > self.mean) == self.higher_is_better else "worse"


def by_seed(results: Sequence[Result], task: str, variant: str, num_ranks: int) -> list[Result]:
    """Return the results of the seeds of one training, in order."""
    found = [r for r in results if (r.run.task, r.run.variant, r.run.num_ranks) == (task, variant, num_ranks)]
    return sorted(found, key=lambda result: result.run.seed)


def markdown(results: Sequence[Result]) -> str:
    """Return a table for each task, and sentences that say what is further from fp32 than its seeds are apart."""
    parts = []
    for task in TASKS:
        rows = list(_rows(results, task))
        if rows:
            score, other = ("accuracy, %", "loss")[:: 1 if TASKS[task].tells_accuracy else -1]
            columns = ["ranks", "variant", "seeds", f"test {score}", "standard deviation", "min to max"]
            columns += ["minus fp32, by seed", "in the range of fp32", f"test {other}"]
            parts += [f"## {task}", "", _row(columns), "|---" * len(columns) + "|", *rows, ""]
    return "\n".join(["## In short", "", *overviews(results), *parts, *_sentences(results)])


def overviews(results: Sequence[Result]) -> list[str]:
    """Return two tables for a document, of wires and of local steps: mean, standard deviation, where the mean lies."""
    every = sorted({result.run.num_ranks for result in results})
    exchanges = [PLAIN, *map(local, LOCAL_STEPS), *map(averaged, LOCAL_STEPS)]
    return [_overview(results, WIRES, num_ranks=[2]), _overview(results, exchanges, num_ranks=every)]


def _overview(results: Sequence[Result], variants: Sequence[str], *, num_ranks: Sequence[int]) -> str:
    names = [f"{task}, {'accuracy in %' if TASKS[task].tells_accuracy else 'test loss'}" for task in TASKS]
    rows = [_row(["ranks", "variant", *names]), "|---" * (2 + len(names)) + "|"]
    for number in num_ranks:
        for variant in variants:
            by_task = [(by_seed(results, task, variant, number), task) for task in TASKS]
            if any(found for found, _ in by_task):
                cells = [_cell(found, by_seed(results, task, PLAIN, number)) for found, task in by_task]
                rows.append(_row([str(number), variant, *cells]))
    return "\n".join([*rows, ""])


def _cell(found: Sequence[Result], plain: Sequence[Result]) -> str:
    if not found:
        return ""
    spread = _of_seeds(found)
    digits = 1 if spread.higher_is_better else 3
    text = f"{spread.mean:.{digits}f}"
    if len(found) > 1:
        text += f" ± {spread.deviation:.{digits}f}"
    is_compared = found[0].run.variant != PLAIN and len(plain) > 1
    return f"{text}, {_of_seeds(plain).place_of(spread)}" if is_compared else text


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _rows(results: Sequence[Result], task: str) -> Iterator[str]:
    digits = 2 if TASKS[task].tells_accuracy else 4

    def shown(value: float, sign: str = "") -> str:
        return f"{value:{sign}.{digits}f}"

    for num_ranks in sorted({result.run.num_ranks for result in results}):
        plain = {result.run.seed: result for result in by_seed(results, task, PLAIN, num_ranks)}
        for variant in VARIANTS:
            found = by_seed(results, task, variant, num_ranks)
            if not found:
                continue
            spread = Spread.of([result.score for result in found], task)
            cells = [str(num_ranks), variant, str(len(found)), shown(spread.mean)]
            cells.append(shown(spread.deviation) if len(found) > 1 else "")
            cells.append(f"{shown(min(spread.scores))} to {shown(max(spread.scores))}")
            differences = [result.score - plain[result.run.seed].score for result in found if result.run.seed in plain]
            if variant != PLAIN and len(differences) > 1:
                by_pair = Spread.of(differences, task)
                cells.append(f"{shown(by_pair.mean, '+')} ± {shown(by_pair.deviation)}")
                cells.append(_of_seeds(list(plain.values())).place_of(spread))
            else:
                cells += ["", ""]
            yield _row([*cells, _other_score(found)])


def _other_score(results: Sequence[Result]) -> str:
    """Return the mean of the loss where accuracy is the score, and of accuracy where it is the loss."""
    if TASKS[results[0].run.task].tells_accuracy:
        return f"{statistics.mean(result.loss for result in results):.4f}"
    return f"{100 * statistics.mean(result.accuracy for result in results):.2f}"


def _sentences(results: Sequence[Result]) -> Iterator[str]:
    """Say for each way to send less where its mean lies."""
    for variant in [name for name in VARIANTS if name not in (PLAIN, DDP)]:
        places: dict[str, list[str]] = {}
        for num_ranks in sorted({result.run.num_ranks for result in results}):
            for task in TASKS:
                found, plain = (by_seed(results, task, name, num_ranks) for name in (variant, PLAIN))
                if found and len(plain) > 1:
                    place = _of_seeds(plain).place_of(_of_seeds(found))
                    places.setdefault(place, []).append(f"{task} on {num_ranks} ranks")
        if places:
            said = "; ".join(f"{place} for {', '.join(where)}" for place, where in places.items())
            yield f"* `{variant}`: its mean against the range of fp32's seeds: {said}."


def _of_seeds(results: Sequence[Result]) -> Spread:
    return Spread.of([result.score for result in results], results[0].run.task)
