"""The fenced blocks of documents."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from markdown_it import MarkdownIt


@dataclass(frozen=True)
class Block:
    """What stands between two fences.

    Attributes:
        line: how many lines of the page come before the text.
        kind: what is written behind the first fence; "indented" for code without fences.
        text: what it says.
    """

    line: int
    kind: str
    text: str

    @property
    def file_name(self) -> str | None:
        """The file that it is, if its first line says so: `# train.py`."""
        first = self.text.partition("\n")[0].removeprefix("# ")
        return first if first.endswith(".py") and " " not in first else None

    @property
    def commands(self) -> list[str]:
        """What a user types, without comments: the lines behind `$`, or, where no line has one, all of them."""
        lines = self.text.replace("\\\n", " ").splitlines()
        typed = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")] or lines
        without_comments = [line.partition(" #")[0].strip() for line in typed]
        return [line for line in without_comments if line and not line.startswith("#")]


def blocks_of(document: Path) -> list[Block]:
    """The blocks of `document`, from top to bottom."""
    tokens = MarkdownIt("commonmark").parse(document.read_text())
    return [
        Block(line=token.map[0] + (token.type == "fence"), kind=token.info or "no kind", text=token.content)
        if token.type == "fence"
        else Block(line=token.map[0], kind="indented", text=token.content)
        for token in tokens
        if token.type in ("fence", "code_block") and token.map
    ]
