"""What a stranger on the network, another user and a hostile file cannot do: the promises of SECURITY.md."""

from __future__ import annotations

import ctypes
import json
import os
import pickle
import re
import secrets
import signal
import socket
import stat
import subprocess
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem  # type: ignore[import-untyped]
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
from torch.distributed import HashStore  # type: ignore[attr-defined]

from lightning_bucketddp import BucketDDPStrategy
from lightning_bucketddp.bindings.trainer_lightning import BucketDDPCheckpointIO
from lightning_bucketddp.checkpoint.atomic_file import temporary_name
from lightning_bucketddp.checkpoint.checkpoint_io import CheckpointWriteError, _opened
from lightning_bucketddp.cli import main
from lightning_bucketddp.faults.side_channel import SideChannel
from lightning_bucketddp.recording.schema import path_of
from lightning_bucketddp.strategies.launchers import SavedPredictions
from lightning_bucketddp.wording import printable
from tests.support.doomed_ranks import doomed_ranks
from tests.support.recordings import Recording
from tests.support.scripts.faults import write
from tests.support.scripts.trainers import make_trainer

# Text that would set the title of a terminal, and clear it.
COMMANDS = "\x1b]0;owned\x07\x1b[2J\u202e"
_NEW_HOST_NAME = 0x04000000  # CLONE_NEWUTS


class Touches:
    """Runs a command when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.path}",)


class NotesAddresses(Callback):
    """Writes down where this rank listens."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            write(self._directory / f"listening{trainer.global_rank}.json", {"at": _listening()})


def fit_with_a_name(*, directory: Path) -> None:
    """Train on a host whose name leads to an address that others can reach, if the system permits such a name."""
    address = _address_of_this_host()
    if address is not None and ctypes.CDLL(None).unshare(_NEW_HOST_NAME) == 0:
        socket.sethostname(address)
    make_trainer(BucketDDPStrategy(), devices=2, max_epochs=1, callbacks=[NotesAddresses(directory)]).fit(BoringModel())


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


REPOSITORY = Path(__file__).parents[1]
PACKAGE = REPOSITORY / "lightning_bucketddp"
PAGE = REPOSITORY / "SECURITY.md"
PLAN = ["plan", "torch.nn:Linear", "--args", "in_features=1", "out_features=1"]


# --- A stranger on the network


def test_a_run_on_one_host_is_reached_from_no_other(tmp_path: Path) -> None:
    with doomed_ranks(fit_with_a_name, directory=tmp_path) as ranks:
        ended = ranks.wait()
    assert ended.exit_codes == [0, 0]
    for rank in (0, 1):
        addresses = ended.results[f"listening{rank}"]["at"]
        assert addresses
        assert set(addresses) == {"127.0.0.1"}


# --- Files that somebody else has written


def test_no_file_that_a_command_reads_is_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    traced = tmp_path / "was_run"
    payload = pickle.dumps(Touches(traced), protocol=0)
    archive = tmp_path / "archive"
    torch.save(Touches(traced), archive)
    tag = f"model: !!python/object/apply:os.system ['touch {traced}']".encode()
    for number, content in enumerate((payload, archive.read_bytes(), tag)):
        folder = tmp_path / str(number)
        folder.mkdir()
        for name in ("rank-0.jsonl", "profile.json", "config.yaml"):
            (folder / name).write_bytes(content + b"\n")
        assert main(["report", str(folder), "--output", str(folder / "page.html")]) == 2
        for file in ("rank-0.jsonl", "profile.json"):
            assert main([*PLAN, "--profile", str(folder / file)]) == 2
        assert main(["plan", str(folder / "config.yaml")]) == 2
        assert "Traceback" not in capsys.readouterr().err
    assert not traced.exists()
    pickle.loads(payload)  # which it would be
    assert traced.exists()


def test_a_terminal_is_not_commanded_by_what_a_command_reads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Recording().write(tmp_path / f"run{COMMANDS}")
    (folder / f"rank-{COMMANDS}.jsonl").write_text('{"kind": "\\u001b[2J"}\n')
    first = path_of(folder, 0)
    run, *rest = first.read_text().splitlines()
    hostile = {"host": COMMANDS, "device": COMMANDS, "backend": COMMANDS, "options": {COMMANDS: [COMMANDS]}}
    first.write_text("\n".join([json.dumps({**json.loads(run), **hostile}), *rest, ""]))
    assert main(["report", str(folder), "--output", str(tmp_path / "page.html")]) == 0
    assert main(["report", str(tmp_path / COMMANDS)]) == 2
    profile = {"ready_s": [0.1, 0.1], "backward_s": 0.2, "cost": None, "num_ranks": COMMANDS}
    for name in ("weight", COMMANDS):
        specs = [{"name": name, "num_bytes": 4, "kind": COMMANDS}, {"name": "bias", "num_bytes": 4, "kind": COMMANDS}]
        (tmp_path / f"{name}.json").write_text(json.dumps({**profile, "specs": specs}))
        status = main([*PLAN, "--profile", str(tmp_path / f"{name}.json")])
        assert status == (0 if name == "weight" else 2)
    printed = capsys.readouterr()
    for told in (printed.out, printed.err):
        assert "\\x1b" in told
        assert printable(told) == told


# --- Another user of the host


