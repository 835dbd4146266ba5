"""Every block of code in README.md, SECURITY.md and docs/ runs, and every message that they quote is one of ours."""

from __future__ import annotations

import ast
import functools
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pytest
from lightning import __version__ as lightning_version
from markdown_it import MarkdownIt

from benchmarks.quality_results import load, overviews
from benchmarks.report import SPEED_UP
from docs.make_house import HOUSE, draw
from tests.support.cases import for_each
from tests.support.programs import REPOSITORY, run_commands
from tests.support.ranks import run_on_ranks
from tests.support.scripts.document import READER, SHORT_RUNS, run_page, train_by_config


@dataclass(frozen=True)
class Block:
    """What stands between two fences, so many lines of the page below its top; or "indented" code without fences."""

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


PATHS = [REPOSITORY / "README.md", REPOSITORY / "SECURITY.md", *sorted(REPOSITORY.glob("docs/*.md"))]
PAGES = {path.name: blocks_of(path) for path in PATHS}
SHELL = ("console", "bash")
# Each has a test below, but for the API: tests/test_site.py builds that.
KINDS = {"python", "yaml", "text", "{eval-rst}", *SHELL}
# Their commands measure for minutes, need a GPU or make virtual environments. tests/test_benchmarks.py and
# tests/test_examples.py run what they run; here, what they name must exist.
GUIDES = ["CONTRIBUTING.md", "examples/README.md", "benchmarks/README.md"]
# By how they begin: the commands that are not run here, and why.
NOT_RUN = {
    "pip install .": "needs the network; tests/test_install.py installs what was built",
    "pip install dist/": "needs the network; `make dist` does it",
    "make dist": "makes virtual environments; CI runs it",
    "make demo": "makes a virtual environment; tests/test_examples.py runs the same example",
    "make test": "runs this test",
    "bucketddp doctor": "its exit status is about this machine; its own tests run it",
    "torchrun --nnodes 2": "needs two nodes",
    "make soak": "takes minutes; tests/faults/test_soak.py runs rounds of it",
    "make fuzz": "takes minutes; tests/fuzz/test_fuzz.py runs 25 programs",
    "python -m benchmarks.projects": "installs packages and takes minutes; tests/test_projects.py tests the comparison",
    "python -m benchmarks.quality": "takes a quarter of an hour on 16 cores; tests/test_benchmarks.py runs its parts",
}
# Pages whose code or commands take many seconds of a core.
LONG = {"faster.md", "large-batches.md", "where-time-goes.md", "slow-networks.md"}
# By a part of their text: the blocks that need a later Lightning than the oldest one that is supported.
NEEDS_LIGHTNING = {"weights_only=False": (2, 6), "save_on_exception=True": (2, 6)}


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
    "page", [pytest.param(page, marks=[pytest.mark.long] * (page in LONG)) for page in with_blocks("python", *SHELL)]
)
def test_code_and_commands_run(page: str, directory: Path) -> None:
    code = [block for block in PAGES[page] if block.kind == "python" and runs_here(block)]
    scripts = [block for block in code if block.file_name]
    for script in scripts:
        (directory / str(script.file_name)).write_text(script.text)
    if blocks := [(block.line, block.text) for block in code if block not in scripts]:
        run_on_ranks(run_page, page=page, blocks=blocks, directory=directory)
    commands = [command for block in PAGES[page] if block.kind in SHELL for command in block.commands]
    missing = [str(block.file_name) for block in PAGES[page] if block.file_name and not runs_here(block)]
    run = [
        command
        for command in commands
        if not command.startswith(tuple(NOT_RUN)) and not any(name in command for name in missing)
    ]
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


@for_each("page", with_blocks("text"))
def test_quoted_messages_are_in_the_source(page: str) -> None:
    unknown = {block.line: unknown_words(block.text) for block in PAGES[page] if block.kind == "text"}
    assert {line: words for line, words in unknown.items() if words} == {}


def test_findings_of_the_doctor_are_quoted_as_they_are_said() -> None:
    [block] = [b for b in PAGES["command-line.md"] if b.text.startswith("$ bucketddp doctor --checkpoints")]
    findings = re.findall(r"^ +(?:(?:ok|note|warning|error) +|-> )(.*)$", block.text, flags=re.MULTILINE)
    assert len(findings) > 10
    unknown = {finding: {*unknown_words(finding)} - {"torch", "lightning", "gloo", "data"} for finding in findings}
    assert {finding: words for finding, words in unknown.items() if words} == {}


@for_each("page", PAGES)
def test_every_block_is_of_a_kind_that_is_tested(page: str) -> None:
    assert [f"{page}:{block.line}: {block.kind}" for block in PAGES[page] if block.kind not in KINDS] == []


def test_every_command_that_is_not_run_is_in_some_document() -> None:
    commands = [c for blocks in PAGES.values() for block in blocks if block.kind in SHELL for c in block.commands]
    assert [beginning for beginning in NOT_RUN if not any(command.startswith(beginning) for command in commands)] == []


def measured_through_the_trainer(result: str) -> list[str]:
    """The speed-ups of a result file on 2 ranks, one for each setting."""
    parts = (REPOSITORY / "benchmarks" / "results" / result).read_text().split("\n\n")
    titles = [i for i, part in enumerate(parts) if "2 ranks" in part and "through the trainer" in part.lower()]
    measured = []
    for header, *rows in (parts[i + 1].splitlines() for i in titles if SPEED_UP in parts[i + 1]):
        end = header.index(SPEED_UP) + len(SPEED_UP)
        measured += [f"{row[:end].split()[-1]}x" for row in rows if row.startswith("bucketddp")]
    return measured


