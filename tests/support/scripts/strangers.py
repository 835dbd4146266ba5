"""A fit, with a stranger who reaches the store's port."""

from __future__ import annotations

import ctypes
import os
import pickle
import socket
import time
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, Trainer
from lightning.pytorch.demos.boring_classes import BoringModel

from lightning_bucketddp import BucketDDPStrategy
from lightning_bucketddp.comm.process_group import access_store
from lightning_bucketddp.faults.local_ranks import place
from lightning_bucketddp.faults.side_channel import SideChannel
from tests.support.scripts.faults import write

# What nobody of a run writes, each for another part of what reads it.
HOSTILE = [
    "nonsense",
    "",
    "null",
    "[]",
    '"text"',
    "{}",
    "1e400",
    "[" * 100_000,
    '{"kind": "raised", "rank": "1", "what": ["a"]}',
    '{"kind": "raised", "rank": 1, "what": "a", "stack": 7}',
    '{"kind": "died", "rank": 1, "what": "a", "more": 1}',
    '{"count": 1, "where": "", "seconds": "long", "waits": true, "process": "", "stack": ""}',
    '{"rank": [], "pid": "1"}',
    f'{{"rank": 1, "pid": {2**70}, "host": "{socket.gethostname()}", "namespace": ""}}',
]
# Text that would set the title of a terminal, and clear it.
COMMANDS = "\x1b]0;owned\x07\x1b[2J\u202e"
_NEW_HOST_NAME = 0x04000000  # CLONE_NEWUTS


class Touches:
    """Runs a command when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.path}",)


def keys(channel: SideChannel) -> list[str]:
    """Return the keys of `channel` that hold JSON."""
    of_ranks = [f"{kind}/{rank}" for kind in ("beat", "knows", "left") for rank in range(channel.world_size)]
    names = ["failure", "decision", "stop", f"identity/{place()}/1", f"identity/{place()}/2", *of_ranks]
    return [channel._key(name) for name in names]


class Siege(Callback):
    """From batch 2 on, rank 0 plays the stranger; at last rank 1 fails."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._connections: list[socket.socket] = []

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        time.sleep(0.05)
        if batch_idx == 2:
            write(self._directory / f"listening{trainer.global_rank}.json", {"at": _listening()})
        # Not beside the failure: who overwrites what is there keeps others from reading it.
        if batch_idx in range(2, 2 + len(HOSTILE) + 1) and trainer.global_rank == 0:
            self._attack(trainer.strategy._fault_handler._watchdog._channel, batch_idx)  # type: ignore[attr-defined]
        if batch_idx == 2 + len(HOSTILE) + 1 and trainer.global_rank == 1:
            raise ValueError(f"boom{COMMANDS}")

    def _attack(self, channel: SideChannel, batch: int) -> None:
        access = access_store()
        payload = pickle.dumps(Touches(self._directory / "was_run"), protocol=0).decode()
        for key in keys(channel):
            access.store.set(key, [*HOSTILE, payload][batch % (len(HOSTILE) + 1)])
        for said in (b"", b"\x09", b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 100):
            self._connections.append(socket.create_connection(("127.0.0.1", access.port or 0)))
            self._connections[-1].sendall(said)


def fit_under_siege(*, directory: Path) -> None:
    """Train on a host whose name leads to an address that others can reach, if the system permits such a name."""
    address = _address_of_this_host()
    if address is not None and ctypes.CDLL(None).unshare(_NEW_HOST_NAME) == 0:
        socket.sethostname(address)
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        strategy=BucketDDPStrategy(),
        max_epochs=1,
        callbacks=[Siege(directory)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(BoringModel())


def _listening() -> list[str]:
    """Return the addresses at which this process listens."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            is_socket = os.readlink(f"/proc/self/fd/{name}").startswith("socket:")
        except OSError:  # the one of the listing
            continue
        if not is_socket:
            continue
        with socket.socket(fileno=os.dup(int(name))) as s:
            if s.family != socket.AF_UNIX and s.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                found.append(str(s.getsockname()[0]))
    return found


def _address_of_this_host() -> str | None:
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
            s.connect(("192.0.2.1", 9))  # sends nothing
            return str(s.getsockname()[0])
    except OSError:
        return None
