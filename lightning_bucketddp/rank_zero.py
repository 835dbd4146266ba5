"""Lines for the user, on rank zero, beside those of Lightning."""

from __future__ import annotations

import logging

from lightning_utilities.core import rank_zero

_log = logging.getLogger("lightning_bucketddp")


def rank_zero_info(text: str) -> None:
    """Log `text` where Lightning logs, unless the user has set the logger `lightning_bucketddp` to a higher level."""
    if _log.level <= logging.INFO:
        rank_zero.rank_zero_info(text)
