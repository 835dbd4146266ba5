"""The `bucketddp` command."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module

# By name: the module that has `HELP`, `add_arguments(parser)` and `run(arguments) -> exit status`. Imported when asked
# for, because torch takes seconds to import.
_COMMANDS: dict[str, str] = {"report": "lightning_bucketddp.report.report_command"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status."""
    parser = argparse.ArgumentParser(prog="bucketddp", description="Look at data-parallel training, before and after.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, module in _COMMANDS.items():
        command = import_module(module)
        subparser = commands.add_parser(name, help=command.HELP, description=command.HELP)
        command.add_arguments(subparser)
        subparser.set_defaults(run=command.run)
    parsed = parser.parse_args(arguments)
    status: int = parsed.run(parsed)
    return status


if __name__ == "__main__":
    sys.exit(main())
