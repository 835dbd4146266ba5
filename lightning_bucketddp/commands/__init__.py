"""The commands of `bucketddp`: report, plan, doctor.

Each is a package with `HELP`, `add_arguments(parser)` and `run(arguments)`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

# Without a terminal there is no width to fit into.
_PIPED_WIDTH = 160


class UsageError(Exception):
    """Ends a command with exit status 2 and one line: the mistake, and how to correct it."""


def first_line(error: Exception) -> str:
    """Return the type and the first line of an error."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


@contextmanager
def trimmed_console() -> Iterator[Console]:
    """Yield a console, whose output is printed without trailing spaces."""
    from rich.console import Console  # not needed for `--help`

    console = Console(highlight=False, width=None if sys.stdout.isatty() else _PIPED_WIDTH)
    with console.capture() as printed:
        yield console
    print("\n".join(line.rstrip() for line in printed.get().splitlines()))
