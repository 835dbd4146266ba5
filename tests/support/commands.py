"""Command lines for tests, as a user types them, waited for until no process of theirs is left."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from tests.support import warm
from tests.support.programs import SCRIPTS, no_process_left, wait_for

# Read once: these run in threads, too, and a test that takes back its variables clears all of them for a moment.
_ENVIRONMENT = dict(os.environ)


def run_commands(*commands: str, cwd: Path, variables: Mapping[str, str] | None = None) -> str:
    """What `commands`, which run at once, print; fails unless all of them end well."""
    # Where a user who has activated a virtual environment finds `python` and `torchrun`; and srun, which stands in.
    places = [SCRIPTS / "slurm", Path(warm.python()).parent, Path(sys.executable).parent, _ENVIRONMENT["PATH"]]
    path = os.pathsep.join(map(str, places))
    output = cwd / "output.txt"  # not a pipe, which a process left behind would keep open
    with no_process_left() as marks, output.open("w") as file:
        environment = {**_ENVIRONMENT, **(variables or {}), **marks, "PATH": path, "IPYTHONDIR": str(cwd)}
        environment.setdefault("OMP_NUM_THREADS", "1")  # the ranks share few cores
        processes = [
            subprocess.Popen(["bash", "-ec", command], cwd=cwd, env=environment, stdout=file, stderr=subprocess.STDOUT)
            for command in commands
        ]
        wait_for(processes)
        # Here, because at the end of the block what is left of them is killed.
        assert {process.returncode for process in processes} == {0}, output.read_text()
    return output.read_text()