def test_predictions_of_another_user_are_not_taken_for_those_of_rank_zero(tmp_path: Path) -> None:
    saved = SavedPredictions([1, 2])
    assert stat.S_IMODE(os.stat(saved._path).st_mode) == 0o600
    torch.save(Touches(tmp_path / "was_run"), tmp_path / "other")
    os.replace(tmp_path / "other", saved._path)
    with pytest.raises(PermissionError, match="is not the file that rank zero wrote"):
        saved.take()
    assert not (tmp_path / "was_run").exists()
    assert not os.path.exists(saved._path)
    saved = SavedPredictions([1, 2])
    assert saved.take() == [1, 2]
    assert not os.path.exists(saved._path)


def test_a_copy_of_a_remote_checkpoint_is_readable_by_its_owner_alone() -> None:
    filesystem = MemoryFileSystem()
    filesystem.pipe("/security/model.ckpt", b"content")
    with _opened("/security/model.ckpt", filesystem) as file:
        assert stat.S_IMODE(os.fstat(file.fileno()).st_mode) == 0o600
        assert file.read() == b"content"


def test_links_that_lie_in_wait_are_not_written_through(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = tmp_path / "kept"
    kept.write_text("mine")
    assert temporary_name() != temporary_name()
    # Nobody can foretell it, but for this test.
    monkeypatch.setattr(secrets, "token_hex", lambda num_bytes: "ab" * num_bytes)
    (tmp_path / temporary_name()).symlink_to(kept)
    with pytest.raises(CheckpointWriteError):
        BucketDDPCheckpointIO().save_checkpoint({"weights": 1}, tmp_path / "model.ckpt")
    assert kept.read_text() == "mine"


def test_only_stopped_ranks_of_this_host_are_killed() -> None:
    store = HashStore()
    channels = [SideChannel(store, name="run", rank=rank, world_size=4) for rank in range(4)]
    with ExitStack() as stack:
        stopped, elsewhere, running, stranger = (
            stack.enter_context(subprocess.Popen(["sleep", "600"], stdin=subprocess.DEVNULL)) for _ in range(4)
        )
        for process in (stopped, elsewhere, running, stranger):
            stack.callback(process.kill)
        channels[2].local_ranks.place = "another host"
        for channel, process in zip(channels, (stranger, stopped, elsewhere, running), strict=True):
            channel.local_ranks.introduce(process.pid)
        ranks = channels[0].local_ranks
        ranks.discover()
        for process in (stopped, elsewhere, stranger):
            process.send_signal(signal.SIGSTOP)
            os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
        ranks.kill_frozen()
        assert stopped.wait() == -signal.SIGKILL
        for process in (elsewhere, running, stranger):
            process.terminate()
            process.send_signal(signal.SIGCONT)
            assert process.wait() == -signal.SIGTERM
    for channel in channels:
        channel.close()


# --- What the page says


def test_every_place_that_unpickles_listens_or_starts_a_program_is_known() -> None:
    """A new one needs a look, and a line in SECURITY.md."""
    sources = {str(path.relative_to(PACKAGE)): path.read_text() for path in PACKAGE.rglob("*.py")}

    def places(pattern: str) -> set[str]:
        return {path for path, source in sources.items() if re.search(pattern, source)}

    assert places(r"weights_only=False\)") == {"strategies/launchers.py", "strategies/exact_evaluation.py"}
    assert places(r"pickle\.Unpickler\b|pickle\.loads?\(") == {"checkpoint/async_writer.py"}
    assert places(r"torch\.load\(") == {
        *{"checkpoint/rank_state.py", "checkpoint/checkpoint_io.py"},
        *{"strategies/launchers.py", "strategies/exact_evaluation.py"},
    }
    listening = {"startup/store.py", "commands/doctor/network.py", "commands/doctor/finding.py"}
    assert places(r"create_server|\.bind\(\(|\.listen\(|http\.server|socketserver") == listening
    assert places(r"\bTCPStore\(") == {"startup/store.py", "comm/process_group.py"}
    assert places(r"subprocess\.(run|Popen)\(|os\.(system|exec|popen|spawn)") == {
        "commands/doctor/finding.py",
        "strategies/launchers.py",  # the user's own command again, for a rank whose process died
    }
    assert places(r"shell=True|(?<![\w.])(eval|exec)\(") == set()


def test_every_variable_of_the_environment_is_listed() -> None:
    sources = [path.read_text() for path in [*PACKAGE.rglob("*.py"), REPOSITORY / "lightning_bucketddp_autoload.py"]]
    named = {name for source in sources for name in re.findall(r'"([A-Z][A-Z0-9]+(?:_[A-Z0-9]+)+)"', source)}
    listed = set(re.findall(r"`([A-Z][A-Z0-9_]+)`", PAGE.read_text()))
    assert {name for name in named - {"RUN_DIR"} if not name.startswith("NCCL_")} - listed == set()
    assert "NCCL_*" in PAGE.read_text()


def test_every_test_that_the_page_names_exists() -> None:
    promised = re.findall(r"`(tests/[\w/]+\.py)`(?:[:,] `(test_\w+)`)?", PAGE.read_text())
    assert len(promised) > 10
    for path, name in promised:
        assert f"def {name or 'test_'}" in (REPOSITORY / path).read_text(), (path, name)
