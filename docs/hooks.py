"""Lets pages link to files of the repository outside of `docs/`: the site has copies of what is linked.

A link such as `../examples/digits.py` is right where the pages are read beside the code. The site may be read without
it, from any disk, so it brings along what its pages lead to; documents among that become pages.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

_REPOSITORY = Path(__file__).parents[1]
_COPIES = "repository"
# The target of a link, if it is no address with a scheme and no heading of the same page.
_TARGET = re.compile(r"(?<=\]\()(?![a-z]+:|#)[^)#\s]+")


def on_files(files: Files, *, config: MkDocsConfig) -> None:
    """Add what pages link to, and what that links to."""
    documents = [file.src_uri for file in files.documentation_pages()]
    while documents:
        document = _in_repository(documents.pop())
        for path in _linked_from(document):
            uri = _in_site(path)
            if not uri.startswith(_COPIES) or files.get_file_from_path(uri) is not None:
                continue
            if not (_REPOSITORY / path).is_file():
                raise PluginError(f"{document} links to {path}, which is no file of the repository.")
            files.append(_copy(path, config))
            if path.endswith(".md"):
                documents.append(uri)


def on_page_markdown(markdown: str, *, page: Page, **_: Any) -> str:
    """Lead links to the copies, and those between the copies and the pages to each other."""
    here = page.file.src_uri

    def lead(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(_in_repository(here)), match[0]))
        return posixpath.relpath(_in_site(target), posixpath.dirname(here) or ".")

    return _TARGET.sub(lead, markdown)


def _linked_from(document: str) -> Iterator[str]:
    for target in _TARGET.findall((_REPOSITORY / document).read_text()):
        yield posixpath.normpath(posixpath.join(posixpath.dirname(document), target))


def _copy(path: str, config: MkDocsConfig) -> File:
    source = str(_REPOSITORY / path)
    return File.generated(config, _in_site(path), abs_src_path=source, inclusion=InclusionLevel.NOT_IN_NAV)


def _in_site(path: str) -> str:
    """Where the site has a path of the repository."""
    return path.removeprefix("docs/") if path.startswith("docs/") else f"{_COPIES}/{path}"


def _in_repository(uri: str) -> str:
    """Where the repository has a page of the site."""
    return uri.removeprefix(f"{_COPIES}/") if uri.startswith(f"{_COPIES}/") else f"docs/{uri}"
