"""What the person who calls a command has to do differently."""

from __future__ import annotations


class UsageError(Exception):
    """Ends a command with one line that says what to change, and exit status 2."""
