"""What a release is made of fits together: version, addresses, archives and workflows."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import hatchling.build
import pytest
import yaml  # type: ignore[import-untyped]

from hatch_build import with_absolute_links
from lightning_bucketddp import __version__
from tests.dist import REPOSITORY, package_files, surprises_in_sdist

PYPROJECT = (REPOSITORY / "pyproject.toml").read_text()
CHANGELOG = (REPOSITORY / "CHANGELOG.md").read_text()
WORKFLOWS = sorted((REPOSITORY / ".github" / "workflows").glob("*.yml"))
[ADDRESS] = re.findall(r'^Repository = "https://github.com/(.+)"$', PYPROJECT, re.MULTILINE)


def read_yaml(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


def steps_of(path: Path) -> list[dict[str, Any]]:
    return [step for job in read_yaml(path)["jobs"].values() for step in job["steps"]]


def test_version_changelog_and_citation_agree() -> None:
    version, date = re.findall(r"^## \[(\d.*?)\] - (\S+)$", CHANGELOG, re.MULTILINE)[0]
    citation = read_yaml(REPOSITORY / "CITATION.cff")
    assert (version, date) == (__version__, citation["date-released"])
    assert version == citation["version"]


def test_every_file_names_the_same_repository() -> None:
    """Who changes the address in pyproject.toml is told here which other files have the old one."""
    listed = subprocess.run(["git", "ls-files"], cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout
    texts = (".md", ".toml", ".yml", ".cff", ".py", ".html", ".ipynb")
    paths = [REPOSITORY / name for name in listed.splitlines() if name.endswith(texts)]
    ours = re.compile(r"//(?:github\.com/([\w-]+)|([\w-]+)\.github\.io)/lightning-bucketddp")
    named = {
        (match[1] or match[2], path.name)
        for path in paths
        if path.is_file()
        for match in ours.finditer(path.read_text())
    }
    assert {owner for owner, _ in named} == {ADDRESS.partition("/")[0]}, named
    assert {"pyproject.toml", "CITATION.cff", "config.yml"} <= {file for _, file in named}


def test_every_folder_of_the_package_has_an_owner() -> None:
    lines = (REPOSITORY / ".github" / "CODEOWNERS").read_text().splitlines()
    owner_of = dict(line.split() for line in lines if line and not line.startswith("#"))
    assert {owner.partition("/")[0] for owner in owner_of.values()} == {f"@{ADDRESS.partition('/')[0]}"}
    assert [path for path in owner_of if path != "*" and not (REPOSITORY / path.lstrip("/")).exists()] == []
    folders = {
        f"/{path.parent.relative_to(REPOSITORY)}/" for path in REPOSITORY.glob("lightning_bucketddp/*/__init__.py")
    }
    assert folders - owner_of.keys() == set()


def test_the_sdist_holds_what_builds_a_wheel_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)
    assert surprises_in_sdist(tmp_path / hatchling.build.build_sdist(str(tmp_path)), package_files()) == set()


def test_links_of_the_readme_work_on_a_package_index() -> None:
    address = f"https://github.com/{ADDRESS}"
    text = '[a](docs/a.md#b) ![p](docs/p.png) [w](https://w.org) [h](#here) <img src="docs/p.svg" width="1">'
    assert with_absolute_links(text, address) == (
        f"[a]({address}/blob/HEAD/docs/a.md#b) ![p]({address}/raw/HEAD/docs/p.png) [w](https://w.org) [h](#here)"
        f' <img src="{address}/raw/HEAD/docs/p.svg" width="1">'
    )


def test_workflows_call_targets_of_the_makefile() -> None:
    """So that everything they do can be done here, too."""
    targets = set(re.findall(r"^([a-z-]+):", (REPOSITORY / "Makefile").read_text(), re.MULTILINE))
    matrix = read_yaml(REPOSITORY / ".github/workflows/ci.yml")["jobs"]["test"]["strategy"]["matrix"]
    called = {*matrix["target"], *(entry["target"] for entry in matrix["include"])}
    for path in WORKFLOWS:
        for command in (step["run"] for step in steps_of(path) if "run" in step):
            [target] = re.findall(r'^make ("\$TARGET"|[a-z-]+)(?: TAG="\$GITHUB_REF_NAME")?$', command)
            called.add(target)
    assert called - {'"$TARGET"'} <= targets
    assert {"lint", "test", "test-long", "test-oldest", "test-next", "docs", "dist"} <= called


def test_ci_runs_the_python_versions_that_are_promised() -> None:
    promised = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', PYPROJECT)
    assert (
        read_yaml(REPOSITORY / ".github/workflows/ci.yml")["jobs"]["test"]["strategy"]["matrix"]["python"] == promised
    )


def test_actions_are_pinned_and_only_two_jobs_may_write() -> None:
    writers = set()
    for path in WORKFLOWS:
        workflow = read_yaml(path)
        assert workflow["permissions"] == {"contents": "read"}
        for name, job in workflow["jobs"].items():
            assert "timeout-minutes" in job
            if "write" in job.get("permissions", {}).values():
                writers.add(f"{path.stem}: {name}")
        uses = [step["uses"] for step in steps_of(path) if "uses" in step]
        assert [action for action in uses if not re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}", action)] == []
    assert writers == {"docs: deploy", "publish: publish"}
