"""Which attempt of a run this is, when torchrun restarts it.

Note: keys of earlier attempts
    torchrun's agent keeps one store for all attempts of a run. Older torch (2.5) has keys for each attempt; newer torch
    (2.13) has not, so a process that is started again may find the addresses of processes that are gone, and fail or
    wait for them. The agents of several nodes count restarts each for itself, so the number names an attempt only where
    there is one node.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from torch.distributed import PrefixStore  # type: ignore[attr-defined]


@contextmanager
def keys_of_this_attempt() -> Iterator[None]:
    """A process group that is made inside sees nothing of earlier attempts (Note: keys of earlier attempts)."""
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if attempt == "0" or os.environ.get("GROUP_WORLD_SIZE") != "1":
        yield
        return
    rendezvous = import_module("torch.distributed.rendezvous")  # torch has a function of that name too
    create = rendezvous._create_c10d_store

    def create_for_attempt(*args: Any, **kwargs: Any) -> Any:
        return PrefixStore(f"bucketddp/attempt/{attempt}", create(*args, **kwargs))

    rendezvous._create_c10d_store = create_for_attempt  # type: ignore[attr-defined]
    try:
        yield
    finally:
        rendezvous._create_c10d_store = create  # type: ignore[attr-defined]
