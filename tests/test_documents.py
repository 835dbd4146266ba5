"""Every block of code in README.md, SECURITY.md and docs/ runs, and every message that they quote is one of ours."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from lightning.pytorch import __version__ as lightning_version

from benchmarks.quality_results import load, overviews
from benchmarks.report import SPEED_UP
from tests.support.commands import run_commands
from tests.support.fences import Block, blocks_of
from tests.support.messages import unknown_words
from tests.support.programs import REPOSITORY
from tests.support.ranks import run_on_ranks
from tests.support.scripts.document import READER, SHORT_RUNS, run_page, train_by_config

PATHS = [REPOSITORY / "README.md", REPOSITORY / "SECURITY.md", *sorted(REPOSITORY.glob("docs/*.md"))]
PAGES = {path.name: blocks_of(path) for path in PATHS}
SHELL = ("console", "bash")
# Each has a test below.
KINDS = {"python", "yaml", "text", *SHELL}
# By how they begin: the commands that are not run here, and why.
NOT_RUN = {
    "pip install lightning-bucketddp": "needs the network; tests/test_install.py installs what was built",
    "make demo": "makes a virtual environment; tests/test_install.py runs the same example",
    "make test": "runs this test",
    "make docs": "makes a virtual environment; CI runs it",
    "bucketddp doctor": "its exit status is about this machine; its own tests run it",
    "torchrun --nnodes 2": "needs two nodes",
    "make soak": "takes minutes; tests/faults/test_soak.py runs rounds of it",
    "python -m benchmarks.quality": "takes a quarter of an hour on 16 cores; tests/test_benchmarks.py runs its parts",
}
# Pages whose commands take half a minute of a core.
LONG = {"observability.md", "slow-networks.md"}
# By a part of their text: the blocks that need a later Lightning than the oldest one that is supported.
NEEDS_LIGHTNING = {"weights_only=False": (2, 6)}


def with_blocks(*kinds: str) -> list[str]:
    return [page for page, blocks in PAGES.items() if any(block.kind in kinds for block in blocks)]


def runs_here(block: Block) -> bool:
    version = tuple(int(number) for number in lightning_version.split(".")[:2])
    return all(version >= needed for part, needed in NEEDS_LIGHTNING.items() if part in block.text)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Where a reader is: in a checkout."""
    for name in ("benchmarks", "examples", "tests"):
        (tmp_path / name).symlink_to(REPOSITORY / name)
    return tmp_path


@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=[pytest.mark.long] * (page in LONG)) for page in with_blocks("python", *SHELL)],
)
def test_code_and_commands_run(page: str, directory: Path) -> None:
    code = [block for block in PAGES[page] if block.kind == "python" and runs_here(block)]
    scripts = [block for block in code if block.file_name]
    for script in scripts:
        (directory / str(script.file_name)).write_text(script.text)
    if blocks := [(block.line, block.text) for block in code if block not in scripts]:
        run_on_ranks(run_page, page=page, blocks=blocks, directory=directory)
    commands = [command for block in PAGES[page] if block.kind in SHELL for command in block.commands]
    run = [command for command in commands if not command.startswith(tuple(NOT_RUN))]
    if run:
        paths = [str(READER), str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])]
        variables = {**SHORT_RUNS, "PYTHONPATH": os.pathsep.join(paths)}
        run_commands("\n".join(run), cwd=directory, variables=variables)
    not_started = [script.file_name for script in scripts if not any(str(script.file_name) in line for line in run)]
    assert not_started == []


@pytest.mark.parametrize("page", with_blocks("yaml"))
def test_configurations_train(page: str, directory: Path) -> None:
    for block in PAGES[page]:
        if block.kind == "yaml":
            config = directory / "config.yaml"
            config.write_text(block.text)
            strategies = run_on_ranks(train_by_config, config=config, directory=directory)
            assert strategies == ["BucketDDPStrategy"] * 2


@pytest.mark.parametrize("page", with_blocks("text"))
def test_quoted_messages_are_in_the_source(page: str) -> None:
    unknown = {block.line: unknown_words(block.text) for block in PAGES[page] if block.kind == "text"}
    assert {line: words for line, words in unknown.items() if words} == {}


@pytest.mark.parametrize("page", PAGES)
def test_every_block_is_of_a_kind_that_is_tested(page: str) -> None:
    assert [f"{page}:{block.line}: {block.kind}" for block in PAGES[page] if block.kind not in KINDS] == []


def test_every_command_that_is_not_run_is_in_some_document() -> None:
    commands = [c for blocks in PAGES.values() for block in blocks if block.kind in SHELL for c in block.commands]
    assert [beginning for beginning in NOT_RUN if not any(command.startswith(beginning) for command in commands)] == []


def test_readme_shows_what_was_measured_through_the_trainer_with_every_setting() -> None:
    """Beside the speed-ups that come from settings, those that come without."""
    readme = (REPOSITORY / "README.md").read_text()
    table = readme[readme.index("## How fast") : readme.index("## Options")]
    measured = []
    for result in ("gpu_suite_h200_202611.md", "speed_aarch64-2core_202611.md"):
        assert result in table
        parts = (REPOSITORY / "benchmarks" / "results" / result).read_text().split("\n\n")
        titles = [i for i, part in enumerate(parts) if "2 ranks" in part and "through the trainer" in part.lower()]
        for header, *rows in (parts[i + 1].splitlines() for i in titles if SPEED_UP in parts[i + 1]):
            end = header.index(SPEED_UP) + len(SPEED_UP)
            measured += [f"{row[:end].split()[-1]}x" for row in rows if row.startswith("bucketddp")]
    gpt2, resnet50, tiny = ["1.04x", "1.11x", "1.99x"], ["1.26x", "1.19x", "1.74x"], ["1.16x", "1.17x", "1.36x"]
    assert measured == [*gpt2, *resnet50, *tiny, "0.97x"]
    assert set(measured) <= set(re.findall(r"\d\.\d\dx", table))


def test_the_page_on_slow_networks_shows_what_was_measured_of_quality() -> None:
    page = (REPOSITORY / "docs" / "slow-networks.md").read_text()
    [file] = (REPOSITORY / "benchmarks" / "results").glob("quality_*.jsonl")
    assert f"{file.stem}.md" in page
    assert [table for table in overviews(load(file)) if table not in page] == []


def test_a_message_that_is_not_ours_is_noticed() -> None:
    ours = "StartError: Two processes want to be rank 3: process 1 on host a1, and process 2 on host b2. ..."
    assert unknown_words(ours) == []
    assert unknown_words(ours.replace("want", "wish")) != []


def test_blocks_are_found_and_told_apart(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# Title\n\n```python\n# train.py\nx = 1\n```\n\n* a list\n\n  ```console\n  $ make it  # now\n  made\n  ```\n"
        "\n```\nplain\n```\n\n    indented\n"
    )
    blocks = blocks_of(page)
    assert [(block.line, block.kind) for block in blocks] == [
        (3, "python"),
        (10, "console"),
        (15, "no kind"),
        (18, "indented"),
    ]
    assert blocks[0].file_name == "train.py"
    assert blocks[1].commands == ["make it"]
