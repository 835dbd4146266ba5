"""One HTML page that has all in it: no network, no library, no other file."""

from __future__ import annotations

import json
from importlib.resources import files

from lightning_bucketddp.commands.report.page_content import page_content
from lightning_bucketddp.recording.reader import RunRecord

# In this order: what a script uses stands before it.
_SCRIPTS = ("elements.js", "head.js", "timeline.js", "plan.js", "plots.js", "page.js")


def make_page(record: RunRecord) -> str:
    """The page of a run."""
    # Names come from people's code: none may end the element that holds them.
    content = json.dumps(page_content(record), separators=(",", ":")).replace("<", "\\u003c")
    return (
        _asset("page.html")
        .replace("/* page.css */", _asset("page.css"))
        .replace("/* scripts */", "\n".join(map(_asset, _SCRIPTS)))
        .replace("/* content */", content)
    )


def _asset(name: str) -> str:
    return files("lightning_bucketddp.commands.report").joinpath("assets", name).read_text(encoding="utf-8")