def test_what_was_measured_through_the_trainer_is_shown_with_every_setting() -> None:
    """Beside the speed-ups that come from settings, those that come without."""
    section = (REPOSITORY / "README.md").read_text().partition("## How fast\n")[2].partition("\n## ")[0]
    gpu, cpu = "gpu_suite_h200_202611.md", "speed_aarch64-2core_202611.md"
    assert gpu in section
    assert cpu in section
    measured = measured_through_the_trainer(gpu)
    assert len(measured) == 9
    assert {*measured, *measured_through_the_trainer(cpu)} <= set(re.findall(r"\d\.\d\dx", section))


def test_the_picture_of_the_house_is_that_of_the_code() -> None:
    assert HOUSE.read_text() == draw(), "`make docs` draws it anew"


def test_every_page_of_the_design_is_short_and_listed() -> None:
    folder = REPOSITORY / "docs" / "design"
    pages = {path.name: path.read_text().splitlines() for path in folder.glob("*.md")}
    listed = re.findall(r"^\| \[.*\]\((.+)\) \|", "\n".join(pages["index.md"]), re.MULTILINE)
    assert {*listed, "index.md"} == pages.keys()
    assert [name for name, lines in pages.items() if len(lines) > 60 or max(map(len, lines)) > 160] == []
    # Code would have to run, like that of other pages.
    assert {name: blocks for name in pages if (blocks := blocks_of(folder / name))} == {}


def test_the_page_on_slow_networks_shows_what_was_measured_of_quality() -> None:
    page = (REPOSITORY / "docs" / "slow-networks.md").read_text()
    [file] = (REPOSITORY / "benchmarks" / "results").glob("quality_*.jsonl")
    assert f"{file.stem}.md" in page
    assert [table for table in overviews(load(file)) if table not in page] == []


def commands_of(guide: str) -> list[str]:
    """Return the commands of a document, those within its sentences and tables too."""
    path = REPOSITORY / guide
    blocks = [command for block in blocks_of(path) if block.kind in SHELL for command in block.commands]
    within = re.findall(r"`((?:python|make|sbatch|jupyter|cd|\./|\.venv/bin/)[^`]* [^`]+)`", path.read_text())
    return [*blocks, *within]


def missing_in(command: str, folder: Path) -> list[str]:
    """Return the targets, modules, files and options that a command names, but that do not exist."""
    words = command.replace(";", " ").split()
    targets = (REPOSITORY / "Makefile").read_text()
    modules = [word for before, word in pairwise(words) if before == "-m" and word.startswith(("benchmarks", "tests"))]
    folders = {name.replace(".", "/") for module in modules for name in (module, module.rpartition(".")[0])}
    known = "".join(path.read_text() for name in folders for path in (REPOSITORY / name).glob("*.py"))
    places = [folder, folder / "cli", REPOSITORY]

    def exists(before: str, word: str) -> bool:
        if before == "make":
            return word.startswith(".venv/.") or re.search(rf"^{re.escape(word)}:", targets, re.MULTILINE) is not None
        if word in modules:
            path = REPOSITORY / word.replace(".", "/")
            return path.with_suffix(".py").is_file() or (path / "__main__.py").is_file()
        if word.startswith("--") and modules:
            return f'"{word}"' in known or f'"{word[2:]}"' in known  # some are made of names
        if re.search(r"\w\.(py|sh|sbatch|ipynb|yaml)$", word):
            return any((place / word).is_file() for place in places)
        return True

    return [word for before, word in pairwise(["", *words]) if not exists(before, word)]


@for_each("guide", GUIDES)
def test_commands_of_guides_name_what_exists(guide: str) -> None:
    commands = commands_of(guide)
    assert len(commands) > 8
    missing = {command: missing_in(command, (REPOSITORY / guide).parent) for command in commands}
    assert {command: words for command, words in missing.items() if words} == {}


def test_a_command_that_names_what_does_not_exist_is_noticed() -> None:
    assert missing_in("make tests", REPOSITORY) == ["tests"]
    assert missing_in("python -m benchmarks.step_tim", REPOSITORY) == ["benchmarks.step_tim"]
    assert missing_in("python -m benchmarks.step_time --modle mlp", REPOSITORY) == ["--modle"]
    assert missing_in("cd cli; python train.py fit --config other.yaml", REPOSITORY / "examples") == ["other.yaml"]


def rows(text: str) -> list[list[str]]:
    """The cells of each row, without headings."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [row for row in cells if row[0] != "feature" and set(row[0]) != {"-"}]


def named_tests(cell: str) -> list[str]:
    return re.findall(r"`(tests/[\w/]+\.py::\w+)`", cell)


def exists(test: str) -> bool:
    path, _, name = test.partition("::")
    if not (REPOSITORY / path).exists():
        return False
    tree = ast.parse((REPOSITORY / path).read_text())
    return any(isinstance(node, ast.FunctionDef) and node.name == name for node in tree.body)


@for_each("row", rows((REPOSITORY / "docs" / "compatibility.md").read_text()))
def test_every_row_on_compatibility_names_tests_that_exist(row: list[str]) -> None:
    assert len(row) == 4
    assert named_tests(row[3])
    assert [test for test in named_tests(row[3]) if not exists(test)] == []


def test_a_test_that_is_not_there_is_noticed() -> None:
    assert not exists("tests/test_documents.py::test_nothing")
    assert not exists("tests/test_nothing.py::test_nothing")
    assert named_tests("`tests/test_a.py::test_b`, later") == ["tests/test_a.py::test_b"]
    assert rows("| feature | a |\n|---|---|\n| x | y |") == [["x", "y"]]
