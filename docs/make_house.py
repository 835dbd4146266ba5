"""Draws the folders of the package, docs/images/house.svg: `make docs`, or `python -m docs.make_house`.

The order is that of the rule about imports in tests/test_architecture.py, the text of a folder the first line of its
`__init__.py`. Neither is imported, so that this needs Python only.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
PACKAGE = REPOSITORY / "lightning_bucketddp"
HOUSE = REPOSITORY / "docs" / "images" / "house.svg"

# What brackets at the right say, the colours of the boxes, and the folder with which a group begins at its top.
GROUPS = [
    ("Lightning", "box", "bindings"),
    ("tools", "tools", "commands"),
    ("a run", "run", "checkpoint"),
    ("a step", "step", "reducer"),
]
WIDTH, BOX_WIDTH, BOX_HEIGHT, BOX_EVERY = 960, 790, 34, 40
FIRST_BOX_AT = 64
# More would not fit into a box.
MAX_CHARACTERS = 88

STYLE = """\
  <style>
    .paper { fill: #ffffff; stroke: #d0d7de; }
    .box { fill: #f6f8fa; stroke: #57606a; }
    .tools { fill: #fff3e0; stroke: #ef6c00; }
    .run { fill: #e0f2f1; stroke: #00796b; }
    .step { fill: #ede7f6; stroke: #5e35b1; }
    .line { stroke: #57606a; stroke-width: 1.5; fill: none; }
    text { fill: #24292f; }
    .folder { font-weight: 600; }
    .small { font-size: 13.5px; fill: #57606a; }
    .middle { text-anchor: middle; }
  </style>
  <defs>
    <marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" orient="auto">\
<path d="M0 0 8 4 0 8z" fill="#57606a"/></marker>
  </defs>"""


@dataclass(frozen=True)
class Folder:
    """One box: a folder, what is in it, and the colour of its group."""

    name: str
    text: str
    colour: str
    top: int


def folders_from_the_top() -> list[str]:
    """Return the folders in the order of the rule about imports."""
    tree = ast.parse((REPOSITORY / "tests" / "test_architecture.py").read_text())
    [names] = [
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "FOLDERS"
    ]
    return list(reversed(names))


def text_of(folder: str) -> str:
    """Return what a folder says of itself, in one line without its full stop.

    Raises:
        ValueError: if it is longer than a box.
    """
    path = PACKAGE / folder / "__init__.py"
    line = (ast.get_docstring(ast.parse(path.read_text())) or "").partition("\n")[0]
    text = line.removesuffix(".").replace("`", "")
    if not 0 < len(text) <= MAX_CHARACTERS:
        raise ValueError(f"The docstring of `{path}` must begin with a line of at most {MAX_CHARACTERS} characters.")
    return text


def boxes(names: list[str]) -> list[Folder]:
    """Return a box for each folder, from the top."""
    colours = {folder: colour for _, colour, folder in GROUPS}
    found: list[Folder] = []
    for number, name in enumerate(names):
        colour = colours[name] if name in colours else found[-1].colour
        found.append(Folder(name, text_of(name), colour, FIRST_BOX_AT + number * BOX_EVERY))
    return found


def brackets(folders: list[Folder]) -> list[str]:
    """Return the lines at the right, one around each group, with its name."""
    top_of = {folder.name: folder.top for folder in folders}
    tops = [*(top_of[first] for _, _, first in GROUPS), FIRST_BOX_AT + len(folders) * BOX_EVERY]
    lines = []
    for (name, _, _), (top, next_top) in zip(GROUPS, pairwise(tops), strict=True):
        begin, end = top + 4, next_top - (BOX_EVERY - BOX_HEIGHT) - 4
        lines += [
            f'  <path class="line" d="M860 {begin} h8 V{end} h-8"/>',
            f'  <text class="small" x="878" y="{(begin + end) // 2 + 5}">{name}</text>',
        ]
    return lines


def box(folder: Folder) -> list[str]:
    """Return the rectangle of a folder, with its name and text."""
    rectangle = f'x="60" y="{folder.top}" width="{BOX_WIDTH}" height="{BOX_HEIGHT}" rx="6"'
    return [
        f'  <rect class="{folder.colour}" {rectangle}/>',
        f'  <text class="folder" x="76" y="{folder.top + 22}">{folder.name}</text>',
        f'  <text class="small" x="196" y="{folder.top + 22}">{escape(folder.text, quote=False)}</text>',
    ]


def draw() -> str:
    """Return the picture."""
    folders = boxes(folders_from_the_top())
    end = folders[-1].top + BOX_HEIGHT
    height = end + BOX_HEIGHT
    names = ", ".join(folder.name for folder in folders)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img"'
        ' aria-labelledby="title description" font-family="system-ui, sans-serif" font-size="15">',
        '  <title id="title">The folders of lightning_bucketddp</title>',
        f'  <desc id="description">From top to bottom: {names}. Each imports only folders below it.</desc>',
        STYLE,
        f'  <rect class="paper" x="0.5" y="0.5" width="{WIDTH - 1}" height="{height - 1}" rx="8"/>',
        '  <text class="folder" x="24" y="36">lightning_bucketddp/</text>',
        '  <text class="small" x="232" y="36">each folder imports only folders below it</text>',
        f'  <path class="line" d="M40 {FIRST_BOX_AT} V{end}" marker-end="url(#tip)"/>',
        f'  <text class="small middle" transform="translate(28 {(FIRST_BOX_AT + end) / 2 + 3})'
        ' rotate(-90)">imports</text>',
        *brackets(folders),
        *(line for folder in folders for line in box(folder)),
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    HOUSE.write_text(draw())
