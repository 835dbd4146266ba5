"""Threads that ask where the main thread is while it makes garbage of tensors."""

from __future__ import annotations

import gc
import threading
from typing import Any

import torch

from lightning_bucketddp.core.whereabouts import Whereabouts

NUM_LOOKS = 1_000


def make_garbage() -> None:
    cycle: list[Any] = [torch.ones(1, requires_grad=True) * 2]
    cycle.append(cycle)


def look(whereabouts: Whereabouts) -> None:
    for _ in range(NUM_LOOKS):
        make_garbage()
        assert not whereabouts.is_waiting


def main() -> None:
    gc.set_threshold(5)  # many collections, and most of them where frames are made
    whereabouts = Whereabouts(waiting_in=())
    whereabouts.follow_this_thread()
    watches = [threading.Thread(target=look, args=(whereabouts,)) for _ in range(8)]
    for watch in watches:
        watch.start()
    while any(watch.is_alive() for watch in watches):
        make_garbage()
    assert gc.isenabled()


if __name__ == "__main__":
    main()
