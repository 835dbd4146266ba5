"""`bucketddp report`: a page, and a trace, of a recorded run."""

from __future__ import annotations

import argparse
import sys
import webbrowser
from pathlib import Path

from lightning_bucketddp.commands.report.page import make_page, make_trace
from lightning_bucketddp.config import MIB
from lightning_bucketddp.recording.reader import find_folder, read_run
from lightning_bucketddp.wording import printable

HELP = "Make one HTML page of a recorded run: where communication time went, and which rank was late."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="the folder of the run, or one above it")
    parser.add_argument("--output", type=Path, default=Path("report.html"), help="the page (default: report.html)")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="also write a Chrome trace, for ui.perfetto.dev")
    parser.add_argument("--open", action="store_true", help="open the page in the browser")


def run(arguments: argparse.Namespace) -> int:
    try:
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
