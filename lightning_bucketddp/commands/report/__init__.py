"""`bucketddp report`: a page of a recorded run, one HTML file that needs no network and no library, and a trace.

Times on the page are milliseconds; those of a step count from its beginning.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import webbrowser
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from lightning_bucketddp import __version__
from lightning_bucketddp.commands import UsageError
from lightning_bucketddp.config import AUTO, MIB, ReducerConfig
from lightning_bucketddp.planning.cost import Profile, Timeline, simulate
from lightning_bucketddp.planning.optimal_plan import optimal_plan, predict
from lightning_bucketddp.recording.schema import (
    RecordedPlan,
    RecordedRun,
    Span,
    Step,
    align,
    find_folder,
    read_run,
    shown_steps,
)
from lightning_bucketddp.recording.summary import PHASE_IN_WORDS, suggestions
from lightning_bucketddp.recording.typical_step import NO_COST, RankNumbers, TypicalStep, plan_in
from lightning_bucketddp.wording import list_some, printable

HELP = """Make one HTML page of a recorded run: where communication time went, and which rank was late.

With --compare, print the steps of two runs side by side. Exit status: 0 B is not slower, 1 it is, 2 wrong usage."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_dir", type=Path, nargs="?", metavar="RUN_DIR", help="the folder of the run, or one above")
    parser.add_argument("--compare", type=Path, nargs=2, metavar=("A", "B"), help="the folders of two runs, for CI")
    parser.add_argument("--output", type=Path, default=Path("report.html"), help="the page (default: report.html)")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="also write a Chrome trace, for ui.perfetto.dev")
    parser.add_argument("--open", action="store_true", help="open the page in the browser")


def run(arguments: argparse.Namespace) -> int:
    if (arguments.run_dir is None) == (arguments.compare is None):
        raise UsageError("pass the folder of a run, or --compare with two of them.")
    try:
        if arguments.compare is not None:
            return print_comparison(*(typical_step_of(read_run(find_folder(path))) for path in arguments.compare))
        folder = find_folder(arguments.run_dir)
        record = read_run(folder)
        print(printable(f"Read {len(record.ranks)} ranks and {len(record.step_numbers)} steps from {folder}"))
        for problem in record.problems:
            print(printable(f"Note: {problem}"), file=sys.stderr)
        for what, path, make in (("page", arguments.output, make_page), ("trace", arguments.trace, make_trace)):
            if path is not None:
                path.write_text(make(record), encoding="utf-8")
                print(f"Wrote the {what}: {path} ({path.stat().st_size / MIB:.1f} MiB)")
    except (ValueError, OSError) as error:
        print(printable(f"bucketddp report: {error}"), file=sys.stderr)
        return 2
    if arguments.open:
        webbrowser.open(arguments.output.resolve().as_uri())
    return 0


def print_comparison(a: TypicalStep, b: TypicalStep) -> int:
    """Print the phases of two typical steps and a verdict; return 1 if that of B is slower."""
    rows = {
        PHASE_IN_WORDS[phase]: (a.phases.get(phase, 0.0), b.phases.get(phase, 0.0)) for phase in a.phases | b.phases
    }
    rows["all"] = (a.step_s, b.step_s)
    print(f"{'one step':<24}{'A ms':>10}{'B ms':>10}{'B / A':>8}")
    for name, (before_s, after_s) in rows.items():
        ratio = f"{after_s / before_s:.2f}" if before_s > 0 else "-"
        print(f"{name:<24}{1e3 * before_s:>10.2f}{1e3 * after_s:>10.2f}{ratio:>8}")
    # As for a straggler (Note: typical step).
    noise_s = max(0.03 * a.step_s, 3 * max(rank.step_error_s for rank in (*a.ranks, *b.ranks)))
    by_s = b.step_s - a.step_s
    effect = "takes as long" if abs(by_s) <= noise_s else "is slower" if by_s > 0 else "is faster"
    print(f"B {effect}: {by_s / a.step_s:+.1%}, noise {noise_s / a.step_s:.1%}.")
    return int(by_s > noise_s)


Json = dict[str, Any]


def make_page(record: RecordedRun) -> str:
    assets = files("lightning_bucketddp.commands.report").joinpath("assets")
    # A script uses those before it.
    names = ("page.html", "page.css", "elements.js", "head.js", "timeline.js", "plan.js", "plots.js", "page.js")
    page, style, *scripts = (assets.joinpath(name).read_text(encoding="utf-8") for name in names)
    # Names come from users' code: none may end the script element that holds them.
    content = json.dumps(page_content(record), separators=(",", ":")).replace("<", "\\u003c")
    page = page.replace("/* page.css */", style).replace("/* scripts */", "\n".join(scripts))
    return page.replace("/* content */", content)


