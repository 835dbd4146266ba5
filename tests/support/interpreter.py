"""Fresh Python interpreters for tests of what happens at import time."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import textwrap


def run_python(*arguments: str, **environment: str) -> str:
    """What `python <arguments>` prints, run outside the repository; fails with its error output if it fails."""
    with tempfile.TemporaryDirectory() as elsewhere:
        process = subprocess.run(
            [sys.executable, *arguments],
            env={**os.environ, **environment},
            cwd=elsewhere,
            capture_output=True,
            text=True,
            check=False,
        )
    assert process.returncode == 0, process.stdout + process.stderr
    return process.stdout


def run_code(code: str, **environment: str) -> str:
    """What `code` prints in an interpreter of its own."""
    return run_python("-c", textwrap.dedent(code), **environment).strip()
