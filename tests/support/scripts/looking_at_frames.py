"""Threads that ask where the main thread is, while frames and threads come and go and tensors are garbage."""

from __future__ import annotations

import gc
import threading
from typing import Any

import torch

from lightning_bucketddp.faults.progress import Progress

NUM_LOOKS = 1_000
DEPTH = 2


def make_garbage() -> None:
    cycle: list[Any] = [torch.ones(1, requires_grad=True) * 2]
    cycle.append(cycle)


def descend(depth: int) -> None:
    make_garbage()
    if depth:
        (descend if depth % 3 else LARGE["descend"])(depth - 1)


# The same with many variables: where one frame was, there is a larger one at the next moment.
_VARIABLES = "".join(f"    v{number} = depth\n" for number in range(120))
LARGE: dict[str, Any] = {"make_garbage": make_garbage, "small": descend}
exec(f"def descend(depth):\n{_VARIABLES}    make_garbage()\n    small(depth - 1)", LARGE)


def look(progress: Progress) -> None:
    for _ in range(NUM_LOOKS):
        make_garbage()
        assert not progress.is_waiting


def main() -> None:
    gc.set_threshold(5)  # many collections, and most of them where frames are looked at
    progress = Progress(waiting_in=())
    progress.follow_this_thread()
    progress.since -= 10  # so long that somebody looks
    watches = [threading.Thread(target=look, args=(progress,)) for _ in range(8)]
    for watch in watches:
        watch.start()
    while any(watch.is_alive() for watch in watches):
        descend(DEPTH)
        passer_by = threading.Thread(target=make_garbage)
        passer_by.start()
        passer_by.join()
    assert gc.isenabled()


if __name__ == "__main__":
    main()
