"""The `bucketddp` command."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module

from lightning_bucketddp import __version__
from lightning_bucketddp.commands import UsageError
from lightning_bucketddp.wording import printable

_USAGE_STATUS = 2
_INTERRUPTED_STATUS = 130


@dataclass(frozen=True, slots=True)
class _Command:
    """One command, and the question that it answers.

    Attributes:
        question: what the user wants to know.
        example: what to type for that.
        module: has `HELP`, `add_arguments(parser)` and `run(arguments) -> exit status`. It is imported on demand,
            because importing torch takes seconds.
    """

    question: str
    example: str
    module: str


_COMMANDS = {
    "doctor": _Command(
        "Is this machine, or this cluster, ready for a long run?",
        "bucketddp doctor --checkpoints DIR",
        "lightning_bucketddp.commands.doctor",
    ),
    "plan": _Command(
        "How will my model be reduced, and how will it scale?",
        "bucketddp plan my_project.models:LitNet --ranks 8",
        "lightning_bucketddp.commands.plan",
    ),
    "report": _Command(
        "Where did the time of a run go, and which rank was late?",
        "bucketddp report RUN_DIR",
        "lightning_bucketddp.commands.report",
    ),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    name: str = _parser().parse_args(given[:1] or ["--help"]).command
    try:
        return _run(name, given[1:])
    except UsageError as error:
        print(printable(f"bucketddp {name}: {error}"), file=sys.stderr)
        return _USAGE_STATUS
    except KeyboardInterrupt:
        return _INTERRUPTED_STATUS
    except BrokenPipeError:
        # The reader, such as `head`, has enough. Python would complain when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _parser() -> argparse.ArgumentParser:
    """Return a parser that lists the commands and rejects anything else."""
    questions = "\n\n".join(f"  {command.question}\n      {command.example}" for command in _COMMANDS.values())
    parser = argparse.ArgumentParser(
        prog="bucketddp",
        usage="bucketddp COMMAND [options]",
        description=f"What do you want to know?\n\n{questions}",
        epilog="`bucketddp COMMAND --help` explains the options.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"lightning-bucketddp {__version__}")
    parser.add_argument("command", choices=list(_COMMANDS), metavar="COMMAND", help=argparse.SUPPRESS)
    return parser


def _run(name: str, arguments: Sequence[str]) -> int:
    """Import the command `name`, parse its arguments and run it."""
    command = import_module(_COMMANDS[name].module)
    parser = argparse.ArgumentParser(
        prog=f"bucketddp {name}", description=command.HELP, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    command.add_arguments(parser)
    status: int = command.run(parser.parse_args(arguments))
    return status


if __name__ == "__main__":
    sys.exit(main())
