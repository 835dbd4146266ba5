"""Python interpreters for tests of what happens at import time."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import textwrap

from tests.support import warm


def run_python(*arguments: str, **environment: str) -> str:
    """What `python <arguments>` prints, run outside the repository; fails with its error output if it fails."""
    return _output_of(sys.executable, *arguments, **environment)


def run_code(code: str, **environment: str) -> str:
    """What `code` prints in a fresh interpreter."""
    return run_python("-c", textwrap.dedent(code), **environment).strip()


def run_code_after_torch(code: str, **environment: str) -> str:
    """What `code` prints where torch is imported, and what Lightning imports, but neither Lightning nor we.

    That takes a tenth of the time. With a variable that is read when torch is imported, it is a fresh interpreter.
    """
    return _output_of(warm.python_without_lightning(), "-c", textwrap.dedent(code), **environment).strip()


def _output_of(python: str, *arguments: str, **environment: str) -> str:
    with tempfile.TemporaryDirectory() as elsewhere:
        process = subprocess.run(
            [python, *arguments],
            env={**os.environ, **environment},
            cwd=elsewhere,
            capture_output=True,
            text=True,
            check=False,
        )
    assert process.returncode == 0, process.stdout + process.stderr
    return process.stdout
