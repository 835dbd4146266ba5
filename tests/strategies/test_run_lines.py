"""What a run writes to the log: one line at its start, one at its end, and neither into a progress bar."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.ranks import run_on_ranks
from tests.support.scripts.shown import lines_of_fits, on_a_terminal


def test_a_fit_begins_and_ends_with_one_line(tmp_path: Path) -> None:
    shown, on_rank_one = run_on_ranks(lines_of_fits, directory=str(tmp_path))
    assert not any(on_rank_one.values())
    warning, *skipped = shown.pop("skipped")
    assert warning.startswith("bucketddp: not finite in step 26 ")
    assert skipped == ["bucketddp: 2 optimizer steps and 1 skipped; 6.2 MiB sent per rank in 6 reductions."]
    assert [line for lines in shown.values() for line in lines if len(line) > 100] == []
    start = [
        "bucketddp: 2 ranks (gloo); 2 buckets planned for 2.07 MiB of gradients, sent as fp32;",
        "  bucket_cap_mb=[1, 2], on_nonfinite=skip; no effect: find_unused_parameters, static_graph.",
    ]
    # Its trials are no fit that a user has asked for, and the fit that follows was described already.
    assert shown == {
        "validate": [],
        "lr_find": start,
        "fit": [end_of(steps=20)],
        "again": [end_of(steps=5)],
        "silenced": [],
        "failed": [],
    }


def end_of(steps: int) -> str:
    return f"bucketddp: {steps} optimizer steps; {2.067 * steps:.1f} MiB sent per rank in {2 * steps} reductions."


@pytest.mark.parametrize("bar", ["TQDMProgressBar", "RichProgressBar"])
def test_no_line_tears_a_progress_bar(bar: str, tmp_path: Path) -> None:
    written, _ = run_on_ranks(on_a_terminal, bar=bar, directory=str(tmp_path))
    assert "\x1b[" in written  # a terminal that shows colours, or moves its cursor
    # Alone on their line, and plain; where a bar was above, the cursor is shown again.
    alone = r"(?:^|\n)(?:\x1b\[\?25h)?(bucketddp: [^\x1b\r]*)\r\n"
    lines = re.findall(alone, written)
    assert written.count("bucketddp: ") == len(lines) == 2, written
    # Rich draws its bar again and again for as long as it hides the cursor.
    begin, end = ("\x1b[?25l", "\x1b[?25h") if bar == "RichProgressBar" else ("Sanity Checking", "Epoch 0: 100%")
    assert "bucketddp: " not in written[written.index(begin) : written.rindex(end)]
    assert "planned" in lines[0]
    assert "20 optimizer steps" in lines[1]
