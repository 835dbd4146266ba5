"""The texts that the package can say, found in its source, for tests of documents that quote them."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator

from tests.support.programs import REPOSITORY

PACKAGE = REPOSITORY / "lightning_bucketddp"
# In a quotation: a name in backticks, what has digits in it, the class that speaks, what was left out; and values that
# are words.
_VALUE = re.compile(r"(`[^`]*`|\S*\d\S*|\b[A-Z]\w+:|\.\.\.|\b(?:forward|shape|gloo|SIGKILL|No space left on device)\b)")
_WORD = re.compile(r"[A-Za-z_]{2,}")
# In a text of the source: what stands between two values or signs is quoted as a whole, or not at all.
_PLACE = "\0"
_BREAK = re.compile(r"(?<=[.;]) ")


def unknown_words(quotation: str) -> list[str]:
    """The words of `quotation` that are neither in a text of the package nor values."""
    # What is indented is a stack of the program that is talked about.
    quotation = " ".join(line for line in quotation.splitlines() if not line.startswith("  "))
    known = [False] * len(quotation)
    for pattern in (_VALUE, *_texts()):
        for match in pattern.finditer(quotation):
            for start, end in match.regs[1:]:
                known[start:end] = [True] * (end - start)
    return [word[0] for word in _WORD.finditer(quotation) if not all(known[word.start() : word.end()])]


@functools.cache
def _texts() -> list[re.Pattern[str]]:
    trees = [ast.parse(file.read_text()) for file in PACKAGE.rglob("*.py")]
    patterns = {_pattern(part) for tree in trees for text in _literals(tree) for part in _BREAK.split(text)}
    return [re.compile(pattern, flags=re.IGNORECASE) for pattern in sorted(patterns - {""})]


def _literals(tree: ast.Module) -> Iterator[str]:
    """The strings of a module that are no documentation, with `_PLACE` for each value."""
    joined = [node for node in ast.walk(tree) if isinstance(node, ast.JoinedStr)]
    documentation = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    # Single words in them are no names: f"{'has' if one else 'have'} ended".
    within = {id(node) for text in joined for value in text.values for node in ast.walk(value)}
    for text in joined:
        yield "".join(str(part.value) if isinstance(part, ast.Constant) else _PLACE for part in text.values)
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documentation:
            yield re.sub(r"%[.\d]*[sdfg]", _PLACE, node.value) + (_PLACE if id(node) in within else "")


def _pattern(text: str) -> str:
    """What a part of a text looks like in a quotation; nothing for a single word, which may be any name."""
    if _PLACE not in text and len(_WORD.findall(text)) < 2:
        return ""
    literals = [re.escape(re.sub(r"\s+", " ", literal)) for literal in text.strip(_PLACE + " \n").split(_PLACE)]
    # A value is known by itself, or it is another text.
    return ".{1,99}?".join(f"({literal})" for literal in literals)
