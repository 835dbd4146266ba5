"""The README as a package index shows it: its links to files of the repository lead to the repository."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

_LINK = re.compile(r'(\]\(|(?:src|srcset|href)=")(?![a-z]+:|#)([^)"\s]+)')
_PICTURES = (".png", ".svg", ".gif", ".jpg")


def with_absolute_links(text: str, repository: str) -> str:
    """Return `text` with relative links made absolute, those of pictures to the files themselves."""
    return _LINK.sub(
        lambda link: f"{link[1]}{repository}/{'raw' if link[2].endswith(_PICTURES) else 'blob'}/HEAD/{link[2]}", text
    )


class ReadmeHook(MetadataHookInterface):
    def update(self, metadata: dict[str, Any]) -> None:
        text = Path(self.root, "README.md").read_text(encoding="utf-8")
        metadata["readme"] = {
            "content-type": "text/markdown",
            "text": with_absolute_links(text, metadata["urls"]["Repository"]),
        }