@dataclass(frozen=True)
class InlinePage:
    """A page that a notebook shows below the cell that returns it."""

    html: str
    height: int

    def _repr_html_(self) -> str:
        # In a frame without an origin: neither its scripts nor its styles reach the notebook.
        return (
            f'<iframe srcdoc="{escape(self.html)}" sandbox="allow-scripts" title="bucketddp report"'
            f' style="width: 100%; height: {self.height}px; border: 0"></iframe>'
        )


def typical_step_of(record: RecordedRun) -> TypicalStep:
    ranks = [RankNumbers.of(ours.run, [ours.steps[n] for n in sorted(ours.steps)]) for ours in record.ranks.values()]
    return TypicalStep.of(ranks, record.first.run, record.last_plan, record.first.profile)


def page_content(record: RecordedRun) -> Json:
    """Return everything that the page's scripts read, as JSON."""
    first, run, typical = record.first, record.first.run, typical_step_of(record)
    return {
        "version": __version__,
        "folder": str(record.folder.resolve()),
        "problems": list(record.problems),
        "run": {
            "worldSize": run.world_size,
            "device": run.device,
            "backend": run.backend,
            "numParameters": run.num_parameters,
            "gradientBytes": run.gradient_bytes,
            "memoryBytes": max(step.memory_bytes for ours in record.ranks.values() for step in ours.steps.values()),
            "options": run.options,
        },
        "ranks": [
            {
                "rank": r.rank,
                "host": r.host,
                "step": _ms(r.step_s),
                "own": _ms(r.own_s),
                "exposed": _ms(r.phases["exposed"]),
            }
            for r in typical.ranks
        ],
        "typical": _typical(typical),
        "suggestions": suggestions(typical),
        "steps": [_step(record, number) for number in shown_steps(record)],
        "plans": {str(version): [asdict(b) for b in plan.buckets] for version, plan in first.plans.items()},
        "history": _history(record),
        "sizes": predict_sizes(typical.profile(), typical.plan),
        "noSizes": _why_no_sizes(run.options),
        "tuning": first.tuning,
    }


def _typical(typical: TypicalStep) -> Json:
    straggler, by_s = typical.straggler or (None, 0.0)
    return {
        "phases": {name: _ms(seconds) for name, seconds in typical.phases.items()},
        "step": _ms(typical.step_s),
        "communication": _ms(typical.communication_s),
        "exchange": _ms(typical.exchange_s),
        "overlap": typical.overlap,
        # Its index among the ranks; -1: none.
        "straggler": -1 if straggler is None else typical.ranks.index(straggler),
        "stragglerBy": _ms(by_s),
    }


def _step(record: RecordedRun, number: int) -> Json:
    steps = align(record, number)
    start_s, end_s = min(step.start_s for step in steps.values()), max(step.end_s for step in steps.values())

    def since_start(*times_s: float) -> list[float]:
        return [_ms(time_s - start_s) for time_s in times_s]

    def lanes(of_rank: Step | None) -> Json | None:
        if of_rank is None:
            return None
        reductions = zip(of_rank.buckets, of_rank.reductions(), strict=True)
        exchanges = zip(of_rank.gathers, of_rank.exchanges(), strict=True)
        return {
            "spans": [[span.name, *since_start(span.start_s, span.end_s)] for span in of_rank.spans],
            # Ready, launched, start and end.
            "buckets": [since_start(b.ready_s, b.launched_s, ran.start_s, ran.end_s) for b, ran in reductions],
            "gathers": [[gather.bucket, *since_start(ran.start_s, ran.end_s)] for gather, ran in exchanges],
        }

    plan = next(iter(steps.values())).plan
    by_rank = [lanes(steps.get(rank)) for rank in record.ranks]
    return {"number": number, "plan": plan, "length": _ms(end_s - start_s), "ranks": by_rank}


def _history(record: RecordedRun) -> Json:
    """Return, by rank and step, the time of the step with and without waiting for reductions."""
    numbers = record.step_numbers
    step_by_rank = [[ours.steps.get(number) for number in numbers] for ours in record.ranks.values()]
    return {
        "steps": numbers,
        "step": [[step and _ms(step.step_s) for step in steps] for steps in step_by_rank],
        "own": [[step and _ms(step.own_s) for step in steps] for steps in step_by_rank],
        "replayed": [step is not None and step.num_replayed > 0 for step in step_by_rank[0]],
    }


def _why_no_sizes(options: Mapping[str, Any]) -> str:
    why = f"What an all-reduce costs at other sizes cannot be told from this run: {NO_COST}."
    if options.get("shard_optimizer"):
        return why
    if options.get("bucket_cap_mb") == AUTO:
        return f'{why} bucket_cap_mb="{AUTO}" measures it if there are several buckets and 17 backwards or more.'
    return (
        f'{why} Train with bucket_cap_mb="{AUTO}", which measures it, to see the wait that is predicted for them here.'
    )


