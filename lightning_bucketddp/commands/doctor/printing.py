"""The doctor's findings for people to read."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from lightning_bucketddp.commands.doctor.examination import Examination
from lightning_bucketddp.commands.doctor.finding import Finding, Observation, Verdict, counted
from lightning_bucketddp.config import MIB

_STYLES = {Verdict.OK: "green", Verdict.NOTE: "cyan", Verdict.WARNING: "yellow", Verdict.ERROR: "bold red"}
# Where nobody looks at a terminal, lines are as long as they want.
_PIPED_WIDTH = 160


def print_findings(seen: Examination) -> None:
    """A table of all findings, what was measured, and what follows from it."""
    console = Console(highlight=False, width=None if sys.stdout.isatty() else _PIPED_WIDTH)
    with console.capture() as printed:
        _print(seen, console)
    print("\n".join(line.rstrip() for line in printed.get().splitlines()))


def _print(seen: Examination, console: Console) -> None:
    findings = list(seen.findings())
    hosts = {observed["hostname"] for observed in seen.ranks} if seen.num_hosts > 1 else set()
    table = Table(box=None, show_header=False, padding=(0, 1), pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for theme, of_theme in groupby(_shortened(findings, hosts), key=lambda finding: finding.theme):
        table.add_row(Text(theme, style="bold"), "")
        for finding in of_theme:
            table.add_row(
                Padding(Text(str(finding.verdict), style=_STYLES[finding.verdict]), (0, 0, 0, 2)), _text(finding)
            )
    console.print(table)
    if seen.speed is not None:
        console.print()
        console.print(_speeds(seen.speed))
    console.print()
    console.print(_conclusion(findings))


def _shortened(findings: Sequence[Finding], hosts: set[str]) -> list[Finding]:
    """What is well, and the same on several hosts but for numbers, is said once."""
    alike: dict[tuple[str, Verdict, str], list[Finding]] = {}
    for index, finding in enumerate(findings):
        pattern = str(index)
        if hosts and finding.verdict <= Verdict.NOTE:
            pattern = re.sub("|".join(map(re.escape, hosts)) + r"|[\d.,]+", "", finding.text)
        alike.setdefault((finding.theme, finding.verdict, pattern), []).append(finding)
    return [
        first if not others else replace(first, text=f"{first.text} ({counted(len(others), 'more host')} alike.)")
        for first, *others in alike.values()
    ]


def _text(finding: Finding) -> Text:
    text = Text(finding.text)
    if finding.remedy:
        text.append(f"\n-> {finding.remedy}", style="italic")
    return text


def _speeds(measured: Observation) -> Table:
    table = Table(box=None, padding=(0, 2), pad_edge=False)
    for column in ("all-reduce", "time", "each rank sends"):
        table.add_column(column, justify="right")
    for size in measured["by_size"]:
        num_bytes = size["bytes"]
        table.add_row(
            f"{num_bytes // MIB} MiB" if num_bytes >= MIB else f"{num_bytes // 1024} KiB",
            f"{size['seconds'] * 1e3:,.3f} ms",
            f"{size['link_bytes_per_s'] / 1e9:.3f} GB/s",
        )
    return table


def _conclusion(findings: list[Finding]) -> Text:
    num_errors = sum(finding.verdict == Verdict.ERROR for finding in findings)
    num_warnings = sum(finding.verdict == Verdict.WARNING for finding in findings)
    parts = [counted(number, name) for number, name in ((num_errors, "error"), (num_warnings, "warning")) if number]
    what = " and ".join(parts) or "Nothing is wrong"
    end = ": do not start a long run like this." if num_errors else "."
    style = _STYLES[max(finding.verdict for finding in findings)] if parts else _STYLES[Verdict.OK]
    return Text(f"{what}{end}", style=style)
