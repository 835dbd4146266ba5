"""Shrinks a program that fails to the fewest blocks, by trials of what leaves out most."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

from tests.fuzz.compare import Verdict
from tests.fuzz.events import EVENTS
from tests.fuzz.program import BEFORE_SETUP, NUM_EPOCHS, SHORT, Program, is_possible


@dataclass(frozen=True)
class Finding:
    """A program and what came of it."""

    program: Program
    verdict: Verdict


def shrink(judge: Callable[[Program], Verdict], finding: Finding, *, within_s: float) -> Finding:
    """Return the smallest program that fails as that of `finding` does, as far as it is found in time."""
    until = time.monotonic() + within_s
    tried = {finding.program}
    candidates = simpler(finding.program)
    while (program := next(candidates, None)) is not None and time.monotonic() < until:
        if program not in tried and is_possible(program):
            tried.add(program)
            verdict = judge(program)
            # Another kind of failure is not the one that is looked for.
            if verdict.kind == finding.verdict.kind:
                finding, candidates = Finding(program, verdict), simpler(program)
    return finding


def simpler(program: Program) -> Iterator[Program]:
    """Yield programs with less in them, those first that have lost most."""
    shorter = tuple(replace(event, at=min(event.at, NUM_EPOCHS * SHORT - 1)) for event in program.events)
    bare = Program(loop=program.loop, accumulate=program.accumulate, events=shorter)
    yield bare
    yield replace(bare, options=program.options)
    yield replace(program, options=())
    for index in range(len(program.events)):
        yield replace(program, events=program.events[:index] + program.events[index + 1 :])
    for index in range(len(program.options)):
        yield replace(program, options=program.options[:index] + program.options[index + 1 :])
    yield replace(program, loop="automatic", num_optimizers=1, blocks_sync=True)
    yield replace(program, num_batches=SHORT, events=shorter)
    for field in fields(program):
        if field.name not in ("events", "options", "num_batches"):
            default: Any = {field.name: field.default}
            yield replace(program, **default)
    yield replace(program, accumulate=min(program.accumulate, 2))
    for index, event in enumerate(program.events):
        kind = EVENTS[event.what]
        earliest = BEFORE_SETUP if kind.place == "setup" else 0
        for at in range(earliest, event.at):
            moved = replace(event, at=at)
            yield replace(program, events=(*program.events[:index], moved, *program.events[index + 1 :]))