def _ms(seconds: float) -> float:
    return round(1e3 * seconds, 3)


def predict_sizes(profile: Profile | None, current: RecordedPlan | None) -> Json | None:
    """Simulate the recorded backward with a grid of bucket sizes, with the plan in use, and with the best plan.

    The plan in use is left out if it has other parameters. None if the cost of a reduction is not known.
    """
    if current is None or profile is None or profile.cost is None or not profile.dense_bytes:
        return None
    cost, specs = profile.cost, profile.specs

    def point(step: Timeline, cap_mb: float | None = None) -> Json:
        if cap_mb is None:  # the size of the largest bucket of several parameters
            shared = [bucket for bucket in step.plan if len(bucket.members) > 1] or step.plan
            cap_mb = max(sum(specs[i].num_bytes for i in bucket.members) for bucket in shared) / MIB
        return {"cap": cap_mb, "buckets": len(step.plan), "exposed": _ms(step.exposed_s)}

    # From 0.25 MiB to one bucket for all, two for each doubling.
    num_steps = math.ceil(2 * math.log2(max(profile.dense_bytes / MIB, 0.5) / 0.25))
    caps_mb = [0.25 * 2 ** (i / 2) for i in range(num_steps + 1)]
    used = plan_in(profile, current)
    return {
        "byCap": [point(predict(profile, ReducerConfig(bucket_cap_mb=mb), cost), mb) for mb in caps_mb],
        "current": None if used is None else point(simulate(profile, used, cost)),
        "optimum": point(simulate(profile, optimal_plan(profile), cost)),
    }


_COMPUTE, _COMMUNICATION = 1, 2  # the lanes of a rank


def make_trace(record: RecordedRun) -> str:
    """Return a trace of the steps that the page shows, with one process per rank and one lane per kind of work.

    Steps are placed by the clock of the first rank; those that it did not record are left out.
    """
    steps = [align(record, number) for number in shown_steps(record) if number in record.first.steps]
    zero_s = min((step.start_s for by_rank in steps for step in by_rank.values()), default=0.0)
    events: list[Json] = []
    for rank, ours in record.ranks.items():
        process = {"ph": "M", "pid": rank}
        events.append({**process, "name": "process_name", "args": {"name": f"rank {rank} ({ours.run.host})"}})
        events.append({**process, "name": "process_sort_index", "args": {"sort_index": rank}})
        for lane, name in ((_COMPUTE, "compute"), (_COMMUNICATION, "communication")):
            events.append({**process, "tid": lane, "name": "thread_name", "args": {"name": name}})
            events.append({**process, "tid": lane, "name": "thread_sort_index", "args": {"sort_index": lane}})
    for by_rank in steps:
        for rank, step in by_rank.items():
            events += _step_events(record, rank, step, zero_s)
    return json.dumps({"displayTimeUnit": "ms", "traceEvents": events}, separators=(",", ":"))


def _step_events(record: RecordedRun, rank: int, step: Step, zero_s: float) -> Iterator[Json]:
    def us(seconds: float) -> float:
        return round(1e6 * seconds, 3)

    def bar(span: Span, lane: int, kind: str, about: Json) -> Json:
        event = {"name": span.name, "ph": "X", "ts": us(span.start_s - zero_s), "dur": us(span.seconds)}
        return {**event, "pid": rank, "tid": lane, "cat": kind, "args": about}

    for span in step.spans:
        yield bar(span, _COMPUTE, "compute", {"step": step.step})
    for exchange in step.exchanges():
        yield bar(exchange, _COMMUNICATION, "weights", {"step": step.step})
    plan = record.first.plans.get(step.plan)
    buckets = plan.buckets if plan is not None else []
    for index, (times, reduction) in enumerate(zip(step.buckets, step.reductions(), strict=True)):
        known: Json = {"step": step.step}
        if index < len(buckets):
            names = list_some(buckets[index].parameters, limit=3)
            known |= {"bytes": buckets[index].num_bytes, "parameters": names}
        known["ready to launch (ms)"] = _ms(times.launched_s - times.ready_s)
        known["launch to start (ms)"] = _ms(reduction.start_s - times.launched_s)
        yield bar(reduction, _COMMUNICATION, "reduction", known)
        # An arrow from the moment in backward when the bucket was complete.
        arrow = {"name": "ready", "cat": "ready", "id": f"{step.step}.{rank}.{index}", "pid": rank}
        yield {**arrow, "ph": "s", "tid": _COMPUTE, "ts": us(times.ready_s - zero_s)}
        yield {**arrow, "ph": "f", "bp": "e", "tid": _COMMUNICATION, "ts": us(reduction.start_s - zero_s)}
