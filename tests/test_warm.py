"""The warm interpreter of the tests is to a script, and to whoever starts it, what the ordinary one is."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support import warm
from tests.support.hosts import held
from tests.support.programs import processes_of

LOOK = """
import json, os, sys
print(json.dumps({
    "name": __name__, "file": globals().get("__file__"), "arguments": sys.argv, "path": sys.path[0],
    "directory": os.getcwd(), "variable": os.environ.get("COLOUR"), "input": sys.stdin.read(),
    "descriptors": sorted(map(int, os.listdir("/proc/self/fd")))[:-1], "flags": sys.flags.isolated,
    "network": os.readlink("/proc/self/ns/net"), "user": os.getuid(), "is_loaded": "torch" in sys.modules,
    "parent": os.getppid(), "warnings": sys.warnoptions,
}))
"""


def look(python: str, *arguments: str, within: tuple[str, ...] = (), **options: Any) -> dict[str, Any]:
    command = [*within, python, *arguments]
    environment = {**os.environ, "COLOUR": "green"}
    process = subprocess.run(command, input="spoken", capture_output=True, text=True, env=environment, **options)
    assert process.returncode == 0, process.stderr
    return dict(json.loads(process.stdout))


def test_a_script_sees_what_it_sees_in_an_ordinary_interpreter(tmp_path: Path) -> None:
    (tmp_path / "below").mkdir()
    script = tmp_path / "below" / "script.py"
    script.write_text(LOOK)
    reading, writing = os.pipe()
    for start in (["below/script.py"], ["-u", "-c", LOOK], ["-W", "ignore", "-m", "below.script"]):
        warm_one, ordinary = (
            look(python, *start, "--some", "argument", cwd=tmp_path, pass_fds=[writing])
            for python in (warm.python(), sys.executable)
        )
        assert warm_one.pop("is_loaded")
        assert not ordinary.pop("is_loaded")
        assert warm_one == ordinary
    os.close(reading)
    os.close(writing)


SPAWN = """
import multiprocessing, os, sys

def look(pid):
    spawned = os.getpid()
    print("torch" in sys.modules, os.getppid() == pid, end=" ", flush=True)
    if forked := os.fork():
        os.waitpid(forked, 0)
    else:
        print(os.getppid() == spawned, flush=True)

if __name__ == "__main__":
    child = multiprocessing.get_context("spawn").Process(target=look, args=[os.getpid()])
    child.start()
    child.join()
    sys.exit(child.exitcode)
"""


def test_a_process_that_a_script_spawns_is_warm_too_and_its_child(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SPAWN)
    assert subprocess.check_output([warm.python(), "script.py"], cwd=tmp_path, text=True) == "True True True\n"


def test_it_is_in_the_namespaces_of_who_starts_it() -> None:
    with held("unshare", "--user", "--map-root-user", "--net") as pid:
        within = ("nsenter", "--target", str(pid), "--user", "--net", "--preserve-credentials")
        there = look(warm.python(), "-c", LOOK, within=within)
        assert there["is_loaded"]
        assert there["network"] == os.readlink(f"/proc/{pid}/ns/net") != os.readlink("/proc/self/ns/net")


@pytest.mark.parametrize("option", [["-X", "dev"], ["-I"]])
def test_what_a_fork_cannot_do_is_left_to_the_ordinary_interpreter(option: list[str]) -> None:
    assert not look(warm.python(), *option, "-c", LOOK)["is_loaded"]


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("raise SystemExit(7)", 7),
        ("1 / 0", 1),
        ("import os; os._exit(3)", 3),
        ("import os; os.kill(os.getpid(), 9)", -signal.SIGKILL),
        ("import signal; signal.raise_signal(signal.SIGINT)", -signal.SIGINT),
    ],
)
def test_it_ends_as_the_script_does(code: str, status: int) -> None:
    assert subprocess.run([warm.python(), "-c", code], stderr=subprocess.DEVNULL).returncode == status


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_signal_reaches_the_script_and_no_process_is_left(number: int) -> None:
    run_id = "12345678-" + warm.NO_RUN[9:]
    code = "import time\ntry:\n    print('begun', flush=True); time.sleep(100)\nfinally:\n    print('end')"
    environment = {**os.environ, warm.RUN_VARIABLE: run_id}
    with subprocess.Popen([warm.python(), "-c", code], stdout=subprocess.PIPE, env=environment) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"begun\n"
        assert len(processes_of(run_id)) == 2
        process.send_signal(number)
        assert process.stdout.read() == (b"end\n" if number == signal.SIGINT else b"")
    assert process.returncode == -number
    while processes_of(run_id):
        time.sleep(0.01)
