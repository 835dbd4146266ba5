"""Lists, names and counts in words, for messages; text of files that others wrote, made fit for a terminal."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Sequence
from functools import partial
from typing import Any


def list_some(items: Sequence[object], *, limit: int = 8) -> str:
    """Return "a, b, c and 5 more": the first `limit` of `items`, and how many are left out."""
    shown = ", ".join(map(str, items[:limit]))
    return f"{shown} and {len(items) - limit} more" if len(items) > limit else shown


def list_names(names: Sequence[str], *, limit: int = 3) -> str:
    """Return "`a`, `b`, `c` and 5 more"."""
    return list_some([f"`{name}`" for name in names], limit=limit)


def list_ranks(ranks: Sequence[int]) -> str:
    """Return "rank 3" or "ranks 1, 2, 5", with all of them."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def list_some_ranks(ranks: Sequence[int], *, limit: int = 8) -> str:
    """Return "rank 3" or "ranks 1, 2, 5 and 4 more"."""
    return f"rank{'s' if len(ranks) > 1 else ''} {list_some(ranks, limit=limit)}"


def pluralize(number: int, noun: str) -> str:
    """Return "1 rank" or "2,000 ranks"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def wrap(text: str) -> str:
    """Return a text for the log in lines of at most 100 characters; a path stays whole."""
    fill = partial(textwrap.fill, width=100, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
    return "\n".join(line if len(line) <= 100 else fill(line) for line in text.split("\n"))


def printable(text: str) -> str:
    """Return `text` with what would command a terminal, or hide other text, written as an escape sequence of Python."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)


def load_printable_json(text: str) -> Any:
    """Return the JSON `text` from a file that anyone may have written, with every string in it `printable`."""
    # Without a backslash no string holds anything else: this is the fast way for what is read by the megabyte.
    return json.loads(text) if "\\" not in text and text.isprintable() else _all_printable(json.loads(text))


def _all_printable(value: Any) -> Any:
    if isinstance(value, dict):
        return {printable(key): _all_printable(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_all_printable(item) for item in value]
    return printable(value) if isinstance(value, str) else value
