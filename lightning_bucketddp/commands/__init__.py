"""The commands of `bucketddp`: each is a package with `HELP`, `add_arguments(parser)` and `run(arguments)`."""


class UsageError(Exception):
    """Ends a command with one line that says what to change, and exit status 2."""
