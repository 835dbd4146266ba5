"""The `bucketddp` command itself: help that is quick, and errors without tracebacks."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_bucketddp import __version__, cli
from lightning_bucketddp.commands import UsageError, trimmed_console
from tests.support.programs import run_code

COMMANDS = list(cli._COMMANDS)


def call(arguments: Sequence[str]) -> int:
    """The exit status, however it comes."""
    try:
        return cli.main(arguments)
    except SystemExit as end:
        return int(end.code or 0)


def raising(error: BaseException) -> Any:
    def run(_arguments: object) -> int:
        raise error

    return run


@pytest.fixture
def doctor(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A command in the place of the doctor, whose `run` a test chooses."""
    command = SimpleNamespace(HELP="help", add_arguments=lambda parser: None, run=lambda arguments: 0)
    monkeypatch.setattr(cli, "import_module", lambda name: command)
    return command


def test_help_and_version_do_not_wait_for_torch() -> None:
    printed = run_code("""
        import sys
        from lightning_bucketddp.cli import main
        for arguments in (["--help"], ["--version"], []):
            try:
                main(arguments)
            except SystemExit as end:
                print("status", end.code, "torch" in sys.modules, "rich" in sys.modules)
    """)
    assert printed.count("status 0 False False") == 3
    assert f"lightning-bucketddp {__version__}\n" in printed


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_explains_itself(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert call([name, "--help"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith(f"usage: bucketddp {name}")
    assert import_module(f"lightning_bucketddp.commands.{name}").HELP in printed


@pytest.mark.parametrize(
    "arguments", [["no-such-command"], ["--no-such-option"], ["--"], ["doctor", "--no-such-option"]]
)
def test_what_is_not_known_is_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert call(arguments) == 2
    assert "error:" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "status", "told"),
    [
        (UsageError("--this is wrong: do that."), 2, "bucketddp doctor: --this is wrong: do that.\n"),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_an_error_of_the_user_is_one_line_and_an_interruption_none(
    error: BaseException, status: int, told: str, doctor: SimpleNamespace, capsys: pytest.CaptureFixture[str]
) -> None:
    doctor.run = raising(error)
    assert call(["doctor"]) == status
    assert capsys.readouterr() == ("", told)


def test_an_error_of_ours_is_not_hidden(doctor: SimpleNamespace) -> None:
    doctor.run = raising(ValueError("a bug"))
    with pytest.raises(ValueError, match="a bug"):
        call(["doctor"])


def test_a_reader_that_has_enough_is_no_error() -> None:
    code = """if True:
        import sys
        from types import SimpleNamespace
        from lightning_bucketddp import __version__, cli
        def run(arguments):
            for _ in range(100_000):
                print("a line")
            return 0
        cli.import_module = lambda name: SimpleNamespace(HELP="", add_arguments=lambda parser: None, run=run)
        sys.exit(cli.main(["doctor"]))
    """
    reading, writing = os.pipe()
    process = subprocess.Popen([sys.executable, "-c", code], stdout=writing, stderr=subprocess.PIPE, text=True)
    os.close(writing)
    os.read(reading, 10)
    os.close(reading)
    _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (0, "")


@pytest.mark.parametrize(
    ("on_terminal", "variables", "written"),
    [(True, {}, "\x1b[31mlate\x1b[0m\r\n"), (True, {"NO_COLOR": "1"}, "late\r\n"), (False, {}, "late\n")],
)
def test_colours_are_for_terminals(
    on_terminal: bool, variables: dict[str, str], written: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"TERM": "xterm", **variables}.items():
        monkeypatch.setenv(name, value)
    ours, theirs = os.openpty() if on_terminal else os.pipe()
    with open(theirs, "w") as stream:
        with redirect_stdout(stream), trimmed_console() as console:
            console.print("[red]late[/red]")
        stream.flush()
        assert os.read(ours, 100).decode() == written
    os.close(ours)
