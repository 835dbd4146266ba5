"""Builds the documents as a site: `make docs`.

The source folder is the whole repository, so that a link from a page to any other file is right on GitHub and in the
site alike: documents become pages, and all else becomes a copy to open. Pages are plain Markdown; what only the site
needs, the navigation, is here.
"""

from __future__ import annotations

from sphinx.application import Sphinx

from lightning_bucketddp import __version__

# By the document that they belong to: the titles of sections, and their pages in order.
NAVIGATION: dict[str, dict[str, list[str]]] = {
    "docs/index": {
        "Start": ["install", "switch", "check"],
        "Train": [
            "where-time-goes",
            "faster",
            "slow-networks",
            "save-memory",
            "large-batches",
            "exact-data",
            "different-work",
            "many-machines",
        ],
        "Operate": ["when-it-fails", "checkpoints", "Restart <restart>", "replicas", "nonfinite", "faq"],
        "Reference": ["options", "command-line", "api", "compatibility", "public"],
        "Understand": [
            "how-it-works",
            "how-it-is-found",
            "how-we-know",
            "third-party-projects",
            "soak",
            "design/index",
        ],
        "Project": [
            "../examples/README",
            "../benchmarks/README",
            "../CONTRIBUTING",
            "../CHANGELOG",
            "../SECURITY",
            "../CODE_OF_CONDUCT",
            "README <../README>",
        ],
    },
    "docs/design/index": {
        "Decisions": [
            "unwrapped-module",
            "bucket-order",
            "optimal-plan",
            "gradient-memory",
            "failure-protocol",
            "restarts",
            "saver",
            "evaluation-rounds",
            "sharded-state",
            "batch-size-search",
            "int8",
        ],
    },
    "benchmarks/README": {"Results": ["results/*"]},
}

project = "lightning-bucketddp"
author = "the lightning-bucketddp developers"
copyright = author
release = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
root_doc = "docs/index"
include_patterns = ["*.md", "docs/**.md", "examples/*.md", "benchmarks/*.md", "benchmarks/results/*.md"]
exclude_patterns = [".*"]
html_theme = "pydata_sphinx_theme"
html_title = project
html_static_path = ["static"]
html_css_files = ["site.css"]
# Pages that are opened from disk must not read each other.
html_js_files = [(None, {"body": 'DOCUMENTATION_OPTIONS.SHOW_SEARCH_SUMMARY = location.protocol !== "file:";'})]
html_extra_path = ["root"]
templates_path = ["templates"]
html_sidebars = {"**": ["navigation.html"]}
html_copy_source = False
html_show_sourcelink = False
html_context = {"default_mode": "auto"}
html_theme_options = {
    "navbar_center": [],
    "show_toc_level": 2,
    "secondary_sidebar_items": ["page-toc"],
    "footer_start": [],
    "footer_end": [],
}

# As GitHub makes them, so that links to headings work in both.
myst_heading_anchors = 4
# Docstrings are written in Markdown's habit: `code` between single backticks.
default_role = "literal"
autodoc_class_signature = "mixed"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
maximum_signature_line_length = 80
napoleon_use_ivar = True
add_module_names = False
copybutton_prompt_text = "$ "
toc_object_entries = False


def add_navigation(app: Sphinx, document: str, source: list[str]) -> None:
    """Append what GitHub would show as code: the tables of contents."""
    for caption, pages in NAVIGATION.get(document, {}).items():
        lines = ["```{toctree}", ":hidden:", ":glob:", f":caption: {caption}", "", *pages, "```"]
        source[0] += "\n" + "\n".join(lines) + "\n"


def setup(app: Sphinx) -> None:
    app.connect("source-read", add_navigation)
