"""The `bucketddp` command."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module

from lightning_bucketddp import __version__
from lightning_bucketddp.commands import UsageError
from lightning_bucketddp.wording import printable

_USAGE_STATUS = 2
_INTERRUPTED_STATUS = 130


# By name: the user's question, and the command line that answers it.
_COMMANDS = {
    "doctor": (
        "Is this machine, or this cluster, ready for a long run?",
        "bucketddp doctor --checkpoints DIR",
    ),
    "plan": (
        "How will my model be reduced, and how will it scale?",
        "bucketddp plan my_project.models:LitNet --ranks 8",
    ),
    "report": (
        "Where did the time of a run go, and which rank was late?",
        "bucketddp report RUN_DIR",
    ),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    name: str = _parser().parse_args(given[:1] or ["--help"]).command
    try:
        command = import_module(f"lightning_bucketddp.commands.{name}")  # not before: importing torch takes seconds
        parser = argparse.ArgumentParser(
            prog=f"bucketddp {name}", description=command.HELP, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        command.add_arguments(parser)
        status: int = command.run(parser.parse_args(given[1:]))
        return status
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
    questions = "\n\n".join(f"  {question}\n      {example}" for question, example in _COMMANDS.values())
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


if __name__ == "__main__":
    sys.exit(main())
