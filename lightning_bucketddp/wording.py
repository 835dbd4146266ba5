"""Lists, names and counts in words, for messages."""

from __future__ import annotations

from collections.abc import Sequence


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
    """Return "1 rank" or "2 ranks"."""
    return f"{number} {noun}{'' if number == 1 else 's'}"
