"""`bucketddp report`: a page, and a trace, of a recorded run."""

from __future__ import annotations

import argparse
import sys
import webbrowser
from pathlib import Path

from lightning_bucketddp.commands import UsageError
from lightning_bucketddp.commands.report.page import make_page, make_trace, typical_step_of
from lightning_bucketddp.config import MIB
from lightning_bucketddp.recording.schema import find_folder, read_run
from lightning_bucketddp.recording.summary import PHASE_IN_WORDS
from lightning_bucketddp.recording.typical_step import TypicalStep
from lightning_bucketddp.wording import printable

HELP = """Make one HTML page of a recorded run: where communication time went, and which rank was late.

With --compare, print the steps of two runs side by side. Exit status: 0 B is not slower, 1 it is, 2 wrong usage."""

_DIFFERENT = 0.03  # of a step; less may be chance


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
    rows = {PHASE_IN_WORDS[phase]: (a.phases[phase], b.phases.get(phase, 0.0)) for phase in a.phases}
    rows["all"] = (a.step_s, b.step_s)
    print(f"{'one step':<24}{'A ms':>10}{'B ms':>10}{'B / A':>8}")
    for name, (before_s, after_s) in rows.items():
        ratio = f"{after_s / before_s:.2f}" if before_s > 0 else "-"
        print(f"{name:<24}{1e3 * before_s:>10.2f}{1e3 * after_s:>10.2f}{ratio:>8}")
    # As for a straggler (Note: typical step).
    noise_s = max(_DIFFERENT * a.step_s, 3 * max(rank.step_error_s for rank in (*a.ranks, *b.ranks)))
    by_s = b.step_s - a.step_s
    effect = "takes as long" if abs(by_s) <= noise_s else "is slower" if by_s > 0 else "is faster"
    print(f"B {effect}: {by_s / a.step_s:+.1%}, noise {noise_s / a.step_s:.1%}.")
    return int(by_s > noise_s)
